"""AdamW over a flat shard in one pass, as a Triton kernel: with fp32 state and a bf16 copy it moves
30 bytes for each parameter.

torch's fused kernel needs a second pass for the copy in the compute dtype, and writes the unscaled
gradient back."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


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
def _adamw(
    master,
    grad,
    average,
    square,
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
    BLOCK: tl.constexpr,
):
    if tl.load(skip) == 0.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        # ``_count_step`` has made them once for all threads: nothing here is fp64, of which many
        # GPUs compute a sixty-fourth as much as of fp32.
        correction1 = tl.load(corrections)
        correction2 = tl.load(corrections + 1)
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) / tl.load(scale)
        p = tl.load(master + place, mask=inside, other=0.0)
        m = tl.load(average + place, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(square + place, mask=inside, other=0.0).to(tl.float32)
        p -= lr * DECAY * p
        m += REST1 * (g - m)
        v += REST2 * (g * g - v)
        p -= lr / correction1 * m / (tl.sqrt_rn(v) / correction2 + EPS)
        tl.store(master + place, p, mask=inside)
        # The master has seen them before they are rounded.
        tl.store(average + place, m.to(average.dtype.element_ty), mask=inside)
        tl.store(square + place, v.to(square.dtype.element_ty), mask=inside)
        if COPIES:
            tl.store(copy + place, p.to(copy.dtype.element_ty), mask=inside)


def adamw(
    master: Tensor,
    grad: Tensor,
    average: Tensor,
    square: Tensor,
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
) -> None:
    """Make one AdamW step with ``grad / scale`` on [n], in place. The master is fp32, each moment
    fp32 or bf16; ``copy``, in the compute dtype, gets the new master.

    ``step``, ``scale`` and ``skip`` are 0-dim fp32 tensors on the device. If ``skip`` is not 0
    nothing changes, ``step`` included."""
    corrections = torch.empty(2, dtype=torch.float32, device=master.device)
    _count_step[(1,)](
        step, skip, corrections, LOG1=_logarithm(beta1), LOG2=_logarithm(beta2), num_warps=1
    )
    count = master.numel()
    if count == 0:
        return
    _adamw[(-(-count // BLOCK),)](
        master,
        grad,
        average,
        square,
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
        BLOCK=BLOCK,
        num_warps=8,
    )


def _logarithm(beta: float) -> float:
    return math.log(max(beta, 1e-300))  # log(0) is minus infinity, which this stands for
