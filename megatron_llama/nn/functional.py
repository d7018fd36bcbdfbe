"""RMSNorm, rotary embedding and SwiGLU, in the order of operations of HuggingFace's LLaMA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.nn.recompute import Recomputable
from megatron_llama.nn.sink import Arrived, Home, accumulate, arrive


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are taken: fp32, or fp64 for the reference runs."""
    return torch.promote_types(dtype, torch.float32)


class _RMSNorm(torch.autograd.Function):
    """Also returns what repeating the product needs: the scale, and the weight's arrival."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Arrived]:
        scale = torch.rsqrt(x.to(at_least_fp32(x.dtype)).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.mark_non_differentiable(scale)
        ctx.set_materialize_grads(False)
        ctx.arrived = arrive(weight)
        return _scaled(x, weight, scale), scale, ctx.arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, Tensor | None, None]:
        if grad is None:
            return None, None, None
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = grad.to(scale.dtype) * normed
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            ctx.arrived.check()
            # d/dx of x * rsqrt(mean(x^2) + eps): remove the component along x, then rescale.
            wide_grad = grad.to(scale.dtype) * weight
            along = (product * weight).mean(-1, keepdim=True)
            x_grad = (wide_grad - normed * along).mul_(scale).to(x.dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = _deliver(ctx.arrived.home, product.flatten(0, -2).sum(0), weight.dtype)
        return x_grad, weight_grad, None


def _scaled(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """``scale`` is at least fp32, and so is its product with a narrower x."""
    return weight * (x * scale).to(x.dtype)


def _scaled_again(arrived: Arrived, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    arrived.check()
    return _scaled(x, weight, scale)


def _deliver(home: Home | None, grad: Tensor, dtype: torch.dtype) -> Tensor | None:
    if home is None:
        return grad.to(dtype)
    view, beta = home.buffer()
    accumulate(view, beta, grad)
    home.done()
    return None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., h] scaled to unit root mean square, times weight [h]; sums in fp32 (Zhang and Sennrich, 2019)."""
    return _RMSNorm.apply(x, weight, eps)[0]  # type: ignore[no-any-return, no-untyped-call]


def recomputable_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Recomputable:
    """``rms_norm``, and how to repeat it from its input and scale."""
    normed, scale, arrived = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return Recomputable(normed, partial(_scaled_again, arrived), (x.detach(), weight.detach(), scale))


def rope_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None, device: torch.device) -> Tensor:
    """Angular frequencies [head_dim / 2], fp32, in radians per position (Su et al., 2021, section 3.4.2).

    ``scaling`` as in a resolved ModelConfig: None, or rope_type ``linear`` or ``llama3`` with its numbers."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).to(device, torch.float32)
    frequencies = 1.0 / (theta ** (steps / head_dim))
    if scaling is None:
        return frequencies
    return _llama3_scaled(frequencies, scaling) if scaling["rope_type"] == "llama3" else frequencies / float(scaling["factor"])


def _llama3_scaled(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Slow down the waves longer than the original context, keep the short ones, blend between (Llama 3.1)."""
    factor, context = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / frequencies
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelength > context / low, frequencies / factor, blended)
    return torch.where(wavelength < context / high, frequencies, scaled)


def rope_table(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [..., 1, head_dim / 2] of positions [...]. fp32: bf16 would merge 4096 positions into 769."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


class _SplitHeads(torch.autograd.Function):
    """Rotates in place, in the storage of the projection: queries, keys and values are then kept for backward as they lie there,
    once. The projection's output must have no other reader."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, int]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        query, key = sizes
        # Detached: to autograd the three are new tensors, not views of an input that has changed.
        heads = qkv.detach().view(*qkv.shape[:2], -1, 2 * cos.shape[-1])
        ctx.rotated = query + key
        _rotate(heads[:, :, : ctx.rotated], cos, sin)
        return torch.split(heads, [query, key, heads.shape[2] - query - key], dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad = torch.cat(grads, dim=2)
        _rotate(grad[:, :, : ctx.rotated], cos, -sin)
        return grad.flatten(2), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """In place, computed at least in fp32, which the table is."""
    first, second = x.chunk(2, dim=-1)
    turned = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(turned)


def split_heads(qkv: Tensor, cos: Tensor, sin: Tensor, *, query: int, key: int) -> tuple[Tensor, Tensor, Tensor]:
    """Projections [s, b, (query + 2 key) * head_dim], which are overwritten, to queries [s, b, query, head_dim], keys and values
    [s, b, key, head_dim], with queries and keys rotated; cos and sin [s, 1 or b, 1, head_dim / 2].

    The two halves of a head are the two coordinates, as in HuggingFace."""
    return _SplitHeads.apply(qkv, cos, sin, (query, key))  # type: ignore[no-any-return, no-untyped-call]


class _SwiGLU(torch.autograd.Function):
    """Keeps its input alone; silu(gate) is computed again."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        gate_grad, up_grad = result.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        return result


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a [..., 2f] tensor whose halves are gate and up (Shazeer, 2020)."""
    return _SwiGLU.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]


def recomputable_swiglu(gate_up: Tensor) -> Recomputable:
    """``swiglu``, and how to repeat it."""
    return Recomputable(swiglu(gate_up), _swiglu, (gate_up.detach(),))
