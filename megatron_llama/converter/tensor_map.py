"""Tensors of foreign files as pieces of HuggingFace tensors. One table, ``TensorMap``, maps their
rows; reading and writing use the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_llama.checkpoint.model_folders.model_fields import MATCHING_FILES
from megatron_llama.checkpoint.model_folders.safetensors_file import BLOCK_ELEMENTS
from megatron_llama.checkpoint.torch_file import TorchFile
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec, Rectangle
from megatron_llama.errors import describe


@dataclass(frozen=True)
class TensorMap:
    """The rows of HuggingFace's tensors in the rows of a tensor in a foreign file. Rows that no
    slice covers are padding: zeros."""

    shape: tuple[int, ...]
    slices: tuple[HFSlice, ...]
    rotary_head: int = 0
    """Number n of rows of an attention head, if its rotary pairs are neighbours (2i, 2i + 1)
    instead of halves (i, i + n / 2) as in HuggingFace's order; else 0."""

    @staticmethod
    def of(spec: ParamSpec) -> TensorMap:
        """Return the map of a parameter of ours, unchanged."""
        return TensorMap(spec.shape, spec.slices)

    def one_slice(self, index: int, rotary_head: int = 0) -> TensorMap:
        """Return the map of one slice as a tensor of its own."""
        piece = self.slices[index]
        return TensorMap((piece.rows, *self.shape[1:]), (replace(piece, row=0),), rotary_head)

    @property
    def width(self) -> int:
        """Number of elements of one row."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class MappedTensor:
    """A tensor for ``write_torch_file``: its map, and the source of its values."""

    map: TensorMap
    source: WeightSource

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return self.map.shape

    @property
    def elements(self) -> int:
        """Number of values to read from the source: all but padding."""
        return self.elements_of(0, self.map.shape[0])

    def elements_of(self, first: int, last: int) -> int:
        """Return the number of such values in the rows ``[first, last)``."""
        return sum(cut.rows for cut in _cuts(self.map, first, last)) * self.map.width

    def blocks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the values as contiguous rows, from the first to the last."""
        rows = self.map.shape[0]
        step = max(1, BLOCK_ELEMENTS // self.map.width)
        if self.map.rotary_head:  # pairs are reordered within a head, so a block holds whole heads
            step = max(1, step // self.map.rotary_head) * self.map.rotary_head
        for first in range(0, rows, step):
            yield self.rows(first, min(first + step, rows), dtype)

    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Return the rows ``[first, last)``: whole heads if rotary pairs are neighbours."""
        out = torch.zeros((last - first, *self.map.shape[1:]), dtype=dtype)
        for run in _runs(_cuts(self.map, first, last)):
            self._fill(out, first, run)
        return out

    def _fill(self, out: Tensor, first: int, run: list[HFSlice]) -> None:
        rows = sum(cut.rows for cut in run)
        dims = len(self.map.shape)
        size = (rows, self.map.width)[:dims]
        # Rows that fill the block in their order are read into it directly.
        direct = len(run) == 1 and rows == out.shape[0] and not self.map.rotary_head
        values = out if direct else torch.empty(size, dtype=out.dtype)
        offset = (run[0].hf_row, run[0].hf_col)[:dims]
        self.source(Rectangle(run[0].name, run[0].shape, offset, size, 0), values)
        if self.map.rotary_head:
            values = _neighbours(values, self.map.rotary_head)
        if values is not out:
            for cut in run:
                at = cut.hf_row - run[0].hf_row
                start = cut.row - first
                out[start : start + cut.rows] = values[at : at + cut.rows]


def _cuts(map: TensorMap, first: int, last: int) -> Iterator[HFSlice]:
    """Yield the parts of the slices in the rows ``[first, last)``."""
    for piece in map.slices:
        low = max(first, piece.row)
        high = min(last, piece.row + piece.rows)
        if low < high:
            yield replace(piece, row=low, rows=high - low, hf_row=piece.hf_row + low - piece.row)


def _runs(cuts: Iterable[HFSlice]) -> list[list[HFSlice]]:
    """Group the cuts that follow each other in one HuggingFace tensor. Each group is read at once,
    since a source may read large chunks whole."""
    runs: list[list[HFSlice]] = []
    for cut in sorted(cuts, key=lambda cut: (cut.name, cut.hf_col, cut.hf_row)):
        before = runs[-1][-1] if runs else None
        behind = before and (before.name, before.hf_col, before.hf_row + before.rows)
        if behind == (cut.name, cut.hf_col, cut.hf_row):
            runs[-1].append(cut)
        else:
            runs.append([cut])
    return runs


def _neighbours(rows: Tensor, head: int) -> Tensor:
    """Reorder the rows of heads from HuggingFace's order to the one with rotary pairs as
    neighbours."""
    return rows.view(-1, 2, head // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _halves(first: int, last: int, head: int) -> Tensor:
    """Return the places of HuggingFace's rows ``[first, last)`` in the order with rotary pairs as
    neighbours."""
    rows = torch.arange(first, last)
    within = rows % head
    return rows - within + 2 * (within % (head // 2)) + within // (head // 2)


@dataclass(frozen=True)
class _StoredSlice:
    map: TensorMap
    piece: HFSlice
    tensor: Tensor
    file: TorchFile


class TensorReader:
    """A WeightSource that fills rectangles of HuggingFace tensors from the tensors of memory-mapped
    files that were added to it."""

    def __init__(self) -> None:
        self._stored: dict[str, list[_StoredSlice]] = {}
        self._first: dict[tuple[Any, ...], tuple[Tensor, TorchFile]] = {}

    def add(self, name: str, map: TensorMap, tensor: Tensor, file: TorchFile) -> list[str]:
        """Add a tensor, or return its problem. A tensor that another file holds already must have
        the same values there."""
        where = f"{file.path} {name}"
        if tuple(tensor.shape) != map.shape:
            got = f"shape {tuple(tensor.shape)}"
            return [describe(where, got=got, expected=map.shape, do=MATCHING_FILES)]
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            do = "quantized models cannot be converted: take the original"
            expected = "float32, bfloat16 or float16"
            return [describe(where, got=tensor.dtype, expected=expected, do=do)]
        key = tuple((piece.name, piece.hf_row, piece.hf_col) for piece in map.slices)
        if key in self._first:
            earlier, origin = self._first[key]
            # Copies of norms are compared. Copies of a whole head are large: they are not read
            # twice.
            if tensor.dim() > 1 or torch.equal(tensor, earlier):
                return []
            expected = f"those of {origin.path}: files of one checkpoint"
            return [describe(where, got="other values", expected=expected, do=MATCHING_FILES)]
        if key:
            self._first[key] = tensor, file
        for piece in map.slices:
            self._stored.setdefault(piece.name, []).append(_StoredSlice(map, piece, tensor, file))
        return []

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size (any float dtype). Raises
        CheckpointError."""
        row, col = (*rectangle.offset, 0)[:2]
        rows, cols = (*rectangle.size, 1)[:2]
        target = out if out.dim() > 1 else out.unsqueeze(1)
        for stored in self._stored[rectangle.name]:
            piece = stored.piece
            width = stored.map.width
            top = max(row, piece.hf_row)
            bottom = min(row + rows, piece.hf_row + piece.rows)
            left = max(col, piece.hf_col)
            right = min(col + cols, piece.hf_col + width)
            if top < bottom and left < right:
                stored.file.verify(stored.tensor)
                values = _rows(stored, top - piece.hf_row, bottom - piece.hf_row)[
                    :, left - piece.hf_col : right - piece.hf_col
                ]
                target[top - row : bottom - row, left - col : right - col] = values


def _rows(stored: _StoredSlice, first: int, last: int) -> Tensor:
    """Return rows of the stored slice in HuggingFace's order, as a matrix."""
    own = stored.tensor if stored.tensor.dim() > 1 else stored.tensor.unsqueeze(1)
    start = stored.piece.row
    if not stored.map.rotary_head:
        return own[start + first : start + last]
    return own[start + _halves(first, last, stored.map.rotary_head)]


def element_count(tensors: Mapping[str, MappedTensor]) -> int:
    """Return the number of values to read from the source for these tensors."""
    return sum(tensor.elements for tensor in tensors.values())
