"""The text models of Gemma 3."""

from __future__ import annotations

from dataclasses import replace

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families.family import Family
from megatron_llama.model.families.windows import ALL_BUT_EVERY_SIXTH
from megatron_llama.model.windows import FULL, SLIDING


def _sized(model: ModelConfig, hidden: int, layers: int) -> ModelConfig:
    """Return the model with another width and depth, and the fields that follow from them."""
    return replace(
        model,
        hidden_size=hidden,
        num_hidden_layers=layers,
        embedding_multiplier=hidden**0.5,
        layer_types=tuple(SLIDING if (layer + 1) % 6 else FULL for layer in range(layers)),
    )


_1B = _sized(
    ModelConfig(
        model_type="gemma3_text",
        vocab_size=262144,
        intermediate_size=6912,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_local_base_freq=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.02,
        hidden_act="gelu_pytorch_tanh",
        bos_token_id=2,
        eos_token_id=1,
        qk_norm="head",
        norm_position="both",
        apply_layernorm_1p=True,
        query_pre_attn_scalar=256.0,
        sliding_window=512,
    ),
    1152,
    26,
)
# The text model of the models that also see pictures.
_4B = _sized(
    replace(
        _1B,
        vocab_size=262208,
        intermediate_size=10240,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window=1024,
    ),
    2560,
    34,
)
_12B = _sized(
    replace(_4B, intermediate_size=15360, num_attention_heads=16, num_key_value_heads=8), 3840, 48
)
_27B = _sized(
    replace(
        _4B,
        intermediate_size=21504,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        query_pre_attn_scalar=168.0,
    ),
    5376,
    62,
)

GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    classifier="Gemma3TextForSequenceClassification",
    always={"qk_norm": "head", "norm_position": "both", "apply_layernorm_1p": True},
    derived={"embedding_multiplier": lambda model: model.hidden_size**0.5},
    fields=(
        "attention_bias",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "rope_local_base_freq",
    ),
    optional=("final_logit_softcapping",),
    integers=("query_pre_attn_scalar",),
    spelling={"hidden_act": "hidden_activation"},
    defaults={
        "pad_token_id": 0,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    neutral={
        "use_bidirectional_attention": (False,),
        "cache_implementation": ("hybrid",),
        # transformers reads this field and never applies it, so a value in it cannot be meant.
        "attn_logit_softcapping": (),
    },
    windows=ALL_BUT_EVERY_SIXTH,
    whole_heads=True,
    tensors={
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    presets={
        "gemma3-1b": _1B,
        "gemma3-4b-text": _4B,
        "gemma3-12b-text": _12B,
        "gemma3-27b-text": _27B,
    },
)
