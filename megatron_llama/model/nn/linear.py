"""Column- and row-parallel linear layers (Shoeybi et al., 2019), with sequence parallelism
(Korthikanti et al., 2022).

An axis of size 1 short-circuits every collective: the same classes are the single-process layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NotRequired, Unpack, cast

import torch
from torch import Tensor, nn

from megatron_llama.engine import host_gemm as gemm
from megatron_llama.engine.comm import autograd, collectives
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.param_handle import (
    ParamHandle,
    accumulate_product,
    deliver,
    wait_unsharded,
)
from megatron_llama.engine.tensors import at_least_fp32, rows
from megatron_llama.model.nn.overlap import LayerProducts, Products, TensorOverlap
from megatron_llama.model.nn.recompute import Recomputable


def empty_weight(*shape: int) -> nn.Parameter:
    """Return a weight without storage: the engine gives it a place in a slot, and its values."""
    return nn.Parameter(torch.empty(*shape, device="meta"))


FIRST_WEIGHT = 8
"""Position of the first weight among the arguments of ``Linear``."""


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias, whose gradients of weight and bias go to their handles; the outputs of
    several weights are stacked. ``count`` weights are followed by as many biases, or by none.

    ``column``: each tp rank holds some of the outputs, so its input gradient is a partial sum.
    ``sequence``: the input is a shard of the sequence, gathered for the product, and gathered again
    in backward rather than kept. ``products`` multiply by weights; weight gradients are products in
    the dtype of the input whatever they are. ``overlap`` hides the first of these gathers; None: it
    is waited for. ``recompute``: kept in place of the input, to make it again in backward; None:
    the input itself is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: Axis,
        column: bool,
        sequence: bool,
        products: Products,
        overlap: TensorOverlap | None,
        recompute: Recomputable | None,
        count: int,
        *parameters: Tensor,
    ) -> Tensor:
        weights = parameters[:count]
        biases = parameters[count:] or (None,) * count
        # Only weight gradients read the input: frozen weights keep none.
        sources = (x,) if recompute is None else recompute.sources
        trained = any(ctx.needs_input_grad[FIRST_WEIGHT : FIRST_WEIGHT + count])
        ctx.save_for_backward(*weights, *(sources if trained else ()))
        ctx.make_input = None if recompute is None else recompute.function
        ctx.tp = tp
        ctx.column = column
        ctx.sequence = sequence
        ctx.products = products
        gathered = None
        # Before the weights are waited for: their own gathers may run meanwhile.
        if sequence and overlap is not None:
            gathered = overlap.gather(x, tp)
        elif sequence:
            x, gathering = autograd.start_all_gather(x, tp, async_op=False)
            gathering.wait()
        ctx.unsharded = []
        ctx.bias_handles = []
        outputs = []
        for weight, bias in zip(weights, biases, strict=True):
            ctx.unsharded.append(wait_unsharded(weight))
            if bias is not None:
                ctx.bias_handles.append((wait_unsharded(bias).handle, bias.dtype))
            if gathered is None:
                outputs.append(products.linear(x, weight, bias))
        if gathered is not None:
            return gathered.products(weights, biases, products)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.unsharded)
        weights = ctx.saved_tensors[:count]
        sources = ctx.saved_tensors[count:]
        needs_x = ctx.needs_input_grad[0]
        needs_weights = ctx.needs_input_grad[FIRST_WEIGHT : FIRST_WEIGHT + count]
        needs_biases = ctx.needs_input_grad[FIRST_WEIGHT + count :]
        sizes = [len(weight) for weight in weights]
        grads = (grad,) if count == 1 else grad.split_with_sizes(sizes, dim=-1)
        given = [ctx.products.gradient(out_grad) for out_grad in grads] if needs_x else []
        handles: list[ParamHandle | None] = [read.handle for read in ctx.unsharded]
        write_gradients = partial(_weight_gradients, handles, grads, needs_weights)

        postponed = False
        if any(needs_weights):
            # Detached: a weight gradient that is postponed must not keep the graph below its input.
            detached = (source.detach() for source in sources)
            axis = ctx.tp if ctx.sequence else None
            start_input = partial(start_input_again, ctx.make_input, axis, *detached)
            # A pass postpones the gradients of all weights or of none, so any handle can be asked.
            if handles[0] is not None:
                work = partial(_postponed_wgrads, write_gradients, start_input)
                postponed = handles[0].keep_wgrad(work)
        writes = any(needs_weights) and not postponed
        gathering = collectives.DONE
        if writes:
            # The gather runs while the input gradient is computed.
            x, gathering = start_input()

        x_grad = None
        reducing = collectives.DONE
        if needs_x:
            for read, out_grad, weight in zip(ctx.unsharded, given, weights, strict=True):
                read.check()
                through_weight = ctx.products.linear_backward(out_grad, weight)
                x_grad = through_weight if x_grad is None else x_grad.add_(through_weight)
            assert x_grad is not None
            # The reduction runs while the weight gradients are computed.
            if ctx.sequence:
                x_grad, reducing = autograd.start_reduce_scatter(x_grad, ctx.tp)
            elif ctx.column and ctx.tp.size > 1:
                reducing = collectives.all_reduce(x_grad, ctx.tp)
        # Never postponed: a sum over a gradient that is at hand costs next to nothing.
        bias_grads = [
            _bias_gradient(out_grad, *bias) if needed else None
            for out_grad, bias, needed in zip(grads, ctx.bias_handles, needs_biases, strict=False)
        ]
        gathering.wait()
        weight_grads = write_gradients(x) if writes else [None] * count
        reducing.wait()
        return x_grad, *[None] * (FIRST_WEIGHT - 1), *weight_grads, *bias_grads


def start_input_again(
    make_input: Callable[..., Tensor] | None, gather_axis: Axis | None, *sources: Tensor
) -> tuple[Tensor, collectives.Pending]:
    """Take or make the input of a product again, and start to gather it; it is valid after the
    wait."""
    x = sources[0] if make_input is None else make_input(*sources)
    if gather_axis is None:
        return x, collectives.DONE
    return autograd.start_all_gather(x, gather_axis)


def _postponed_wgrads(
    write_gradients: Callable[[Tensor], object],
    start_input: Callable[[], tuple[Tensor, collectives.Pending]],
) -> None:
    """The weight half of a split backward pass: the input is made and gathered only now."""
    x, gathering = start_input()
    gathering.wait()
    write_gradients(x)


def _weight_gradients(
    handles: Sequence[ParamHandle | None],
    grads: Sequence[Tensor],
    needed: Sequence[bool],
    x: Tensor,
) -> list[Tensor | None]:
    """Compute ``weight_gradient`` for each weight that needs it."""
    found: list[Tensor | None] = [None] * len(handles)
    # The last one first: buckets are filled, and share slots, in the order of backward.
    for index in reversed(range(len(handles))):
        if needed[index]:
            found[index] = weight_gradient(handles[index], grads[index], x)
    return found


def weight_gradient(handle: ParamHandle | None, grad: Tensor, x: Tensor) -> Tensor | None:
    """Multiply grad [..., f] and x [..., d] to [f, d], into the handle's buffer; without a handle
    the product is returned to autograd."""
    left = rows(grad).t()
    right = rows(x)
    if handle is None:
        return gemm.mm(left, right)
    view, beta = handle.grad_view()
    accumulate_product(view, beta, left, right)
    handle.grad_written()
    return None


def _bias_gradient(grad: Tensor, handle: ParamHandle | None, dtype: torch.dtype) -> Tensor | None:
    """Sum grad [..., f] over all tokens, at least in fp32, into the handle's buffer; without a
    handle the sum is returned to autograd."""
    return deliver(handle, rows(grad).sum(0, dtype=at_least_fp32(grad.dtype)), dtype)


class _AddBias(torch.autograd.Function):
    """Adds a bias in place, and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = wait_unsharded(bias).handle, bias.dtype
        ctx.mark_dirty(x)
        return x.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        return grad, _bias_gradient(grad, *ctx.bias) if ctx.needs_input_grad[1] else None


