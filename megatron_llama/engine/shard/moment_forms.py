"""Moments of a loaded state that the engine keeps in another form: in 8 bits, or not."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod

import torch
from torch import Tensor

from megatron_llama.engine.plan.buckets import ALIGN, align_up
from megatron_llama.engine.plan.limits import UPDATE_PIECE
from megatron_llama.engine.rules.moments import EightBitMoment, Tables
from megatron_llama.engine.shard.values import MOMENTS

SIGNED = MOMENTS[0]
"""The moment that may be negative."""


def other_forms(
    expected: Collection[str], given: Collection[str]
) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yield the moments that an engine keeps in one form and a state has in the other: the moment,
    and the names of its tensors here and there."""
    for moment in MOMENTS:
        plain, in_bytes = (moment,), (f"{moment}_codes", f"{moment}_scales")
        for here, there in ((plain, in_bytes), (in_bytes, plain)):
            if here[0] in expected and here[0] not in given and set(there) <= set(given):
                yield moment, here, there


def blocks_of(shape: tuple[int, ...]) -> tuple[int]:
    """Return the shape of the scales of a parameter."""
    return (-(-prod(shape) // ALIGN),)


def quantised(moment: str, value: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a moment, flat, rounded as by an update with this count of
    steps."""
    kept = _open(moment, value)
    numbers = torch.tensor([step, 0.0], device=value.device)
    flat = value.reshape(-1).float()
    # An update rounds in such pieces too: the results between are several times as large.
    for start in range(0, len(kept.kept.codes), UPDATE_PIECE):
        piece = slice(start, min(start + UPDATE_PIECE, len(kept.kept.codes)))
        values = torch.zeros(piece.stop - piece.start, device=value.device)
        elements = flat[piece]
        values[: len(elements)] = elements
        kept.keep(piece, values, step=numbers[0], skip=numbers[1])
    return kept.kept.codes[: len(flat)], kept.kept.scales


def dequantised(moment: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of a moment in 8 bits, flat, in fp32."""
    kept = _open(moment, codes)
    kept.kept.codes[: codes.numel()] = codes.reshape(-1)
    kept.kept.scales.copy_(scales)
    return kept.read(slice(0, len(kept.kept.codes)))[: codes.numel()]


def _open(moment: str, like: Tensor) -> EightBitMoment:
    numel = align_up(like.numel(), ALIGN)
    flat = torch.empty(numel, dtype=torch.float32, device=like.device)
    return EightBitMoment(flat, Tables.on(like.device), signed=moment == SIGNED)
