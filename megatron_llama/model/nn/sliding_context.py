"""Context parallelism of layers with a window: keys and values that no window reaches are neither
computed nor sent.

Each other rank sends the tokens of its chunks that a rank's queries see (``zigzag.tails``) in one
message, whichever algorithm other layers use: a ring would pass the same tokens on from neighbour
to neighbour, and stop when the window ends. Messages are hidden under computation: forward starts
with the rank's own chunks, and backward ends with one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_llama.engine.comm.collectives import Pending
from megatron_llama.engine.comm.p2p import exchange_with
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.tensors import at_least_fp32
from megatron_llama.model.nn.attention import AttentionBackend, ScoreRule, merge
from megatron_llama.model.nn.documents import EVERY, Part, SplitDocuments, attends_by_document
from megatron_llama.model.plan.zigzag import Tail, reached, tails, zigzag_chunks


def sliding_context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cp: Axis,
    rule: ScoreRule,
    documents: SplitDocuments | None = None,
    backend: AttentionBackend = "auto",
) -> Tensor:
    """Compute ``context.context_attention`` with a window shorter than the sequence: [s / cp, b, n
    * d]. Collective over ``cp``."""
    sequence = _Sequence(cp, query.shape[0] // 2, rule, documents, backend)
    out: Tensor = _SlidingContext.apply(  # type: ignore[no-untyped-call]
        query, key, value, sequence
    )
    return out.flatten(2)


@dataclass(frozen=True)
class _Sequence:
    """The layout of the sequence over ranks, which token sees which, and the kernels."""

    cp: Axis
    chunk: int
    """Tokens per chunk."""
    rule: ScoreRule
    documents: SplitDocuments | None
    backend: AttentionBackend

    @property
    def own(self) -> tuple[int, int]:
        """The chunks of this rank."""
        return zigzag_chunks(self.cp.rank, self.cp.size)

    def tails(self, source: int, target: int) -> tuple[Tail, ...]:
        """Return the tails that rank ``source`` sends to rank ``target``."""
        if source == target:
            return ()
        return tails(source, target, self.cp.size, self.chunk, self.rule.window)

    def end_of_tail(self, tail: Tail) -> slice:
        """Return the tokens of a tail of one of this rank's chunks, among this rank's tokens."""
        stop = (self.own.index(tail.chunk) + 1) * self.chunk
        return slice(stop - tail.tokens, stop)

    def parts(self, key_chunk: int, held: int, query: Tensor) -> Iterator[Part]:
        """Yield this rank's attention calls with the last ``held`` keys of a chunk of its own or of
        others: the first tokens of one of its chunks see as many last tokens of a chunk before
        it."""
        end = (key_chunk + 1) * self.chunk
        for place, chunk in enumerate(self.own):
            row, begin = place * self.chunk, chunk * self.chunk
            tokens = reached(key_chunk, chunk, self.chunk, self.rule.window)
            if chunk == key_chunk and self.documents is not None:
                at_once = attends_by_document(query, self.rule)
                yield from self.documents.square(chunk, row, 0, at_once=at_once)
            elif chunk == key_chunk:
                yield Part(EVERY, slice(row, row + held), slice(0, held), 0)
            elif tokens and self.documents is not None:
                queries, keys = (begin, begin + tokens), (end - tokens, end)
                yield from self.documents.rectangles(
                    queries, keys, row, held - tokens, self.rule.window
                )
            elif tokens:
                offset = begin - end + tokens
                rows = slice(row, row + tokens)
                yield Part(EVERY, rows, slice(held - tokens, held), offset)


class _Tails:
    """Exchanges the keys and values that windows reach, [2, tokens, b, n_kv, d] of each rank, and
    later their gradients in the other direction."""

    def __init__(self, sequence: _Sequence, key_value: Tensor) -> None:
        self.sequence = sequence
        rank = sequence.cp.rank
        peers = range(sequence.cp.size)
        self.sent = {peer: sequence.tails(rank, peer) for peer in peers}
        self.received = {peer: sequence.tails(peer, rank) for peer in peers}
        outgoing = {
            peer: torch.cat([key_value[:, sequence.end_of_tail(tail)] for tail in sent], dim=1)
            for peer, sent in self.sent.items()
            if sent
        }
        self.buffers = {
            peer: _room(key_value, received, key_value.dtype)
            for peer, received in self.received.items()
            if received
        }
        self.pending = exchange_with(outgoing, self.buffers, sequence.cp)

    def chunks(self, buffers: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield each chunk of which this rank has received a tail, and this tail's part of
        ``buffers``."""
        for peer, buffer in buffers.items():
            sizes = [tail.tokens for tail in self.received[peer]]
            parts = torch.split(buffer, sizes, dim=1)
            yield from zip((tail.chunk for tail in self.received[peer]), parts, strict=True)

    def send_back(self, grads: Mapping[int, Tensor], like: Tensor) -> tuple[Pending, Any]:
        """Start to send the gradients of the received tails. Return the buffers of the gradients
        that arrive, for ``add``."""
        buffers = {peer: _room(like, sent, like.dtype) for peer, sent in self.sent.items() if sent}
        return exchange_with(grads, buffers, self.sequence.cp), buffers

    def add(self, buffers: Mapping[int, Tensor], own_grad: Tensor) -> None:
        """Add the gradients from all ranks, in rank order, to those of this rank's keys and
        values."""
        for peer in sorted(buffers):
            sizes = [tail.tokens for tail in self.sent[peer]]
            tail_grads = torch.split(buffers[peer], sizes, dim=1)
            for tail, tail_grad in zip(self.sent[peer], tail_grads, strict=True):
                own_grad[:, self.sequence.end_of_tail(tail)] += tail_grad


