"""Attention of packed documents, each token within its own: the work is the sum over documents.

An accelerator's flash attention takes all documents at once. Where it cannot (hosts, fp32, capped
scores) documents are computed one by one. Under context parallelism the documents of a chunk are
computed so against the chunk itself. Of all tokens before a chunk it sees only those of the
document that it begins in, which is a rectangle of scores without a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_llama.engine.comm.device import is_host
from megatron_llama.engine.mesh import Axis
from megatron_llama.model.nn import attention, sliding
from megatron_llama.model.nn.attention import AttentionBackend, ScoreRule, suits_flash, window_sizes
from megatron_llama.model.plan.documents import Span, places_within, seen_before
from megatron_llama.model.plan.zigzag import chunk_length, zigzag_chunks

_aten = torch.ops.aten
Bounds = NDArray[np.int64]
"""An array, because a sequence may have a document for each token."""
EVERY = slice(None)
"""All samples."""


@dataclass(frozen=True)
class Documents:
    """Packed documents of all sequences of a batch, one sequence after the other. A token attends
    within its document only."""

    starts: Tensor
    """``bounds`` for the kernel: int32, on the device of the tokens."""
    bounds: Bounds
    """The place of each document's first token among the tokens of all sequences, and last the
    number of these tokens. Counted on the host: asking the device would wait for it."""

    @staticmethod
    def of(document_ids: Tensor) -> Documents:
        """Count documents of ids [s, b] on the host: a new one begins where the id changes."""
        ids = document_ids.cpu().numpy().T
        begins = np.ones(ids.shape, np.bool_)
        np.not_equal(ids[:, 1:], ids[:, :-1], out=begins[:, 1:])
        bounds = np.append(np.flatnonzero(begins), ids.size)
        return Documents(torch.from_numpy(bounds.astype(np.int32)), bounds)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(np.diff(self.bounds).max())

    def within(self, length: int, tokens: Span) -> Documents:
        """Return the documents of only these ``tokens`` of each sequence of ``length`` tokens."""
        count = tokens[1] - tokens[0]
        starts, bounds = [self.starts[:1]], [self.bounds[:1]]
        for sample, (first, last) in enumerate(places_within(self.bounds, length, tokens)):
            begin = sample * length + tokens[0]
            inside, end = slice(first + 1, last + 1), begin + count
            starts.append(self.starts[inside].clamp(max=end) + (sample * count - begin))
            bounds.append(np.minimum(self.bounds[inside], end) + (sample * count - begin))
        return Documents(torch.cat(starts), np.concatenate(bounds))


def attends_by_document(query: Tensor, rule: ScoreRule) -> bool:
    """Whether a kernel computes all ``Documents`` of these queries at once."""
    return not is_host(query.device) and suits_flash(query) and not rule.softcap


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    rule: ScoreRule,
    backend: AttentionBackend = "auto",
) -> Tensor:
    """Compute causal attention of packed documents, in the shapes of
    ``attention.causal_attention``."""
    length, batch = query.shape[:2]
    q, k, v = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
    if attends_by_document(query, rule):
        # Never cuDNN's, even if it is asked for: in torch 2.11 its backward uses head_dim as the
        # length of the longest document, and writes beyond its memory if that is longer
        # (pytorch/pytorch#186142). torch's own varlen_attn leaves cuDNN out, in 2.13 too.
        out: Tensor
        out, *_ = _aten._flash_attention_forward(
            *(q, k, v, *_kernel_arguments(documents), False), **_kernel_options(documents, rule)
        )
    else:
        lengths = np.diff(documents.bounds).tolist()
        parts = zip(*(torch.split(part.unsqueeze(1), lengths) for part in (q, k, v)), strict=True)
        outs = [sliding.sliding_attention(*part, rule=rule, backend=backend) for part in parts]
        out = torch.cat(outs).view_as(q)
    return out.view(batch, length, *query.shape[2:]).transpose(0, 1).flatten(2)


def _kernel_arguments(documents: Documents) -> tuple[Tensor, Tensor, int, int, float, bool]:
    starts = documents.starts
    return starts, starts, documents.longest, documents.longest, 0.0, True


def _kernel_options(documents: Documents, rule: ScoreRule) -> dict[str, Any]:
    left = rule.window - 1 if rule.limits(documents.longest) else None
    return {"scale": rule.scale, **window_sizes(left)}


@dataclass(frozen=True)
class Part:
    """One attention call of a rank: some of its queries [b, n, s, d] against some of the keys that
    it holds [b, n_kv, s, d]."""

    samples: slice
    rows: slice
    columns: slice
    offset: int
    """The position of the first query minus that of the first key. 0: queries and keys are the same
    tokens, and a token sees no later one. Otherwise all keys come before all queries."""
    documents: Documents | None = None
    """Those of the tokens, for the kernel that takes them."""

    def _taken(self, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]) -> list[Tensor]:
        rows = [tensor[self.samples, :, self.rows] for tensor in queries]
        return rows + [tensor[self.samples, :, self.columns] for tensor in keys]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule, backend: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """Compute output and log-sum-exp of the rows, as ``attention.attend``."""
        taken = self._taken((query,), (key, value))
        if self.documents is not None:
            flat = (_flat(tensor) for tensor in taken)
            out, lse, *_ = _aten._flash_attention_forward(
                *(*flat, *_kernel_arguments(self.documents), False),
                **_kernel_options(self.documents, rule),
            )
            lse = lse.view(lse.shape[0], len(query), -1).transpose(0, 1)
            return _unflat(out, taken[0]), lse
        if rule.window:
            return sliding.attend(*taken, rule=rule, offset=self.offset, backend=backend)
        return attention.attend(*taken, causal=not self.offset, backend=backend, rule=rule)

    def attend_backward(
        self,
        queries: tuple[Tensor, Tensor, Tensor],
        lse: Tensor,
        key: Tensor,
        value: Tensor,
        rule: ScoreRule,
        backend: AttentionBackend,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of the rows and of the columns, as ``attention.attend_backward``.
        ``queries`` are the gradient, the queries and the merged output; ``lse`` is merged too."""
        grad, query, out, *keys = self._taken(queries, (key, value))
        rows_lse = lse[self.samples, :, self.rows]
        if self.documents is not None:
            unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
            flat = (_flat(tensor) for tensor in (grad, query, *keys, out))
            grads = _aten._flash_attention_backward(
                *(*flat, rows_lse.transpose(0, 1).flatten(1).contiguous()),
                *(*_kernel_arguments(self.documents), unused, unused[0]),
                **_kernel_options(self.documents, rule),
            )
            likes = (query, *keys)
            dq, dk, dv = (_unflat(one, like) for one, like in zip(grads, likes, strict=True))
            return dq, dk, dv
        arguments = (grad, query, *keys, out, rows_lse)
        if rule.window:
            offset = self.offset
            return sliding.attend_backward(*arguments, rule=rule, offset=offset, backend=backend)
        return attention.attend_backward(
            *arguments, causal=not self.offset, backend=backend, rule=rule
        )


