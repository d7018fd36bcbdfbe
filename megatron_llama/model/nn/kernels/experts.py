"""Products of experts' rows in one kernel each, for any numbers of rows, which only the device
knows. Sums are taken in fp32; products of fp32 are whole ones, not tf32."""

from __future__ import annotations

from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

NARROW = MappingProxyType({"ROWS": 64, "COLUMNS": 128, "DEPTH": 64, "num_warps": 8})
WIDE = MappingProxyType({"ROWS": 64, "COLUMNS": 64, "DEPTH": 32, "num_warps": 8})
"""What one program computes, and how much of its sum at once, in 16 bits and in fp32: as much as
the registers of Hopper hold."""


@triton.jit
def tile_of(ends, experts, tile, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of a tile of ROWS rows, its first row, and the end of the expert's rows. An
    expert has as many tiles as its rows fill; behind the last one the expert is ``experts``, or
    more."""
    index = tl.arange(0, EXPERTS)
    end = tl.load(ends + index, mask=index < experts, other=0)
    start = tl.load(ends + index - 1, mask=(index > 0) & (index < experts), other=0)
    tiles = (tl.maximum(end - start, 0) + ROWS - 1) // ROWS
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    own = index == expert
    first_row = tl.sum(tl.where(own, start + (tile - (last - tiles)) * ROWS, 0), 0)
    end_row = tl.sum(tl.where(own, end, 0), 0)
    return expert, first_row, end_row


@triton.jit
def _linear(
    x,
    weights,
    out,
    ends,
    experts,
    width,
    depth,
    x_stride,
    expert_stride,
    width_stride,
    depth_stride,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    expert, first_row, end_row = tile_of(ends, experts, tl.program_id(0), EXPERTS, ROWS)
    if expert < experts:
        rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        inner = tl.arange(0, DEPTH)
        row_inside = (rows < end_row)[:, None]
        column_inside = (columns < width)[None, :]
        left = x + rows[:, None] * x_stride + inner[None, :]
        right = weights + expert.to(tl.int64) * expert_stride
        right += columns[None, :] * width_stride + inner[:, None].to(tl.int64) * depth_stride
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for done in range(0, depth, DEPTH):
            inside = inner < depth - done
            a = tl.load(left, mask=row_inside & inside[None, :], other=0.0)
            b = tl.load(right, mask=inside[:, None] & column_inside, other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            left += DEPTH
            right += DEPTH * depth_stride
        place = out + rows[:, None] * width + columns[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=row_inside & column_inside)


@triton.jit
def _accumulate(
    view,
    grad,
    x,
    ends,
    outputs,
    inputs,
    expert_stride,
    view_stride,
    grad_stride,
    x_stride,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    expert = tl.program_id(0)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    row_inside = (rows < outputs)[:, None]
    column_inside = (columns < inputs)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for done in range(start, end, DEPTH):
        inner = (done + tl.arange(0, DEPTH)).to(tl.int64)
        inside = inner < end
        a = tl.load(
            grad + inner[None, :] * grad_stride + rows[:, None],
            mask=row_inside & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            x + inner[:, None] * x_stride + columns[None, :],
            mask=inside[:, None] & column_inside,
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    place = view + expert.to(tl.int64) * expert_stride
    place += rows[:, None] * view_stride + columns[None, :]
    inside_both = row_inside & column_inside
    if ADD:
        total += tl.load(place, mask=inside_both, other=0.0).to(tl.float32)
    tl.store(place, total.to(view.dtype.element_ty), mask=inside_both)


def linear(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of x [n, d] by the weights [E, f, d], of any strides, of their experts,
    whose rows end at ``ends`` [E]: [n, f]."""
    x = x.contiguous()
    experts, width, depth = weights.shape
    tile = _tile(x)
    out = x.new_empty(len(x), width)
    # Each expert's last tile may be short, so there can be this many.
    tiles = triton.cdiv(len(x), tile["ROWS"]) + experts
    _linear[(tiles, triton.cdiv(width, tile["COLUMNS"]))](
        x,
        weights,
        out,
        ends,
        experts,
        width,
        depth,
        x.stride(0),
        *weights.stride(),
        EXPERTS=triton.next_power_of_2(experts),
        **tile,
    )
    return out


def accumulate(view: Tensor, beta: float, grad: Tensor, x: Tensor, ends: Tensor) -> None:
    """Set ``view = beta * view + grad.T @ x``, for the view [f, d] of each expert, of view
    [E, f, d], and its rows of grad [n, f] and x [n, d]. Beta is 0, and the view not read, or 1."""
    grad, x = grad.contiguous(), x.contiguous()
    experts, outputs, inputs = view.shape
    tile = _tile(x)
    tiles = triton.cdiv(outputs, tile["ROWS"]), triton.cdiv(inputs, tile["COLUMNS"])
    _accumulate[(experts, *tiles)](
        view,
        grad,
        x,
        ends,
        outputs,
        inputs,
        view.stride(0),
        view.stride(1),
        grad.stride(0),
        x.stride(0),
        ADD=beta != 0.0,
        **tile,
    )


def _tile(x: Tensor) -> MappingProxyType[str, int]:
    return WIDE if x.dtype is torch.float32 else NARROW
