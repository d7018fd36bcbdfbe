"""Models as their users have them, and what they are trained on.

Each is small, and has the structure of a large one: HuggingFace's own classes, made from their own configurations. Every count of elements
is a multiple of 16, because torch's fused AdamW rounds the elements that fill no vector of the processor in another way. Those of
``shapes.py`` have other counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BartConfig, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig, ResNetConfig, T5Config, ViTConfig
from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer, BartForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer, MixtralForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeForCausalLM
from transformers.models.resnet.modeling_resnet import ResNetBasicLayer, ResNetForImageClassification
from transformers.models.t5.modeling_t5 import T5Block, T5ForConditionalGeneration
from transformers.models.vit.modeling_vit import ViTForImageClassification, ViTLayer

from tests.parallel.cases import token_ids

SEQ_LENGTH, VOCABULARY, LABELS = 32, 304, 16
Inputs = dict[str, Tensor]


def sentences(positions: range) -> Tensor:
    """[b, SEQ_LENGTH] consecutive windows of English text."""
    ids = token_ids(positions.stop * SEQ_LENGTH)
    return torch.stack([ids[p * SEQ_LENGTH : (p + 1) * SEQ_LENGTH] for p in positions])


def text(positions: range) -> Inputs:
    """The windows, and themselves as labels: a causal language model shifts them."""
    ids = sentences(positions)
    return {"input_ids": ids, "labels": ids}


def pairs(positions: range) -> Inputs:
    """The first half of each window to read, and the second to write."""
    ids = sentences(positions)
    half = SEQ_LENGTH // 2
    return {"input_ids": ids[:, :half], "labels": ids[:, half:].contiguous()}


def pictures(positions: range) -> Inputs:
    """[b, 3, 32, 32] noise over a grey value that tells the label, each picture drawn from its own seed."""
    drawn = [torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(position)) for position in positions]
    labels = torch.tensor([position * 7 % LABELS for position in positions])
    return {"pixel_values": torch.stack(drawn) + labels.view(-1, 1, 1, 1) / 8 - 1, "labels": labels}


def vectors(positions: range) -> Inputs:
    """[b, 48] noise around a direction that tells the label."""
    drawn = [torch.randn(48, generator=torch.Generator().manual_seed(position)) for position in positions]
    labels = torch.tensor([position * 7 % LABELS for position in positions])
    return {"x": torch.stack(drawn) + 2 * torch.eye(48)[labels], "labels": labels}


def llama(**changes: Any) -> nn.Module:
    """Grouped-query attention, two layers more than slots."""
    options = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**options | {"num_key_value_heads": 2, "initializer_range": 0.05} | changes))


def qwen3() -> nn.Module:
    """Norms of queries and keys, tied embeddings."""
    options = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    return Qwen3ForCausalLM(Qwen3Config(**options, num_key_value_heads=2, head_dim=16, initializer_range=0.05, tie_word_embeddings=True))


def mixture(kind: type[nn.Module], config: type, **changes: Any) -> nn.Module:
    """Experts that are stacked in one parameter, and the loss that balances them."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    balance = {"output_router_logits": True, "router_aux_loss_coef": 0.05, "num_experts_per_tok": 2}
    return kind(config(**sizes, **balance, initializer_range=0.05, **changes))


mixtral = partial(mixture, MixtralForCausalLM, MixtralConfig, intermediate_size=96, num_local_experts=8, sliding_window=None)
qwen3_moe = partial(
    mixture, Qwen3MoeForCausalLM, Qwen3MoeConfig, intermediate_size=96, moe_intermediate_size=48, head_dim=16, num_experts=16, norm_topk_prob=True
)


def vit() -> nn.Module:
    """A convolution into patches, parameters of three dims, biases."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=LABELS, initializer_range=0.05)
    return ViTForImageClassification(config)


def resnet() -> nn.Module:
    """Convolutions, batch norm and its buffers; units of three sizes."""
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=LABELS))


def t5(tied: bool = True) -> nn.Module:
    """Encoder and decoder with one embedding, which may be the head, too; a table of relative positions in each first block."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    if not tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone() / 8)
    return model


def bart() -> nn.Module:
    """Encoder and decoder of two classes with one embedding, learned positions, biases."""
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (("layers", 2), ("ffn_dim", 96))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(
        **sides, **heads, vocab_size=VOCABULARY, d_model=64, max_position_embeddings=32, dropout=0.0, init_std=0.05, use_cache=False
    )
    return BartForConditionalGeneration(config)


class Mlp(nn.Sequential):
    """Three hidden layers."""

    def __init__(self) -> None:
        layers = [nn.Linear(width, 64) for width in (48, 64, 64)]
        super().__init__(*(each for layer in layers for each in (layer, nn.GELU())), nn.Linear(64, LABELS))


@dataclass(frozen=True)
class Output:
    """What HuggingFace's models return."""

    loss: Tensor


class Classifier(nn.Module):
    """An MLP that computes its loss as HuggingFace's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        """The mean over the samples."""
        return Output(cross_entropy(self.mlp(x), labels))


def own_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    """The loss that a model computes itself, as HuggingFace's do."""
    loss: Tensor = model(**inputs).loss
    return loss


@dataclass(frozen=True)
class Twin:
    """A model and how it is trained. ``units``: as ``shard`` and FSDP2's users name them."""

    build: Callable[[], nn.Module]
    inputs: Callable[[range], Inputs]
    units: tuple[type[nn.Module], ...]
    loss: Callable[[nn.Module, Inputs], Tensor] = own_loss
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``shard``."""
    idle: str = "none"
    """A part of the names of parameters whose gradient is zero but for rounding, which AdamW makes as large as any other: biases of keys,
    which add the same to all scores of a softmax. Nothing depends on their values."""


TWINS = {
    "llama": Twin(llama, text, (LlamaDecoderLayer,)),
    "qwen3": Twin(qwen3, text, (Qwen3DecoderLayer,)),
    "mixtral": Twin(mixtral, text, (MixtralDecoderLayer,)),
    "qwen3_moe": Twin(qwen3_moe, text, (Qwen3MoeDecoderLayer,)),
    "vit": Twin(vit, pictures, (ViTLayer,), idle="k_proj.bias"),
    "resnet": Twin(resnet, pictures, (ResNetBasicLayer,)),
    "mlp": Twin(Classifier, vectors, (nn.Linear,)),
    "t5": Twin(t5, pairs, (T5Block,)),
    "t5 untied": Twin(partial(t5, tied=False), pairs, (T5Block,)),
    "bart": Twin(bart, pairs, (BartEncoderLayer, BartDecoderLayer), idle="k_proj.bias"),
}
