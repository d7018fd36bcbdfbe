"""Experts that data-parallel ranks divide among them: tokens travel to the ranks that hold their
experts, and what these make of them travels back.

Each of the ``ep`` ranks gathers the tokens of all, with the table of their experts and weights,
computes the rows of its own experts, and sums them for each token; a reduce-scatter adds the sums
up, and each rank has those of its own tokens. Backward makes the conjugate messages, and gathers
the tokens again rather than keep them. The gradient of an expert is then that of the tokens of all
``ep`` ranks.

Nothing depends on what routers choose: shapes are known before, no host waits for a number, and all
ranks issue the same messages. Of every gathered token a rank has room for as many rows as it can
have experts here, so no token is dropped.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_llama.engine.comm.autograd import (
    gather_sequence,
    scatter_sequence,
    start_all_gather,
    start_reduce_scatter,
)
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.tensors import rows
from megatron_llama.model.nn.moe.experts import expert_mlp
from megatron_llama.model.nn.moe.routing import Routing
from megatron_llama.model.nn.ops import Gate
from megatron_llama.model.nn.recompute import Recomputable


def dispatched_mlp(
    x: Tensor | Recomputable,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate,
    ep: Axis,
    *,
    recompute: bool = False,
    on_input: bool = False,
) -> Tensor:
    """Send x [..., h] through the experts of each token, which are those of all ranks of ``ep``:
    [..., h]. The weights are those of the experts of this rank; see ``expert_mlp``. Collective:
    each rank has as many tokens."""
    value, source = (x.value, x) if isinstance(x, Recomputable) else (x, None)
    experts, weights = _Table.apply(  # type: ignore[no-untyped-call]
        routing.experts, routing.weights, ep
    )
    count = len(down) // value.shape[-1]
    here = experts - ep.rank * count
    # The number behind the last expert stands for all that other ranks have.
    here = torch.where((here >= 0) & (here < count), here, count)
    make_input = None if source is None else source.function
    tokens = Recomputable(
        gather_sequence(rows(value), ep),
        partial(_gather_again, make_input, ep),
        (value,) if source is None else source.sources,
    )
    out = expert_mlp(
        tokens,
        routing._replace(experts=here, weights=weights),
        gate_up,
        down,
        gate,
        recompute=recompute,
        # The experts of a token differ, so it has at most so many here.
        most=len(experts) * min(experts.shape[1], count),
        on_input=on_input,
    )
    return scatter_sequence(out, ep).view(value.shape)


def _gather_again(make_input: Any, ep: Axis, *sources: Tensor) -> Tensor:
    """Take or make this rank's tokens again, and gather those of all ranks: [t * ep, h]."""
    x = sources[0] if make_input is None else make_input(*sources)
    tokens, gathering = start_all_gather(rows(x), ep, async_op=False)
    gathering.wait()
    return tokens


class _Table(torch.autograd.Function):
    """Gathers a table of experts [t, k] and their weights, in one message: [t * ep, k] each."""

    @staticmethod
    def forward(ctx: Any, experts: Tensor, weights: Tensor, ep: Axis) -> tuple[Tensor, Tensor]:
        ctx.ep = ep
        # As whole numbers of the width of a weight, whose bits they carry.
        width = torch.int32 if weights.element_size() == 4 else torch.int64
        table = torch.cat((experts.to(width), weights.view(width)), dim=1)
        full, gathering = start_all_gather(table, ep, async_op=False)
        gathering.wait()
        of_experts, of_weights = full.chunk(2, dim=1)
        gathered = of_experts.to(torch.int64)
        ctx.mark_non_differentiable(gathered)
        return gathered, of_weights.contiguous().view(weights.dtype)

    @staticmethod
    def backward(ctx: Any, _: None, grad: Tensor) -> tuple[None, Tensor, None]:
        # Of each place of the table one rank has the gradient, and the others zeros.
        own, reducing = start_reduce_scatter(grad, ctx.ep, async_op=False)
        reducing.wait()
        return None, own, None
