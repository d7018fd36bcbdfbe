"""Qwen3's models with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families.experts import BALANCING, SOME_BLOCKS
from megatron_llama.model.families.family import Family
from megatron_llama.model.families.reader import ConfigReader
from megatron_llama.model.families.windows import EVERY_LAYER, Windows

_30B_A3B = ModelConfig(
    model_type="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    initializer_range=0.02,
    bos_token_id=151643,
    eos_token_id=151645,
    qk_norm="head",
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)
_235B_A22B = replace(
    _30B_A3B,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=94,
    num_attention_heads=64,
    moe_intermediate_size=1536,
)


def _read_window(reader: ConfigReader) -> tuple[int, tuple[str, ...]]:
    """Return no window unless one is switched on, whatever its size."""
    if not reader.switch("use_sliding_window"):
        reader.seen.add("sliding_window")
        return 0, ()
    return EVERY_LAYER.read(reader)


def _write_window(model: ModelConfig) -> Mapping[str, Any]:
    return {"use_sliding_window": model.sliding_window > 0, **EVERY_LAYER.write(model)}


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    classifier="Qwen3MoeForSequenceClassification",
    always={"qk_norm": "head"},
    fields=("attention_bias",),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "router_aux_loss_coef": 0.001,
    },
    neutral=BALANCING,
    windows=Windows(_read_window, _write_window),
    experts=SOME_BLOCKS,
    presets={"qwen3-30b-a3b": _30B_A3B, "qwen3-235b-a22b": _235B_A22B},
)
