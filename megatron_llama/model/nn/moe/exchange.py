"""Experts that data-parallel ranks divide among them, where a token travels only to the ranks that
hold some of its experts: once to each of them, with all its experts and their weights.

The rank computes the rows of its own experts, sums them for each token, and sends one row back,
which the owner of the token adds to those of other ranks. Backward makes the conjugate messages,
all with the counts of the forward pass.

How many tokens come to a rank depends on what routers choose, and no token is dropped. So counts
travel first, and the host waits for them, once in a block: a graph cannot capture it. All ranks
issue the same messages, those that send or receive nothing too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from megatron_llama.engine.comm import collectives
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.tensors import rows
from megatron_llama.model.nn.moe.experts import expert_mlp
from megatron_llama.model.nn.moe.routing import Routing
from megatron_llama.model.nn.moe.rows import TokenRows
from megatron_llama.model.nn.ops import Gate
from megatron_llama.model.nn.recompute import Recomputable
from megatron_llama.model.plan.dispatch import equal_load


@dataclass(frozen=True)
class Exchange:
    """The rows that this rank exchanges with all ranks of ``ep``, those with itself included."""

    ep: Axis
    sent: tuple[int, ...]
    """Of each rank, the rows that go to it."""
    received: tuple[int, ...]
    """Of each rank, the rows that come from it."""
    most: int
    """Rows of the experts of this rank, of all tokens that come."""

    def spread(self, values: Tensor) -> Tensor:
        """Send rows [n, ...] to the ranks of experts, in rank order: [m, ...]."""
        return self._exchanged(values, self.received, self.sent)

    def collect(self, values: Tensor) -> Tensor:
        """Send rows [m, ...] back to the owners of their tokens: [n, ...]."""
        return self._exchanged(values, self.sent, self.received)

    def _exchanged(
        self, values: Tensor, incoming: Sequence[int], outgoing: Sequence[int]
    ) -> Tensor:
        received = values.new_empty((sum(incoming), *values.shape[1:]))
        counts = (incoming, outgoing)
        collectives.all_to_all_rows(
            received, values.contiguous(), self.ep, counts, async_op=False
        ).wait()
        return received


def exchanged_mlp(
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
    [..., h]. The weights are those of the experts of this rank; see ``expert_mlp``. What comes from
    other ranks is kept for backward; with ``recompute`` it is sent again instead. Collective."""
    value, source = (x.value, x) if isinstance(x, Recomputable) else (x, None)
    count = len(down) // value.shape[-1]
    ranks = ranks_of(routing.experts, count, ep.size)
    token_rows, exchange = _agreed(routing.experts, ranks, count, ep)
    kept = token_rows.order, token_rows.elsewhere
    experts, weights = _Table.apply(  # type: ignore[no-untyped-call]
        routing.experts, routing.weights, *kept, exchange
    )
    here = experts - ep.rank * count
    # The number behind the last expert stands for all that other ranks have.
    here = torch.where((here >= 0) & (here < count), here, count)
    tokens = _Spread.apply(rows(value), *kept, exchange)  # type: ignore[no-untyped-call]
    if recompute:
        make_input = None if source is None else source.function
        sources = (value,) if source is None else source.sources
        tokens = Recomputable(
            tokens,
            partial(_spread_again, make_input, routing.experts.shape[1], exchange),
            (token_rows.order, *sources),
        )
    out = expert_mlp(
        tokens,
        routing._replace(experts=here, weights=weights),
        gate_up,
        down,
        gate,
        recompute=recompute,
        most=exchange.most,
        on_input=on_input,
    )
    collected = _Collect.apply(out, *kept, exchange)  # type: ignore[no-untyped-call]
    return cast(Tensor, collected).view(value.shape)


