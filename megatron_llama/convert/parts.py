"""Tensors of foreign files as pieces of HuggingFace tensors: one table says where each row belongs,
for both directions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_llama.convert.pickled import PickledFile
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import describe
from megatron_llama.plans.params import HFSlice, ParamSpec, Rectangle

BLOCK_ELEMENTS = 2**24
"""Written at a time: 64 MiB in fp32."""
FOREIGN_MODEL = "take the files, args and config that belong together"


@dataclass(frozen=True)
class Part:
    """A tensor of a file. Rows that no slice covers are padding: zeros."""

    shape: tuple[int, ...]
    slices: tuple[HFSlice, ...]
    head: int = 0
    """Rows of an attention head when its rotary pairs are neighbours (2i, 2i + 1) instead of halves
    (i, i + head / 2)."""

    @staticmethod
    def of(spec: ParamSpec) -> Part:
        """A parameter as it is."""
        return Part(spec.shape, spec.slices)

    def alone(self, index: int, head: int = 0) -> Part:
        """One slice as a tensor of its own."""
        part = self.slices[index]
        return Part((part.rows, *self.shape[1:]), (replace(part, row=0),), head)

    @property
    def width(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Outgoing:
    """A part with the source of its values: what ``write_pickled`` writes."""

    part: Part
    source: WeightSource

    @property
    def shape(self) -> tuple[int, ...]:
        """See Values."""
        return self.part.shape

    @property
    def elements(self) -> int:
        """So many are asked of the source: all but padding."""
        return sum(piece.rows for piece in self.part.slices) * self.part.width

    def blocks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """See Values."""
        part = self.part
        rows = self.part.shape[0]
        step = max(1, BLOCK_ELEMENTS // part.width)
        if part.head:
            step = max(1, step // part.head) * part.head
        for first in range(0, rows, step):
            yield self._block(first, min(first + step, rows), dtype)

    def _block(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        out = torch.zeros((last - first, *self.part.shape[1:]), dtype=dtype)
        for run in _runs(_cuts(self.part, first, last)):
            self._fill(out, first, run)
        return out

    def _fill(self, out: Tensor, first: int, run: list[HFSlice]) -> None:
        rows = sum(cut.rows for cut in run)
        dims = len(self.part.shape)
        size = (rows, self.part.width)[:dims]
        values = (
            out
            if len(run) == 1 and rows == out.shape[0] and not self.part.head
            else torch.empty(size, dtype=out.dtype)
        )
        self.source(
            Rectangle(run[0].name, run[0].shape, (run[0].hf_row, run[0].hf_col)[:dims], size, 0),
            values,
        )
        if self.part.head:
            values = _neighbours(values, self.part.head)
        if values is not out:
            for cut in run:
                at = cut.hf_row - run[0].hf_row
                start = cut.row - first
                out[start : start + cut.rows] = values[at : at + cut.rows]


def _cuts(part: Part, first: int, last: int) -> Iterator[HFSlice]:
    """What the slices hold of the rows ``[first, last)``."""
    for each in part.slices:
        low = max(first, each.row)
        high = min(last, each.row + each.rows)
        if low < high:
            yield replace(each, row=low, rows=high - low, hf_row=each.hf_row + low - each.row)


def _runs(cuts: Iterable[HFSlice]) -> list[list[HFSlice]]:
    """Cuts that follow each other in one HuggingFace tensor, to be asked for at once: a source may
    read in large chunks."""
    runs: list[list[HFSlice]] = []
    for cut in sorted(cuts, key=lambda cut: (cut.name, cut.hf_col, cut.hf_row)):
        before = runs[-1][-1] if runs else None
        if before and (before.name, before.hf_col, before.hf_row + before.rows) == (
            cut.name,
            cut.hf_col,
            cut.hf_row,
        ):
            runs[-1].append(cut)
        else:
            runs.append([cut])
    return runs


def _neighbours(rows: Tensor, head: int) -> Tensor:
    """HuggingFace's order of a head's rows -> the one with rotary pairs as neighbours."""
    return rows.view(-1, 2, head // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _halves(first: int, last: int, head: int) -> Tensor:
    """Where HuggingFace's rows ``[first, last)`` lie in the order with rotary pairs as
    neighbours."""
    rows = torch.arange(first, last)
    within = rows % head
    return rows - within + 2 * (within % (head // 2)) + within // (head // 2)


@dataclass(frozen=True)
class _Stored:
    part: Part
    piece: HFSlice
    tensor: Tensor
    file: PickledFile


class PartReader:
    """Stored parts as a WeightSource: writes rectangles of HuggingFace tensors from the
    memory-mapped files."""

    def __init__(self) -> None:
        self._stored: dict[str, list[_Stored]] = {}
        self._first: dict[tuple[Any, ...], tuple[Tensor, PickledFile]] = {}

    def add(self, name: str, part: Part, tensor: Tensor, file: PickledFile) -> list[str]:
        """Take a tensor in, or say what is wrong with it. What another file holds already has to be
        the same there."""
        where = f"{file.path} {name}"
        if tuple(tensor.shape) != part.shape:
            return [
                describe(
                    where, got=f"shape {tuple(tensor.shape)}", expected=part.shape, do=FOREIGN_MODEL
                )
            ]
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            do = "quantized models cannot be converted: take the original"
            return [
                describe(where, got=tensor.dtype, expected="float32, bfloat16 or float16", do=do)
            ]
        key = tuple((piece.name, piece.hf_row, piece.hf_col) for piece in part.slices)
        if key in self._first:
            return self._differs(where, tensor, *self._first[key])
        if key:
            self._first[key] = tensor, file
        for piece in part.slices:
            self._stored.setdefault(piece.name, []).append(_Stored(part, piece, tensor, file))
        return []

    def _differs(self, where: str, tensor: Tensor, other: Tensor, file: PickledFile) -> list[str]:
        """Copies of norms are compared; those of a whole head are not read twice."""
        if tensor.dim() > 1 or torch.equal(tensor, other):
            return []
        return [
            describe(
                where,
                got="other values",
                expected=f"those of {file.path}: files of one checkpoint",
                do=FOREIGN_MODEL,
            )
        ]

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size (any float dtype). Raises
        CheckpointError."""
        row, col = (*rectangle.offset, 0)[:2]
        rows, cols = (*rectangle.size, 1)[:2]
        target = out if out.dim() > 1 else out.unsqueeze(1)
        for each in self._stored[rectangle.name]:
            piece = each.piece
            width = each.part.width
            top = max(row, piece.hf_row)
            bottom = min(row + rows, piece.hf_row + piece.rows)
            left = max(col, piece.hf_col)
            right = min(col + cols, piece.hf_col + width)
            if top < bottom and left < right:
                each.file.verify(each.tensor)
                values = _rows(each, top - piece.hf_row, bottom - piece.hf_row)[
                    :, left - piece.hf_col : right - piece.hf_col
                ]
                target[top - row : bottom - row, left - col : right - col] = values


def _rows(stored: _Stored, first: int, last: int) -> Tensor:
    """Rows of the stored slice in HuggingFace's order, as a matrix."""
    own = stored.tensor if stored.tensor.dim() > 1 else stored.tensor.unsqueeze(1)
    start = stored.piece.row
    if not stored.part.head:
        return own[start + first : start + last]
    return own[start + _halves(first, last, stored.part.head)]


def elements_of(tensors: Mapping[str, Outgoing]) -> int:
    """So many values are asked of the source for these."""
    return sum(tensor.elements for tensor in tensors.values())
