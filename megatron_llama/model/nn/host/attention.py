"""Rotary embedding and causal attention on a CPU, as one autograd function of the projection [s, b,
(n + 2 n_kv) * d] itself: views and their gradients cost as much as the work where a model is small.

In bf16, on a processor that multiplies it, attention is made of batched matrix products: the
attention scores of some queries at a time, which a cache holds, and again in backward. It takes a
third of the time of torch's flash attention for CPUs, whose products are slow in 16 bits. Scores
and probabilities are rounded to bf16, as in HuggingFace's eager attention; sums are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_llama.engine.comm import device as devices
from megatron_llama.model.nn import sliding
from megatron_llama.model.nn.attention import PLAIN_SCORES, ScoreRule, attend, attend_backward
from megatron_llama.model.nn.functional import heads_of
from megatron_llama.model.nn.ops import Ops

QUERIES = 256
"""Queries whose scores are computed at once, against all keys up to the last of them: only half a
square of this size is wasted."""
MIN_TOKENS = 128
"""Sequence length from which on products are faster than torch's kernel."""
SCORES = 2**22
"""About so many attention scores are computed at once."""


class _RotatedAttention(torch.autograd.Function):
    """Rotates in place, and keeps queries, keys and values for backward where they are, in the
    projection's output."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, int],
        ops: Ops,
        rule: ScoreRule,
    ) -> Tensor:
        ctx.heads = heads
        ctx.ops = ops
        ctx.rule = rule
        qkv = heads_of(qkv.detach(), qkv.shape[-1] // (heads[0] + 2 * heads[1]))
        ops.rotate(qkv.narrow(2, 0, sum(heads)), cos, sin)
        query, key, value = _split_heads(qkv, heads)
        ctx.uses_products = _uses_products(query) and not rule.softcap
        if ctx.uses_products:
            out = _attend(query, key, value, rule)
            ctx.save_for_backward(qkv, cos, sin)
        elif rule.limits(query.shape[2]):
            out, lse = sliding.attend(query, key, value, rule=rule)
            ctx.save_for_backward(qkv, cos, sin, out, lse)
        else:
            out, lse = attend(query, key, value, causal=True, rule=rule)
            ctx.save_for_backward(qkv, cos, sin, out, lse)
        return out.permute(2, 0, 1, 3).flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, *rest = ctx.saved_tensors
        query, key, value = _split_heads(qkv, ctx.heads)
        out_grad = heads_of(grad, qkv.shape[3]).permute(1, 2, 0, 3)
        rule = ctx.rule
        if ctx.uses_products:
            grads = _backward(out_grad, query, key, value, rule)
        elif rule.limits(query.shape[2]):
            grads = sliding.attend_backward(out_grad, query, key, value, *rest, rule=rule)
        else:
            grads = attend_backward(out_grad, query, key, value, *rest, causal=True, rule=rule)
        qkv_grad = ctx.ops.rotate_back(*(tensor.permute(2, 0, 1, 3) for tensor in grads), cos, sin)
        return qkv_grad.flatten(2), None, None, None, None, None


def _split_heads(qkv: Tensor, heads: tuple[int, int]) -> tuple[Tensor, ...]:
    """View [s, b, n + 2 n_kv, d] as queries, keys and values [b, n or n_kv, s, d]."""
    return qkv.permute(1, 2, 0, 3).split_with_sizes((*heads, heads[1]), 1)


def rotated_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    query: int,
    key: int,
    ops: Ops,
    rule: ScoreRule = PLAIN_SCORES,
) -> Tensor:
    """Compute causal attention with rotary embedding from qkv [s, b, (query + 2 key) * d]: [s, b,
    query * d]. For a CPU.

    cos and sin are [s, 1 or b, 1, r / 2], of the first r dims of a head. ``qkv`` is overwritten and
    must have no other reader."""
    out: Tensor = _RotatedAttention.apply(  # type: ignore[no-untyped-call]
        qkv, cos, sin, (query, key), ops, rule
    )
    return out


def _uses_products(query: Tensor) -> bool:
    suits = (
        query.dtype is torch.bfloat16
        and query.shape[2] >= MIN_TOKENS
        and not devices.is_fake(query)
    )
    return suits and devices.multiplies_bf16()


@dataclass(frozen=True)
class _Piece:
    """The queries and keys whose scores are computed at once."""

    heads: slice
    """Key/value heads of all samples."""
    queries: slice
    keys: slice
    """The keys that the queries see, up to the last query."""


def _pieces(query: Tensor, key: Tensor, window: int) -> Iterator[_Piece]:
    """Yield pieces of about SCORES attention scores."""
    groups = query.shape[1] // key.shape[1]
    length = query.shape[2]
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        first = max(0, start - window + 1) if window else 0
        step = max(1, SCORES // (groups * (stop - start) * (stop - first)))
        for head in range(0, key.shape[0] * key.shape[1], step):
            yield _Piece(slice(head, head + step), slice(start, stop), slice(first, stop))


def _probabilities(queries: Tensor, keys: Tensor, piece: _Piece, window: int) -> Tensor:
    """Return the causal attention probabilities, bf16 [g, m, t, s], of scaled queries [g, m, t, d],
    the last t positions of keys [g, s, d]; m query heads share a key head."""
    attn_scores = torch.bmm(queries.flatten(1, 2), keys.transpose(1, 2)).view(
        *queries.shape[:3], -1
    )
    length = queries.shape[2]
    hidden = torch.full(
        (length, length), float("-inf"), dtype=attn_scores.dtype, device=attn_scores.device
    )
    # Only the last square has keys that come after a query.
    attn_scores[..., -length:] += hidden.triu(1)
    if window:
        # Only the first square has keys that are out of the window: column c of row r is key
        # keys.start + c against position queries.start + r.
        last_hidden = piece.queries.start - window - piece.keys.start
        first_keys = attn_scores[..., :length]
        rows, columns = torch.tril_indices(length, first_keys.shape[-1], last_hidden)
        first_keys[..., rows, columns] = float("-inf")
    probabilities: Tensor = torch.softmax(attn_scores, -1)
    return probabilities


def _grouped(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Group queries [b, n, s, d] by key/value head, [b * n_kv, n / n_kv, s, d], and scale them."""
    scaled: Tensor = query * scale
    return scaled.reshape(-1, query.shape[1] // key.shape[1], *query.shape[2:])


def _attend(query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
    """Compute the output [b, n, s, d] of queries of this shape, and n_kv heads of keys and
    values."""
    scale = rule.scale_of(query.shape[3])
    queries, keys, values = (
        _grouped(query, key, scale),
        *(tensor.flatten(0, 1) for tensor in (key, value)),
    )
    out = torch.empty_like(queries)
    for piece in _pieces(query, key, rule.window):
        q = queries[piece.heads, :, piece.queries]
        seen = (piece.heads, piece.keys)
        probabilities = _probabilities(q, keys[seen], piece, rule.window)
        out[piece.heads, :, piece.queries] = torch.bmm(
            probabilities.flatten(1, 2), values[seen]
        ).view_as(q)
    return out.view(query.shape)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule
) -> tuple[Tensor, Tensor, Tensor]:
    scale = rule.scale_of(query.shape[3])
    queries, keys, values = (
        _grouped(query, key, scale),
        *(tensor.flatten(0, 1) for tensor in (key, value)),
    )
    upstream = grad.reshape(queries.shape)
    query_grad = torch.empty_like(queries)
    # Summed over the pieces of queries, so in fp32.
    key_grad, value_grad = (torch.zeros(keys.shape, dtype=torch.float32) for _ in range(2))
    for piece in _pieces(query, key, rule.window):
        q = queries[piece.heads, :, piece.queries]
        seen = (piece.heads, piece.keys)
        probabilities = _probabilities(q, keys[seen], piece, rule.window)
        out_grad = upstream[piece.heads, :, piece.queries].flatten(1, 2)
        flat = probabilities.flatten(1, 2)
        value_grad[seen] += torch.bmm(flat.transpose(1, 2), out_grad)
        score_grad = torch.ops.aten._softmax_backward_data(
            torch.bmm(out_grad, values[seen].transpose(1, 2)), flat, -1, flat.dtype
        )
        query_grad[piece.heads, :, piece.queries] = torch.bmm(score_grad, keys[seen]).view_as(q)
        key_grad[seen] += torch.bmm(score_grad.transpose(1, 2), q.flatten(1, 2))
    query_grad *= scale
    return (
        query_grad.view(query.shape),
        key_grad.to(key.dtype).view(key.shape),
        value_grad.to(key.dtype).view(key.shape),
    )
