"""The columns of a shard. A flat shard holds rows, and parts of rows, of several matrices; a column
of such a matrix is one input channel. Here some of the columns are packed into one vector, and put
back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.plans.buckets import ALIGN, Segment, align_up

ROWS_OF = 1 << 16
"""Elements that are worked on at once where an operation takes several passes: they stay in the
cache of a core."""

AT_ONCE = 1 << 22
"""Elements that are worked on at once where an operation takes memory of its own on the device,
which nobody has planned."""


def in_rows(rows: int, columns: int) -> Iterator[slice]:
    """The rows of a matrix in turns of AT_ONCE elements."""
    step = max(1, AT_ONCE // max(1, columns))
    return (slice(low, low + step) for low in range(0, rows, step))


@dataclass(frozen=True)
class Block:
    """``rows`` x ``cols`` elements of a shard from ``start``: the columns from ``col`` of matrix
    number ``matrix``."""

    matrix: int
    start: int
    rows: int
    col: int
    cols: int

    def view(self, shard: Tensor) -> Tensor:
        """Its place in a shard, [rows, cols]."""
        return shard[self.start : self.start + self.rows * self.cols].view(self.rows, self.cols)

    def parts(self, shard: Tensor) -> Iterator[Tensor]:
        """Its place in a shard, some rows at a time."""
        view = self.view(shard)
        return (view[rows] for rows in in_rows(self.rows, self.cols))

    def of(self, columns: Tensor) -> Tensor:
        """The part of a vector over the matrix's columns that belongs to it, [cols]."""
        return columns[self.col : self.col + self.cols]


def blocks_of(segment: Segment, matrix: int) -> Iterator[Block]:
    """A segment as at most three blocks: the tail of a row, whole rows, the head of a row.
    ``matrix``: the number they carry."""
    width = segment.spec.width
    low = segment.in_param
    stop = segment.in_param + segment.length
    while low < stop:
        col = low % width
        rows = (stop - low) // width if col == 0 else 0
        cols = width if rows else min(width - col, stop - low)
        yield Block(matrix, segment.in_shard + low - segment.in_param, max(rows, 1), col, cols)
        low += max(rows, 1) * cols


@dataclass(frozen=True)
class Part:
    """The chosen columns of one block, and their place in the packed vector."""

    block: Block
    chosen: Tensor
    """Numbers of the chosen columns within the block, int64 [c], increasing."""
    start: int
    every: bool
    """Whether all columns of the block are chosen."""

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, c]."""
        return self.block.rows, self.chosen.numel()

    def place(self, packed: Tensor) -> Tensor:
        """Its elements in a packed vector, [rows, c]."""
        rows, columns = self.shape
        return packed[self.start : self.start + rows * columns].view(rows, columns)

    def columns(self, values: Tensor) -> Tensor:
        """Of a vector over the matrix's columns, the values of the chosen ones, [c]."""
        return self.block.of(values)[self.chosen]


class Packing:
    """Some columns of the matrices in one shard as one vector: block after block, row by row."""

    def __init__(
        self, blocks: Iterable[Block], masks: Sequence[Tensor], device: torch.device
    ) -> None:
        """``masks``: by matrix, bool over its columns, on the host."""
        self.parts: list[Part] = []
        self.numel = 0
        """Packed elements."""
        for block in blocks:
            chosen = block.of(masks[block.matrix]).nonzero().flatten()
            if chosen.numel():
                self.parts.append(
                    Part(block, chosen.to(device), self.numel, chosen.numel() == block.cols)
                )
                self.numel += block.rows * chosen.numel()

    @property
    def padded(self) -> int:
        """Size of a vector for it in which no element is in the tail that fused kernels round
        differently."""
        return align_up(self.numel, ALIGN)

    def pack(self, shard: Tensor, packed: Tensor) -> None:
        """Copy the chosen columns out of a shard, into the dtype of ``packed``."""
        for part in self.parts:
            place = part.place(packed)
            view = part.block.view(shard)
            if part.every:
                place.copy_(view)
                continue
            for rows in in_rows(*part.shape):
                place[rows].copy_(view[rows].index_select(1, part.chosen))

    def unpack(self, packed: Tensor, shard: Tensor) -> None:
        """Copy them back, into the dtype of ``shard``. Everything else stays."""
        for part in self.parts:
            place = part.place(packed)
            view = part.block.view(shard)
            if part.every:
                view.copy_(place)
                continue
            for rows in in_rows(*part.shape):
                view[rows].index_copy_(1, part.chosen, place[rows].to(shard.dtype))
