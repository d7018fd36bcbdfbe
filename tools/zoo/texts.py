"""Models of text, and small additions to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from tools.zoo.entry import Entry, Inputs, built, numbers

WORDS, LENGTH, SAMPLES = 97, 18, 3
"""Vocabulary, tokens of a sample, samples of a microbatch: no multiples of anything."""
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
QUERIES = {"num_key_value_heads": 2, "intermediate_size": 56}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "moe_intermediate_size": 24}
hf = partial(built, "transformers")


def text(generator: Generator) -> Inputs:
    """Draw token ids, which are labels, too: a causal language model shifts them."""
    ids = numbers(WORDS, SAMPLES, LENGTH, first=3)(generator)
    return {"input_ids": ids, "labels": ids}


def translations(generator: Generator) -> Inputs:
    """Draw token ids to read and others to write."""
    draw = numbers(WORDS, SAMPLES, LENGTH, first=3)
    return {"input_ids": draw(generator), "labels": draw(generator)}


def next_words(output: Tensor, inputs: Inputs) -> Tensor:
    """Return the loss of a language model that returns logits."""
    return cross_entropy(output[:, :-1].flatten(0, 1), inputs["target"][:, 1:].flatten())


def ids_alone(generator: Generator) -> Inputs:
    """Draw token ids for a model that computes no loss."""
    ids = numbers(WORDS, SAMPLES, LENGTH)(generator)
    return {"ids": ids, "target": ids}


class Attention(nn.Module):
    """Causal attention with one projection for queries, keys and values, as in nanoGPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, width] to the same."""
        q, k, v = self.qkv(x).unflatten(2, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined


class GptBlock(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, width] to the same."""
        x = x + self.dropout(self.attention(self.norms[0](x)))
        fed: Tensor = x + self.dropout(self.feed(self.norms[1](x)))
        return fed


class NanoGpt(nn.Module):
    """A language model as people write it: learned positions, dropout, a tied head."""

    def __init__(self, width: int = 36) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(GptBlock(width, 3, dropout=0.1) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s] to logits."""
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class LstmLayer(nn.Module):
    """A recurrent layer with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, width] to the same."""
        read: Tensor = self.lstm(x)[0]
        return x + read


class LstmModel(nn.Module):
    """A recurrent language model."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(*(LstmLayer(width) for _ in range(2)))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s] to logits."""
        logits: Tensor = self.head(self.layers(self.words(ids)))
        return logits


def adapted(base: Callable[[], nn.Module], config: str, **options: Any) -> Callable[[], nn.Module]:
    """Return what builds a model with frozen weights and additions of PEFT."""

    def build() -> nn.Module:
        peft = import_module("peft")
        model: nn.Module = peft.get_peft_model(base(), getattr(peft, config)(**options))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # zeros would leave the other factor without a gradient
                    parameter.normal_(std=0.05)
        return model

    return build


