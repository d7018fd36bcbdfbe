"""What the experts of a block compute: a gated MLP each, of the tokens that are sent to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from megatron_llama.engine.param_handle import ParamHandle, wait_unsharded
from megatron_llama.engine.tensors import rows
from megatron_llama.model.nn.moe import rows as grouped
from megatron_llama.model.nn.moe.routing import Routing
from megatron_llama.model.nn.moe.rows import (
    ExpertProducts,
    ExpertRows,
    PlainProducts,
    by_expert,
    sorted_rows,
)
from megatron_llama.model.nn.ops import Gate
from megatron_llama.model.nn.recompute import Recomputable

Factors = Callable[[], tuple[Tensor, Tensor]]
"""Makes the two factors of a weight gradient: the gradient of an output, and the input."""


class _ExpertMLP(torch.autograd.Function):
    """Keeps its input, the table of experts with their weights, and the output of the first
    product. Sorting, gathered rows and activation are repeated in backward.

    ``recompute``: the first product is repeated, too, and its output not kept. ``source``: kept in
    place of the input, to make it again; None: the input itself is kept. ``most``: other ranks have
    experts too (``sorted_rows``), and a source makes the input again by a message. ``on_input``:
    the weights of a token's experts multiply their inputs, not their outputs. ``products`` multiply
    by weights; weight gradients are products in the dtype of the input whatever they are."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate: Gate,
        recompute: bool,
        source: Recomputable | None,
        most: int | None,
        on_input: bool,
        products: ExpertProducts,
    ) -> Tensor:
        tokens = rows(x)
        count = len(down) // tokens.shape[1]
        groups = sorted_rows(experts, count, x.dtype, most=most)
        first_read = wait_unsharded(gate_up)
        inputs = groups.gather(tokens, weights if on_input else None)
        both = products.linear(inputs, gate_up, groups)
        second_read = wait_unsharded(down)
        out = products.linear(groups.gate(gate).forward(both), down, groups)

        # Only the gradient of the first weight, the repeated product, and the gradients of weights
        # of inputs read the input.
        keeps_input = recompute or ctx.needs_input_grad[3] or (on_input and ctx.needs_input_grad[2])
        kept_inputs = ((x,) if source is None else source.sources) if keeps_input else ()
        outputs = () if recompute else (both,)
        ctx.save_for_backward(experts, weights, gate_up, down, *outputs, *kept_inputs)
        ctx.make_input = None if source is None else source.function
        ctx.reads = first_read, second_read
        ctx.count = count
        ctx.gate = gate
        ctx.recompute = recompute
        ctx.most = most
        ctx.on_input = on_input
        ctx.products = products
        return groups.sum(out, None if on_input else weights).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        experts, weights, gate_up, down, *kept = ctx.saved_tensors
        first_read, second_read = ctx.reads
        needs_x, _, needs_weights, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        both = None if ctx.recompute else kept.pop(0)
        groups = sorted_rows(experts, ctx.count, grad.dtype, most=ctx.most)
        # Detached: a weight gradient that is postponed must not keep the graph below its input.
        sources = [source.detach() for source in kept]
        make_input = ctx.make_input
        gate = groups.gate(ctx.gate)
        on_input = ctx.on_input
        made: Tensor | None = None
        if both is None:
            first_read.check()
        if ctx.most is not None and make_input is not None:
            uses = (both is None, needs_gate_up, on_input and needs_weights)
            if sum(uses) > 1:
                # One message for all. Without messages making it again takes less memory.
                made = make_input(*sources)

        def gathered(weights: Tensor | None) -> Tensor:
            if made is not None:
                return groups.gather(made, weights)
            tokens = sources[0] if make_input is None else make_input(*sources)
            return groups.gather(rows(tokens), weights)

        # A weight gradient that is postponed keeps the weights of inputs alone.
        input_weights = weights if on_input else None

        def input_rows() -> Tensor:
            return gathered(input_weights)

        if both is None:
            both = ctx.products.linear(input_rows(), gate_up, groups)
        needs_both = needs_x or needs_gate_up or (on_input and needs_weights)

        def through_second(both: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
            """Return the gradients of the second product's input, of the experts' weights of each
            token, and of the product's weight. What they are made from is gone then."""
            active = gate.forward(both)
            out_grad = rows(grad)
            grad_rows = groups.gather(out_grad)
            active_grad = weights_grad = down_grad = None
            # The gradient of the input for a weight of 1. Its product with that input is the
            # gradient of a row's weight, so no output of the second product is kept.
            if needs_both or needs_weights:
                second_read.check()
                active_grad = ctx.products.linear_backward(grad_rows, down, groups)
            if needs_weights and not on_input:
                assert active_grad is not None
                weights_grad = groups.dots(active_grad, active, weights)
            if needs_down:
                weighted = active if on_input else groups.weighted(active, weights)
                down_grad = _weight_gradient(
                    down,
                    second_read.handle,
                    groups,
                    lambda: (grad_rows, weighted),
                    postponed=lambda: (groups.gather(out_grad), weighted),
                )
            return active_grad, weights_grad, down_grad

        active_grad, weights_grad, down_grad = through_second(both)
        x_grad = gate_up_grad = None
        if needs_both:
            assert active_grad is not None
            if not on_input:
                groups.weigh(active_grad, weights)
            both_grad = gate.backward(active_grad, both)
            del active_grad, both
            if needs_x or (on_input and needs_weights):
                first_read.check()
                input_grad = ctx.products.linear_backward(both_grad, gate_up, groups)
                if on_input and needs_weights:
                    weights_grad = groups.dots(input_grad, gathered(None), weights)
                x_grad = groups.sum(input_grad, weights if on_input else None).view(grad.shape)
                del input_grad
            if needs_gate_up:
                gate_up_grad = _weight_gradient(
                    gate_up, first_read.handle, groups, lambda: (both_grad, input_rows())
                )
        return x_grad, None, weights_grad, gate_up_grad, down_grad, *[None] * 6


def _weight_gradient(
    weight: Tensor,
    handle: ParamHandle | None,
    groups: ExpertRows,
    factors: Factors,
    *,
    postponed: Factors | None = None,
) -> Tensor | None:
    """Write the gradient of the experts' weight into the handle's buffer, now or in a later weight
    pass; without a handle it is returned to autograd. ``postponed`` makes the factors from less
    memory, if there is a way."""
    later = factors if postponed is None else postponed
    if handle is None:
        view = torch.empty_like(weight)
        grouped.accumulate(by_expert(view, len(groups.ends)), 0.0, *factors(), groups)
        return view
    if not handle.keep_wgrad(lambda: _write(handle, groups, later)):
        _write(handle, groups, factors)
    return None


def _write(handle: ParamHandle, groups: ExpertRows, factors: Factors) -> None:
    grad, x = factors()
    view, beta = handle.grad_view()
    grouped.accumulate(by_expert(view, len(groups.ends)), beta, grad, x, groups)
    handle.grad_written()


def expert_mlp(
    x: Tensor | Recomputable,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate,
    *,
    recompute: bool = False,
    most: int | None = None,
    on_input: bool = False,
    products: ExpertProducts | None = None,
) -> Tensor:
    """Send x [..., h] through the experts of each token, and sum their outputs by the weights of
    ``routing``: [..., h]. ``on_input``: sum them as they are; the weights multiply their inputs.

    ``gate_up`` [E * 2I, h] has of each expert the rows of its gate, then those of up; ``down``
    [E * h, I] those of its output. With ``recompute`` backward computes all again from x.
    ``most``: the weights are those of some experts, which have at most so many rows, and the number
    E in the table stands for all others, which add nothing (``dispatch.py``). ``products``: those
    by the weights; None: in the dtype of x."""
    value, source = (x.value, x) if isinstance(x, Recomputable) else (x, None)
    out = _ExpertMLP.apply(  # type: ignore[no-untyped-call]
        *(value, routing.experts, routing.weights, gate_up, down, gate, recompute, source),
        *(most, on_input, PlainProducts() if products is None else products),
    )
    return cast(Tensor, out)