def _room(like: Tensor, message: tuple[Tail, ...], dtype: torch.dtype) -> Tensor:
    tokens = sum(tail.tokens for tail in message)
    return like.new_empty((2, tokens, *like.shape[2:]), dtype=dtype)


def _heads_first(tensor: Tensor) -> Tensor:
    """View [s, b, n, d] as kernels take it: [b, n, s, d]."""
    return tensor.permute(1, 2, 0, 3)


class _SlidingContext(torch.autograd.Function):
    """Saves the rank's own tensors: other ranks' keys and values are sent again in backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sequence: _Sequence) -> Tensor:
        key_value = torch.stack((key, value))
        q = _heads_first(query)
        # Pieces are merged in fp32 and rounded once, behind the last one.
        wide = at_least_fp32(query.dtype)
        out = torch.zeros_like(query, dtype=wide)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=wide)

        def attend_to(chunk: int, keys_and_values: Tensor) -> None:
            k, v = (_heads_first(tensor) for tensor in keys_and_values)
            for part in sequence.parts(chunk, k.shape[2], q):
                part_out, part_lse = part.attend(q, k, v, sequence.rule, sequence.backend)
                where = (part.samples, slice(None), part.rows)
                merge(_heads_first(out)[where], lse[where], part_out, part_lse)

        others = _Tails(sequence, key_value)
        for chunk, own in zip(sequence.own, key_value.chunk(2, dim=1), strict=True):
            attend_to(chunk, own)
        others.pending.wait()
        for chunk, tail in others.chunks(others.buffers):
            attend_to(chunk, tail)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key_value, out, lse)
        ctx.sequence = sequence
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key_value, out, lse = ctx.saved_tensors
        sequence: _Sequence = ctx.sequence
        query_grad = torch.zeros_like(query, dtype=lse.dtype)
        own_grad = torch.zeros_like(key_value, dtype=lse.dtype)
        heads = _heads_first(grad.contiguous()), _heads_first(query), _heads_first(out)

        def add_grads_of(chunk: int, keys_and_values: Tensor, total: Tensor) -> None:
            k, v = (_heads_first(tensor) for tensor in keys_and_values)
            for part in sequence.parts(chunk, k.shape[2], query):
                dq, dk, dv = part.attend_backward(heads, lse, k, v, sequence.rule, sequence.backend)
                _heads_first(query_grad)[part.samples, :, part.rows].add_(dq)
                for sums, part_grad in zip(total, (dk, dv), strict=True):
                    _heads_first(sums)[part.samples, :, part.columns].add_(part_grad)

        others = _Tails(sequence, key_value)
        (first, second), values = sequence.own, key_value.chunk(2, dim=1)
        totals = own_grad.chunk(2, dim=1)
        add_grads_of(first, values[0], totals[0])
        others.pending.wait()
        grads = {
            peer: torch.zeros_like(buffer, dtype=lse.dtype)
            for peer, buffer in others.buffers.items()
        }
        received = zip(others.chunks(others.buffers), others.chunks(grads), strict=True)
        for (chunk, tail), (_, tail_grad) in received:
            add_grads_of(chunk, tail, tail_grad)
        pending, buffers = others.send_back(grads, own_grad)
        # One own chunk was left to compute while the gradients are sent.
        add_grads_of(second, values[1], totals[1])
        pending.wait()
        others.add(buffers, own_grad)
        key_grad, value_grad = own_grad.to(key_value.dtype)
        return query_grad.to(query.dtype), key_grad, value_grad, None
