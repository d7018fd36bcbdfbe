"""Products of experts' rows in FP8 in one kernel, for any numbers of rows, which only the device
knows. Sums of 128 products are multiplied by the scales of their numbers, and added up in fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_llama.model.nn.kernels.experts import tile_of

ROWS = 64
COLUMNS = 128
SIDE = tl.constexpr(128)
"""Numbers with a scale in common, and of one sum: the tensor cores of Hopper add up products of
FP8 with fewer bits than fp32 has."""


@triton.jit
def _linear(
    x,
    x_scales,
    weights,
    weight_scales,
    out,
    ends,
    experts,
    width,
    depth,
    row_scale_stride,
    tile_scale_stride,
    expert_stride,
    width_stride,
    expert_scale_stride,
    width_scale_stride,
    depth_scale_stride,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    expert, first_row, end_row = tile_of(ends, experts, tl.program_id(0), EXPERTS, ROWS)
    if expert < experts:
        own_expert = expert.to(tl.int64)
        rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        inner = tl.arange(0, SIDE)
        row_inside = rows < end_row
        column_inside = columns < width
        left = x + rows[:, None] * depth + inner[None, :]
        right = weights + own_expert * expert_stride
        right += columns[None, :] * width_stride + inner[:, None]
        left_scale = x_scales + rows * row_scale_stride
        right_scale = weight_scales + own_expert * expert_scale_stride
        right_scale += columns // SIDE * width_scale_stride
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for done in range(0, depth, SIDE):
            inside = inner < depth - done
            a = tl.load(left, mask=row_inside[:, None] & inside[None, :], other=0.0)
            b = tl.load(right, mask=inside[:, None] & column_inside[None, :], other=0.0)
            of_rows = tl.load(left_scale, mask=row_inside, other=0.0)
            of_columns = tl.load(right_scale, mask=column_inside, other=0.0)
            total += tl.dot(a, b) * of_rows[:, None] * of_columns[None, :]
            left += SIDE
            right += SIDE
            left_scale += tile_scale_stride
            right_scale += depth_scale_stride
        place = out + rows[:, None] * width + columns[None, :]
        inside_both = row_inside[:, None] & column_inside[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=inside_both)


def linear(
    x: Tensor, x_scales: Tensor, weights: Tensor, weight_scales: Tensor, ends: Tensor
) -> Tensor:
    """Multiply the rows of codes x [n, k] by those of the weights [E, f, k] of their experts, whose
    rows end at ``ends`` [E]: bf16, [n, f]. The numbers of a row of a weight are neighbours. Scales
    of rows are [n, k / 128], or [n, 1]; those of weights [E, f / 128, k / 128], or [E, 1, 1]."""
    x = x.contiguous()
    experts, width, depth = weights.shape
    assert weights.stride(2) == 1
    out = torch.empty(len(x), width, dtype=torch.bfloat16, device=x.device)
    # Each expert's last tile may be short, so there can be this many.
    tiles = triton.cdiv(len(x), ROWS) + experts
    _linear[(tiles, triton.cdiv(width, COLUMNS))](
        x,
        x_scales,
        weights,
        weight_scales,
        out,
        ends,
        experts,
        width,
        depth,
        *_scale_strides(x_scales),
        *weights.stride()[:2],
        *_scale_strides(weight_scales),
        EXPERTS=triton.next_power_of_2(experts),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=8,
    )
    return out


def _scale_strides(scales: Tensor) -> list[int]:
    """Return the strides of scales: 0 along a dim that has one."""
    return [
        stride if size > 1 else 0
        for size, stride in zip(scales.shape, scales.stride(), strict=True)
    ]
