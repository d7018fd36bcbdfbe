"""Rotary embedding of some heads of a projection, in place or into another tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 8
"""Heads of a token that one program rotates with one read of the table."""


@triton.jit
def _rotate(
    source,
    target,
    cos,
    sin,
    sign,
    batch,
    heads,
    half,
    source_token,
    source_sample,
    source_head,
    target_token,
    target_sample,
    target_head,
    table_token,
    table_sample,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = (tl.program_id(0) // batch).to(tl.int64)
    sample = (tl.program_id(0) % batch).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, HALF)
    known = channel < half
    table = token * table_token + sample * table_sample + channel
    cosine = tl.load(cos + table, mask=known, other=0.0)[None, :]
    sine = tl.load(sin + table, mask=known, other=0.0)[None, :] * sign
    inside = (head < heads)[:, None] & known[None, :]
    start = (
        source
        + token * source_token
        + sample * source_sample
        + head[:, None] * source_head
        + channel[None, :]
    )
    goal = (
        target
        + token * target_token
        + sample * target_sample
        + head[:, None] * target_head
        + channel[None, :]
    )
    first = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(goal, (first * cosine - second * sine).to(target.dtype.element_ty), mask=inside)
    tl.store(goal + half, (second * cosine + first * sine).to(target.dtype.element_ty), mask=inside)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first r dims of every head [s, b, n, d], one half with the other, by cos and sin
    [s, 1 or b, 1, r / 2], fp32, in place."""
    heads = heads.narrow(-1, 0, 2 * cos.shape[-1])
    _rotate_into(heads, heads, cos, sin, 1.0)


def rotate_back(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient [s, b, n + 2 n_kv, d] of the projection, from those of the rotated
    queries and keys and of the values."""
    query, key, value = (
        grad if grad.stride(-1) == 1 else grad.contiguous() for grad in (query, key, value)
    )
    sizes = [grad.shape[2] for grad in (query, key, value)]
    result = query.new_empty(*query.shape[:2], sum(sizes), query.shape[3])
    places = torch.split(result, sizes, dim=2)
    rotated = 2 * cos.shape[-1]
    for grad, place in zip((query, key), places, strict=False):
        _rotate_into(grad[..., :rotated], place[..., :rotated], cos, sin, -1.0)
        if rotated < grad.shape[-1]:
            place[..., rotated:].copy_(grad[..., rotated:])
    places[2].copy_(value)
    return result


def _rotate_into(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    """Write rotated heads into ``target``, which may be ``source``; the last dim is contiguous in
    both."""
    assert (
        source.stride(-1) == target.stride(-1) == cos.stride(-1) == 1
        and cos.stride() == sin.stride()
    )
    length, batch, heads, width = source.shape
    if source.numel() == 0:
        return
    strides = (
        *source.stride()[:3],
        *target.stride()[:3],
        cos.stride(0),
        cos.stride(1) if cos.shape[1] > 1 else 0,
    )
    block = triton.next_power_of_2(width // 2)
    grid = (length * batch, -(-heads // HEADS))
    _rotate[grid](
        source, target, cos, sin, sign, batch, heads, width // 2, *strides, HEADS=HEADS, HALF=block
    )
