"""silu(gate) * up, and its gradient, in one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _forward(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start = gate_up + row * 2 * width + columns
    gate = tl.load(start, mask=inside, other=0.0)
    up = tl.load(start + width, mask=inside, other=0.0).to(tl.float32)
    fp32 = gate.to(tl.float32)
    # Rounded as torch rounds the output of silu.
    silu = (fp32 * tl.sigmoid(fp32)).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + columns, (silu * up).to(gate.dtype), mask=inside)


@triton.jit
def _backward(grad, gate_up, result, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start = row * 2 * width + columns
    gate = tl.load(gate_up + start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + start + width, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(grad + row * width + columns, mask=inside, other=0.0)
    grad_fp32 = upstream.to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(result + start, (grad_fp32 * up * slope).to(upstream.dtype), mask=inside)
    tl.store(result + start + width, (grad_fp32 * gate * sigmoid).to(upstream.dtype), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., f], of [..., 2f]."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    if out.numel():
        _forward[_grid(out)](gate_up, out, width, BLOCK=BLOCK)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of [..., 2f] from that of [..., f]."""
    grad = grad.contiguous()
    gate_up = gate_up.contiguous()
    result = torch.empty_like(gate_up)
    if grad.numel():
        _backward[_grid(grad)](grad, gate_up, result, grad.shape[-1], BLOCK=BLOCK)
    return result


def _grid(out: Tensor) -> tuple[int, int]:
    width = out.shape[-1]
    return out.numel() // width, -(-width // BLOCK)
