"""``--freeze``: parameters of the table that are not trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from megatron_llama.engine.plan.specs import UnitSpec


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a HuggingFace parameter is not trained."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def with_frozen(unit: UnitSpec, patterns: Sequence[str]) -> UnitSpec:
    """Return the unit, with each parameter frozen whose HuggingFace tensors all are.
    ``checks/freeze.py`` refuses patterns that freeze a part of one."""
    params = []
    for spec in unit.params:
        frozen = all(is_frozen(hf_slice.name, patterns) for hf_slice in spec.slices)
        params.append(replace(spec, trainable=spec.trainable and not frozen))
    return replace(unit, params=tuple(params))
