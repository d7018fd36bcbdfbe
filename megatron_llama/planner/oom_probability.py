"""How likely a run is to run out of memory: predictions of bytes have errors too."""

from __future__ import annotations

import math

USABLE = 0.955
"""Of what the driver reports: the rest is its context, the communicators' buffers and what lies
between allocations."""
SPREAD = 0.05
"""Standard deviation of measured over predicted bytes, in logarithms."""


def out_of_memory(needed: float, memory: float) -> float:
    """Probability that ``needed`` bytes, as predicted, do not fit into a device of ``memory``
    bytes."""
    excess = math.log(max(needed, 1.0) / max(1.0, memory * USABLE))
    return 0.5 * (1 + math.erf(excess / SPREAD / math.sqrt(2)))
