"""Schedule-free AdamW over a flat shard in one pass, as a Triton kernel: with fp32 state and a bf16
copy it moves 30 bytes for each parameter, as many as AdamW."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _between(x, z, REST: tl.constexpr):
    """Return y. Both kernels share the formula: a run that goes on from x and z has the bits of one
    that was never interrupted."""
    return tl.fma(z - x, REST, x)


@triton.jit
def _update(
    average,
    grad,
    newest,
    square,
    copy,
    numbers,
    scale,
    skip,
    count,
    REST: tl.constexpr,
    DECAY: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(skip) == 0.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        share = tl.load(numbers)
        rate = tl.load(numbers + 1)
        forgets = tl.load(numbers + 2)
        correction = tl.load(numbers + 3)
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) / tl.load(scale)
        x = tl.load(average + place, mask=inside, other=0.0)
        z = tl.load(newest + place, mask=inside, other=0.0)
        v = tl.load(square + place, mask=inside, other=0.0)
        v += forgets * (g * g - v)
        update = g / (tl.sqrt_rn(v / correction) + EPS) + DECAY * _between(x, z, REST)
        z -= rate * update
        # The first step that counts has the whole share: then x is z exactly, not up to rounding.
        x = tl.where(share < 0.5, x + share * (z - x), z - (1.0 - share) * (z - x))
        tl.store(average + place, x, mask=inside)
        tl.store(newest + place, z, mask=inside)
        tl.store(square + place, v, mask=inside)
        y = _between(x, z, REST)
        tl.store(copy + place, y.to(copy.dtype.element_ty), mask=inside)


@triton.jit
def _show(average, newest, copy, count, REST: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(average + place, mask=inside, other=0.0)
    z = tl.load(newest + place, mask=inside, other=0.0)
    tl.store(copy + place, _between(x, z, REST).to(copy.dtype.element_ty), mask=inside)


def update(
    average: Tensor,
    grad: Tensor,
    newest: Tensor,
    square: Tensor,
    copy: Tensor,
    *,
    share: Tensor,
    rate: Tensor,
    forgets: Tensor,
    correction: Tensor,
    scale: Tensor,
    skip: Tensor,
    beta1: float,
    decay: float,
    eps: float,
) -> None:
    """Make one step with ``grad / scale`` on x, z and the second moment, fp32 [n], in place;
    ``copy``, in the compute dtype, gets y. The numbers of the step are 0-dim fp32 tensors on the
    device. If ``skip`` is not 0 nothing changes."""
    numbers = torch.stack((share, rate, forgets, correction))
    count = average.numel()
    _update[(-(-count // BLOCK),)](
        average,
        grad,
        newest,
        square,
        copy,
        numbers,
        scale,
        skip,
        count,
        REST=1.0 - beta1,
        DECAY=decay,
        EPS=eps,
        BLOCK=BLOCK,
        num_warps=8,
    )


def show(average: Tensor, newest: Tensor, copy: Tensor, *, beta1: float) -> None:
    """Write y into ``copy``, from x and z [n]."""
    count = average.numel()
    _show[(-(-count // BLOCK),)](
        average, newest, copy, count, REST=1.0 - beta1, BLOCK=BLOCK, num_warps=8
    )
