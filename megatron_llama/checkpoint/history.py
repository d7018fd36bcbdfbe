"""What a run keeps of its bad steps: the samples it leaves out, and what the next loss is compared
with. Numbers only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Skipped:
    """One bad step, of which nothing stayed in the weights."""

    iteration: int
    """1-based: the step that it would have been."""
    first_sample: int
    """Position in the run's order of samples, as ``consumed_samples`` counts."""
    last_sample: int
    """Included."""
    reason: str
    """``loss`` or ``gradient norm``, which was not finite, or ``loss spike``."""
    value: float
    """Of what the reason names."""

    def entry(self) -> dict[str, Any]:
        """For JSON, which has no word for what is not finite: those become text."""
        return {
            **asdict(self),
            "value": self.value if math.isfinite(self.value) else str(self.value),
        }


@dataclass(frozen=True)
class History:
    """What of the past decides on bad steps to come: with it a resumed run decides as one that was
    never interrupted."""

    skipped: tuple[Skipped, ...] = ()
    """In the order in which they were found."""
    good_losses: tuple[float, ...] = ()
    """Of the last good steps, newest last; with --loss-spike-factor."""
    bad_in_a_row: int = 0

    def first_sample(self, consumed: int, size: Callable[[int], int]) -> int:
        """Where a step begins when ``consumed`` samples are behind the run: a step that would hold
        a sample that is left out begins behind it. ``size``: samples of a step that begins at a
        sample."""
        for left_out in sorted(self.skipped, key=lambda entry: entry.first_sample):
            if (
                left_out.first_sample < consumed + size(consumed)
                and consumed <= left_out.last_sample
            ):
                consumed = left_out.last_sample + 1
        return consumed

    def entry(self) -> dict[str, Any]:
        """For ``meta.json``."""
        return {**asdict(self), "skipped": [one.entry() for one in self.skipped]}


NO_HISTORY = History()
"""Of a run without bad steps."""


def read_history(entry: Mapping[str, Any]) -> History:
    """The inverse of ``History.entry``. Raises KeyError, TypeError or ValueError where it is
    none."""
    skipped = (Skipped(**{**one, "value": float(one["value"])}) for one in entry["skipped"])
    return History(
        tuple(skipped),
        tuple(float(loss) for loss in entry["good_losses"]),
        int(entry["bad_in_a_row"]),
    )