def column_linear(
    x: Tensor | Recomputable, weight: Tensor, tp: Axis, *, sequence_parallel: bool
) -> Tensor:
    """Multiply x [s or s/tp, ..., d] by this rank's rows [f/tp, d] of the weight: [s, ...,
    f/tp]."""
    return _linear(x, (weight,), (), tp, column=True, sequence=sequence_parallel and tp.size > 1)


def plain_linear(
    x: Tensor | Recomputable, weight: Tensor, tp: Axis, products: Products = gemm
) -> Tensor:
    """Multiply x [..., d] by a weight [f, d]: [..., f], without communication."""
    return _linear(x, (weight,), (), tp, column=False, sequence=False, products=products)


def _linear(
    x: Tensor | Recomputable,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    tp: Axis,
    *,
    column: bool,
    sequence: bool,
    products: Products = gemm,
    overlap: TensorOverlap | None = None,
) -> Tensor:
    value, recompute = (x.value, x) if isinstance(x, Recomputable) else (x, None)
    how = (tp, column, sequence, products, overlap, recompute, len(weights))
    out = _Linear.apply(value, *how, *weights, *biases)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


class LinearOptions(LayerProducts):
    """How a linear layer is spread over tp, and computed."""

    tp: Axis
    sequence_parallel: bool
    bias: NotRequired[bool]