LLAMA = hf("LlamaForCausalLM", "LlamaConfig", **SIZES, **QUERIES)
GPT2 = hf(
    "GPT2LMHeadModel",
    "GPT2Config",
    vocab_size=WORDS,
    n_embd=32,
    n_layer=3,
    n_head=4,
    n_positions=32,
)
T5_SIZES = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 56, "num_layers": 2}
BERT = {**SIZES, "intermediate_size": 56, "max_position_embeddings": 32}
BART = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("ffn_dim", 56), ("attention_heads", 4))
}
MLA = {
    **{"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
}
MAMBA = {"vocab_size": WORDS, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 3}

TEXTS = {
    "nanogpt": Entry("", NanoGpt, ids_alone, ("GptBlock",), next_words),
    "lstm": Entry("", LstmModel, ids_alone, ("LstmLayer",), next_words),
    "llama": Entry("transformers", LLAMA, text, ("LlamaDecoderLayer",)),
    "gpt2": Entry("transformers", GPT2, text, ("GPT2Block",)),
    "bloom": Entry(
        "transformers",
        hf(
            "BloomForCausalLM", "BloomConfig", vocab_size=WORDS, hidden_size=32, n_layer=3, n_head=4
        ),
        text,
        ("BloomBlock",),
    ),
    "gemma3": Entry(
        "transformers",
        hf(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            **SIZES,
            **QUERIES,
            head_dim=8,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        text,
        ("Gemma3DecoderLayer",),
    ),
    "mixtral": Entry(
        "transformers",
        hf(
            "MixtralForCausalLM",
            "MixtralConfig",
            **SIZES,
            **QUERIES,
            num_local_experts=4,
            output_router_logits=True,
        ),
        text,
        ("MixtralDecoderLayer",),
    ),
    "qwen3 moe": Entry(
        "transformers",
        hf(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            **SIZES,
            **QUERIES,
            **EXPERTS,
            head_dim=8,
            num_experts=4,
        ),
        text,
        ("Qwen3MoeDecoderLayer", "Qwen3MoeExperts"),
    ),
    "deepseek v3": Entry(
        "transformers",
        hf(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            **SIZES,
            **MLA,
            intermediate_size=56,
            num_key_value_heads=4,
        ),
        text,
        ("DeepseekV3DecoderLayer",),
    ),
    "mamba": Entry(
        "transformers", hf("MambaForCausalLM", "MambaConfig", **MAMBA), text, ("MambaBlock",)
    ),
    "mamba2": Entry(
        "transformers",
        hf(
            "Mamba2ForCausalLM",
            "Mamba2Config",
            **MAMBA,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            chunk_size=8,
        ),
        text,
        ("Mamba2Block",),
    ),
    "rwkv": Entry(
        "transformers",
        hf("RwkvForCausalLM", "RwkvConfig", vocab_size=WORDS, hidden_size=32, num_hidden_layers=2),
        text,
        ("RwkvBlock",),
    ),
    "bert": Entry(
        "transformers", hf("BertForMaskedLM", "BertConfig", **BERT), translations, ("BertLayer",)
    ),
    "albert": Entry(
        "transformers",
        hf("AlbertForMaskedLM", "AlbertConfig", **BERT, embedding_size=16),
        translations,
        ("AlbertLayer",),
    ),
    "t5": Entry(
        "transformers",
        hf(
            "T5ForConditionalGeneration",
            "T5Config",
            **T5_SIZES,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        translations,
        ("T5Block",),
    ),
    "bart": Entry(
        "transformers",
        hf(
            "BartForConditionalGeneration",
            "BartConfig",
            **BART,
            vocab_size=WORDS,
            d_model=32,
            max_position_embeddings=32,
        ),
        translations,
        ("BartEncoderLayer", "BartDecoderLayer"),
    ),
    "reformer": Entry(
        "transformers",
        hf(
            "ReformerModelWithLMHead",
            "ReformerConfig",
            vocab_size=WORDS,
            hidden_size=32,
            attn_layers=["local", "local"],
            num_attention_heads=4,
            attention_head_size=8,
            feed_forward_size=56,
            local_attn_chunk_length=6,
            axial_pos_embds_dim=(16, 16),
            axial_pos_shape=(3, 6),
            max_position_embeddings=LENGTH,
            is_decoder=True,
            # Its layers draw their own seeds from the machine, so that no two runs drop the same.
            hidden_dropout_prob=0.0,
            local_attention_probs_dropout_prob=0.0,
        ),
        text,
        # Its layers compute again in backward by a method that calls these two, and not the layer.
        ("ReformerAttention", "ChunkReformerFeedForward"),
        frozen=("lm_head.bias",),  # a second name of the decoder's bias, which is the one in use
    ),
    "lora llama": Entry(
        "peft",
        adapted(LLAMA, "LoraConfig", r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1),
        text,
        ("LlamaDecoderLayer",),
    ),
    "dora gpt2": Entry(
        "peft",
        adapted(
            GPT2, "LoraConfig", r=4, target_modules=["c_attn"], use_dora=True, fan_in_fan_out=True
        ),
        text,
        ("GPT2Block",),
    ),
    "ia3 t5": Entry(
        "peft",
        adapted(
            hf(
                "T5ForConditionalGeneration",
                "T5Config",
                **T5_SIZES,
                num_heads=4,
                decoder_start_token_id=0,
            ),
            "IA3Config",
            target_modules=["k", "v", "wo"],
            feedforward_modules=["wo"],
        ),
        translations,
        ("T5Block",),
    ),
}
