"""Phi-3 and Phi-4."""

from __future__ import annotations

from dataclasses import replace

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families.family import Family
from megatron_llama.model.families.windows import EVERY_LAYER

_PHI4 = ModelConfig(
    model_type="phi3",
    vocab_size=100352,
    hidden_size=5120,
    intermediate_size=17920,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=10,
    head_dim=128,
    max_position_embeddings=16384,
    rms_norm_eps=1e-5,
    rope_theta=250000.0,
    initializer_range=0.02,
    bos_token_id=100257,
    eos_token_id=100257,
)
_LONG_FACTOR = (
    "1 1.118320672 1.250641126 1.398617824 1.564103225 1.74916897 1.956131817 2.187582649 "
    "2.446418898 2.735880826 3.059592084 3.421605075 3.826451687 4.279200023 4.785517845 "
    "5.351743533 5.984965424 6.693110555 7.485043894 8.370679318 9.36110372 10.4687158 11.70738129 "
    "13.09260651 14.64173252 16.37415215 18.31155283 20.47818807 22.90118105 25.61086418 "
    "28.64115884 32.03 32.1 32.13 32.23 32.6 32.61 32.64 32.66 32.7 32.71 32.93 32.97 33.28 33.49 "
    "33.5 44.16 47.77"
)
_PHI4_MINI = replace(
    _PHI4,
    vocab_size=200064,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=32,
    num_attention_heads=24,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rope_theta=10000.0,
    rope_scaling={
        "rope_type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [float(word) for word in _LONG_FACTOR.split()],
        "original_max_position_embeddings": 4096,
    },
    partial_rotary_factor=0.75,
    sliding_window=262144,
    tie_word_embeddings=True,
    bos_token_id=199999,
    eos_token_id=199999,
)

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    classifier="Phi3ForSequenceClassification",
    fields=("partial_rotary_factor",),
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        # Beyond a small vocabulary.
        "pad_token_id": 32000,
    },
    neutral={"full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,)},
    windows=EVERY_LAYER,
    rope_types=("default", "longrope"),
    rope_aliases={"su": "longrope"},
    fused={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
    presets={"phi-4": _PHI4, "phi-4-mini": _PHI4_MINI},
)
