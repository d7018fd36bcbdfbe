"""Mistral."""

from __future__ import annotations

from megatron_llama.config.families.family import Family

MISTRAL = Family(model_type="mistral", architecture="MistralForCausalLM")
