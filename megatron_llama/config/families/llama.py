"""LLaMA."""

from __future__ import annotations

from megatron_llama.config.families.family import Family

LLAMA = Family(model_type="llama", architecture="LlamaForCausalLM")
