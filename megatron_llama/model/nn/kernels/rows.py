"""Rows of tokens brought into the order of their experts and back, in one pass each.

Only the device knows where the rows of the last expert end. Rows behind it are neither read nor
written, and programs that would have those alone end at once. No two programs write to one place,
so results do not depend on which is first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 8
COLUMNS = 256
"""Rows and columns that a program has in registers at once."""


@triton.jit
def _end_of(end, rows, HAS_END: tl.constexpr):
    """Return the end of the rows that hold something."""
    if HAS_END:
        return tl.minimum(tl.load(end), rows)
    else:
        return rows


@triton.jit
def _move(
    values,
    weights,
    order,
    end,
    out,
    rows,
    width,
    stride,
    out_stride,
    per_token,
    GATHERS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_END: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    last = _end_of(end, rows, HAS_END)
    if first < last:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        row_inside = row < last
        place = tl.load(order + row, mask=row_inside, other=0)
        source = place // per_token if GATHERS else row
        if WEIGHTED:
            weight = tl.load(weights + place, mask=row_inside, other=0.0)[:, None]
        for done in range(0, width, BLOCK):
            column = done + tl.arange(0, BLOCK)
            inside = row_inside[:, None] & (column < width)[None, :]
            moved = tl.load(
                values + source[:, None] * stride + column[None, :], mask=inside, other=0.0
            )
            if WEIGHTED:
                moved = (moved.to(tl.float32) * weight).to(out.dtype.element_ty)
            tl.store(out + row[:, None] * out_stride + column[None, :], moved, mask=inside)


@triton.jit
def _part(
    values,
    weights,
    places,
    elsewhere,
    place,
    inside,
    column,
    width,
    stride,
    WEIGHTED: tl.constexpr,
    HAS_ELSEWHERE: tl.constexpr,
):
    """Return the weighted rows of places of the table in fp32; zeros where a place has no row."""
    here = inside
    if HAS_ELSEWHERE:
        here = here & (tl.load(elsewhere + place, mask=inside, other=1) == 0)
    row = tl.load(places + place, mask=here, other=0)
    mask = here[:, None] & (column < width)[None, :]
    start = values + row[:, None] * stride
    part = tl.load(start + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if WEIGHTED:
        part = part * tl.load(weights + place, mask=here, other=0.0)[:, None]
    return part


@triton.jit
def _sum(
    values,
    weights,
    places,
    elsewhere,
    out,
    tokens,
    width,
    stride,
    per_token,
    WEIGHTED: tl.constexpr,
    HAS_ELSEWHERE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    place = token * per_token
    # Not added to a zero, whose sign would be lost.
    total = _part(
        values,
        weights,
        places,
        elsewhere,
        place,
        inside,
        column,
        width,
        stride,
        WEIGHTED,
        HAS_ELSEWHERE,
    )
    for number in range(1, per_token):
        total += _part(
            values,
            weights,
            places,
            elsewhere,
            place + number,
            inside,
            column,
            width,
            stride,
            WEIGHTED,
            HAS_ELSEWHERE,
        )
    tl.store(
        out + token[:, None] * width + column[None, :],
        total.to(out.dtype.element_ty),
        mask=inside[:, None] & (column < width)[None, :],
    )


@triton.jit
def _dots(
    left,
    right,
    order,
    end,
    out,
    rows,
    width,
    left_stride,
    right_stride,
    HAS_END: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    last = _end_of(end, rows, HAS_END)
    if first < last:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        row_inside = row < last
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for done in range(0, width, BLOCK):
            column = done + tl.arange(0, BLOCK)
            inside = row_inside[:, None] & (column < width)[None, :]
            a = tl.load(left + row[:, None] * left_stride + column[None, :], mask=inside, other=0.0)
            b = tl.load(
                right + row[:, None] * right_stride + column[None, :], mask=inside, other=0.0
            )
            total += a.to(tl.float32) * b.to(tl.float32)
        place = tl.load(order + row, mask=row_inside, other=0)
        tl.store(out + place, tl.sum(total, 1), mask=row_inside)


def gather(
    x: Tensor, weights: Tensor | None, order: Tensor, per_token: int, end: Tensor | None
) -> Tensor:
    """Return the rows [n, h] of tokens x [t, h], times the weights [t, k] of their places if there
    are any. ``order`` [n] has the place of each row in the table [t, k], and ``end`` [1] the end of
    the rows that hold something; None: all do."""
    x = _with_rows(x)
    out = x.new_empty(len(order), x.shape[1])
    _launch_move(x, weights, order, per_token, end, out, gathers=True)
    return out


def weigh(values: Tensor, weights: Tensor, order: Tensor, end: Tensor | None, out: Tensor) -> None:
    """Write the rows of values [n, d], each times the weight of its place in the table [t, k], to
    ``out``, which may be the values themselves. In both the numbers of a row are neighbours."""
    assert values.stride(1) == out.stride(1) == 1
    _launch_move(values, weights, order, 1, end, out, gathers=False)


def sum_rows(
    values: Tensor, weights: Tensor | None, places: Tensor, elsewhere: Tensor | None, per_token: int
) -> Tensor:
    """Sum the rows [n, h] of each token, times its weights [t, k] if there are any, in fp32 and in
    the order of the table: [t, h]. ``places`` [t * k] has the row of each place of the table, and
    ``elsewhere`` [t, k] says which have none."""
    values = _with_rows(values)
    tokens, width = len(places) // per_token, values.shape[1]
    out = values.new_empty(tokens, width)
    if out.numel():
        block = _block(width)
        _sum[(triton.cdiv(tokens, ROWS), triton.cdiv(width, block))](
            values,
            None if weights is None else weights.contiguous(),
            places,
            None if elsewhere is None else elsewhere.contiguous().view(torch.uint8),
            out,
            tokens,
            width,
            values.stride(0),
            per_token,
            WEIGHTED=weights is not None,
            HAS_ELSEWHERE=elsewhere is not None,
            ROWS=ROWS,
            BLOCK=block,
            # A product is rounded before it is added, as by torch's operators.
            enable_fp_fusion=False,
        )
    return out


def dots(left: Tensor, right: Tensor, order: Tensor, end: Tensor | None, out: Tensor) -> None:
    """Write the scalar product of each row of left [n, d] with that of right, in fp32, to its place
    in the table ``out`` [t, k]."""
    left, right = _with_rows(left), _with_rows(right)
    rows, width = left.shape
    if left.numel():
        _dots[(triton.cdiv(rows, ROWS),)](
            left,
            right,
            order,
            end,
            out,
            rows,
            width,
            left.stride(0),
            right.stride(0),
            HAS_END=end is not None,
            ROWS=ROWS,
            BLOCK=_block(width),
        )


def _launch_move(
    values: Tensor,
    weights: Tensor | None,
    order: Tensor,
    per_token: int,
    end: Tensor | None,
    out: Tensor,
    *,
    gathers: bool,
) -> None:
    rows, width = out.shape
    if out.numel():
        _move[(triton.cdiv(rows, ROWS),)](
            values,
            None if weights is None else weights.contiguous(),
            order,
            end,
            out,
            rows,
            width,
            values.stride(0),
            out.stride(0),
            per_token,
            GATHERS=gathers,
            WEIGHTED=weights is not None,
            HAS_END=end is not None,
            ROWS=ROWS,
            BLOCK=_block(width),
        )


def _with_rows(values: Tensor) -> Tensor:
    """Return the values with those of a row next to each other."""
    return values if values.stride(1) == 1 else values.contiguous()


def _block(width: int) -> int:
    return int(min(triton.next_power_of_2(width), COLUMNS))
