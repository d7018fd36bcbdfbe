"""OLMo 2."""

from __future__ import annotations

from dataclasses import replace

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families.family import Family

_7B = ModelConfig(
    model_type="olmo2",
    vocab_size=100352,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=500000.0,
    initializer_range=0.02,
    eos_token_id=100257,
    qk_norm="projection",
    norm_position="after",
)
_13B = replace(
    _7B,
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=40,
)

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    classifier="Olmo2ForSequenceClassification",
    always={"qk_norm": "projection", "norm_position": "after"},
    fields=("attention_bias",),
    defaults={"rms_norm_eps": 1e-5, "pad_token_id": 1},
    tensors={
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    presets={"olmo2-7b": _7B, "olmo2-13b": _13B},
)