def ranks_of(experts: Tensor, count: int, size: int) -> Tensor:
    """Return the ranks that hold some of the experts [t, k] of each token, each once and in order:
    [t, k], where the number ``size`` stands for no rank. Each rank has ``count`` experts."""
    ranks = (experts // count).sort(dim=-1).values
    again = ranks[:, 1:] == ranks[:, :-1]
    ranks[:, 1:].masked_fill_(again, size)
    return ranks


def _agreed(experts: Tensor, ranks: Tensor, count: int, ep: Axis) -> tuple[TokenRows, Exchange]:
    """Return the rows to send, sorted by rank, and what each rank sends to which. The host waits
    for the numbers. Collective."""
    places = torch.arange(ep.size, device=ranks.device)
    # Beside the tokens also the rows of experts, for which a rank has to make room.
    tables = (ranks, experts // count)
    sent = torch.stack([(table.unsqueeze(-1) == places).sum((0, 1)) for table in tables], dim=1)
    received = torch.empty_like(sent)
    collectives.all_to_all(received, sent, ep, async_op=False).wait()
    if devices.is_fake(ranks):
        # Nobody has been sent anywhere: as if all experts had as many.
        load = equal_load(*experts.shape, experts=count * ep.size, ep=ep.size)
        each = (load.sent // ep.size,) * ep.size
        exchange = Exchange(ep, each, each, load.rows)
    else:
        outgoing, _, incoming, of_experts = torch.cat((sent, received), dim=1).t().tolist()
        exchange = Exchange(ep, tuple(outgoing), tuple(incoming), sum(of_experts))
    order = torch.sort(ranks.flatten(), stable=True).indices[: sum(exchange.sent)]
    return TokenRows(ranks.shape[1], order, ranks == ep.size), exchange


def _spread_again(
    make_input: Any, per_token: int, exchange: Exchange, order: Tensor, *sources: Tensor
) -> Tensor:
    """Take or make this rank's tokens again, and send them to the ranks of experts."""
    x = sources[0] if make_input is None else make_input(*sources)
    return exchange.spread(TokenRows(per_token, order, None).gather(rows(x)))


def _kept_rows(ctx: Any) -> TokenRows:
    order, elsewhere = ctx.saved_tensors
    return TokenRows(elsewhere.shape[1], order, elsewhere)


class _Spread(torch.autograd.Function):
    """Sends tokens [t, h] to the ranks of their experts: [m, h]. The gradient of a token is the sum
    of those that come back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order: Tensor, elsewhere: Tensor, exchange: Exchange
    ) -> Tensor:
        ctx.save_for_backward(order, elsewhere)
        ctx.exchange = exchange
        return exchange.spread(TokenRows(elsewhere.shape[1], order, elsewhere).gather(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        summed = _kept_rows(ctx).sum(ctx.exchange.collect(grad), None)
        return summed, None, None, None


class _Collect(torch.autograd.Function):
    """Sends outputs [m, h] back to the owners of their tokens, which add them up: [t, h]."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, order: Tensor, elsewhere: Tensor, exchange: Exchange
    ) -> Tensor:
        ctx.save_for_backward(order, elsewhere)
        ctx.exchange = exchange
        token_rows = TokenRows(elsewhere.shape[1], order, elsewhere)
        return token_rows.sum(exchange.collect(out), None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange.spread(_kept_rows(ctx).gather(grad)), None, None, None


class _Table(torch.autograd.Function):
    """Sends the experts [t, k] of tokens and their weights, in one message: [m, k] each."""

    @staticmethod
    def forward(
        ctx: Any,
        experts: Tensor,
        weights: Tensor,
        order: Tensor,
        elsewhere: Tensor,
        exchange: Exchange,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(order, elsewhere)
        ctx.exchange = exchange
        # As whole numbers of the width of a weight, whose bits they carry.
        width = torch.int32 if weights.element_size() == 4 else torch.int64
        table = torch.cat((experts.to(width), weights.view(width)), dim=1)
        sent = TokenRows(experts.shape[1], order, elsewhere).gather(table)
        of_experts, of_weights = exchange.spread(sent).chunk(2, dim=1)
        received = of_experts.to(torch.int64)
        ctx.mark_non_differentiable(received)
        return received, of_weights.contiguous().view(weights.dtype)

    @staticmethod
    def backward(ctx: Any, _: None, grad: Tensor) -> tuple[None, Tensor, None, None, None]:
        # A rank has the gradients of the weights of its own experts, and zeros of the others.
        summed = _kept_rows(ctx).sum(ctx.exchange.collect(grad), None)
        return None, summed, None, None, None
