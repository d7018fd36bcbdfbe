"""Tiles of 128 numbers that codes are easily got wrong for."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.model.nn.fp8.published import MAGNITUDES


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers, each row by a power of ten of its own."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 4, (*shape[:-1], 1), generator=generator)
    return (torch.randn(*shape, generator=generator) * sizes).to(dtype)


def hard_tiles(dtype: torch.dtype) -> Tensor:
    """[tiles, 128]: zeros, one sign, subnormals, the largest at powers of two and beside 448 times them, every tie between two codes,
    and numbers that are none."""
    base = normal(1, 128, seed=1, dtype=torch.float32)[0]
    base = base / base.abs().amax()
    found = [torch.zeros(128), -torch.zeros(128), base.abs(), -base.abs(), base * 2.0**-140, base * 1e-38, base * 3e38]
    for exponent in (-149, -133, -127, -126, -120, -119, -118, -20, 0, 30, 118, 127):
        found += [base * 2.0**exponent, torch.full((128,), 2.0**exponent)]
    for exponent in (-127, -119, -9, 0, 40, 119):
        largest = torch.tensor(448.0 * 2.0**exponent).to(dtype)
        bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
        for neighbour in (-1, 0, 1):
            tile = (base * 2.0**exponent).float()
            tile[17] = (largest.view(bits) + neighbour).view(dtype).float() * (1 if neighbour else -1)
            found.append(tile)
    ladder = torch.tensor(MAGNITUDES)
    ties = (ladder[1:] + ladder[:-1]) / 2
    for exponent in (0, -30, 30):
        found += [torch.cat([ladder, ladder[-1:]]) * 2.0**exponent, -torch.cat([ties, ladder[-2:]]) * 2.0**exponent]
    for odd in (float("nan"), float("inf"), -float("inf")):
        tile = base.clone()
        tile[5] = odd
        found.append(tile)
    found.append(torch.cat([torch.full((64,), float("inf")), torch.full((64,), float("nan"))]))
    return torch.stack([tile.float() for tile in found]).to(dtype)
