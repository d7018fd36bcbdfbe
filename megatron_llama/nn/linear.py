"""Column- and row-parallel linear layers (Shoeybi et al., 2019), with sequence parallelism
(Korthikanti et al., 2022).

An axis of size 1 short-circuits every collective: the same classes are the single-process layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_llama.distributed.comm import autograd, collectives
from megatron_llama.distributed.mesh import Axis
from megatron_llama.nn.host import gemm
from megatron_llama.nn.ops import rows
from megatron_llama.nn.param_handle import ParamHandle, accumulate_product, wait_unsharded
from megatron_llama.nn.recompute import Recomputable


def empty_weight(*shape: int) -> nn.Parameter:
    """Return a weight without storage: the engine gives it a place in a slot, and its values."""
    return nn.Parameter(torch.empty(*shape, device="meta"))


class _Linear(torch.autograd.Function):
    """x @ weight.T, whose weight gradient goes to the weight's handle.

    ``column``: each tp rank holds some of the outputs, so its input gradient is a partial sum.
    ``sequence``: the input is a shard of the sequence, gathered for the product, and gathered again
    in backward rather than kept. ``recompute``: what is kept in place of the input to make it again
    in backward; None: the input itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        tp: Axis,
        column: bool,
        sequence: bool,
        recompute: Recomputable | None,
    ) -> Tensor:
        # Only the weight gradient reads the input: a frozen weight keeps none.
        sources = (x,) if recompute is None else recompute.sources
        ctx.save_for_backward(weight, *(sources if ctx.needs_input_grad[1] else ()))
        ctx.make_input = None if recompute is None else recompute.function
        ctx.tp = tp
        ctx.column = column
        ctx.sequence = sequence
        if sequence:
            x, gathering = autograd.start_all_gather(x, tp)
            gathering.wait()
        ctx.unsharded = wait_unsharded(weight)
        return gemm.linear(x, weight)  # F.linear, but on some CPUs oneDNN's product

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        weight, *sources = ctx.saved_tensors
        handle: ParamHandle | None = ctx.unsharded.handle
        needs_x, needs_weight, *_ = ctx.needs_input_grad

        postponed = False
        if needs_weight:
            # Detached: a weight gradient that is postponed must not keep the graph below its input.
            detached = (source.detach() for source in sources)
            start_input = partial(
                _start_input, ctx.make_input, ctx.tp if ctx.sequence else None, *detached
            )
            if handle is not None:
                postponed = handle.keep_wgrad(partial(_postponed_wgrad, handle, grad, start_input))
        gathering = collectives.DONE
        if needs_weight and not postponed:
            # The gather runs while the input gradient is computed.
            x, gathering = start_input()

        x_grad = None
        reducing = collectives.DONE
        if needs_x:
            ctx.unsharded.check()
            x_grad = gemm.linear_backward(grad, weight)
            # The reduction runs while the weight gradient is computed.
            if ctx.sequence:
                x_grad, reducing = autograd.start_reduce_scatter(x_grad, ctx.tp)
            elif ctx.column and ctx.tp.size > 1:
                reducing = collectives.all_reduce(x_grad, ctx.tp)
        gathering.wait()
        weight_grad = None
        if needs_weight and not postponed:
            weight_grad = _weight_gradient(handle, grad, x)
        reducing.wait()
        return x_grad, weight_grad, None, None, None, None


def _start_input(
    make_input: Callable[..., Tensor] | None, gather_axis: Axis | None, *sources: Tensor
) -> tuple[Tensor, collectives.Pending]:
    """Take or make the input of a product again, and start to gather it; it is valid after the
    wait."""
    x = sources[0] if make_input is None else make_input(*sources)
    if gather_axis is None:
        return x, collectives.DONE
    return autograd.start_all_gather(x, gather_axis)


def _postponed_wgrad(
    handle: ParamHandle, grad: Tensor, start_input: Callable[[], tuple[Tensor, collectives.Pending]]
) -> None:
    """The weight half of a split backward pass: the input is made and gathered only now."""
    x, gathering = start_input()
    gathering.wait()
    _weight_gradient(handle, grad, x)


def _weight_gradient(handle: ParamHandle | None, grad: Tensor, x: Tensor) -> Tensor | None:
    """Multiply grad [..., f] and x [..., d] to [f, d], into the handle's buffer; without a handle
    the product is returned to autograd."""
    left = rows(grad).t()
    right = rows(x)
    if handle is None:
        return left @ right
    view, beta = handle.grad_view()
    accumulate_product(view, beta, left, right)
    handle.grad_written()
    return None


def column_linear(
    x: Tensor | Recomputable, weight: Tensor, tp: Axis, *, sequence_parallel: bool
) -> Tensor:
    """Multiply x [s or s/tp, ..., d] by this rank's rows [f/tp, d] of the weight: [s, ...,
    f/tp]."""
    return _linear(x, weight, tp, column=True, sequence=sequence_parallel and tp.size > 1)


def plain_linear(x: Tensor | Recomputable, weight: Tensor, tp: Axis) -> Tensor:
    """Multiply x [..., d] by a weight [f, d]: [..., f], without communication."""
    return _linear(x, weight, tp, column=False, sequence=False)


def _linear(
    x: Tensor | Recomputable, weight: Tensor, tp: Axis, *, column: bool, sequence: bool
) -> Tensor:
    value, recompute = (x.value, x) if isinstance(x, Recomputable) else (x, None)
    return _Linear.apply(value, weight, tp, column, sequence, recompute)  # type: ignore[no-any-return, no-untyped-call]


class ColumnLinear(nn.Module):
    """A linear layer whose outputs are split over tp: [s or s/tp, b, inputs] to [s, b, outputs /
    tp]."""

    def __init__(self, inputs: int, outputs: int, *, tp: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.weight = empty_weight(outputs // tp.size, inputs)
        self.adapters: nn.Module | None = None
        """A low-rank addition to the output (``nn/lora.py``)."""

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        """Multiply, and gather the sequence before it with sequence parallelism."""
        out = column_linear(x, self.weight, self.tp, sequence_parallel=self.sequence_parallel)
        return out if self.adapters is None else out + self.adapters(x)


class RowLinear(nn.Module):
    """A linear layer whose inputs are split over tp: [s, b, inputs / tp] to [s or s/tp, b,
    outputs], summed over tp."""

    def __init__(self, inputs: int, outputs: int, *, tp: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.weight = empty_weight(outputs, inputs // tp.size)
        self.adapters: nn.Module | None = None
        """A low-rank addition to the output (``nn/lora.py``)."""

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        """Multiply, and sum over tp, each rank a part of the sequence with sequence parallelism."""
        out = plain_linear(x, self.weight, self.tp)
        if self.adapters is not None:
            out = out + self.adapters(x)
        if self.sequence_parallel:
            return autograd.scatter_sequence(out, self.tp)
        return autograd.reduce(out, self.tp)
