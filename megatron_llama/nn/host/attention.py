"""Rotation and causal attention on a host, of the projection [..., (n + 2 n_kv) d] itself: in one
autograd function, because views and their gradients cost as much as the work where a model is
small.

In bf16, on a processor that multiplies it, attention is made of batched matrix products: of the
scores of some queries at a time, which a cache holds, and again in backward. It takes a third of
the time of torch's flash attention for hosts, whose products are slow in 16 bits. Scores and
probabilities are rounded to bf16, as in HuggingFace's eager attention; sums are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_llama.distributed import device as devices
from megatron_llama.nn.attention import attend, attend_backward
from megatron_llama.nn.functional import heads_of
from megatron_llama.nn.ops import Ops

QUERIES = 256
"""Queries whose scores are computed at once. Later keys than theirs are left out; of what is
computed, half of a square is masked."""
SHORTEST = 128
"""Tokens from which on products are faster."""
SCORES = 2**22
"""Scores at once, more or less."""


class _RotatedAttention(torch.autograd.Function):
    """Rotates in place, and keeps queries, keys and values for backward as they lie in the
    projection's output."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], ops: Ops
    ) -> Tensor:
        ctx.heads = heads
        ctx.ops = ops
        whole = heads_of(qkv.detach(), 2 * cos.shape[-1])
        ops.rotate(whole.narrow(2, 0, sum(heads)), cos, sin)
        query, key, value = _apart(whole, heads)
        ctx.by_products = _by_products(query)
        if ctx.by_products:
            out = _attend(query, key, value)
            ctx.save_for_backward(whole, cos, sin)
        else:
            out, lse = attend(query, key, value, causal=True)
            ctx.save_for_backward(whole, cos, sin, out, lse)
        return out.permute(2, 0, 1, 3).flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        whole, cos, sin, *rest = ctx.saved_tensors
        query, key, value = _apart(whole, ctx.heads)
        above = heads_of(grad, whole.shape[3]).permute(1, 2, 0, 3)
        grads = (
            _backward(above, query, key, value)
            if ctx.by_products
            else attend_backward(above, query, key, value, *rest, causal=True)
        )
        found = ctx.ops.rotate_back(*(part.permute(2, 0, 1, 3) for part in grads), cos, sin)
        return found.flatten(2), None, None, None, None


def _apart(whole: Tensor, heads: tuple[int, int]) -> tuple[Tensor, ...]:
    """[s, b, n + 2 n_kv, d] as queries, keys and values [b, n or n_kv, s, d], views."""
    return whole.permute(1, 2, 0, 3).split_with_sizes((*heads, heads[1]), 1)


def rotated_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, query: int, key: int, ops: Ops
) -> Tensor:
    """Projections [s * b or s, b, (query + 2 key) * d], which are overwritten, to the output [s * b
    or s, b, query * d] of plain causal attention with rotary positions; cos and sin [s, 1 or b, 1,
    d / 2]. The projection must have no other reader. On a host."""
    return _RotatedAttention.apply(qkv, cos, sin, (query, key), ops)  # type: ignore[no-any-return, no-untyped-call]


def _by_products(query: Tensor) -> bool:
    suits = (
        query.dtype is torch.bfloat16 and query.shape[2] >= SHORTEST and not devices.is_fake(query)
    )
    return suits and devices.multiplies_bf16()


def _pieces(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice, int]]:
    """(key/value heads of all samples, queries, keys seen) so that every piece has about SCORES."""
    groups = query.shape[1] // key.shape[1]
    length = query.shape[2]
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        step = max(1, SCORES // (groups * (stop - start) * stop))
        for first in range(0, key.shape[0] * key.shape[1], step):
            yield slice(first, first + step), slice(start, stop), stop


def _probabilities(queries: Tensor, keys: Tensor) -> Tensor:
    """Of scaled queries [g, t, d], the last of those of keys [g, s, d]: bf16 [g, t, s], causal.
    With several queries of a group beside each other, [g, m * t, d] is [g, m, t, d]."""
    scores = torch.bmm(queries.flatten(1, 2), keys.transpose(1, 2)).view(*queries.shape[:3], -1)
    length = queries.shape[2]
    future = torch.full(
        (length, length), float("-inf"), dtype=scores.dtype, device=scores.device
    ).triu_(1)
    scores[..., -length:] += future
    shares: Tensor = torch.softmax(scores, -1)
    return shares


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """Queries [b, n, s, d] by key/value head, [b * n_kv, n / n_kv, s, d], scaled."""
    scaled: Tensor = query * float(query.shape[-1] ** -0.5)
    return scaled.reshape(-1, query.shape[1] // key.shape[1], *query.shape[2:])


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[b, n, s, d], and n_kv heads of keys and values, to the output, as queries."""
    queries, keys, values = _grouped(query, key), *(part.flatten(0, 1) for part in (key, value))
    out = torch.empty_like(queries)
    for heads, part, seen in _pieces(query, key):
        shares = _probabilities(queries[heads, :, part], keys[heads, :seen])
        out[heads, :, part] = torch.bmm(shares.flatten(1, 2), values[heads, :seen]).view_as(
            out[heads, :, part]
        )
    return out.view(query.shape)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values = _grouped(query, key), *(part.flatten(0, 1) for part in (key, value))
    upstream = grad.reshape(queries.shape)
    query_grad = torch.empty_like(queries)
    # Sums over the pieces of queries.
    key_grad, value_grad = (torch.zeros(keys.shape, dtype=torch.float32) for _ in range(2))
    for heads, part, seen in _pieces(query, key):
        shares = _probabilities(queries[heads, :, part], keys[heads, :seen])
        above = upstream[heads, :, part].flatten(1, 2)
        flat = shares.flatten(1, 2)
        value_grad[heads, :seen] += torch.bmm(flat.transpose(1, 2), above)
        score_grad = torch.ops.aten._softmax_backward_data(
            torch.bmm(above, values[heads, :seen].transpose(1, 2)), flat, -1, flat.dtype
        )
        query_grad[heads, :, part] = torch.bmm(score_grad, keys[heads, :seen]).view_as(
            query_grad[heads, :, part]
        )
        key_grad[heads, :seen] += torch.bmm(
            score_grad.transpose(1, 2), queries[heads, :, part].flatten(1, 2)
        )
    query_grad *= float(query.shape[-1] ** -0.5)
    return (
        query_grad.view(query.shape),
        key_grad.to(key.dtype).view(key.shape),
        value_grad.to(key.dtype).view(key.shape),
    )
