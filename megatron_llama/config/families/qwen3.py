"""Qwen3."""

from __future__ import annotations

from megatron_llama.config.families.family import Family

QWEN3 = Family(model_type="qwen3", architecture="Qwen3ForCausalLM")
