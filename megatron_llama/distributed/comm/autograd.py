"""The conjugate pairs of tensor and sequence parallelism, as autograd functions.

``copy`` and ``reduce`` are f and g of Megatron-LM (Shoeybi et al., 2019, section 3);
``gather_sequence`` and ``scatter_sequence`` are g and g-bar of Korthikanti et al., 2022, section
4.2.2. All work on the first dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_llama.distributed.comm import collectives
from megatron_llama.distributed.mesh import Axis


def gathered(shard: Tensor, axis: Axis) -> tuple[Tensor, collectives.Pending]:
    """Start gathering along the first dim; the tensor is valid after the wait."""
    full = shard.new_empty((shard.shape[0] * axis.size, *shard.shape[1:]))
    return full, collectives.all_gather(full, shard.contiguous(), axis)


def scattered(full: Tensor, axis: Axis) -> tuple[Tensor, collectives.Pending]:
    """Start summing over the ranks and splitting along the first dim; the tensor is valid after the
    wait."""
    shard = full.new_empty((full.shape[0] // axis.size, *full.shape[1:]))
    return shard, collectives.reduce_scatter(shard, full.contiguous(), axis)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()  # summed in place, and somebody else may read it
        collectives.all_reduce(grad, ctx.axis).wait()
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        full, pending = gathered(shard, axis)
        pending.wait()
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shard, pending = scattered(grad, ctx.axis)
        pending.wait()
        return shard, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(tensor)
        collectives.all_reduce(tensor, axis).wait()
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        shard, pending = scattered(full, axis)
        pending.wait()
        return shard

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        full, pending = gathered(grad, ctx.axis)
        pending.wait()
        return full, None


def copy(tensor: Tensor, axis: Axis) -> Tensor:
    """The tensor, of which the ranks of the axis use different parts (f): summed over the axis in
    backward."""
    return tensor if axis.size == 1 else _Copy.apply(tensor, axis)  # type: ignore[no-untyped-call]


def gather_sequence(shard: Tensor, axis: Axis) -> Tensor:
    """[s / size, ...] to [s, ...], of which the ranks use different parts (g): summed and split in
    backward."""
    return shard if axis.size == 1 else _Gather.apply(shard, axis)  # type: ignore[no-untyped-call]


def reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, in place (g): identity in backward."""
    return tensor if axis.size == 1 else _Reduce.apply(tensor, axis)  # type: ignore[no-untyped-call]


def scatter_sequence(full: Tensor, axis: Axis) -> Tensor:
    """[s, ...] partial sums to [s / size, ...] sums (g-bar): all-gather in backward."""
    return full if axis.size == 1 else _Scatter.apply(full, axis)  # type: ignore[no-untyped-call]
