"""Column- and row-parallel linear layers (Shoeybi et al., 2019), with sequence parallelism (Korthikanti et al., 2022).

An axis of size 1 short-circuits every collective: the same classes are the single-process layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_llama.comm import autograd, collectives
from megatron_llama.mesh import Axis
from megatron_llama.nn.sink import GradSink, accumulate_product, sink_of


def empty_weight(*shape: int) -> nn.Parameter:
    """A weight without storage: the engine gives it a place in a slot, and its values."""
    return nn.Parameter(torch.empty(*shape, device="meta"))


class _Linear(torch.autograd.Function):
    """x @ weight.T. ``column``: each rank holds some outputs, so the input's gradient is a partial sum over tp.
    ``sequence``: the input is a sequence shard that is gathered for the product and again, not kept, for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: Axis, column: bool, sequence: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.column, ctx.sequence, ctx.sink = tp, column, sequence, sink_of(weight)
        if sequence:
            x, pending = autograd.gathered(x, tp)
            pending.wait()
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        gathering = None
        if ctx.sequence and ctx.needs_input_grad[1]:
            x, gathering = autograd.gathered(x, ctx.tp)
        x_grad = torch.matmul(grad, weight) if ctx.needs_input_grad[0] else None
        # The input gradient travels while the weight gradient is computed.
        x_grad, reducing = _reduce_input_gradient(x_grad, ctx)
        if gathering is not None:
            gathering.wait()
        weight_grad = _weight_gradient(ctx.sink, grad, x) if ctx.needs_input_grad[1] else None
        if reducing is not None:
            reducing.wait()
        return x_grad, weight_grad, None, None, None


def _reduce_input_gradient(x_grad: Tensor | None, ctx: Any) -> tuple[Tensor | None, collectives.Pending | None]:
    if x_grad is None or not ctx.column or ctx.tp.size == 1:
        return x_grad, None
    if ctx.sequence:
        return autograd.scattered(x_grad, ctx.tp)
    return x_grad, collectives.all_reduce(x_grad, ctx.tp)


def _weight_gradient(sink: GradSink | None, grad: Tensor, x: Tensor) -> Tensor | None:
    """grad [..., f] and x [..., d] to [f, d]: into the sink, or returned when the weight has none."""
    left, right = grad.flatten(0, -2).t(), x.flatten(0, -2)
    if sink is None:
        return left @ right
    view, beta = sink.buffer()
    accumulate_product(view, beta, left, right)
    sink.done()
    return None


def column_linear(x: Tensor, weight: Tensor, tp: Axis, *, sequence_parallel: bool) -> Tensor:
    """x [s or s/tp, b, d] and this rank's rows [f/tp, d] of the weight -> [s, b, f/tp]."""
    return _Linear.apply(x, weight, tp, True, sequence_parallel and tp.size > 1)  # type: ignore[no-any-return, no-untyped-call]


class ColumnLinear(nn.Module):
    """Outputs split over tp: input [s or s/tp, b, inputs] -> [s, b, outputs / tp]."""

    def __init__(self, inputs: int, outputs: int, *, tp: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.weight = empty_weight(outputs // tp.size, inputs)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return column_linear(x, self.weight, self.tp, sequence_parallel=self.sequence_parallel)


class RowLinear(nn.Module):
    """Inputs split over tp: input [s, b, inputs / tp] -> [s or s/tp, b, outputs], summed over tp."""

    def __init__(self, inputs: int, outputs: int, *, tp: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.weight = empty_weight(outputs, inputs // tp.size)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        partial = _Linear.apply(x, self.weight, self.tp, False, False)  # type: ignore[no-untyped-call]
        return autograd.scatter_sequence(partial, self.tp) if self.sequence_parallel else autograd.reduce(partial, self.tp)
