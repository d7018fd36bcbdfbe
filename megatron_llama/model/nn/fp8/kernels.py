"""Triton kernels that make the codes of ``codes.py``: one read of the numbers, one write of codes
and scales.

They work on the bits of fp32. As integers, magnitudes keep their order, and infinity and NaN are
above all others, so that the largest of a tile that holds one is not finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SIDE = tl.constexpr(128)
ROWS = 32
"""Rows of a program: their scales of one column of tiles are neighbours in memory."""
NUMBERS = 4096
"""Of a program that scales a whole tensor."""


@triton.jit
def _scaling(largest):
    """Return the factors of codes, and the scales, as bits of fp32, for the bits of the largest
    magnitudes."""
    # 448 = 1.75 * 2^8, and 0.75 is 0x600000 of the fraction.
    power = 135 - (largest >> 23) - ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.minimum(power, 127)
    # 2^-127 is subnormal: its exponent is 0, and its fraction a half.
    scale = tl.where(power == 127, 0x400000, (127 - power) << 23)
    factor = (power + 127) << 23
    finite = largest < 0x7F800000
    factor = tl.where(largest == 0, 0x3F800000, tl.where(finite, factor, 0))
    scale = tl.where(largest == 0, 0x3F800000, tl.where(finite, scale, 0x7F800000))
    return factor, scale


@triton.jit
def _magnitude(wide):
    return wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _tiles(x, codes, scales, rows, width, stride, ROWS: tl.constexpr):
    # Columns first: programs that run together read whole rows.
    column = tl.program_id(0) % (width // SIDE)
    row = tl.program_id(0) // (width // SIDE) * ROWS + tl.arange(0, ROWS)
    place = column * SIDE + tl.arange(0, SIDE)[None, :]
    inside = row < rows
    far = row.to(tl.int64)[:, None]
    wide = tl.load(x + far * stride + place, mask=inside[:, None], other=0.0).to(tl.float32)
    factor, scale = _scaling(tl.max(_magnitude(wide), 1))
    scaled = wide * factor.to(tl.float32, bitcast=True)[:, None]
    tl.store(codes + far * width + place, scaled.to(codes.dtype.element_ty), mask=inside[:, None])
    tl.store(
        scales + column.to(tl.int64) * rows + row, scale.to(tl.float32, bitcast=True), mask=inside
    )


@triton.jit
def _blocks(weight, codes, scales, back, back_scales, height, width, BOTH: tl.constexpr):
    column = tl.program_id(0)
    row = tl.program_id(1)
    rows = (row * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    columns = (column * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    place = rows[:, None] * width + columns[None, :]
    wide = tl.load(weight + place).to(tl.float32)
    factor, scale = _scaling(tl.max(tl.max(_magnitude(wide), 1), 0))
    made = (wide * factor.to(tl.float32, bitcast=True)).to(codes.dtype.element_ty)
    tl.store(codes + place, made)
    tl.store(scales + row * (width // SIDE) + column, scale.to(tl.float32, bitcast=True))
    if BOTH:
        # Read back, out of the cache: where codes that were just made are both stored and moved to
        # other threads, the assembler of CUDA 12.8 may move registers that nothing wrote to.
        tl.debug_barrier()
        made = tl.load(codes + place)
        tl.store(back + columns[:, None] * height + rows[None, :], tl.trans(made))
        tl.store(back_scales + column * (height // SIDE) + row, scale.to(tl.float32, bitcast=True))


@triton.jit
def _scaled(x, codes, factor, count, reach, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32) * tl.load(factor)
    # NaN is neither above nor below.
    wide = tl.where(wide > reach, reach, tl.where(wide < -reach, -reach, wide))
    tl.store(codes + place, wide.to(codes.dtype.element_ty), mask=place < count)


@triton.jit
def _transposed(codes, back, height, width):
    columns = (tl.program_id(0) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    rows = (tl.program_id(1) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    part = tl.load(codes + rows[:, None] * width + columns[None, :], mask=inside, other=0)
    place = columns[:, None] * height + rows[None, :]
    tl.store(back + place, tl.trans(part), mask=tl.trans(inside))


def tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [..., k] and scales [..., k / 128] of x [..., k]. In memory scales of one column
    of tiles are neighbours, as products take them."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    matrix = x.flatten(0, -2)
    rows, columns, _ = torch.unflatten(matrix, 1, (-1, 128)).shape
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = x.new_empty((columns, *x.shape[:-1]), dtype=torch.float32)
    if rows:
        grid = (columns * triton.cdiv(rows, ROWS),)
        _tiles[grid](
            matrix, codes, scales, rows, columns * 128, matrix.stride(0), ROWS=ROWS, num_warps=4
        )
    return codes, scales.movedim(0, -1)


def blocks(weight: Tensor, both: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return codes [n, k] and scales [n / 128, k / 128] of a weight [n, k], and those of the
    transposed weight, which are made only with ``both``."""
    weight = weight.contiguous()
    height, width = weight.shape
    made = _empty(weight, height, width)
    back = _empty(weight, width, height) if both else made
    grid = (made[1].shape[1], made[1].shape[0])
    _blocks[grid](weight, *made, *back, height, width, BOTH=both, num_warps=8)
    return made, back


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes of x times ``factor``, fp32 of one number, clamped to what codes reach."""
    x = x.contiguous()
    codes = torch.empty_like(x, dtype=dtype)
    if x.numel():
        grid = (triton.cdiv(x.numel(), NUMBERS),)
        _scaled[grid](x, codes, factor, x.numel(), torch.finfo(dtype).max, BLOCK=NUMBERS)
    return codes


def transposed(codes: Tensor) -> Tensor:
    """Return contiguous codes [k, n] of those [n, k] of a weight, in a tenth of the time of torch's
    copy."""
    codes = codes.contiguous()
    height, width = codes.shape
    back = codes.new_empty((width, height))
    grid = (triton.cdiv(width, 128), triton.cdiv(height, 128))
    # As bytes: nothing is computed.
    _transposed[grid](codes.view(torch.uint8), back.view(torch.uint8), height, width, num_warps=8)
    return back


def _empty(weight: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    codes = weight.new_empty((height, width), dtype=torch.float8_e4m3fn)
    rows, _, columns, _ = torch.unflatten(torch.unflatten(codes, 1, (-1, 128)), 0, (-1, 128)).shape
    return codes, weight.new_empty((rows, columns), dtype=torch.float32)
