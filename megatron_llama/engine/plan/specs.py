"""A parameter as the engine knows it: its local shape, the whole tensors in which its elements sit,
and the unit with which it is gathered.

The parameters of a run come from ``model/plan``, those of a user's model from its modules. An
example, with hidden size 64, 8 heads of 8 dims, 8 key/value heads and tp 2: rank 1 holds
``qkv_proj`` of shape [96, 64]. It has three *slices*: its rows 0-31 are rows 32-63 of HuggingFace's
``q_proj``, its rows 32-63 the same rows of ``k_proj``, its rows 64-95 those of ``v_proj``. A shard
of the engine is any range of the flattened parameter, say its elements 100 to 1500. In
HuggingFace's tensor that is no block of rows: it is the rest of row 1, whole rows, and the
beginning of a row. These blocks are its *rectangles*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True)
class HFSlice:
    """Rows ``[row, row + rows)`` of a local parameter are the block at ``(hf_row, hf_col)`` of one
    HuggingFace tensor."""

    name: str
    shape: tuple[int, ...]
    row: int
    rows: int
    hf_row: int = 0
    hf_col: int = 0

    @property
    def width(self) -> int:
        """Elements of one row of the HuggingFace tensor: 1 for a vector or a number."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as a tensor-parallel rank holds it. ``shape`` includes the padding of the
    vocabulary; the slices cover all other rows."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[HFSlice, ...]
    decay: bool
    """Whether weight decay applies: to two or more dims, unless a group says otherwise."""
    copies: int = 1
    """Number of consecutive tensor-parallel ranks that hold the same values."""
    partial_grad: bool = False
    """Whether each copy sees only a part of the gradient, so that the copies' gradients have to be
    summed."""
    tied: bool = False
    """Whether the other end of the pipeline holds the same parameter: the tied embedding."""
    contributions: int = 1
    """Gradient contributions of one microbatch: 2 for an embedding that is also the head of the
    same process."""
    stage: int = 0
    """The pipeline stage whose backward passes write the gradient."""
    trainable: bool = True
    """Whether it is trained: not frozen by ``--freeze`` or by ``--lora-rank``."""
    adapter: bool = False
    """Whether it is one half of a low-rank addition: small, and with buffers of its own."""
    group: int = 0
    """The number of its group: parameters that share learning rate, betas, eps and decay."""
    resident: bool = False
    """Whether it is so small that it stays unsharded, in one bucket for all units: parameters with
    fewer than two dims, and the score of a reward model."""
    muon: bool = False
    """Whether Muon updates it, and not AdamW."""
    ep: int = 1
    """Neighbouring data-parallel ranks that each hold other experts."""
    dtype: str = ""
    """The dtype in which it computes, where that is not ``EngineOptions.dtype``."""
    reduces_in: str = ""
    """That of its gradient on the wire, where ``EngineOptions.reduces_in_bf16`` does not say it."""

    @property
    def numel(self) -> int:
        """Local elements, padding included."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Elements of one row: 1 for a vector or a number."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class UnitSpec:
    """Parameters that are gathered together: the embedding, one transformer block, or the final
    norm with the head; of a user's model one of the modules that were named as units, or the rest
    of a module."""

    name: str
    params: tuple[ParamSpec, ...]
    """Several units of a user's model may list one parameter, which is then equal in all of them:
    it is shared."""
    is_block: bool = False
    """Whether it is a transformer block."""
    is_root_part: bool = False
    """Whether it is a part of a user's model that is in no unit: it has slots of its own."""
    inside: tuple[int, ...] = ()
    """The numbers of the units around this one, the outermost first: while it runs, they do too,
    and read their weights."""
    module_class: str = ""
    """The name of the module's class. Units of one class share slots."""


@dataclass(frozen=True)
class Rectangle:
    """A contiguous range of a local parameter that is a rectangle of one HuggingFace tensor."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole HuggingFace tensor."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    """Its first element in the flattened local parameter."""

    @property
    def numel(self) -> int:
        """Elements of the rectangle."""
        return math.prod(self.size)


def rectangles(spec: ParamSpec, start: int, stop: int) -> Iterator[Rectangle]:
    """Yield the elements ``[start, stop)`` of the flattened parameter as HuggingFace rectangles, in
    order: for a matrix at most three for each slice, the end of a row, whole rows, and the
    beginning of a row; with d dims at most 2 d - 1. Padding belongs to no slice and is left out."""
    width = spec.width
    for hf_slice in spec.slices:
        low = max(start, hf_slice.row * width)
        high = min(stop, (hf_slice.row + hf_slice.rows) * width)
        while low < high:
            offset, size = _largest_box(spec.shape, low, high)
            # The first element of the slice, in the coordinates of the HuggingFace tensor.
            shift = (hf_slice.hf_row - hf_slice.row, hf_slice.hf_col)
            moved = (at + by for at, by in zip_longest(offset, shift[: len(offset)], fillvalue=0))
            yield Rectangle(hf_slice.name, hf_slice.shape, tuple(moved), size, low)
            low += math.prod(size)


def _largest_box(
    shape: tuple[int, ...], low: int, high: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and size of the largest box that begins at element ``low`` of a flattened
    tensor, is contiguous, and ends at ``high`` at the latest."""
    offset = []
    rest = low
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :])
        index, rest = divmod(rest, stride)
        offset.append(index)
        count = min(shape[dim] - index, (high - low) // stride)
        if rest == 0 and count:
            after = len(shape) - dim - 1
            return (*offset, *[0] * after), (*[1] * dim, count, *shape[dim + 1 :])
    return (), ()  # a number: one element, and no dims
