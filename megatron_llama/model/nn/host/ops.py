"""``Ops`` for CPUs: the norm of heads and the gate by gelu some tokens at a time, so that
intermediate results stay in a cache and the results are written where they belong. On whole tensors
each operator would go through memory, much of it new to the process. With 16 bits, whose sums are
fp32 inside of torch's operators, these compute whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_llama.model.nn import ops
from megatron_llama.model.nn.ops import Ops, head_factors, inverse_rms

ELEMENTS = 2**18
"""Elements of a tensor that are computed at once: some of them fit into a cache."""
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
CUBE = 0.044715
"""gelu by tanh is x * sigmoid(z) with z = SLOPE * (x + CUBE * x^3), because (1 + tanh(u)) / 2 is
sigmoid(2 u) (Hendrycks and Gimpel, 2016). A sigmoid takes half of the time of torch's gelu."""


def _parts(x: Tensor) -> Iterator[slice]:
    """Yield the first dim of x, some at a time."""
    step = max(1, ELEMENTS * len(x) // max(1, x.numel()))
    for start in range(0, len(x), step):
        yield slice(start, start + step)


def norm_heads(
    heads: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, one_plus: bool, query: int
) -> tuple[Tensor, Tensor]:
    """Compute ``ops.norm_heads``."""
    if heads.element_size() < 4:
        return ops.norm_heads(heads, query_weight, key_weight, eps, one_plus, query)
    kept = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    scale = heads.new_empty((*heads.shape[:-1], 1))
    factor = head_factors(query_weight, key_weight, query, heads.shape[2], one_plus)
    for rows in _parts(heads):
        block = kept[rows].copy_(heads[rows])
        scale[rows] = inverse_rms(block, eps)
        torch.mul(block, scale[rows], out=heads[rows])
        heads[rows].mul_(factor)
    return kept, scale


def norm_heads_backward(
    grad: Tensor,
    kept: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    scale: Tensor,
    one_plus: bool,
    query: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``ops.norm_heads_backward``."""
    if grad.element_size() < 4:
        return ops.norm_heads_backward(grad, kept, query_weight, key_weight, scale, one_plus, query)
    count = kept.shape[2]
    factor = head_factors(query_weight, key_weight, query, count, one_plus)
    result = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    sums = torch.zeros_like(factor)
    for rows in _parts(kept):
        upstream = grad[rows, :, :count].clone(memory_format=torch.contiguous_format)
        product = upstream * kept[rows]
        # With x the head and r its scale, the part along x is -r^3 / d * sum(grad * w * x) * x.
        along = (product * factor).sum(-1, keepdim=True).mul_(scale[rows].square())
        sums += product.mul_(scale[rows]).sum((0, 1))
        upstream.mul_(factor).addcmul_(kept[rows], along, value=-1.0 / kept.shape[-1])
        torch.mul(upstream, scale[rows], out=result[rows, :, :count])
        result[rows, :, count:] = grad[rows, :, count:]
    return result, sums[:query].sum(0), sums[query:].sum(0)


def geglu(gate_up: Tensor) -> Tensor:
    """Compute ``ops.geglu``."""
    if gate_up.element_size() < 4:
        return ops.geglu(gate_up)
    out = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
    start = gate_up.new_full((1,), SLOPE)
    for rows in _parts(out):
        gate, up = gate_up[rows].chunk(2, dim=-1)
        z = torch.addcmul(start, gate, gate, value=SLOPE * CUBE).mul_(gate)
        torch.mul(z.sigmoid_().mul_(gate), up, out=out[rows])
    return out


def geglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Compute ``ops.geglu_backward``."""
    if gate_up.element_size() < 4:
        return ops.geglu_backward(grad, gate_up)
    result = torch.empty_like(gate_up)
    start = gate_up.new_full((1,), SLOPE)
    for rows in _parts(grad):
        gate, up = gate_up[rows].chunk(2, dim=-1)
        gate_grad, up_grad = result[rows].chunk(2, dim=-1)
        sigmoid = torch.addcmul(start, gate, gate, value=SLOPE * CUBE).mul_(gate).sigmoid_()
        torch.mul(grad[rows], gate, out=up_grad)
        up_grad.mul_(sigmoid)
        # gelu' is sigmoid(z) + x * z' * sigmoid'(z).
        slope = torch.addcmul(start, gate, gate, value=3.0 * SLOPE * CUBE).mul_(gate)
        gelu_grad = torch.ops.aten.sigmoid_backward(slope, sigmoid).add_(sigmoid)
        torch.mul(gelu_grad.mul_(up), grad[rows], out=gate_grad)
    return result


HOST = Ops(
    norm_heads=norm_heads,
    norm_heads_backward=norm_heads_backward,
    geglu=geglu,
    geglu_backward=geglu_backward,
)
"""The other functions are torch's, operator by operator."""
