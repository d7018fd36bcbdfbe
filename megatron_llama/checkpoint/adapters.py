"""Low-rank additions (LoRA) in checkpoints: their merge into weights that are read, and whether a
run goes on with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from megatron_llama.config.schema import LoraConfig
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError
from megatron_llama.model.plan.lora import adapter_names

LIKE = ("lora_rank", "lora_alpha", "lora_target_modules")
"""Options that a run must share with the checkpoint whose additions it goes on to train."""


class MergedWeights:
    """A WeightSource of the merged weights W + scaling * B A, which are computed in fp32 and
    rounded once."""

    def __init__(
        self,
        base: WeightSource,
        adapters: WeightSource,
        shapes: Mapping[str, tuple[int, ...]],
        scaling: float,
    ) -> None:
        """``shapes`` holds the shape of each A and B that ``adapters`` has, by name, as
        ``adapter_shapes`` returns them."""
        self._base = base
        self._adapters = adapters
        self._shapes = shapes
        self._scaling = scaling

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
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
    """Return the factor of the product B A."""
    return lora.lora_alpha / lora.lora_rank


def saved_lora(config: Mapping[str, Any]) -> LoraConfig:
    """Return the additions of a checkpoint from the configuration in its ``meta.json``. Rank 0
    stands for none."""
    saved = config.get("lora", {})
    known = {field.name: saved[field.name] for field in fields(LoraConfig) if field.name in saved}
    targets = known.pop("lora_target_modules", None)
    lora = LoraConfig(**known)
    return lora if targets is None else LoraConfig(**known, lora_target_modules=tuple(targets))


def takes_up(where: str, saved: LoraConfig, lora: LoraConfig, *, anew: bool) -> bool:
    """Whether a run that loads a checkpoint goes on to train exactly what is in it: the model
    alone, or the same additions.

    Otherwise it begins with the merged model and, if it has a rank, with additions of its own. That
    has to be requested with ``anew`` (--finetune). Without it CheckpointError is raised, since
    either choice could silently be wrong."""
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
    if isinstance(value, tuple):
        return " ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
