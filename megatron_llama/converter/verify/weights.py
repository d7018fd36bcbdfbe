"""Compares the weights of two models bit for bit, block by block, so that neither is in memory
whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_llama.checkpoint.model_folders.formats import ModelReader
from megatron_llama.checkpoint.model_folders.safetensors_file import row_blocks
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.plan.params import hf_shapes

PRECISION: Mapping[str, int] = MappingProxyType({"bfloat16": 8, "float16": 11, "float32": 24})
"""Bits of the significand, by dtype."""
_BITS: Mapping[int, torch.dtype] = MappingProxyType({2: torch.int16, 4: torch.int32})


def stored_dtype(source: ModelReader) -> str:
    """Return the dtype of the stored weights; in a native checkpoint always fp32, whatever dtype
    the run computed in."""
    return "float32" if source.format == "native" else source.dtype


def common_dtype(first: ModelReader, second: ModelReader) -> str:
    """Return the less precise of the two stored dtypes, in which the weights are compared."""
    return min((stored_dtype(first), stored_dtype(second)), key=PRECISION.__getitem__)


class RoundedSource:
    """A WeightSource whose values are rounded to a dtype, whatever dtype they are read in."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self._source = source
        self._dtype = dtype

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        rounded = torch.empty(rectangle.size, dtype=self._dtype)
        self._source(rectangle, rounded)
        out.copy_(rounded)


@dataclass(frozen=True)
class TensorDifference:
    """The difference between two tensors, or between parts of them."""

    first: tuple[int, ...]
    """Index of the first element that differs."""
    values: tuple[float, float]
    """The two values of that element."""
    count: int
    """Number of elements that differ."""
    deviation: float
    """Largest difference; NaN if only one side is a number."""


def weight_differences(first: ModelReader, second: ModelReader) -> Iterator[str]:
    """Yield a line for each tensor that differs, in the order of the model. Raises CheckpointError
    for a tensor that cannot be read."""
    ours = hf_shapes(first.model)
    theirs = hf_shapes(second.model)
    dtype = getattr(torch, common_dtype(first, second))
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours or name not in theirs:
            yield f"{name}: only in {'A' if name in ours else 'B'}"
        elif ours[name] != theirs[name]:
            yield f"{name}: shape {ours[name]} in A, {theirs[name]} in B"
        elif (difference := _compare(name, ours[name], first, second, dtype)) is not None:
            a, b = difference.values
            yield (
                f"{name}: {difference.count:,} of {math.prod(ours[name]):,} elements,"
                f" the first at {list(difference.first)}:"
                f" {a:.9g} in A, {b:.9g} in B; largest deviation {difference.deviation:.3g}"
            )


def _compare(
    name: str, shape: tuple[int, ...], first: ModelReader, second: ModelReader, dtype: torch.dtype
) -> TensorDifference | None:
    parts = []
    for block in row_blocks(name, shape):
        sides = torch.empty(2, *block.size, dtype=dtype)
        for source, out in zip((first, second), sides, strict=True):
            source(block, out)
        if (difference := _difference(*sides, row=block.offset[0])) is not None:
            parts.append(difference)
    if not parts:
        return None
    # torch's maximum keeps a NaN, Python's may lose it.
    deviations = torch.tensor([part.deviation for part in parts], dtype=torch.float64)
    count = sum(part.count for part in parts)
    return TensorDifference(parts[0].first, parts[0].values, count, float(deviations.max()))


def _difference(a: Tensor, b: Tensor, *, row: int) -> TensorDifference | None:
    """Return the difference between two blocks of rows, of which ``row`` is the first, or None.
    Bits count: 0 and -0 differ, and a NaN equals itself."""
    bits = _BITS[a.element_size()]
    if torch.equal(a.view(bits), b.view(bits)):
        return None
    where = (a.view(bits) != b.view(bits)).view(-1)
    at = int(where.to(torch.uint8).argmax())
    inside = [int(index) for index in torch.unravel_index(torch.tensor(at), a.shape)]
    ours = a.view(-1)[where].double()
    theirs = b.view(-1)[where].double()
    return TensorDifference(
        (inside[0] + row, *inside[1:]),
        (float(ours[0]), float(theirs[0])),
        ours.numel(),
        float((ours - theirs).abs().max()),
    )