class _ParallelLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, **spread: Unpack[LinearOptions]) -> None:
        """Make the weight of this rank's ``inputs`` and ``outputs``."""
        super().__init__()
        self.tp = spread["tp"]
        self.sequence_parallel = spread["sequence_parallel"]
        self.overlap = spread.get("overlap")
        self.products = spread.get("products", gemm)
        self.weight = empty_weight(outputs, inputs)
        self.bias = empty_weight(outputs) if spread.get("bias") else None
        self.adapters: nn.Module | None = None
        """A low-rank addition to the output (``model/nn/lora.py``)."""


class ColumnLinear(_ParallelLinear):
    """A linear layer whose outputs are split over tp: [s or s/tp, b, inputs] to [s, b, outputs /
    tp]."""

    def __init__(self, inputs: int, outputs: int, **spread: Unpack[LinearOptions]) -> None:
        super().__init__(inputs, outputs // spread["tp"].size, **spread)

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        """Multiply, and gather the sequence before it with sequence parallelism."""
        return stacked_outputs(x, (self,))


def stacked_outputs(x: Tensor | Recomputable, layers: Sequence[ColumnLinear]) -> Tensor:
    """Run column-parallel layers of the same axis that read the same input, all with a bias or all
    without, and stack their outputs: [s or s/tp, b, inputs] to [s, b, all outputs / tp].

    The input is gathered once for all of them, and its gradients are summed before they are
    reduced."""
    first = layers[0]
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    how: Any = {"products": first.products, "overlap": first.overlap}
    sequence = first.sequence_parallel and first.tp.size > 1
    out = _linear(x, weights, biases, first.tp, column=True, sequence=sequence, **how)
    if all(layer.adapters is None for layer in layers):
        return out
    from megatron_llama.model.nn.lora import column_additions  # which few runs need

    return out + column_additions(x, layers)


class RowLinear(_ParallelLinear):
    """A linear layer whose inputs are split over tp: [s, b, inputs / tp] to [s or s/tp, b,
    outputs], summed over tp."""

    def __init__(self, inputs: int, outputs: int, **spread: Unpack[LinearOptions]) -> None:
        super().__init__(inputs // spread["tp"].size, outputs, **spread)
        self.products = spread.get("row_products", self.products)

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        """Multiply, sum over tp (with sequence parallelism each rank a part of the sequence), and
        add the bias, which every rank has whole."""
        addition = None if self.adapters is None else cast(Tensor, self.adapters(x))
        if self.overlap is not None and self.tp.size > 1:
            out = self.overlap.sum(x, self, addition)
        else:
            out = plain_linear(x, self.weight, self.tp, self.products)
            out = out if addition is None else out + addition
            summed = autograd.scatter_sequence if self.sequence_parallel else autograd.reduce
            out = summed(out, self.tp)
        if self.bias is None:
            return out
        return cast(Tensor, _AddBias.apply(out, self.bias))  # type: ignore[no-untyped-call]
