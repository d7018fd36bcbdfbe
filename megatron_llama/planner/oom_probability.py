"""The probability that a run runs out of memory, since predictions of bytes have errors."""

from __future__ import annotations

import math

ALLOCATABLE = 0.955
"""Expected share of the driver's reported memory that tensors can use. The driver's context, the
communicators' buffers and gaps between allocations take the rest. ``train.setup.memory.USABLE`` is
smaller because a run that decides by it should not fail."""
SPREAD = 0.05
"""Standard deviation of the logarithm of measured over predicted bytes."""


def out_of_memory(needed: float, memory: float) -> float:
    """Return the probability that a predicted need of ``needed`` bytes does not fit into a device
    of ``memory`` bytes."""
    excess = math.log(max(needed, 1.0) / max(1.0, memory * ALLOCATABLE))
    return 0.5 * (1 + math.erf(excess / SPREAD / math.sqrt(2)))
