"""Column- and row-parallel linear layers (Shoeybi et al., 2019), with sequence parallelism
(Korthikanti et al., 2022).

An axis of size 1 short-circuits every collective: the same classes are the single-process layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_llama.distributed.comm import autograd, collectives
from megatron_llama.distributed.comm.function import Function
from megatron_llama.distributed.mesh import Axis
from megatron_llama.nn.functional import added
from megatron_llama.nn.host import gemm
from megatron_llama.nn.ops import rows
from megatron_llama.nn.param_handle import ParamHandle, accumulate_product, wait_unsharded
from megatron_llama.nn.recompute import Recomputable
from megatron_llama.nn.tape import differentiated


def empty_weight(*shape: int) -> nn.Parameter:
    """A weight without storage: the engine gives it a place in a slot, and its values."""
    return nn.Parameter(torch.empty(*shape, device="meta"))


class _Linear(Function):
    """x @ weight.T. ``column``: each rank holds some outputs, so the input's gradient is a partial
    sum over tp. ``sequence``: the input is a sequence shard that is gathered for the product and
    again, not kept, for backward. ``again``: what is kept instead of the input to have it in
    backward; None: the input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        tp: Axis,
        column: bool,
        sequence: bool,
        again: Recomputable | None,
    ) -> Tensor:
        # Only the weight gradient reads the input.
        sources = () if not ctx.needs_input_grad[1] else (x,) if again is None else again.sources
        ctx.save_for_backward(weight, *sources)
        ctx.input = _itself if again is None else again.function
        ctx.tp = tp
        ctx.column = column
        ctx.sequence = sequence
        if sequence:
            x, pending = autograd.gathered(x, tp)
            pending.wait()
        ctx.unsharded = wait_unsharded(weight)
        return gemm.linear(x, weight)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        weight, *sources = ctx.saved_tensors
        # Without their graph: a weight gradient that is put off must not keep the input of the
        # stage.
        bare = (source.detach() if source.requires_grad else source for source in sources)
        make_input = partial(ctx.input, *bare)
        gathering = collectives.DONE
        gather_axis = ctx.tp if ctx.sequence else None
        handle = ctx.unsharded.handle
        wanted = ctx.needs_input_grad[1]
        later = (
            wanted
            and handle is not None
            and handle.postpone_wgrad(partial(_later, handle, grad, make_input, gather_axis))
        )
        now = wanted and not later
        if now:
            x, gathering = _gathered(make_input(), gather_axis)
        x_grad = None
        if ctx.needs_input_grad[0]:
            ctx.unsharded.check()
            x_grad = gemm.linear_backward(grad, weight)
        # The input gradient travels while the weight gradient is computed.
        x_grad, reducing = _reduce_input_gradient(x_grad, ctx)
        gathering.wait()
        weight_grad = _weight_gradient(handle, grad, x) if now else None
        reducing.wait()
        return x_grad, weight_grad, None, None, None, None


def _itself(x: Tensor) -> Tensor:
    return x


def _later(
    handle: ParamHandle, grad: Tensor, make_input: Callable[[], Tensor], gather_axis: Axis | None
) -> None:
    """The weight gradient of a pass that was split: the input is made and gathered again only
    now."""
    x, gathering = _gathered(make_input(), gather_axis)
    gathering.wait()
    _weight_gradient(handle, grad, x)


def _gathered(x: Tensor, axis: Axis | None) -> tuple[Tensor, collectives.Pending]:
    return (x, collectives.DONE) if axis is None else autograd.gathered(x, axis)


def _reduce_input_gradient(
    x_grad: Tensor | None, ctx: Any
) -> tuple[Tensor | None, collectives.Pending]:
    if x_grad is None or not ctx.column or ctx.tp.size == 1:
        return x_grad, collectives.DONE
    if ctx.sequence:
        return autograd.scattered(x_grad, ctx.tp)
    return x_grad, collectives.all_reduce(x_grad, ctx.tp)


def _weight_gradient(handle: ParamHandle | None, grad: Tensor, x: Tensor) -> Tensor | None:
    """grad [..., f] and x [..., d] to [f, d]: into its home, or returned when the weight has
    none."""
    left = rows(grad).t()
    right = rows(x)
    if handle is None:
        return left @ right
    view, beta = handle.buffer()
    accumulate_product(view, beta, left, right)
    handle.done()
    return None


def column_linear(
    x: Tensor | Recomputable, weight: Tensor, tp: Axis, *, sequence_parallel: bool
) -> Tensor:
    """x [s or s/tp, ..., d] and this rank's rows [f/tp, d] of the weight -> [s, ..., f/tp]; the
    first dim may be s * b."""
    return _linear(x, weight, tp, column=True, sequence=sequence_parallel and tp.size > 1)


def plain_linear(x: Tensor | Recomputable, weight: Tensor, tp: Axis) -> Tensor:
    """x [..., d] and a weight [f, d] -> [..., f], without communication."""
    return _linear(x, weight, tp, column=False, sequence=False)


def _linear(
    x: Tensor | Recomputable, weight: Tensor, tp: Axis, *, column: bool, sequence: bool
) -> Tensor:
    value, again = (x.value, x) if isinstance(x, Recomputable) else (x, None)
    return _Linear.apply(value, weight, tp, column, sequence, again)  # type: ignore[no-any-return]


def _adapted(out: Tensor, adapters: nn.Module, x: Tensor | Recomputable) -> Tensor:
    """An output with its low-rank addition."""

    def addition(value: Tensor) -> Tensor:
        found: Tensor = adapters(replace(x, value=value) if isinstance(x, Recomputable) else value)
        return found

    value = x.value if isinstance(x, Recomputable) else x
    return added(out, differentiated(addition, value, weights=adapters.parameters()))


class ColumnLinear(nn.Module):
    """Outputs split over tp: input [s or s/tp, ..., inputs] -> [s, ..., outputs / tp]."""

    def __init__(self, inputs: int, outputs: int, *, tp: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.weight = empty_weight(outputs // tp.size, inputs)
        self.adapters: nn.Module | None = None
        """A low-rank addition to the output, see ``nn/lora.py``."""

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        """See the class."""
        out = column_linear(x, self.weight, self.tp, sequence_parallel=self.sequence_parallel)
        return out if self.adapters is None else _adapted(out, self.adapters, x)


class RowLinear(nn.Module):
    """Inputs split over tp: input [s, ..., inputs / tp] -> [s or s/tp, ..., outputs], summed over
    tp."""

    def __init__(self, inputs: int, outputs: int, *, tp: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.weight = empty_weight(outputs, inputs // tp.size)
        self.adapters: nn.Module | None = None
        """A low-rank addition to the output, see ``nn/lora.py``."""

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        """See the class."""
        partial = plain_linear(x, self.weight, self.tp)
        if self.adapters is not None:
            partial = _adapted(partial, self.adapters, x)
        return (
            autograd.scatter_sequence(partial, self.tp)
            if self.sequence_parallel
            else autograd.reduce(partial, self.tp)
        )
