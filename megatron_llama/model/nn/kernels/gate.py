"""The gated activations silu(gate) * up and gelu(gate) * up, and their gradients, in one pass each.

Both activations are x * sigmoid(z): with z = x for silu, and for gelu by tanh with z = 2 u, because
(1 + tanh(u)) / 2 is sigmoid(2 u).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_llama.model.nn.ops import Gate

BLOCK = 1024
SLOPE = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
CUBE = tl.constexpr(0.044715)
"""z is SLOPE * (x + CUBE * x^3) (Hendrycks and Gimpel, 2016)."""


@triton.jit
def _forward(
    gate_up, out, end, width, GELU: tl.constexpr, HAS_END: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if HAS_END:
        inside = inside & (row < tl.load(end))
    start = gate_up + row * 2 * width + columns
    gate = tl.load(start, mask=inside, other=0.0)
    up = tl.load(start + width, mask=inside, other=0.0).to(tl.float32)
    fp32 = gate.to(tl.float32)
    z = SLOPE * (fp32 + CUBE * fp32 * fp32 * fp32) if GELU else fp32
    # Rounded as torch rounds the output of the activation.
    active = (fp32 / (1.0 + tl.exp(-z))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + columns, (active * up).to(gate.dtype), mask=inside)


@triton.jit
def _backward(
    grad,
    gate_up,
    result,
    end,
    width,
    GELU: tl.constexpr,
    HAS_END: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if HAS_END:
        inside = inside & (row < tl.load(end))
    start = row * 2 * width + columns
    gate = tl.load(gate_up + start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + start + width, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(grad + row * width + columns, mask=inside, other=0.0)
    grad_fp32 = upstream.to(tl.float32)
    z = SLOPE * (gate + CUBE * gate * gate * gate) if GELU else gate
    sigmoid = 1.0 / (1.0 + tl.exp(-z))
    rest = 1.0 - sigmoid
    if GELU:
        # z grows with x^3, so 1 - sigmoid(z) would be all rounding.
        rest = SLOPE * (1.0 + 3.0 * CUBE * gate * gate) / (1.0 + tl.exp(z))
    slope = sigmoid * (1.0 + gate * rest)
    tl.store(result + start, (grad_fp32 * up * slope).to(upstream.dtype), mask=inside)
    tl.store(result + start + width, (grad_fp32 * gate * sigmoid).to(upstream.dtype), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., f], of [..., 2f]."""
    return _gated(gate_up, None, gelu=False)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of [..., 2f] from that of [..., f]."""
    return _gradient(grad, gate_up, None, gelu=False)


def geglu(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, [..., f], of [..., 2f], with the approximation of gelu by tanh."""
    return _gated(gate_up, None, gelu=True)


def geglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of [..., 2f] from that of [..., f]."""
    return _gradient(grad, gate_up, None, gelu=True)


def of_rows(gate: Gate, end: Tensor) -> Gate:
    """Return the gate for rows [n, 2f] of which those from ``end`` [1] on are neither read nor
    written, if it is one of these kernels; any other as it is."""
    if gate.forward not in (swiglu, geglu):
        return gate
    gelu = gate.forward is geglu

    def forward(gate_up: Tensor) -> Tensor:
        return _gated(gate_up, end, gelu=gelu)

    def backward(grad: Tensor, gate_up: Tensor) -> Tensor:
        return _gradient(grad, gate_up, end, gelu=gelu)

    return Gate(forward, backward)


def _gated(gate_up: Tensor, end: Tensor | None, *, gelu: bool) -> Tensor:
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    if out.numel():
        has_end = end is not None
        _forward[_grid(out)](gate_up, out, end, width, GELU=gelu, HAS_END=has_end, BLOCK=BLOCK)
    return out


def _gradient(grad: Tensor, gate_up: Tensor, end: Tensor | None, *, gelu: bool) -> Tensor:
    grad = grad.contiguous()
    gate_up = gate_up.contiguous()
    result = torch.empty_like(gate_up)
    if grad.numel():
        sizes = {"GELU": gelu, "HAS_END": end is not None, "BLOCK": BLOCK}
        _backward[_grid(grad)](grad, gate_up, result, end, grad.shape[-1], **sizes)
    return result


def _grid(out: Tensor) -> tuple[int, int]:
    width = out.shape[-1]
    return out.numel() // width, -(-width // BLOCK)