def _flat(heads: Tensor) -> Tensor:
    """View or copy [b, n, s, d] as [b * s, n, d]."""
    return heads.transpose(1, 2).flatten(0, 1)


def _unflat(tokens: Tensor, like: Tensor) -> Tensor:
    """View [b * s, n, d] as [b, n, s, d]."""
    return tokens.view(like.transpose(1, 2).shape).transpose(1, 2)


@dataclass(frozen=True)
class SplitDocuments:
    """The documents of sequences that are spread over ranks, as one of these needs them."""

    whole: Documents
    chunk: int
    """Tokens of a chunk."""
    length: int
    """Tokens of a sequence."""
    own: Mapping[int, Documents]
    """The documents of each chunk of this rank, of all sequences."""

    @staticmethod
    def of(documents: Documents, length: int, cp: Axis) -> SplitDocuments:
        """Cut documents of sequences of ``length`` tokens. Raises ConfigError if the chunks are not
        equal."""
        size = chunk_length(length, cp.size)
        own = {
            chunk: documents.within(length, (chunk * size, (chunk + 1) * size))
            for chunk in zigzag_chunks(cp.rank, cp.size)
        }
        return SplitDocuments(documents, size, length, own)

    def square(self, chunk: int, row: int, column: int, *, at_once: bool) -> Iterator[Part]:
        """Yield the parts of a chunk with itself; its tokens are the rows from ``row`` on and the
        columns from ``column`` on."""
        documents = self.own[chunk]
        if at_once:
            columns = slice(column, column + self.chunk)
            yield Part(EVERY, slice(row, row + self.chunk), columns, 0, documents)
            return
        for start, stop in pairwise(documents.bounds.tolist()):
            sample, first = divmod(start, self.chunk)
            span = first, first + stop - start
            yield Part(_one(sample), _moved(span, row), _moved(span, column), 0)

    def rectangles(
        self, queries: Span, keys: Span, row: int, column: int, window: int = 0
    ) -> Iterator[Part]:
        """Yield the parts of tokens with earlier ones, as ``seen_before``; the first query is at
        ``row``, and the first key at ``column``."""
        for sample in range(int(self.whole.bounds[-1]) // self.length):
            start = sample * self.length
            for rows, columns in seen_before(self.whole.bounds, start, queries, keys, window):
                yield Part(
                    _one(sample),
                    _moved(rows, row - queries[0]),
                    _moved(columns, column - keys[0]),
                    rows[0] - columns[0],
                )


def _one(sample: int) -> slice:
    return slice(sample, sample + 1)


def _moved(span: Span, by: int) -> slice:
    return slice(span[0] + by, span[1] + by)
