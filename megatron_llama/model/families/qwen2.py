"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from dataclasses import replace

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families.family import Family
from megatron_llama.model.families.windows import LAST_LAYERS

_0_5B = ModelConfig(
    model_type="qwen2",
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
    initializer_range=0.02,
    bos_token_id=151643,
    eos_token_id=151643,
    add_qkv_bias=True,
)
_1_5B = replace(
    _0_5B,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    head_dim=128,
    max_position_embeddings=131072,
)
_3B = replace(
    _1_5B,
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=16,
    max_position_embeddings=32768,
)
_7B = replace(
    _1_5B,
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
_14B = replace(
    _7B,
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
)
_32B = replace(_14B, intermediate_size=27648, num_hidden_layers=64)
_72B = replace(
    _14B, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64
)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    classifier="Qwen2ForSequenceClassification",
    always={"add_qkv_bias": True},
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    neutral={"use_mrope": (False,)},
    windows=LAST_LAYERS,
    # The base models; the instruct ones have an epsilon of 1e-6, and other special tokens.
    presets={
        "qwen2.5-0.5b": _0_5B,
        "qwen2.5-1.5b": _1_5B,
        "qwen2.5-3b": _3B,
        "qwen2.5-7b": _7B,
        "qwen2.5-14b": _14B,
        "qwen2.5-32b": _32B,
        "qwen2.5-72b": _72B,
    },
)
