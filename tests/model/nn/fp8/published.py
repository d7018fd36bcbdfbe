"""The published definition of blockwise codes, in fp64 and one number at a time: what TransformerEngine's and torchao's references
return for scales that are powers of two."""

from __future__ import annotations

import math
from bisect import bisect_left

MAGNITUDES = [(fraction / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7) for exponent in range(16) for fraction in range(8)][:-1]
"""Of the codes 0 to 126 of e4m3, in order: 4 bits of exponent, 3 of fraction; 127 is NaN."""


def scale(amax: float) -> float:
    """The least power of two with which 448 reaches the largest magnitude."""
    if amax == 0:
        return 1.0
    if not math.isfinite(amax):
        return math.inf
    exponent = -127
    while 448.0 * 2.0**exponent < amax:
        exponent += 1
    return 2.0**exponent


def code(value: float, by: float) -> int:
    """The byte whose magnitude is nearest to that of the scaled number, and of two as near the even one."""
    if not math.isfinite(value):
        return 127
    scaled = abs(value) / by
    above = min(bisect_left(MAGNITUDES, scaled), 126)
    below = max(above - 1, 0)
    down, up = scaled - MAGNITUDES[below], MAGNITUDES[above] - scaled
    nearest = below if down < up or (down == up and below % 2 == 0) else above
    return nearest | (128 if math.copysign(1.0, value) < 0 else 0)
