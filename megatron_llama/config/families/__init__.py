"""Model families, one file each: what their models always have, how their ``config.json`` and
their tensors are called, and their presets. ``docs/add-a-family.md`` says how to add one."""

from __future__ import annotations

from megatron_llama.config.families.family import Family
from megatron_llama.registry import Registry

FAMILIES: Registry[Family] = Registry(
    {
        "llama": "config.families.llama:LLAMA",
        "mistral": "config.families.mistral:MISTRAL",
        "qwen2": "config.families.qwen2:QWEN2",
        "qwen3": "config.families.qwen3:QWEN3",
        "phi3": "config.families.phi3:PHI3",
        "gemma2": "config.families.gemma2:GEMMA2",
        "gemma3_text": "config.families.gemma3_text:GEMMA3_TEXT",
        "olmo2": "config.families.olmo2:OLMO2",
    }
)
"""model_type -> family. A run imports that of its model."""
