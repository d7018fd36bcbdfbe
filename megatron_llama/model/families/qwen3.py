"""Qwen3."""

from __future__ import annotations

from dataclasses import replace

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families.family import Family
from megatron_llama.model.families.windows import LAST_LAYERS

_0_6B = ModelConfig(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
    initializer_range=0.02,
    bos_token_id=151643,
    eos_token_id=151645,
    qk_norm="head",
)
_1_7B = replace(_0_6B, hidden_size=2048, intermediate_size=6144)
_4B = replace(
    _0_6B, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32
)
_8B = replace(_4B, hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False)
_14B = replace(
    _8B, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40
)
_32B = replace(_14B, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    classifier="Qwen3ForSequenceClassification",
    always={"qk_norm": "head"},
    fields=("attention_bias",),
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    windows=LAST_LAYERS,
    presets={
        "qwen3-0.6b": _0_6B,
        "qwen3-1.7b": _1_7B,
        "qwen3-4b": _4B,
        "qwen3-8b": _8B,
        "qwen3-14b": _14B,
        "qwen3-32b": _32B,
    },
)
