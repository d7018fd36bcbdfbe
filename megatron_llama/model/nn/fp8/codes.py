"""The blockwise recipe: codes in e4m3, with one scale for 128 numbers of a row, or for a square of
128 x 128.

A scale is the least power of two with which the largest number of its tile becomes a code of at
most 448, the largest of e4m3; 2^-127 is the least of all, and zeros have 1. Powers of two round
nothing, so the only rounding is that of the codes, to the nearest, and ties to even. A tile that
holds infinity or NaN has the scale infinity, and codes that are the products of its numbers and
zero: zeros of their signs, and NaN. So all of it is NaN, the loss is too, and the step is skipped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.kernels import runs_kernels
from megatron_llama.model.nn.fp8 import ops
from megatron_llama.model.nn.fp8.ops import SIDE


class Tiles(NamedTuple):
    """A tensor [..., k] as codes of its rows; a number is its code times its tile's scale."""

    codes: Tensor
    """e4m3, [..., k]."""
    scales: Tensor
    """fp32, [..., k / 128]; on a GPU those of one column are neighbours in memory."""


class Blocks(NamedTuple):
    """A weight [n, k] as codes; a number is its code times its block's scale."""

    codes: Tensor
    """e4m3, [n, k]."""
    scales: Tensor
    """fp32, [n / 128, k / 128]."""


def tiles(x: Tensor) -> Tiles:
    """Return codes of x [..., k], bf16 or fp32, in tiles of 128 along the last dim."""
    if not _runs_kernels(x):
        return Tiles(*ops.tiles(x))
    from megatron_llama.model.nn.fp8 import kernels

    return Tiles(*kernels.tiles(x))


def blocks(weight: Tensor) -> Blocks:
    """Return codes of a weight [n, k], bf16 or fp32, in blocks of 128 x 128."""
    if not _runs_kernels(weight):
        return Blocks(*ops.blocks(weight))
    from megatron_llama.model.nn.fp8 import kernels

    return Blocks(*kernels.blocks(weight, both=False)[0])


def both_orders(weight: Tensor) -> tuple[Blocks, Blocks]:
    """Return ``blocks`` of a weight [n, k], and of the transposed weight, [k, n], which gradients
    of inputs are multiplied by."""
    if not _runs_kernels(weight):
        forward = blocks(weight)
        return forward, transposed(forward)
    from megatron_llama.model.nn.fp8 import kernels

    forward, backward = (Blocks(*made) for made in kernels.blocks(weight, both=True))
    return forward, backward


def transposed(weight: Blocks) -> Blocks:
    """Return the codes [k, n] of the transposed weight. Blocks are square, so they are the same
    codes."""
    codes, scales = (values.t().clone(memory_format=torch.contiguous_format) for values in weight)
    return Blocks(codes, scales)


def decoded(encoded: Tiles | Blocks) -> Tensor:
    """Return the numbers that codes and scales stand for, in fp32 and without rounding."""
    scales = encoded.scales
    if isinstance(encoded, Blocks):
        scales = scales.repeat_interleave(SIDE, 0)
    wide = torch.unflatten(encoded.codes.float(), -1, (-1, SIDE))
    return (wide * scales.unsqueeze(-1)).flatten(-2)


def _runs_kernels(values: Tensor) -> bool:
    return not devices.is_fake(values) and runs_kernels(values.device, values.dtype)
