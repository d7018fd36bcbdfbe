"""Attention, whole and in pieces: the same kernels, once with autograd and once with the log-sum-exp that lets pieces be merged.

A piece is a set of queries against a set of keys. Pieces of the same queries merge exactly (Rabe and Staats, 2021; Dao et al., 2022),
and a piece's backward is exact when it is given the merged output and log-sum-exp, because a probability is exp(score - lse).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.device import is_host

_aten = torch.ops.aten
_BIAS_ALIGNMENT = 16
"""Elements to which the rows of a bias must be aligned for the accelerator's kernel."""
_LSE_ALIGNMENT = 32
"""Queries to which that kernel pads its log-sum-exp."""


def causal_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """The whole of causal attention. query [s, b, n, d], key and value [s, b, n_kv, d] -> [s, b, n * d].

    mask: bool [b, 1, s, s], True where a position may attend (causality included); None is plain causal.
    """
    q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])
    return out.permute(2, 0, 1, 3).flatten(2)


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One piece. query [b, n, s_q, d], key and value [b, n_kv, s_k, d] -> output as query, log-sum-exp [b, n, s_q].

    The log-sum-exp is fp32 (fp64 for fp64). ``causal`` needs s_q = s_k; ``mask`` is bool [b, 1, s_q, s_k], True where a query may attend;
    both hold at once. A query that may attend to nothing gets some finite output and a log-sum-exp so low that ``merge`` drops it.
    No autograd: see ``attend_backward``.
    """
    bias = _bias(mask, query)
    if is_host(query.device):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=bias)
    elif _is_flash(query, bias):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    else:
        k, v = _expanded(key, query), _expanded(value, query)
        out, padded, *_ = _aten._scaled_dot_product_efficient_attention(query, k, v, bias, True, 0.0, causal)
        lse = padded[..., : query.shape[2]]
    return out, lse


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one piece's query, key and value, in their shapes and dtypes. ``out`` and ``lse`` are the merged ones."""
    bias, lse = _bias(mask, query), lse.contiguous()
    q, k, v = query, key, value
    if is_host(query.device):
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias)
    elif _is_flash(query, bias):
        lengths, unused = (q.shape[2], k.shape[2]), torch.zeros(2, dtype=torch.uint64, device=q.device)
        state = (None, None, *lengths, 0.0, causal, unused, unused[0])
        grads = _aten._scaled_dot_product_flash_attention_backward(grad, q, k, v, out, lse, *state)
    else:
        k, v = _expanded(key, query), _expanded(value, query)
        lse = F.pad(lse, (0, -lse.shape[2] % _LSE_ALIGNMENT), value=float("inf"))
        unused, wanted = torch.zeros((), dtype=torch.int64, device=q.device), (True, True, True, False)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, bias, out, lse, unused, unused, 0.0, wanted, causal
        )
        grads = dq, _summed(dk, key), _summed(dv, value)
    dq, dk, dv = grads
    return dq, dk, dv


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a piece to what other pieces of the same queries gave, in place. out and part [b, n, s_q, d], lse [b, n, s_q].

    Start from zeros with a log-sum-exp of minus infinity. ``out`` is at least fp32: it is rounded once, after the last piece.
    """
    share = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    out.lerp_(part.to(out.dtype), share)
    torch.logaddexp(lse, part_lse, out=lse)


def _is_flash(query: Tensor, bias: Tensor | None) -> bool:
    """Whether the accelerator's fastest kernel applies, which also takes grouped heads: no bias, 16 bits."""
    return bias is None and query.element_size() == 2


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """What the kernels add to the scores, [b, n, s_q, s_k]. Not minus infinity: a row of nothing else has no softmax, and kernels
    disagree on what they return for it. Half of the lowest number leaves room for the score and for a change of base."""
    if mask is None:
        return None
    padded = -(-mask.shape[-1] // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
    bias = query.new_zeros(*mask.shape[:-1], padded)[..., : mask.shape[-1]]
    bias.masked_fill_(~mask, torch.finfo(query.dtype).min / 2)
    return bias.expand(-1, query.shape[1], -1, -1)


def _expanded(heads: Tensor, query: Tensor) -> Tensor:
    """One key or value head per query head."""
    groups = query.shape[1] // heads.shape[1]
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)


def _summed(grad: Tensor, heads: Tensor) -> Tensor:
    """The transpose of ``_expanded``."""
    return grad.reshape(heads.shape[0], heads.shape[1], -1, *heads.shape[2:]).sum(2)
