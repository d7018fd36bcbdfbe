"""Published models by name, with the values of their ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron_llama.config.families import FAMILIES
from megatron_llama.config.schema import ModelConfig

LLAMA_VOCABULARY = 32000
"""The vocabulary that plans assume where no tokenizer is at hand."""
PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {name: model for family in FAMILIES.values() for name, model in family.presets.items()}
)
