"""Causal attention with a sliding window or with capped scores.

An accelerator's flash attention knows windows. All other cases go block by block: some queries
against the keys that their windows reach, so the cost follows the window, and a mask is never
larger than a block. Blocks are computed by the kernels of ``attention.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_llama.engine.comm.device import is_host
from megatron_llama.engine.tensors import at_least_fp32
from megatron_llama.model.nn import attention
from megatron_llama.model.nn.attention import AttentionBackend, ScoreRule, suits_flash, window_sizes

BLOCK = 256
"""Queries of a block. With a window of w positions they see w + BLOCK - 1 keys, of which each sees
w."""

_aten = torch.ops.aten


def sliding_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rule: ScoreRule,
    backend: AttentionBackend = "auto",
) -> Tensor:
    """Compute causal attention of query [s, b, n, d], key and value [s, b, n_kv, d]: [s, b, n *
    d]."""
    length = query.shape[0]
    if rule.is_plain(length):
        return attention.causal_attention(query, key, value, None, backend, rule.scale)
    if is_host(query.device) or not suits_flash(query) or rule.softcap:
        out: Tensor = _SlidingAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, rule, backend
        )
        return out.flatten(2)
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    left = rule.window - 1 if rule.limits(length) else None
    out, *_ = _aten._flash_attention_forward(
        *(q, k, v, None, None, length, length, 0.0, True, False),
        scale=rule.scale,
        **window_sizes(left),
    )
    return out.transpose(0, 1).flatten(2)


def continued_attention(
    query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule, starts: Tensor, shortest: int
) -> Tensor:
    """Compute attention of new tokens, query [s, b, n, d], to themselves and those before them: the
    result of ``KVCache.slide``, [r + s, b, n_kv, d]. Returns [s, b, n * d]; without gradients.

    ``starts``, int64 [b], are the positions of the first new tokens; ``shortest`` is the lowest of
    them. In shorter sequences the first of the r slots before the new tokens are empty."""
    kept = key.shape[0] - query.shape[0]
    is_token = None
    if shortest < kept:
        is_token = torch.arange(key.shape[0], device=query.device) >= (kept - starts).unsqueeze(-1)
    heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    out, _ = attend(*heads, rule=rule, offset=kept, is_token=is_token)
    return out.permute(2, 0, 1, 3).flatten(2)


class _SlidingAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the output and its log-sum-exp for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: ScoreRule,
        backend: AttentionBackend,
    ) -> Tensor:
        ctx.arguments = {"rule": rule, "backend": backend}
        heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        out, lse = attend(*heads, **ctx.arguments)
        ctx.save_for_backward(*heads, out, lse)
        return out.permute(2, 0, 1, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = attend_backward(grad.permute(1, 2, 0, 3), *ctx.saved_tensors, **ctx.arguments)
        return *(tensor.permute(2, 0, 1, 3) for tensor in grads), None, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rule: ScoreRule,
    offset: int = 0,
    is_token: Tensor | None = None,
    backend: AttentionBackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute one piece as ``attention.attend`` does, with causality and the window of ``rule``.

    ``offset`` is the position of the first query minus that of the first key. Either the last query
    has the position of the last key, or all keys come before all queries. Every query sees a key.
    ``is_token``, bool [b, s_k], is False for keys that no query sees."""
    if is_token is None and _runs_flash(query, key, offset, rule):
        out, lse, *_ = _aten._flash_attention_forward(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            *_flash_arguments(query, key, offset),
            False,
            scale=rule.scale,
            **_flash_window(query, key, offset, rule),
        )
        return out.transpose(1, 2), lse
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=at_least_fp32(query.dtype))
    for block in _blocks(query, key, offset, rule, is_token):
        rows = block.rows
        columns = block.columns
        out[:, :, rows], lse[:, :, rows] = attention.attend(
            query[:, :, rows],
            key[:, :, columns],
            value[:, :, columns],
            mask=block.mask,
            backend=backend,
            rule=rule,
        )
    return out, lse


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    rule: ScoreRule,
    offset: int = 0,
    backend: AttentionBackend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of one piece's query, key and value, in their shapes and dtypes, from
    the merged ``out`` and ``lse``."""
    if _runs_flash(query, key, offset, rule):
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        *lengths, dropout, causal = _flash_arguments(query, key, offset)
        grads = _aten._flash_attention_backward(
            *(tensor.transpose(1, 2) for tensor in (grad, query, key, value, out)),
            *(lse.contiguous(), *lengths, dropout, causal, unused, unused[0]),
            scale=rule.scale,
            **_flash_window(query, key, offset, rule),
        )
        dq, dk, dv = (tensor.transpose(1, 2) for tensor in grads)
        return dq, dk, dv
    query_grad = torch.empty_like(query)
    # Summed over blocks of queries, so at least in fp32.
    wide = at_least_fp32(query.dtype)
    key_grad, value_grad = (torch.zeros_like(tensor, dtype=wide) for tensor in (key, value))
    for block in _blocks(query, key, offset, rule):
        rows = block.rows
        columns = block.columns
        block_grad, block_query, block_out = (tensor[:, :, rows] for tensor in (grad, query, out))
        dq, dk, dv = attention.attend_backward(
            block_grad,
            block_query,
            key[:, :, columns],
            value[:, :, columns],
            block_out,
            lse[:, :, rows],
            mask=block.mask,
            backend=backend,
            rule=rule,
        )
        query_grad[:, :, rows] = dq
        key_grad[:, :, columns] += dk
        value_grad[:, :, columns] += dv
    return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype)


def sliding_warnings(
    device: torch.device, dtype: torch.dtype, head_dim: int, rules: Iterable[ScoreRule]
) -> list[str]:
    """Return warnings about layers whose attention goes block by block on an accelerator."""
    if is_host(device):
        return []
    warnings = []
    heads = torch.empty(0, head_dim, dtype=dtype, device="meta")
    if any(rule.softcap for rule in rules):
        warnings.append(
            "attention with --attn-logit-softcapping has no kernel: it runs as products of "
            "matrices, several times slower"
        )
    elif any(rule.window for rule in rules) and not suits_flash(heads):
        warnings.append(
            f"flash attention takes no window with {dtype} and --head-dim {head_dim}: layers with "
            "--sliding-window run block by block, slower"
        )
    return warnings


def _runs_flash(query: Tensor, key: Tensor, offset: int, rule: ScoreRule) -> bool:
    """Whether one piece goes to flash attention as a whole, the same forward and backward."""
    if is_host(query.device) or not suits_flash(query) or rule.softcap:
        return False
    queries = query.shape[2]
    keys = key.shape[2]
    # Given only a limit to the past, flash attention uses the number of keys as the limit to the
    # future, counted from its own position of the query. With more queries than keys, the first
    # queries would miss the last keys.
    return offset + queries == keys or queries <= keys + 1 or not rule.limits(offset + queries)


def _flash_arguments(
    query: Tensor, key: Tensor, offset: int
) -> tuple[None, None, int, int, float, bool]:
    queries = query.shape[2]
    keys = key.shape[2]
    return None, None, queries, keys, 0.0, offset + queries == keys


def _flash_window(query: Tensor, key: Tensor, offset: int, rule: ScoreRule) -> dict[str, int]:
    if not rule.limits(offset + query.shape[2]):
        return {}
    # Flash attention assumes the last query at the position of the last key. If the query comes
    # later, its window reaches less far back from that key.
    later = offset + query.shape[2] - key.shape[2]
    left = rule.window - 1 - later
    assert left >= 0, "the last query sees no key"
    return {"window_size_left": left} if later else window_sizes(left)


@dataclass(frozen=True)
class _Block:
    """Some queries and the keys that they may see."""

    rows: slice
    columns: slice
    mask: Tensor | None
    """bool [b, 1, rows, columns], True where a query sees a key; None: each sees all."""


def _blocks(
    query: Tensor, key: Tensor, offset: int, rule: ScoreRule, is_token: Tensor | None = None
) -> Iterator[_Block]:
    queries = query.shape[2]
    keys = key.shape[2]
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        # From the first key in the first query's window to the last query's own key.
        first = max(0, offset + start - rule.window + 1) if rule.window else 0
        last = min(keys, offset + stop)
        rows = slice(start, stop)
        columns = slice(first, last)
        seen = None
        if is_token is not None:
            seen = is_token[:, None, None, columns].expand(-1, -1, stop - start, -1)
        hides_future = offset + start < last - 1
        hides_past = rule.window > 0 and offset + stop - 1 - rule.window >= first
        if hides_future or hides_past:
            # Column c is key first + c, and row r the query at offset + start + r.
            diagonal = offset + start - first
            near = query.new_ones((stop - start, last - first), dtype=torch.bool).tril_(diagonal)
            if rule.window:
                near.triu_(diagonal - rule.window + 1)
            seen = near.expand(query.shape[0], 1, -1, -1) if seen is None else seen & near
        yield _Block(rows, columns, seen)
