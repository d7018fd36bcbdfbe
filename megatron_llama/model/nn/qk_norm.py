"""RMSNorm of queries and keys before they are rotated: of each head by itself (Henry et al., 2020;
Qwen 3, Gemma 3), or of all heads together, which tensor-parallel ranks divide among them (OLMo 2).

Both replace queries and keys where the projection has written them, which is where attention reads
them. Beside them, backward needs a copy of queries and keys, and their scales. Values exist once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_llama.engine.comm import collectives
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.param_handle import deliver, wait_unsharded
from megatron_llama.engine.tensors import at_least_fp32
from megatron_llama.model.nn.functional import heads_of
from megatron_llama.model.nn.linear import empty_weight
from megatron_llama.model.nn.ops import Ops, scaled


class NormWeight(nn.Module):
    """The weight of a norm that a function of this module applies."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = empty_weight(size)


class _HeadNorm(torch.autograd.Function):
    """The norm of each head of queries and keys, in place."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        sizes: tuple[int, int],
        eps: float,
        one_plus: bool,
        ops: Ops,
    ) -> Tensor:
        query, key = sizes
        ctx.unsharded = [wait_unsharded(weight) for weight in (query_weight, key_weight)]
        ctx.query = query
        ctx.one_plus = one_plus
        ctx.ops = ops
        heads = heads_of(qkv, len(query_weight))[:, :, : query + key]
        kept, scale = ops.norm_heads(heads, query_weight, key_weight, eps, one_plus, query)
        ctx.save_for_backward(kept, scale, query_weight, key_weight)
        ctx.mark_dirty(qkv)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, scale, query_weight, key_weight = ctx.saved_tensors
        for read in ctx.unsharded:
            read.check()
        qkv_grad, *sums = ctx.ops.norm_heads_backward(
            heads_of(grad, kept.shape[-1]),
            kept,
            query_weight,
            key_weight,
            scale,
            ctx.one_plus,
            ctx.query,
        )
        weight_grads = [
            deliver(read.handle, weight_grad, query_weight.dtype) if needed else None
            for read, weight_grad, needed in zip(
                ctx.unsharded, sums, ctx.needs_input_grad[1:3], strict=True
            )
        ]
        return qkv_grad.flatten(2), *weight_grads, None, None, None, None


class _ProjectionNorm(torch.autograd.Function):
    """The norm of all queries of a token together, and of all its keys, in place. The sums of
    squares, and in backward the components along the norms, are summed over tp."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        eps: float,
        one_plus: bool,
        tp: Axis,
    ) -> Tensor:
        weights = (query_weight, key_weight)
        ctx.unsharded = [wait_unsharded(weight) for weight in weights]
        ctx.one_plus = one_plus
        ctx.tp = tp
        projections = _queries_and_keys(qkv, weights)
        dtype = at_least_fp32(qkv.dtype)
        squares = _means([projection.to(dtype).square() for projection in projections], tp)
        scales = squares.add_(eps).rsqrt_()
        kept = qkv[..., : len(query_weight) + len(key_weight)].clone()
        ctx.save_for_backward(kept, scales, *weights)
        for projection, weight, scale in zip(
            projections, weights, scales.split_with_sizes((1, 1), -1), strict=True
        ):
            projection.copy_(scaled(projection, weight, scale, one_plus))
        ctx.mark_dirty(qkv)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, scales, *weights = ctx.saved_tensors
        for read in ctx.unsharded:
            read.check()
        dtype = scales.dtype
        upstream = [projection.to(dtype) for projection in _queries_and_keys(grad, weights)]
        own_scales = scales.split_with_sizes((1, 1), -1)
        normed = [
            projection * scale
            for projection, scale in zip(_queries_and_keys(kept, weights), own_scales, strict=True)
        ]
        factors = [weight.to(dtype) + float(ctx.one_plus) for weight in weights]
        along = _means(
            [
                up * factor * norm
                for up, factor, norm in zip(upstream, factors, normed, strict=True)
            ],
            ctx.tp,
        )
        grads = [
            (up * factor - norm * mean) * scale
            for up, factor, norm, mean, scale in zip(
                upstream,
                factors,
                normed,
                along.split_with_sizes((1, 1), -1),
                own_scales,
                strict=True,
            )
        ]
        weight_grads = [
            deliver(read.handle, (up * norm).sum((0, 1)), weight.dtype) if needed else None
            for read, up, norm, weight, needed in zip(
                ctx.unsharded, upstream, normed, weights, ctx.needs_input_grad[1:3], strict=True
            )
        ]
        value_grad = grad[..., kept.shape[-1] :]
        qkv_grad = torch.cat([tensor.to(grad.dtype) for tensor in (*grads, value_grad)], dim=-1)
        return qkv_grad, *weight_grads, None, None, None


def _queries_and_keys(qkv: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """View the queries and the keys of [s, b, queries + keys + others]."""
    query, key = (len(weight) for weight in weights)
    return [qkv[..., :query], qkv[..., query : query + key]]


def _means(parts: Sequence[Tensor], tp: Axis) -> Tensor:
    """Return the mean over the last dim of each part and over tp, [s, b, parts].

    With copies of key heads this is right in both directions. Forward counts each head as often as
    it is there, and divides by all copies. In backward each copy has the gradient through its own
    queries alone, so the sum is that of all heads; it is divided by all copies because the
    gradients of the copies, of which each takes off this component, are summed."""
    sums = [tensor.sum(-1, keepdim=True).div_(tensor.shape[-1] * tp.size) for tensor in parts]
    means = torch.cat(sums, dim=-1)
    collectives.all_reduce(means, tp, async_op=False).wait()
    return means


def norm_of_heads(
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    *,
    query: int,
    key: int,
    eps: float,
    one_plus: bool,
    ops: Ops,
) -> Tensor:
    """Normalize each of the first ``query`` heads of qkv [s, b, (query + 2 key) * d] with one
    weight [d], and each of the next ``key`` heads with another one.

    ``qkv`` is overwritten, and returned."""
    out = _HeadNorm.apply(  # type: ignore[no-untyped-call]
        qkv, query_weight, key_weight, (query, key), eps, one_plus, ops
    )
    return cast(Tensor, out)


def norm_of_projections(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, *, eps: float, one_plus: bool, tp: Axis
) -> Tensor:
    """Normalize the queries of all tp ranks together, and the keys, in qkv [s, b, (n + 2 n_kv) *
    d], with this rank's part of their weights, [n * d] and [n_kv * d]. Collective.

    ``qkv`` is overwritten, and returned."""
    out = _ProjectionNorm.apply(  # type: ignore[no-untyped-call]
        qkv, query_weight, key_weight, eps, one_plus, tp
    )
    return cast(Tensor, out)
