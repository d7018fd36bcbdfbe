"""How likely a run is to run out of memory: predictions of bytes have errors too."""

from __future__ import annotations

import math

ALLOCATABLE = 0.955
"""Share of the memory that the driver reports which tensors can use; the rest goes to the driver's
context, the communicators' buffers and gaps between allocations. This is what to expect;
``plans.memory.USABLE`` is smaller because a run that decides by it should not fail."""
SPREAD = 0.05
"""Standard deviation of the logarithm of measured over predicted bytes."""


def out_of_memory(needed: float, memory: float) -> float:
    """Return the probability that ``needed`` bytes, as predicted, do not fit into a device of
    ``memory`` bytes."""
    excess = math.log(max(needed, 1.0) / max(1.0, memory * ALLOCATABLE))
    return 0.5 * (1 + math.erf(excess / SPREAD / math.sqrt(2)))
