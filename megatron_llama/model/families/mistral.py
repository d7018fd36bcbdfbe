"""Mistral."""

from __future__ import annotations

from dataclasses import replace

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families.family import Family
from megatron_llama.model.families.windows import EVERY_LAYER

_7B = ModelConfig(
    model_type="mistral",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    initializer_range=0.02,
    bos_token_id=1,
    eos_token_id=2,
    sliding_window=4096,
)
_7B_V03 = replace(_7B, vocab_size=32768, rope_theta=1e6, sliding_window=0)
_NEMO = replace(
    _7B_V03,
    vocab_size=131072,
    hidden_size=5120,
    num_hidden_layers=40,
    max_position_embeddings=128000,
)

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    classifier="MistralForSequenceClassification",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    windows=EVERY_LAYER,
    presets={"mistral-7b-v0.1": _7B, "mistral-7b-v0.3": _7B_V03, "mistral-nemo-12b": _NEMO},
)
