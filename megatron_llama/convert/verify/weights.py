"""Compares the weights of two models bit for bit, block by block, so that neither is ever in
memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_llama.convert.formats import Source
from megatron_llama.convert.safetensors_file import row_blocks
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.plans.params import Rectangle, hf_shapes

PRECISION: Mapping[str, int] = MappingProxyType({"bfloat16": 8, "float16": 11, "float32": 24})
"""Bits of the significand."""
_BITS: Mapping[int, torch.dtype] = MappingProxyType({2: torch.int16, 4: torch.int32})


def stored_dtype(source: Source) -> str:
    """What the weights are stored in: always fp32 in a native checkpoint, whatever the run computed
    in."""
    return "float32" if source.format == "native" else source.dtype


def common_dtype(first: Source, second: Source) -> str:
    """The less precise of what the two are stored in: in it they are compared."""
    return min((stored_dtype(first), stored_dtype(second)), key=PRECISION.__getitem__)


class Rounded:
    """A source whose values are rounded to a dtype, whatever they are read in."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self._source = source
        self._dtype = dtype

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """See WeightSource."""
        rounded = torch.empty(rectangle.size, dtype=self._dtype)
        self._source(rectangle, rounded)
        out.copy_(rounded)


@dataclass(frozen=True)
class Unequal:
    """What differs in one tensor, or in a part of it."""

    first: tuple[int, ...]
    """Index of the first element that differs."""
    values: tuple[float, float]
    """Of that element."""
    count: int
    deviation: float
    """The largest; not a number where only one side is one."""


def weight_differences(first: Source, second: Source) -> Iterator[str]:
    """A line for each tensor that differs, in the order of the model. Raises CheckpointError for
    what cannot be read."""
    ours = hf_shapes(first.model)
    theirs = hf_shapes(second.model)
    dtype = getattr(torch, common_dtype(first, second))
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours or name not in theirs:
            yield f"{name}: only in {'A' if name in ours else 'B'}"
        elif ours[name] != theirs[name]:
            yield f"{name}: shape {ours[name]} in A, {theirs[name]} in B"
        elif (found := _compare(name, ours[name], first, second, dtype)) is not None:
            a, b = found.values
            yield (
                f"{name}: {found.count:,} of {math.prod(ours[name]):,} elements, the first at {list(found.first)}:"
                f" {a:.9g} in A, {b:.9g} in B; largest deviation {found.deviation:.3g}"
            )


def _compare(
    name: str, shape: tuple[int, ...], first: Source, second: Source, dtype: torch.dtype
) -> Unequal | None:
    parts = []
    for block in row_blocks(name, shape):
        sides = torch.empty(2, *block.size, dtype=dtype)
        for source, out in zip((first, second), sides, strict=True):
            source(block, out)
        if (part := _unequal(*sides, row=block.offset[0])) is not None:
            parts.append(part)
    if not parts:
        return None
    deviations = torch.tensor([part.deviation for part in parts], dtype=torch.float64)
    return Unequal(
        parts[0].first, parts[0].values, sum(part.count for part in parts), float(deviations.max())
    )


def _unequal(a: Tensor, b: Tensor, *, row: int) -> Unequal | None:
    """``row``: of the tensor, that is the first of these. Zeros of either sign differ, and a NaN
    equals itself: bits count."""
    bits = _BITS[a.element_size()]
    if torch.equal(a.view(bits), b.view(bits)):
        return None
    where = (a.view(bits) != b.view(bits)).view(-1)
    at = int(where.to(torch.uint8).argmax())
    inside = [int(index) for index in torch.unravel_index(torch.tensor(at), a.shape)]
    ours = a.view(-1)[where].double()
    theirs = b.view(-1)[where].double()
    return Unequal(
        (inside[0] + row, *inside[1:]),
        (float(ours[0]), float(theirs[0])),
        ours.numel(),
        float((ours - theirs).abs().max()),
    )
