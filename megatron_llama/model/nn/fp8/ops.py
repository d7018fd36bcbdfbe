"""The codes of ``codes.py`` in torch's operators, for CPUs: the definition that kernels are held
to."""

from __future__ import annotations

import torch
from torch import Tensor

SIDE = 128
"""Numbers of a tile, and rows and columns of a block."""
LARGEST_EXPONENT = 8
LARGEST_FRACTION = 0x600000
"""448 = 1.75 * 2^8: its exponent, and 0.75 in the 23 bits of an fp32 fraction."""


def tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [..., k] and scales [..., k / 128] of x [..., k]."""
    split = torch.unflatten(x, -1, (-1, SIDE))
    factors = _factors(split.abs().amax(-1).float())
    return _codes(split, factors.unsqueeze(-1)).flatten(-2), factors.reciprocal()


def blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [n, k] and scales [n / 128, k / 128] of a weight [n, k]."""
    split = torch.unflatten(torch.unflatten(weight, 1, (-1, SIDE)), 0, (-1, SIDE))
    factors = _factors(split.abs().amax((1, 3)).float())
    codes = _codes(split, factors.unsqueeze(1).unsqueeze(3))
    return codes.reshape(weight.shape), factors.reciprocal()


def _codes(numbers: Tensor, factors: Tensor) -> Tensor:
    """Return the codes of numbers times fp32 factors."""
    # In place: a product of two dtypes would copy the numbers to fp32 beside its result.
    return numbers.to(torch.float32, copy=True).mul_(factors).to(torch.float8_e4m3fn)


def _factors(amax: Tensor) -> Tensor:
    """Return the factors that turn numbers of tiles with these largest magnitudes, fp32, into
    codes: inverse scales, or 0 where the magnitude is not finite."""
    bits = amax.view(torch.int32)
    # A larger fraction than that of 448 takes one halving more. No code exceeds 448, so the
    # conversion to e4m3 has nothing to clamp.
    halving = (bits & 0x7FFFFF) > LARGEST_FRACTION
    exponent = (LARGEST_EXPONENT + 127 - (bits >> 23) - halving.int()).clamp(max=127)
    factors = (exponent + 127 << 23).view(torch.float32)
    return factors.where(amax != 0, 1.0).where(amax.isfinite(), 0.0)
