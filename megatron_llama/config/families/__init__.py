"""Model families, one file each: what their models always have, how their ``config.json`` and
their tensors are called, and their presets. ``docs/add-a-family.md`` says how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron_llama.config.families.family import Family
from megatron_llama.config.families.gemma2 import GEMMA2
from megatron_llama.config.families.gemma3_text import GEMMA3_TEXT
from megatron_llama.config.families.llama import LLAMA
from megatron_llama.config.families.mistral import MISTRAL
from megatron_llama.config.families.olmo2 import OLMO2
from megatron_llama.config.families.phi3 import PHI3
from megatron_llama.config.families.qwen2 import QWEN2
from megatron_llama.config.families.qwen3 import QWEN3

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA2, GEMMA3_TEXT, OLMO2)
    }
)
"""model_type -> family."""
