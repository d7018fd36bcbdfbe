"""Low-rank additions in checkpoints: added to the weights that they belong to, as they are read,
and taken up by a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from megatron_llama.config.schema import LoraConfig
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import CheckpointError
from megatron_llama.plans.params import Rectangle, adapter_names

LIKE = ("lora_rank", "lora_alpha", "lora_target_modules")
"""Options that a run must have in common with the checkpoint whose additions it trains on."""


class Merged:
    """A source of HuggingFace rectangles: the model's weights W as W + scaling * B A, computed in
    fp32 and rounded once."""

    def __init__(
        self,
        base: WeightSource,
        adapters: WeightSource,
        shapes: Mapping[str, tuple[int, ...]],
        scaling: float,
    ) -> None:
        """``shapes``: of all halves that ``adapters`` has, by name; see ``adapter_shapes``."""
        self._base = base
        self._adapters = adapters
        self._shapes = shapes
        self._scaling = scaling

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """See WeightSource."""
        first, second = adapter_names(rectangle.name)
        if first not in self._shapes:
            self._base(rectangle, out)
            return
        (row, column) = rectangle.offset
        (rows, columns) = rectangle.size
        rank = self._shapes[first][0]
        a = torch.empty(rank, columns)
        b = torch.empty(rows, rank)
        whole = torch.empty(rows, columns)
        self._adapters(Rectangle(first, self._shapes[first], (0, column), (rank, columns), 0), a)
        self._adapters(Rectangle(second, self._shapes[second], (row, 0), (rows, rank), 0), b)
        self._base(rectangle, whole)
        out.copy_(whole.addmm_(b, a, alpha=self._scaling))


def scaling_of(lora: LoraConfig) -> float:
    """The factor of the product."""
    return lora.lora_alpha / lora.lora_rank


def saved_lora(config: Mapping[str, Any]) -> LoraConfig:
    """The additions of a checkpoint, by the configuration in its ``meta.json``; rank 0: it has
    none."""
    saved = config.get("lora", {})
    known = {field.name: saved[field.name] for field in fields(LoraConfig) if field.name in saved}
    targets = known.pop("lora_target_modules", None)
    lora = LoraConfig(**known)
    return lora if targets is None else LoraConfig(**known, lora_target_modules=tuple(targets))


def takes_up(where: str, saved: LoraConfig, lora: LoraConfig, *, anew: bool) -> bool:
    """Whether a run that loads a checkpoint trains on what is in it: the model alone, or the same
    additions.

    Otherwise it begins with the model (the additions of the checkpoint, if any, added to it) and,
    if it has a rank, with additions of its own: only ``anew`` (--finetune). Raises CheckpointError
    where that is not asked for: silently either is wrong."""
    differences = list(_differences(saved, lora))
    if not differences:
        return True
    if not anew:
        do = f"give {_flags(saved)} to resume, or --finetune to begin anew from its weights"
        raise CheckpointError(
            where, got="; ".join(differences), expected="the same as in this run", do=do
        )
    return False


def _differences(saved: LoraConfig, lora: LoraConfig) -> Iterator[str]:
    if saved.lora_rank == lora.lora_rank == 0:
        return
    for name in LIKE:
        before = getattr(saved, name)
        now = getattr(lora, name)
        if before != now and (set(before) != set(now) if isinstance(before, tuple) else True):
            yield f"{name} {_words(before)} (here {_words(now)})"


def _flags(lora: LoraConfig) -> str:
    if not lora.lora_rank:
        return "no --lora-rank"
    return " ".join(f"--{name.replace('_', '-')} {_words(getattr(lora, name))}" for name in LIKE)


def _words(value: object) -> str:
    return (
        " ".join(value)
        if isinstance(value, tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
