"""Context parallelism: attention over a sequence that is spread over ranks in zig-zag order
(``model/plan/zigzag.py``).

Two algorithms share their kernels, their merge and their plan of pieces. With ``all_gather`` the
keys and values of all ranks come in one message (Dubey et al., 2024, section 3.3.2), or some heads
after others in a few. With ``ring``
they travel from rank to rank (Liu et al., 2023), and no rank ever holds them all. In both, messages
are hidden under computation: forward starts with the pieces of the rank's own keys, and backward
ends with one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_llama.engine.comm.autograd import start_all_gather, start_reduce_scatter
from megatron_llama.engine.comm.collectives import Pending
from megatron_llama.engine.comm.p2p import exchange
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.tensors import at_least_fp32
from megatron_llama.model.nn.attention import PLAIN_SCORES, AttentionBackend, ScoreRule, merge
from megatron_llama.model.nn.documents import EVERY, Part, SplitDocuments, attends_by_document
from megatron_llama.model.nn.sliding_context import sliding_context_attention
from megatron_llama.model.plan.zigzag import (
    Piece,
    chunk_length,
    chunk_owner,
    gathered_pieces,
    own_pieces,
    ring_pieces,
    zigzag_chunks,
)

Comm = Literal["all_gather", "ring"]
MOST_MESSAGES = 4
"""Messages into which a gather of keys and values is cut, by their heads."""
LEAST_MESSAGE = 1 << 20
"""Bytes of such a message, of all ranks together: the cost of starting more of them is small."""


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cp: Axis,
    comm: Comm = "all_gather",
    documents: SplitDocuments | None = None,
    backend: AttentionBackend = "auto",
    rule: ScoreRule = PLAIN_SCORES,
) -> Tensor:
    """Compute causal attention of query [s / cp, b, n, d], key and value [s / cp, b, n_kv, d], in
    zig-zag order: [s / cp, b, n * d].

    Rotary embeddings have been applied, with global positions. A token attends within its document
    only. With a window of ``rule`` only the tokens that it reaches are sent, straight between the
    ranks, whatever ``comm`` is. Raises ConfigError if the ranks' chunks are not equal. Collective
    over ``cp``, which has several ranks.
    """
    chunk_length(query.shape[0] * cp.size, cp.size)
    if documents is not None:
        # cuDNN would plan anew for each size of a rectangle, and every step has others.
        backend = "flash"
    if rule.limits(query.shape[0] * cp.size):
        return sliding_context_attention(
            *(query, key, value), cp=cp, rule=rule, documents=documents, backend=backend
        )
    # No window is left that hides anything.
    rule = replace(rule, window=0)
    out: Tensor = _ContextAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, cp, comm, documents, backend, rule
    )
    return out


def local_sequence(whole: Tensor, cp: Axis) -> Tensor:
    """Return this rank's tokens [s / cp, ...] of a sequence [s, ...]. Raises ConfigError if the
    chunks are not equal."""
    if cp.size == 1:
        return whole
    length = chunk_length(whole.shape[0], cp.size)
    return torch.cat(
        [whole.narrow(0, chunk * length, length) for chunk in zigzag_chunks(cp.rank, cp.size)]
    )


@dataclass(frozen=True)
class _Block:
    """Keys and values that this rank has, [2, t, b, n_kv, d], their chunks of the sequence, and the
    pieces to compute with them."""

    key_value: Tensor
    chunks: Sequence[int]
    pieces: tuple[Piece, ...]
    heads: slice
    """The query heads of these keys and values."""


@dataclass(frozen=True)
class _Sequence:
    """The layout of the sequence over ranks, which token may attend to which, and the kernels."""

    cp: Axis
    chunk: int
    """Tokens per chunk."""
    documents: SplitDocuments | None
    backend: AttentionBackend
    """Whose kernels compute the pieces."""
    rule: ScoreRule

    def parts(self, piece: Piece, block: _Block, query: Tensor) -> Iterator[Part]:
        """Yield the attention calls of a piece."""
        row, column = piece.queries[0] * self.chunk, piece.keys[0] * self.chunk
        if self.documents is None:
            columns = slice(column, piece.keys[1] * self.chunk)
            offset = 0 if piece.causal else columns.stop - column
            yield Part(EVERY, slice(row, piece.queries[1] * self.chunk), columns, offset)
            return
        first, last = piece.queries
        own = zigzag_chunks(self.cp.rank, self.cp.size)[first:last]
        if piece.causal:
            at_once = attends_by_document(query, self.rule)
            yield from self.documents.square(own[0], row, column, at_once=at_once)
            return
        held = block.chunks[piece.keys[0] : piece.keys[1]]
        # Chunks that follow each other are one rectangle.
        runs = [(held.start, held.stop)] if isinstance(held, range) else [(c, c + 1) for c in held]
        for place, chunk in enumerate(own):
            queries, first_row = self.tokens((chunk, chunk + 1)), row + place * self.chunk
            for number, run in enumerate(runs):
                first_column = column + number * self.chunk
                keys = self.tokens(run)
                yield from self.documents.rectangles(queries, keys, first_row, first_column)

    def tokens(self, chunks: tuple[int, int]) -> tuple[int, int]:
        """Return the tokens of chunks [start, stop)."""
        return chunks[0] * self.chunk, chunks[1] * self.chunk


def _heads_first(tensor: Tensor) -> Tensor:
    """View [s, b, n, d] as kernels take it: [b, n, s, d]."""
    return tensor.permute(1, 2, 0, 3)


def _messages(key_value: Tensor, cp: Axis) -> int:
    """Return the number of messages into which a gather of keys and values is cut."""
    count = gcd(key_value.shape[3], MOST_MESSAGES)
    return count if cp.size * key_value.nbytes >= count * LEAST_MESSAGE else 1


def _blocks(key_value: Tensor, queries: int, cp: Axis, comm: Comm) -> Iterator[_Block]:
    """Yield the rank's own block, then the others' as they arrive. The next one is on its way while
    the caller computes. ``queries``: query heads."""
    rank = cp.rank
    size = cp.size
    if comm == "all_gather":
        # All heads but the first travel while heads before them are computed.
        count = _messages(key_value, cp)
        gathers = [start_all_gather(part, cp) for part in key_value.chunk(count, dim=3)]
        yield _Block(key_value, zigzag_chunks(rank, size), own_pieces(), EVERY)
        step = queries // count
        for number, (full, pending) in enumerate(gathers):
            pending.wait()
            whole = _in_sequence_order(full, size)
            heads = slice(number * step, (number + 1) * step)
            yield _Block(whole, range(2 * size), gathered_pieces(rank, size), heads)
        return
    current = key_value
    for step in range(size - 1):
        following = torch.empty_like(current)
        pending = exchange(current, following, cp, to=(rank + 1) % size, source=(rank - 1) % size)
        yield _ring_block(current, cp, step)
        pending.wait()
        current = following
    yield _ring_block(current, cp, size - 1)


def _ring_block(key_value: Tensor, cp: Axis, step: int) -> _Block:
    source = (cp.rank - step) % cp.size
    pieces = ring_pieces(cp.rank, source)
    return _Block(key_value, zigzag_chunks(source, cp.size), pieces, EVERY)


def _in_sequence_order(full: Tensor, size: int) -> Tensor:
    """Copy [size * 2, s / size, ...], rank after rank, to [2, s, ...]."""
    parts = full.view(size, 2, 2, full.shape[1] // 2, *full.shape[2:])
    owners = (chunk_owner(chunk, size) for chunk in range(2 * size))
    return torch.cat([parts[rank, :, half] for rank, half in owners], dim=1)


def _in_rank_order(full: Tensor, size: int) -> Tensor:
    """Copy [2, s, ...] to [size * 2, s / size, ...], rank after rank."""
    parts = full.view(2, 2 * size, full.shape[1] // (2 * size), *full.shape[2:])
    order = [
        (which, chunk)
        for rank in range(size)
        for which in (0, 1)
        for chunk in zigzag_chunks(rank, size)
    ]
    return torch.stack([parts[which, chunk] for which, chunk in order]).view(
        2 * size, -1, *full.shape[2:]
    )


class _ReduceScatterGrads:
    """Sends the gradients of all ranks' keys and values to their owners in one reduce-scatter."""

    def __init__(self, cp: Axis) -> None:
        self.cp = cp
        self.sent: list[tuple[Tensor, Pending]] = []

    def send(self, grad: Tensor) -> None:
        self.sent.append(start_reduce_scatter(_in_rank_order(grad, self.cp.size), self.cp))

    def wait(self) -> Tensor:
        """Return the sum of the other ranks' gradients for the own keys and values."""
        for _, pending in self.sent:
            pending.wait()
        grads = [grad for grad, _ in self.sent]
        return grads[0] if len(grads) == 1 else torch.cat(grads, dim=3)


