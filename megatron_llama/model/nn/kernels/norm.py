"""RMSNorm with the residual addition before it: one read and one write of each activation, forward
and backward.

A block adds a layer's output to the residual stream and normalizes the sum. In backward two
gradients of that sum, through the norm and along the stream, are added where they are computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_llama.engine.comm import device as devices

PROGRAMS_PER_UNIT = 2
"""Programs of the backward pass for each multiprocessor: each leaves one row of partial sums of the
weight's gradient."""


@triton.jit
def _forward(
    x,
    delta,
    weight,
    total,
    out,
    scale,
    eps,
    width,
    HAS_DELTA: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    place = row.to(tl.int64) * width + columns
    values = tl.load(x + place, mask=inside, other=0.0)
    if HAS_DELTA:
        values = (
            values.to(tl.float32) + tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
        ).to(values.dtype)
        tl.store(total + place, values, mask=inside)
    fp32 = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(fp32 * fp32, 0) / width + eps)
    tl.store(scale + row, inverse)
    normed = fp32 * inverse
    if not ONE_PLUS:
        # Rounded before the weight is applied, as HuggingFace's LLaMA does, and its Gemma does not.
        normed = normed.to(values.dtype).to(tl.float32)
    result = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) * normed
    if ONE_PLUS:
        result += normed
    tl.store(out + place, result.to(values.dtype), mask=inside)


@triton.jit
def _factor(weight, columns, inside, ONE_PLUS: tl.constexpr):
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if ONE_PLUS:
        factor += 1.0
    return factor


@triton.jit
def _backward(
    grad,
    stream,
    x,
    weight,
    scale,
    x_grad,
    partial,
    rows,
    width,
    share,
    HAS_STREAM: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    KEEPS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    if KEEPS_WEIGHT:
        kept = _factor(weight, columns, inside, ONE_PLUS)
    summed = tl.zeros([BLOCK], tl.float32)
    for row in range(program * share, tl.minimum(program * share + share, rows)):
        place = tl.cast(row, tl.int64) * width + columns
        inverse = tl.load(scale + row)
        normed = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * inverse
        upstream = tl.load(grad + place, mask=inside, other=0.0)
        product = upstream.to(tl.float32) * normed
        summed += product
        factor = kept if KEEPS_WEIGHT else _factor(weight, columns, inside, ONE_PLUS)
        # d/dx of x * rsqrt(mean(x^2) + eps): remove the component along x, then rescale.
        along = tl.sum(product * factor, 0) / width
        if not KEEPS_WEIGHT:
            # Nor do these stay in registers over the sum: they are in the cache. Without a barrier
            # the compiler takes the two loads for one.
            tl.debug_barrier()
            factor = _factor(weight, columns, inside, ONE_PLUS)
            upstream = tl.load(grad + place, mask=inside, other=0.0)
        result = (upstream.to(tl.float32) * factor - normed * along) * inverse
        if HAS_STREAM:
            result += tl.load(stream + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_grad + place, result.to(upstream.dtype), mask=inside)
    tl.store(partial + program.to(tl.int64) * width + columns, summed, mask=inside)


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + delta, or x, both [..., h]; this scaled to unit root mean square, times weight
    [h] or, with ``one_plus``, times 1 + weight; and the scale [..., 1] in fp32."""
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty_like(x)
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    total = x if delta is None else torch.empty_like(x)
    delta_or_x = x if delta is None else delta.contiguous()
    if x.numel():
        block = triton.next_power_of_2(width)
        names = {
            "HAS_DELTA": delta is not None,
            "ONE_PLUS": one_plus,
            "BLOCK": block,
            "num_warps": _warps(block),
        }
        _forward[(x.numel() // width,)](
            x, delta_or_x, weight, total, out, scale, eps, width, **names
        )
    return total, out, scale


def norm_backward(
    grad: Tensor,
    stream: Tensor | None,
    total: Tensor,
    weight: Tensor,
    scale: Tensor,
    one_plus: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the normalized sum, in its dtype, and of the weight, [h] in fp32.

    ``stream`` is the gradient of ``total`` along the residual stream, and is added to the first."""
    grad = grad.contiguous()
    total = total.contiguous()
    width = total.shape[-1]
    rows = total.numel() // width
    share = max(1, -(-rows // (PROGRAMS_PER_UNIT * devices.multiprocessors(total.device))))
    programs = -(-rows // share)
    x_grad = torch.empty_like(total)
    partial = total.new_empty((programs, width), dtype=torch.float32)
    stream_or_grad = grad if stream is None else stream.contiguous()
    if programs:
        block = triton.next_power_of_2(width)
        sizes = (rows, width, share)
        names = {
            "HAS_STREAM": stream is not None,
            "ONE_PLUS": one_plus,
            # 32 warps leave 64 registers to a thread.
            "KEEPS_WEIGHT": _warps(block) < 32,
            "BLOCK": block,
            "num_warps": _warps(block),
        }
        _backward[(programs,)](
            grad, stream_or_grad, total, weight, scale, x_grad, partial, *sizes, **names
        )
    return x_grad, partial.sum(0)


def _warps(block: int) -> int:
    """Return the warps for 16 elements a thread, within what a program may have. With 32 elements
    backward does not fit into registers at a width of 16,384."""
    return min(32, max(1, block // 512))
