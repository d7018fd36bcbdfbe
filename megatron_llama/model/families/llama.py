"""LLaMA 1 to 3."""

from __future__ import annotations

from dataclasses import replace

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families.family import Family

_LLAMA_7B = ModelConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    initializer_range=0.02,
    bos_token_id=1,
    eos_token_id=2,
)
_LLAMA_13B = replace(
    _LLAMA_7B,
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=40,
)
_LLAMA_30B = replace(
    _LLAMA_7B,
    hidden_size=6656,
    intermediate_size=17920,
    num_hidden_layers=60,
    num_attention_heads=52,
    num_key_value_heads=52,
)
_LLAMA_65B = replace(
    _LLAMA_7B,
    hidden_size=8192,
    intermediate_size=22016,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=64,
    rms_norm_eps=1e-5,
)
_LLAMA2_7B = replace(_LLAMA_7B, max_position_embeddings=4096, rms_norm_eps=1e-5)
_LLAMA2_13B = replace(_LLAMA_13B, max_position_embeddings=4096, rms_norm_eps=1e-5)
_LLAMA2_70B = replace(
    _LLAMA_65B, intermediate_size=28672, num_key_value_heads=8, max_position_embeddings=4096
)

_LLAMA3_8B = replace(
    _LLAMA2_7B,
    vocab_size=128256,
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    bos_token_id=128000,
    eos_token_id=128001,
)
_LLAMA3_70B = replace(
    _LLAMA3_8B,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)


def _extended(model: ModelConfig, factor: float) -> ModelConfig:
    """Return the 131072-position variant of a LLaMA 3 model."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return replace(model, max_position_embeddings=131072, rope_scaling=scaling)


_LLAMA31_70B = _extended(_LLAMA3_70B, 8.0)
_LLAMA31_405B = replace(
    _LLAMA31_70B,
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
)
_LLAMA32_1B = replace(
    _extended(_LLAMA3_8B, 32.0),
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    head_dim=64,
    tie_word_embeddings=True,
)
_LLAMA32_3B = replace(
    _LLAMA32_1B, hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, head_dim=128
)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    classifier="LlamaForSequenceClassification",
    fields=("attention_bias", "mlp_bias"),
    whole_heads=True,
    presets={
        "llama-7b": _LLAMA_7B,
        "llama-13b": _LLAMA_13B,
        "llama-30b": _LLAMA_30B,
        "llama-65b": _LLAMA_65B,
        "llama2-7b": _LLAMA2_7B,
        "llama2-13b": _LLAMA2_13B,
        "llama2-70b": _LLAMA2_70B,
        "llama3-8b": _LLAMA3_8B,
        "llama3-70b": _LLAMA3_70B,
        "llama3.1-8b": _extended(_LLAMA3_8B, 8.0),
        "llama3.1-70b": _LLAMA31_70B,
        "llama3.1-405b": _LLAMA31_405B,
        "llama3.2-1b": _LLAMA32_1B,
        "llama3.2-3b": _LLAMA32_3B,
        "llama3.3-70b": _LLAMA31_70B,
    },
)
