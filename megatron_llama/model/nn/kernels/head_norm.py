"""RMSNorm of each head of queries and keys, where the projection has written them.

A program normalizes some heads of one token, each a row of the block; a head is narrow, so that a
row of its own would leave most of a program idle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_llama.engine.comm import device as devices
from megatron_llama.model.nn.kernels.norm import PROGRAMS_PER_UNIT

HEADS = 8
"""Heads of a token in one block."""


@triton.jit
def _weights(query_weight, key_weight, head, query, channel, inside, ONE_PLUS: tl.constexpr):
    """Return the weight of each head of a block: that of queries, or that of keys."""
    is_query = (head < query)[:, None]
    place = channel[None, :]
    weight = tl.load(query_weight + place, mask=inside & is_query, other=0.0).to(tl.float32)
    weight += tl.load(key_weight + place, mask=inside & (head >= query)[:, None], other=0.0).to(
        tl.float32
    )
    if ONE_PLUS:
        weight += 1.0
    return weight


@triton.jit
def _forward(
    heads,
    kept,
    scale,
    query_weight,
    key_weight,
    eps,
    batch,
    count,
    query,
    width,
    token_stride,
    sample_stride,
    head_stride,
    ONE_PLUS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, BLOCK)
    inside = (head < count)[:, None] & (channel < width)[None, :]
    source = heads + (row // batch) * token_stride + (row % batch) * sample_stride
    place = source + head[:, None] * head_stride + channel[None, :]
    values = tl.load(place, mask=inside, other=0.0)
    compact = row * count + head
    tl.store(kept + compact[:, None] * width + channel[None, :], values, mask=inside)
    fp32 = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(fp32 * fp32, 1) / width + eps)
    tl.store(scale + compact, inverse, mask=head < count)
    factor = _weights(query_weight, key_weight, head, query, channel, inside, ONE_PLUS)
    normed = fp32 * inverse[:, None]
    if not ONE_PLUS:
        # Rounded before the weight is applied, as HuggingFace's Qwen 3 does, and its Gemma not.
        normed = normed.to(values.dtype).to(tl.float32)
    tl.store(place, (factor * normed).to(values.dtype), mask=inside)


@triton.jit
def _backward(
    grad,
    kept,
    scale,
    query_weight,
    key_weight,
    heads_grad,
    partial,
    tokens,
    batch,
    count,
    query,
    width,
    token_stride,
    sample_stride,
    head_stride,
    share,
    ONE_PLUS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, BLOCK)
    inside = (head < count)[:, None] & (channel < width)[None, :]
    factor = _weights(query_weight, key_weight, head, query, channel, inside, ONE_PLUS)
    summed = tl.zeros([HEADS, BLOCK], tl.float32)
    for number in range(program * share, tl.minimum(program * share + share, tokens)):
        row = tl.cast(number, tl.int64)
        source = grad + (row // batch) * token_stride + (row % batch) * sample_stride
        upstream = tl.load(
            source + head[:, None] * head_stride + channel[None, :], mask=inside, other=0.0
        )
        compact = row * count + head
        place = compact[:, None] * width + channel[None, :]
        inverse = tl.load(scale + compact, mask=head < count, other=0.0)[:, None]
        normed = tl.load(kept + place, mask=inside, other=0.0).to(tl.float32) * inverse
        product = upstream.to(tl.float32) * normed
        summed += product
        # d/dx of x * rsqrt(mean(x^2) + eps): remove the component along x, then rescale.
        along = (tl.sum(product * factor, 1) / width)[:, None]
        result = (upstream.to(tl.float32) * factor - normed * along) * inverse
        tl.store(heads_grad + place, result.to(upstream.dtype), mask=inside)
    left = (program.to(tl.int64) * count + head)[:, None] * width + channel[None, :]
    tl.store(partial + left, summed, mask=inside)


def norm_heads(
    heads: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, one_plus: bool, query: int
) -> tuple[Tensor, Tensor]:
    """Replace each of the heads [s, b, n, d], of which the first ``query`` are queries and the
    others keys, by its norm; return a copy of the heads, and the scales [s, b, n, 1] in fp32."""
    assert heads.stride(-1) == 1
    length, batch, count, width = heads.shape
    kept = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    scale = heads.new_empty((*heads.shape[:-1], 1), dtype=torch.float32)
    if heads.numel():
        block = triton.next_power_of_2(width)
        grid = (length * batch, -(-count // HEADS))
        sizes = (batch, count, query, width, *heads.stride()[:3])
        _forward[grid](
            heads,
            kept,
            scale,
            query_weight,
            key_weight,
            eps,
            *sizes,
            ONE_PLUS=one_plus,
            HEADS=HEADS,
            BLOCK=block,
        )
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
    """Return the gradient of a projection, of whose first heads, [s, b, n, d], the norms have been
    taken, in its dtype, and of both weights, [d] in fp32. ``grad`` has all heads."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    length, batch, count, width = kept.shape
    tokens = length * batch
    share = max(1, -(-tokens // (PROGRAMS_PER_UNIT * devices.multiprocessors(kept.device))))
    programs = -(-tokens // share)
    heads_grad = torch.empty_like(kept)
    partial = kept.new_empty((programs, count, width), dtype=torch.float32)
    if kept.numel():
        block = triton.next_power_of_2(width)
        sizes = (tokens, batch, count, query, width, *grad.stride()[:3], share)
        _backward[programs, -(-count // HEADS)](
            grad,
            kept,
            scale,
            query_weight,
            key_weight,
            heads_grad,
            partial,
            *sizes,
            ONE_PLUS=one_plus,
            HEADS=HEADS,
            BLOCK=block,
        )
    sums = partial.sum(0)
    whole = torch.cat((heads_grad, grad[:, :, count:]), dim=2)
    return whole, sums[:query].sum(0), sums[query:].sum(0)
