"""Model families, one file each: constant fields of their models, the names of their
``config.json`` and tensors, and their presets. ``docs/add-a-family.md`` says how to add one."""

from __future__ import annotations

from megatron_llama.model.families.family import Family
from megatron_llama.registry import Registry

FAMILIES: Registry[Family] = Registry(
    {
        "llama": "model.families.llama:LLAMA",
        "mistral": "model.families.mistral:MISTRAL",
        "qwen2": "model.families.qwen2:QWEN2",
        "qwen3": "model.families.qwen3:QWEN3",
        "phi3": "model.families.phi3:PHI3",
        "gemma2": "model.families.gemma2:GEMMA2",
        "gemma3_text": "model.families.gemma3_text:GEMMA3_TEXT",
        "mixtral": "model.families.mixtral:MIXTRAL",
        "llama4_text": "model.families.llama4:LLAMA4_TEXT",
        "qwen3_moe": "model.families.qwen3_moe:QWEN3_MOE",
        "olmo2": "model.families.olmo2:OLMO2",
    }
)
"""model_type -> family. A run imports that of its model."""