class _RingGrads:
    """Sends the gradient of a block of keys and values around the ring, one step behind the block:
    every rank adds its part, and the last one sends the sum to the block's owner."""

    def __init__(self, cp: Axis) -> None:
        self.cp = cp
        self.pending: Pending | None = None

    def send(self, grad: Tensor) -> None:
        if self.pending is not None:
            grad += self.wait()
        self.received = torch.empty_like(grad)
        self.pending = exchange(
            grad,
            self.received,
            self.cp,
            to=(self.cp.rank + 1) % self.cp.size,
            source=(self.cp.rank - 1) % self.cp.size,
        )

    def wait(self) -> Tensor:
        """Return the gradient from the rank before this one; in the end, the sum for the own keys
        and values."""
        assert self.pending is not None
        self.pending.wait()
        return self.received


class _ContextAttention(torch.autograd.Function):
    """Saves the rank's own tensors: other ranks' keys and values are sent again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cp: Axis,
        comm: Comm,
        documents: SplitDocuments | None,
        backend: AttentionBackend,
        rule: ScoreRule,
    ) -> Tensor:
        sequence = _Sequence(cp, query.shape[0] // 2, documents, backend, rule)
        key_value = torch.stack((key, value))
        q = _heads_first(query)
        # Pieces are merged in fp32 and rounded once, behind the last one.
        fp32 = at_least_fp32(query.dtype)
        out = torch.zeros_like(query, dtype=fp32)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=fp32)
        for block in _blocks(key_value, query.shape[2], cp, comm):
            k, v = (_heads_first(tensor) for tensor in block.key_value)
            for part in (part for one in block.pieces for part in sequence.parts(one, block, q)):
                piece_out, piece_lse = part.attend(q[:, block.heads], k, v, rule, backend)
                where = (part.samples, block.heads, part.rows)
                merge(_heads_first(out)[where], lse[where], piece_out, piece_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key_value, out, lse)
        ctx.sequence = sequence
        ctx.comm = comm
        return out.flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key_value, out, lse = ctx.saved_tensors
        sums = _GradientSums(
            ctx.sequence, _heads_first(grad.contiguous().view_as(query)), query, out, lse
        )
        cp = ctx.sequence.cp
        others_grads = _ReduceScatterGrads(cp) if ctx.comm == "all_gather" else _RingGrads(cp)
        blocks = _blocks(key_value, query.shape[2], cp, ctx.comm)
        own = next(blocks)
        own_grad = sums.zeros(own)
        sums.add(own, own.pieces[:-1], own_grad)
        for block in blocks:
            block_grad = sums.zeros(block)
            sums.add(block, block.pieces, block_grad)
            others_grads.send(block_grad)
        # One own piece was left to compute while the last gradients are sent.
        sums.add(own, own.pieces[-1:], own_grad)
        own_grad += others_grads.wait()
        key_grad, value_grad = own_grad.to(key_value.dtype)
        return sums.query_grad.to(query.dtype), key_grad, value_grad, *[None] * 5


class _GradientSums:
    """The gradients of queries, keys and values, summed over pieces at least in fp32."""

    def __init__(
        self, sequence: _Sequence, grad: Tensor, query: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        self.sequence = sequence
        self.grad = grad
        self.query = _heads_first(query)
        self.out = _heads_first(out)
        self.lse = lse
        self.query_grad = torch.zeros_like(query, dtype=lse.dtype)

    def zeros(self, block: _Block) -> Tensor:
        """Return zeros into which the gradients of a block's keys and values are summed."""
        return torch.zeros_like(block.key_value, dtype=self.lse.dtype)

    def add(self, block: _Block, pieces: tuple[Piece, ...], block_grad: Tensor) -> None:
        """Compute the gradients of pieces, and add them to those of the queries and of the
        block."""
        k, v = (_heads_first(tensor) for tensor in block.key_value)
        sequence = self.sequence
        heads = block.heads
        queries = (self.grad[:, heads], self.query[:, heads], self.out[:, heads])
        for part in (part for one in pieces for part in sequence.parts(one, block, self.query)):
            dq, dk, dv = part.attend_backward(
                queries, self.lse[:, heads], k, v, sequence.rule, sequence.backend
            )
            _heads_first(self.query_grad)[part.samples, heads, part.rows].add_(dq)
            for total, part_grad in zip(block_grad, (dk, dv), strict=True):
                _heads_first(total)[part.samples, :, part.columns].add_(part_grad)
