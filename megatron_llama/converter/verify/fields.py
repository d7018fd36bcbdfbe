"""Compares two model configurations: fields that change the logits, and fields that do not."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from megatron_llama.checkpoint.meta import without_effect
from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.rope import normal_rope

_OURS = frozenset({"preset", "make_vocab_size_divisible_by"})
"""Fields that describe a run, not a model."""


@dataclass(frozen=True)
class FieldDifference:
    """A field of ``ModelConfig`` with its two values."""

    name: str
    first: Any
    second: Any
    matters: bool
    """Whether it changes the computation."""

    def __str__(self) -> str:
        return f"{self.name}: {self.first} in A, {self.second} in B"


def field_differences(first: ModelConfig, second: ModelConfig) -> list[FieldDifference]:
    """Return every field that differs, in the order of ``ModelConfig``. Rotary scalings that mean
    the same are equal."""
    differences = []
    harmless = without_effect(first, second)
    for name in (field.name for field in fields(ModelConfig) if field.name not in _OURS):
        values = [getattr(model, name) for model in (first, second)]
        a, b = map(normal_rope, values) if name == "rope_scaling" else values
        if a != b:
            differences.append(FieldDifference(name, a, b, name not in harmless))
    return differences
