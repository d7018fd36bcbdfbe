"""An entry of the list of weights that a rank reads, in order. The trainer makes the list of its
pipeline schedule (``pipeline/plan/stage_accesses.py``); for a user's model it is recorded
(``engine/shard/order.py``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightAccess:
    """A unit is about to run forward or backward on one microbatch. Prints as ``F3`` or ``B3``."""

    unit: int
    """The number of the unit, counted over all stages of the rank, in order."""
    backward: bool

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.unit}"
