"""Published models by name, with the values of their ``config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families import FAMILIES

LLAMA_VOCABULARY = 32000
"""The vocabulary that plans assume when no tokenizer is at hand."""


class _Presets(Mapping[str, ModelConfig]):
    """The presets of all families. Families are imported when a preset is looked up."""

    def __getitem__(self, name: str) -> ModelConfig:
        for family in FAMILIES.values():
            if name in family.presets:
                return family.presets[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        for family in FAMILIES.values():
            yield from family.presets

    def __len__(self) -> int:
        return sum(len(family.presets) for family in FAMILIES.values())


PRESETS: Mapping[str, ModelConfig] = _Presets()
