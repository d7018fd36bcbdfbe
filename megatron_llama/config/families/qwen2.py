"""Qwen2."""

from __future__ import annotations

from megatron_llama.config.families.family import Family

QWEN2 = Family(model_type="qwen2", architecture="Qwen2ForCausalLM")
