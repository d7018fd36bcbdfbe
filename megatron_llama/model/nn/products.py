"""Attention of batched matrix products, some queries at a time, for cases without a kernel: capped
scores everywhere, and fp64 on an accelerator.

Scores are at least fp32, and no more than ``SCORES`` of them exist at once. The pieces merge with
those of ``attention.py``, whose contract these functions have.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_llama.engine.tensors import at_least_fp32

SCORES = 2**24
"""About so many attention scores exist at once."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    softcap: float,
    causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute ``attention.attend``: query [b, n, s_q, d], key and value [b, n_kv, s_k, d]."""
    out = torch.empty_like(query)
    wide = at_least_fp32(query.dtype)
    lse = query.new_empty(query.shape[:3], dtype=wide)
    keys, values = (tensor.to(wide) for tensor in (key, value))
    for rows in _rows(query, key):
        attn_scores = _capped(_products(query[:, :, rows], keys, scale), softcap)
        attn_scores = _masked(attn_scores, rows, causal, mask)
        row_lse = attn_scores.logsumexp(-1)
        probabilities = attn_scores.sub_(row_lse.unsqueeze(-1)).exp_()
        out[:, :, rows] = _heads(probabilities @ values.unsqueeze(2)).to(out.dtype)
        lse[:, :, rows] = row_lse.flatten(1, 2)
    return out, lse


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float,
    causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``attention.attend_backward``."""
    wide = at_least_fp32(query.dtype)
    keys, values = (tensor.to(wide) for tensor in (key, value))
    query_grad = torch.empty_like(query)
    key_grad, value_grad = torch.zeros_like(keys), torch.zeros_like(values)
    for rows in _rows(query, key):
        capped = _capped(_products(query[:, :, rows], keys, scale), softcap)
        # d/dx of c * tanh(x / c), from its value.
        slope = 1.0 - (capped / softcap).square() if softcap else None
        masked = _masked(capped, rows, causal, mask)
        row_lse = _grouped(lse[:, :, rows].unsqueeze(-1), key)
        probabilities = masked.sub_(row_lse).exp_()
        upstream = _grouped(grad[:, :, rows].to(wide), key)
        delta = (upstream * _grouped(out[:, :, rows].to(wide), key)).sum(-1, keepdim=True)
        score_grad = (upstream @ values.unsqueeze(2).mT).sub_(delta).mul_(probabilities)
        if slope is not None:
            score_grad.mul_(slope)
        score_grad.mul_(scale)
        queries = _grouped(query[:, :, rows].to(wide), key)
        query_grad[:, :, rows] = _heads(score_grad @ keys.unsqueeze(2)).to(query.dtype)
        key_grad += (score_grad.mT @ queries).sum(2)
        value_grad += (probabilities.mT @ upstream).sum(2)
    return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype)


def _rows(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Yield the queries of one step after the other."""
    batch, heads, length = query.shape[:3]
    step = max(1, SCORES // (batch * heads * key.shape[2]))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _grouped(heads: Tensor, key: Tensor) -> Tensor:
    """Group [b, n, s, d] by key/value head: [b, n_kv, n / n_kv, s, d]."""
    return heads.reshape(heads.shape[0], key.shape[1], -1, *heads.shape[2:])


def _heads(grouped: Tensor) -> Tensor:
    return grouped.flatten(1, 2)


def _products(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return scores [b, n_kv, n / n_kv, s_q, s_k]."""
    return (_grouped(query.to(keys.dtype), keys) @ keys.unsqueeze(2).mT).mul_(scale)


def _capped(attn_scores: Tensor, softcap: float) -> Tensor:
    return attn_scores.div_(softcap).tanh_().mul_(softcap) if softcap else attn_scores


def _masked(attn_scores: Tensor, rows: slice, causal: bool, mask: Tensor | None) -> Tensor:
    """Mask the keys that a query may not see, in place."""
    # Not minus infinity: a query that sees nothing has finite output and a log-sum-exp that
    # ``merge`` drops, as with the kernels.
    lowest = torch.finfo(attn_scores.dtype).min / 2
    if causal:
        shape = attn_scores.shape[-2:]
        future = attn_scores.new_ones(shape, dtype=torch.bool).triu_(rows.start + 1)
        attn_scores.masked_fill_(future, lowest)
    if mask is not None:
        attn_scores.masked_fill_(~mask[:, :, rows].unsqueeze(2), lowest)
    return attn_scores
