"""Gemma 2."""

from __future__ import annotations

from dataclasses import replace

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families.family import Family
from megatron_llama.model.families.windows import EVERY_OTHER
from megatron_llama.model.windows import FULL, SLIDING


def _sized(model: ModelConfig, hidden: int, layers: int) -> ModelConfig:
    """Return the model with another width and depth, and the fields that follow from them."""
    return replace(
        model,
        hidden_size=hidden,
        num_hidden_layers=layers,
        embedding_multiplier=hidden**0.5,
        layer_types=tuple(FULL if layer % 2 else SLIDING for layer in range(layers)),
    )


_2B = _sized(
    ModelConfig(
        model_type="gemma2",
        vocab_size=256000,
        intermediate_size=9216,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.02,
        hidden_act="gelu_pytorch_tanh",
        bos_token_id=2,
        eos_token_id=1,
        norm_position="both",
        apply_layernorm_1p=True,
        query_pre_attn_scalar=256.0,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window=4096,
    ),
    2304,
    26,
)
_9B = _sized(
    replace(_2B, intermediate_size=14336, num_attention_heads=16, num_key_value_heads=8), 3584, 42
)
_27B = _sized(
    replace(
        _2B,
        intermediate_size=36864,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        query_pre_attn_scalar=144.0,
    ),
    4608,
    46,
)

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    classifier="Gemma2ForSequenceClassification",
    always={"norm_position": "both", "apply_layernorm_1p": True},
    derived={"embedding_multiplier": lambda model: model.hidden_size**0.5},
    fields=(
        "attention_bias",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ),
    optional=("attn_logit_softcapping", "final_logit_softcapping"),
    integers=("query_pre_attn_scalar",),
    spelling={"hidden_act": "hidden_activation"},
    defaults={
        "pad_token_id": 0,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    neutral={
        "use_bidirectional_attention": (False,),
        "cache_implementation": ("hybrid",),
        # Published files say the activation and the window twice.
        "hidden_act": ("gelu_pytorch_tanh",),
        "sliding_window_size": (4096,),
    },
    windows=EVERY_OTHER,
    whole_heads=True,
    tensors={
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    presets={"gemma2-2b": _2B, "gemma2-9b": _9B, "gemma2-27b": _27B},
)
