"""The conjugate pairs of tensor and sequence parallelism, as autograd functions.

``copy`` and ``reduce`` are f and g of Megatron-LM (Shoeybi et al., 2019, section 3);
``gather_sequence`` and ``scatter_sequence`` are g and g-bar of Korthikanti et al., 2022, section
4.2.2. All work on the first dim, and do nothing on an axis of size 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_llama.engine.comm import collectives
from megatron_llama.engine.mesh import Axis


def start_all_gather(
    shard: Tensor, axis: Axis, *, async_op: bool = True
) -> tuple[Tensor, collectives.Pending]:
    """Start to gather shards [s / size, ...] to [s, ...]; the tensor is valid after the wait."""
    full = shard.new_empty((shard.shape[0] * axis.size, *shard.shape[1:]))
    return full, collectives.all_gather(full, shard.contiguous(), axis, async_op=async_op)


def start_reduce_scatter(
    full: Tensor, axis: Axis, *, async_op: bool = True
) -> tuple[Tensor, collectives.Pending]:
    """Start to sum [s, ...] over the ranks and split the sum to [s / size, ...]; the tensor is
    valid after the wait."""
    shard = full.new_empty((full.shape[0] // axis.size, *full.shape[1:]))
    return shard, collectives.reduce_scatter(shard, full.contiguous(), axis, async_op=async_op)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()  # autograd may give the same tensor to others, and the sum is in place
        collectives.all_reduce(grad, ctx.axis, async_op=False).wait()
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        full, pending = start_all_gather(shard, axis, async_op=False)
        pending.wait()
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shard, pending = start_reduce_scatter(grad, ctx.axis, async_op=False)
        pending.wait()
        return shard, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(tensor)
        collectives.all_reduce(tensor, axis, async_op=False).wait()
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        shard, pending = start_reduce_scatter(full, axis, async_op=False)
        pending.wait()
        return shard

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        full, pending = start_all_gather(grad, ctx.axis, async_op=False)
        pending.wait()
        return full, None


def copy(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the tensor, which each rank of the axis uses in another way (f): its gradient is
    summed over the axis."""
    return tensor if axis.size == 1 else _Copy.apply(tensor, axis)  # type: ignore[no-untyped-call]


def gather_sequence(shard: Tensor, axis: Axis) -> Tensor:
    """Gather [s / size, ...] to [s, ...], which each rank uses in another way (g): its gradient is
    summed and split."""
    return shard if axis.size == 1 else _Gather.apply(shard, axis)  # type: ignore[no-untyped-call]


def reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, in place (g): its gradient is passed on as it is."""
    if axis.size == 1:
        return tensor
    summed: Tensor = _Reduce.apply(tensor, axis)  # type: ignore[no-untyped-call]
    return summed


def scatter_sequence(full: Tensor, axis: Axis) -> Tensor:
    """Sum partial sums [s, ...] over the axis, and split to [s / size, ...] (g-bar): its gradient
    is gathered."""
    return full if axis.size == 1 else _Scatter.apply(full, axis)  # type: ignore[no-untyped-call]
