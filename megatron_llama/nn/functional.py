"""RMSNorm, rotary embedding and SwiGLU, in the order of operations of HuggingFace's LLaMA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.nn.sink import GradSink, accumulate, sink_of


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are taken: fp32, or fp64 for the reference runs."""
    return torch.promote_types(dtype, torch.float32)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(at_least_fp32(x.dtype))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.sink = sink_of(weight)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        product = grad.to(scale.dtype) * normed
        weight_grad = product.flatten(0, -2).sum(0)
        # d/dx of x * rsqrt(mean(x^2) + eps): remove the component along x, then rescale.
        wide_grad = grad.to(scale.dtype) * weight
        along = (product * weight).mean(-1, keepdim=True)
        x_grad = (wide_grad - normed * along).mul_(scale).to(x.dtype)
        return x_grad, _deliver(ctx.sink, weight_grad, weight.dtype), None


def _deliver(sink: GradSink | None, grad: Tensor, dtype: torch.dtype) -> Tensor | None:
    if sink is None:
        return grad.to(dtype)
    view, beta = sink.buffer()
    accumulate(view, beta, grad)
    sink.done()
    return None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., h] scaled to unit root mean square, times weight [h]; sums in fp32 (Zhang and Sennrich, 2019)."""
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


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


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [s, b, heads, head_dim]; the two halves of a head are the two coordinates, as in HuggingFace."""
    first, second = x.to(at_least_fp32(x.dtype)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a [..., 2f] tensor whose halves are gate and up (Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention. query [s, b, n, d], key and value [s, b, n_kv, d] -> [s, b, n * d].

    mask: bool [b, 1, s, s], True where a position may attend (causality included); None is plain causal.
    """
    q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])
    return out.permute(2, 0, 1, 3).flatten(2)
