"""AdamW over a flat shard in one pass, as a Triton kernel: with fp32 state and a bf16 copy it moves
30 bytes for each parameter, with moments in 8 bits 18.25.

torch's fused kernel needs a second pass for the copy in the compute dtype, and writes the unscaled
gradient back."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_llama.engine.plan.buckets import ALIGN
from megatron_llama.engine.rules.moments import InBytes, Tables

BLOCK = 2048
ALIGNED = tl.constexpr(ALIGN)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _count_step(step, skip, corrections, LOG1: tl.constexpr, LOG2: tl.constexpr):
    """Count the step and write both bias corrections, in one thread. They are computed in fp64: in
    fp32 the difference 1 - 0.999^t loses most of its digits for small t."""
    count = tl.load(step) + 1.0 - tl.load(skip)
    tl.store(step, count)
    time = count.to(tl.float64)
    tl.store(corrections, (1.0 - tl.exp(time * LOG1)).to(tl.float32))
    tl.store(corrections + 1, tl.sqrt(1.0 - tl.exp(time * LOG2)).to(tl.float32))


@triton.jit
def _read(kept, scales, numbers, place, inside, IN_BYTES: tl.constexpr):
    """Return a moment in fp32, as ``EightBitMoment.read`` and ``PlainMoment.read``."""
    values = tl.load(kept + place, mask=inside, other=0)
    if IN_BYTES:
        scale = tl.load(scales + place // ALIGNED, mask=inside, other=0.0)
        return tl.load(numbers + values.to(tl.int32)) * scale
    return values.to(tl.float32)


@triton.jit
def _keep(
    values,
    kept,
    scales,
    numbers,
    first,
    thresholds,
    place,
    inside,
    count,
    IN_BYTES: tl.constexpr,
    SIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keep a moment: ``EightBitMoment.keep`` and ``PlainMoment.keep``."""
    if not IN_BYTES:
        tl.store(kept + place, values.to(kept.dtype.element_ty), mask=inside)
        return
    BLOCKS: tl.constexpr = BLOCK // ALIGNED
    largest = tl.max(tl.abs(tl.reshape(values, [BLOCKS, ALIGNED])), axis=1)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(scales + block, largest, mask=block < count // ALIGNED)
    divisor = tl.maximum(largest, TINY)[:, None] + tl.zeros([BLOCKS, ALIGNED], tl.float32)
    share = tl.div_rn(values, tl.reshape(divisor, [BLOCK]))
    code = tl.load(first + ((share.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)).to(tl.int32)
    code += (tl.load(numbers + code + 1) <= share).to(tl.int32)
    code = tl.minimum(code, 254)
    low = tl.load(numbers + code)
    way = tl.div_rn(share - low, tl.load(numbers + code + 1) - low)
    code += (way > tl.load(thresholds + place % ALIGNED)).to(tl.int32)
    if not SIGNED:
        code = tl.where(values > 0.0, tl.maximum(code, 1), 0)
    tl.store(kept + place, code.to(tl.uint8), mask=inside)


@triton.jit
def _adamw(
    master,
    grad,
    average,
    average_scales,
    square,
    square_scales,
    signed_numbers,
    signed_first,
    unsigned_numbers,
    unsigned_first,
    thresholds,
    copy,
    corrections,
    scale,
    skip,
    lr,
    count,
    REST1: tl.constexpr,
    REST2: tl.constexpr,
    DECAY: tl.constexpr,
    EPS: tl.constexpr,
    COPIES: tl.constexpr,
    BYTES1: tl.constexpr,
    BYTES2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(skip) == 0.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        # ``_count_step`` has computed them once for all threads: nothing here is fp64, at which
        # many GPUs have a sixty-fourth of the speed of fp32.
        correction1 = tl.load(corrections)
        correction2 = tl.load(corrections + 1)
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) / tl.load(scale)
        p = tl.load(master + place, mask=inside, other=0.0)
        m = _read(average, average_scales, signed_numbers, place, inside, BYTES1)
        v = _read(square, square_scales, unsigned_numbers, place, inside, BYTES2)
        p -= lr * DECAY * p
        m += REST1 * (g - m)
        v += REST2 * (g * g - v)
        p -= lr / correction1 * m / (tl.sqrt_rn(v) / correction2 + EPS)
        tl.store(master + place, p, mask=inside)
        # The master has been updated with the moments before they are rounded.
        _keep(
            m, average, average_scales, signed_numbers, signed_first, thresholds,
            place, inside, count, BYTES1, True, BLOCK,
        )  # fmt: skip
        _keep(
            v, square, square_scales, unsigned_numbers, unsigned_first, thresholds,
            place, inside, count, BYTES2, False, BLOCK,
        )  # fmt: skip
        if COPIES:
            tl.store(copy + place, p.to(copy.dtype.element_ty), mask=inside)


def adamw(
    master: Tensor,
    grad: Tensor,
    average: Tensor | InBytes,
    square: Tensor | InBytes,
    step: Tensor,
    copy: Tensor | None,
    *,
    scale: Tensor,
    skip: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    decay: float,
    eps: float,
    tables: Tables | None = None,
) -> None:
    """Make one AdamW step with ``grad / scale`` on [n], in place. The master is fp32, each moment
    fp32, bf16, or in 8 bits, which needs ``tables`` and an n that is a multiple of ALIGN; ``copy``,
    in the compute dtype, gets the new master.

    ``step``, ``scale`` and ``skip`` are 0-dim fp32 tensors on the device. If ``skip`` is not 0
    nothing changes, ``step`` included."""
    corrections = torch.empty(2, dtype=torch.float32, device=master.device)
    _count_step[(1,)](
        step, skip, corrections, LOG1=_logarithm(beta1), LOG2=_logarithm(beta2), num_warps=1
    )
    count = master.numel()
    if count == 0:
        return
    # A moment that is not in bytes has no scales and reads no tables.
    first, second = (
        kept if isinstance(kept, InBytes) else InBytes(kept, kept) for kept in (average, square)
    )
    if tables is None:
        numbers = [corrections] * 5
    else:
        signed, unsigned = tables.signed, tables.unsigned
        numbers = [
            signed.numbers,
            signed.first,
            unsigned.numbers,
            unsigned.first,
            tables.thresholds(step),
        ]
    _adamw[(-(-count // BLOCK),)](
        master,
        grad,
        *first,
        *second,
        *numbers,
        master if copy is None else copy,
        corrections,
        scale,
        skip,
        lr,
        count,
        REST1=1.0 - beta1,
        REST2=1.0 - beta2,
        DECAY=decay,
        EPS=eps,
        COPIES=copy is not None,
        BYTES1=isinstance(average, InBytes),
        BYTES2=isinstance(square, InBytes),
        BLOCK=BLOCK,
        num_warps=8,
    )


def _logarithm(beta: float) -> float:
    return math.log(max(beta, 1e-300))  # log(0) is minus infinity, which this stands for
