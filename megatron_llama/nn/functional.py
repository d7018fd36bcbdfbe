"""RMSNorm, rotary embedding and SwiGLU, in the order of operations of HuggingFace's LLaMA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_llama.distributed.comm.function import Function
from megatron_llama.nn.ops import PLAIN, Ops, rows, scaled
from megatron_llama.nn.ops import at_least_fp32 as at_least_fp32
from megatron_llama.nn.param_handle import ParamHandle, UnshardedRead, accumulate, wait_unsharded
from megatron_llama.nn.recompute import Recomputable


class _AddNorm(Function):
    """The residual stream goes through, so that its two gradients meet here and are added in one
    pass; ``ends``: nobody reads it any more. Also returns what repeating the product needs: the
    scale, and the weight's arrival."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, ops: Ops, ends: bool
    ) -> tuple[Tensor, Tensor, Tensor, UnshardedRead]:
        ctx.unsharded = wait_unsharded(weight)
        ctx.ops = ops
        total, normed, scale = ops.add_norm(x, delta, weight, eps)
        # Not x itself: autograd would make that a view, which may not be changed in place.
        total = total.detach() if delta is None else total
        ctx.save_for_backward(total, weight, scale)
        ctx.mark_non_differentiable(scale, *(total,) * ends)
        ctx.set_materialize_grads(False)
        return total, normed, scale, ctx.unsharded

    @staticmethod
    def backward(
        ctx: Any, stream: Tensor | None, grad: Tensor | None, *_: None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        if grad is None:
            return stream, stream, None, None, None, None
        total, weight, scale = ctx.saved_tensors
        x_wanted, delta_wanted, weight_wanted, *_ = ctx.needs_input_grad
        x_grad = None
        if x_wanted or delta_wanted:
            ctx.unsharded.check()
            x_grad, weight_grad = ctx.ops.norm_backward(grad, stream, total, weight, scale)
        else:
            weight_grad = rows(grad.to(scale.dtype) * (total * scale)).sum(0)
        delivered = (
            _deliver(ctx.unsharded.handle, weight_grad, weight.dtype) if weight_wanted else None
        )
        return x_grad, x_grad if delta_wanted else None, delivered, None, None, None


def _scaled_again(unsharded: UnshardedRead, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    unsharded.check()
    return scaled(x, weight, scale)


def _deliver(handle: ParamHandle | None, grad: Tensor, dtype: torch.dtype) -> Tensor | None:
    if handle is None:
        return grad.to(dtype)
    view, beta = handle.buffer()
    accumulate(view, beta, grad)
    handle.done()
    return None


class _Added(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(other)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def added(x: Tensor, other: Tensor) -> Tensor:
    """x + other, in the place of x."""
    return _Added.apply(x, other)  # type: ignore[no-any-return]


class _Shaped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = x.shape
        # To autograd a view might not be added to in place.
        shaped: Tensor = torch.ops.aten._unsafe_view(x, shape)
        return shaped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.reshape(ctx.shape), None


def shaped(x: Tensor, *shape: int) -> Tensor:
    """x, contiguous, in another shape and the same memory: change neither."""
    return x if x.shape == shape else _Shaped.apply(x, shape)


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.widths = [part.shape[-1] for part in parts]
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.split(grad, ctx.widths, -1)


def joined(*parts: Tensor) -> Tensor:
    """Side by side in the last dim."""
    return _Joined.apply(*parts)  # type: ignore[no-any-return]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., h] scaled to unit root mean square, times weight [h]; sums in fp32 (Zhang and
    Sennrich, 2019)."""
    return final_norm(x, None, weight, eps, PLAIN)[1]


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, ops: Ops = PLAIN
) -> tuple[Tensor, Tensor]:
    """x + delta, [..., h] each, and its ``rms_norm``. Read x no more: its gradients are gathered in
    the sum that is returned."""
    total, normed, *_ = _AddNorm.apply(x, delta, weight, eps, ops, False)
    return total, normed


def final_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, ops: Ops
) -> tuple[Tensor, Tensor]:
    """``add_norm`` where the residual stream ends: the sum has no gradient of its own."""
    total, normed, *_ = _AddNorm.apply(x, delta, weight, eps, ops, True)
    return total, normed


def recomputable_add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, ops: Ops = PLAIN
) -> tuple[Tensor, Recomputable]:
    """``add_norm``, and how to repeat the norm from the sum and the scale."""
    total, normed, scale, unsharded = _AddNorm.apply(x, delta, weight, eps, ops, False)
    return total, Recomputable(
        normed, partial(_scaled_again, unsharded), (total.detach(), weight.detach(), scale)
    )


def rope_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None, device: torch.device
) -> Tensor:
    """Angular frequencies [head_dim / 2], fp32, in radians per position (Su et al., 2021, section
    3.4.2).

    ``scaling`` as in a resolved ModelConfig: None, or rope_type ``linear`` or ``llama3`` with its
    numbers."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).to(torch.float32)
    frequencies = 1.0 / (theta ** (steps / head_dim))
    if scaling is None:
        return frequencies
    return (
        _llama3_scaled(frequencies, scaling)
        if scaling["rope_type"] == "llama3"
        else frequencies / float(scaling["factor"])
    )


def _llama3_scaled(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Slow down the waves longer than the original context, keep the short ones, blend between
    (Llama 3.1)."""
    factor = float(scaling["factor"])
    context = float(scaling["original_max_position_embeddings"])
    low = float(scaling["low_freq_factor"])
    high = float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / frequencies
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelength > context / low, frequencies / factor, blended)
    return torch.where(wavelength < context / high, frequencies, scaled)


def rope_table(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [..., 1, head_dim / 2] of positions [...]. fp32: bf16 would merge 4096 positions
    into 769."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


class _SplitHeads(Function):
    """Rotates in place, in the storage of the projection: queries, keys and values are then kept
    for backward as they lie there, once. The projection's output must have no other reader."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, int], ops: Ops
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.shape = qkv.shape
        ctx.ops = ops
        (query, key) = sizes
        # Detached: to autograd the three are new tensors, not views of an input that has changed.
        heads = heads_of(qkv.detach(), cos)
        ops.rotate(heads[:, :, : query + key], cos, sin)
        return torch.split(heads, [query, key, heads.shape[2] - query - key], dim=2)

    @staticmethod
    def backward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        return (
            ctx.ops.rotate_back(query, key, value, *ctx.saved_tensors).view(ctx.shape),
            None,
            None,
            None,
            None,
        )


def heads_of(projected: Tensor, cos: Tensor) -> Tensor:
    """[..., n * d], tokens in one dim or two, as [s, b, n, d]; cos [s, 1 or b, 1, d / 2]."""
    width = 2 * cos.shape[-1]
    return projected.view(len(cos), -1, projected.shape[-1] // width, width)


def split_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, query: int, key: int, ops: Ops = PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """Projections [s * b or s, b, (query + 2 key) * head_dim], which are overwritten, to queries
    [s, b, query, head_dim], keys and values [s, b, key, head_dim], with queries and keys rotated;
    cos and sin [s, 1 or b, 1, head_dim / 2].

    The two halves of a head are the two coordinates, as in HuggingFace."""
    return _SplitHeads.apply(qkv, cos, sin, (query, key), ops)  # type: ignore[no-any-return]


class _SwiGLU(Function):
    """Keeps its input alone; silu(gate) is computed again."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, ops: Ops) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.ops = ops
        return ops.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        return ctx.ops.swiglu_backward(grad, gate_up), None


def swiglu(gate_up: Tensor, ops: Ops = PLAIN) -> Tensor:
    """silu(gate) * up of a [..., 2f] tensor whose halves are gate and up (Shazeer, 2020)."""
    return _SwiGLU.apply(gate_up, ops)  # type: ignore[no-any-return]


def recomputable_swiglu(gate_up: Tensor, ops: Ops = PLAIN) -> Recomputable:
    """``swiglu``, and how to repeat it."""
    return Recomputable(swiglu(gate_up, ops), ops.swiglu, (gate_up.detach(),))
