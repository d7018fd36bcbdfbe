"""Context parallelism: attention over a sequence that is spread over ranks in zig-zag order
(``model/plan/zigzag.py``).

Two algorithms share their kernels, their merge and their plan of pieces. With ``all_gather`` the
keys and values of all ranks come in one message (Dubey et al., 2024, section 3.3.2). With ``ring``
they travel from rank to rank (Liu et al., 2023), and no rank ever holds them all. In both, messages
are hidden under computation: forward starts with the pieces of the rank's own keys, and backward
ends with one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_llama.engine.comm.autograd import start_all_gather, start_reduce_scatter
from megatron_llama.engine.comm.collectives import Pending
from megatron_llama.engine.comm.p2p import exchange
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.tensors import at_least_fp32
from megatron_llama.model.nn import sliding
from megatron_llama.model.nn.attention import (
    LONGEST_MASKED,
    PLAIN_SCORES,
    AttentionBackend,
    ScoreRule,
    attend,
    attend_backward,
    causal_attention,
    merge,
)
from megatron_llama.model.nn.sliding import DocumentIds, sliding_attention
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


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cp: Axis,
    comm: Comm = "all_gather",
    document_ids: Tensor | None = None,
    backend: AttentionBackend = "auto",
    rule: ScoreRule = PLAIN_SCORES,
) -> Tensor:
    """Compute causal attention of query [s / cp, b, n, d], key and value [s / cp, b, n_kv, d], in
    zig-zag order: [s / cp, b, n * d].

    Rotary embeddings have been applied, with global positions. ``document_ids`` are int [s, b] of
    the whole sequence in its order; a token attends within its document only. With a window of
    ``rule`` only the tokens that it reaches are sent, straight between the ranks, whatever ``comm``
    is. Raises ConfigError if the ranks' chunks are not equal. Collective over ``cp``.
    """
    if cp.size == 1 and (_is_long(document_ids) or not rule.is_plain(len(query))):
        return sliding_attention(
            query, key, value, rule=rule, document_ids=document_ids, backend=backend
        )
    if cp.size == 1:
        mask = None if document_ids is None else causal_document_mask(document_ids)
        return causal_attention(query, key, value, mask, backend, rule.scale)
    chunk_length(query.shape[0] * cp.size, cp.size)
    if rule.limits(query.shape[0] * cp.size):
        return sliding_context_attention(
            *(query, key, value), cp=cp, rule=rule, document_ids=document_ids, backend=backend
        )
    out: Tensor = _ContextAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, cp, comm, document_ids, backend, rule
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


def causal_document_mask(document_ids: Tensor) -> Tensor:
    """Return bool [b, 1, s, s] for ids [s, b], True where a token may attend: to its document's
    tokens up to itself."""
    return _same_document(document_ids, document_ids).tril_()


def _is_long(document_ids: Tensor | None) -> bool:
    """Whether masks of these documents would be too large."""
    return document_ids is not None and len(document_ids) > LONGEST_MASKED


def _same_document(queries: Tensor, keys: Tensor) -> Tensor:
    return queries.t()[:, None, :, None] == keys.t()[:, None, None, :]


@dataclass(frozen=True)
class _Block:
    """Keys and values that this rank has, [2, t, b, n_kv, d], their chunks of the sequence, and the
    pieces to compute with them."""

    key_value: Tensor
    chunks: Sequence[int]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class _Sequence:
    """The layout of the sequence over ranks, which token may attend to which, and the kernels."""

    cp: Axis
    chunk: int
    """Tokens per chunk."""
    document_ids: Tensor | None
    backend: AttentionBackend
    """Whose kernels compute the pieces."""
    rule: ScoreRule

    def tokens(self, chunks: tuple[int, int]) -> slice:
        """Return the tokens of chunks [start, stop)."""
        return slice(chunks[0] * self.chunk, chunks[1] * self.chunk)

    def attend(
        self, piece: Piece, block: _Block, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute a piece, as ``attention.attend``."""
        ids = self._ids(piece, block)
        if _is_long(self.document_ids):
            return sliding.attend(query, key, value, **self._by_blocks(piece, key, ids))
        return attend(query, key, value, **self._at_once(piece, ids))

    def attend_backward(
        self,
        piece: Piece,
        block: _Block,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of a piece, as ``attention.attend_backward``."""
        ids = self._ids(piece, block)
        parts = (grad, query, key, value, out, lse)
        if _is_long(self.document_ids):
            return sliding.attend_backward(*parts, **self._by_blocks(piece, key, ids))
        return attend_backward(*parts, **self._at_once(piece, ids))

    def _at_once(self, piece: Piece, ids: DocumentIds | None) -> dict[str, Any]:
        mask = None if ids is None else _same_document(ids.queries, ids.keys)
        return {"causal": piece.causal, "mask": mask, "backend": self.backend, "rule": self.rule}

    def _by_blocks(self, piece: Piece, key: Tensor, ids: DocumentIds | None) -> dict[str, Any]:
        # Each query sees all keys that come before it, wherever they stand: no window is shorter
        # than the sequence here.
        offset = 0 if piece.causal else key.shape[2]
        return {"rule": self.rule, "offset": offset, "ids": ids, "backend": self.backend}

    def _ids(self, piece: Piece, block: _Block) -> DocumentIds | None:
        if self.document_ids is None:
            return None
        own = zigzag_chunks(self.cp.rank, self.cp.size)
        return DocumentIds(
            self._ids_of(self.document_ids, own, piece.queries),
            self._ids_of(self.document_ids, block.chunks, piece.keys),
        )

    def _ids_of(self, whole: Tensor, chunks: Sequence[int], part: tuple[int, int]) -> Tensor:
        return torch.cat(
            [whole.narrow(0, chunk * self.chunk, self.chunk) for chunk in chunks[part[0] : part[1]]]
        )


def _heads_first(tensor: Tensor) -> Tensor:
    """View [s, b, n, d] as kernels take it: [b, n, s, d]."""
    return tensor.permute(1, 2, 0, 3)


def _blocks(key_value: Tensor, cp: Axis, comm: Comm) -> Iterator[_Block]:
    """Yield the rank's own block, then the others' as they arrive. The next one is on its way while
    the caller computes."""
    rank = cp.rank
    size = cp.size
    if comm == "all_gather":
        full, pending = start_all_gather(key_value, cp)
        yield _Block(key_value, zigzag_chunks(rank, size), own_pieces())
        pending.wait()
        yield _Block(_in_sequence_order(full, size), range(2 * size), gathered_pieces(rank, size))
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
    return _Block(key_value, zigzag_chunks(source, cp.size), ring_pieces(cp.rank, source))


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

    def send(self, grad: Tensor) -> None:
        self.own_grad, self.pending = start_reduce_scatter(
            _in_rank_order(grad, self.cp.size), self.cp
        )

    def wait(self) -> Tensor:
        """Return the sum of the other ranks' gradients for the own keys and values."""
        self.pending.wait()
        return self.own_grad


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
        document_ids: Tensor | None,
        backend: AttentionBackend,
        rule: ScoreRule,
    ) -> Tensor:
        sequence = _Sequence(cp, query.shape[0] // 2, document_ids, backend, rule)
        key_value = torch.stack((key, value))
        q = _heads_first(query)
        # Pieces are merged in fp32 and rounded once, behind the last one.
        fp32 = at_least_fp32(query.dtype)
        out = torch.zeros_like(query, dtype=fp32)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=fp32)
        for block in _blocks(key_value, cp, comm):
            k, v = (_heads_first(tensor) for tensor in block.key_value)
            for piece in block.pieces:
                rows = sequence.tokens(piece.queries)
                columns = sequence.tokens(piece.keys)
                piece_out, piece_lse = sequence.attend(
                    piece, block, q[:, :, rows], k[:, :, columns], v[:, :, columns]
                )
                merge(_heads_first(out)[:, :, rows], lse[:, :, rows], piece_out, piece_lse)
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
        blocks = _blocks(key_value, cp, ctx.comm)
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
        for piece in pieces:
            rows = self.sequence.tokens(piece.queries)
            columns = self.sequence.tokens(piece.keys)
            grad, q, out = (tensor[:, :, rows] for tensor in (self.grad, self.query, self.out))
            dq, dk, dv = self.sequence.attend_backward(
                *(piece, block, grad, q, k[:, :, columns], v[:, :, columns]),
                *(out, self.lse[:, :, rows]),
            )
            _heads_first(self.query_grad)[:, :, rows].add_(dq)
            for total, piece_grad in zip(block_grad, (dk, dv), strict=True):
                _heads_first(total)[:, :, columns].add_(piece_grad)
