"""The memory of a run's bad steps: the samples that it leaves out, and the losses that the next
loss is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megatron_llama.config.fields import Fields

# Values of --on-bad-step.
STOP = "stop"
ROLLBACK = "rollback"


@dataclass(frozen=True)
class Skipped:
    """One bad step. Nothing of it stayed in the weights."""

    iteration: int
    """Number that the step would have had, counted from 1."""
    first_sample: int
    """Position of the step's first sample in the run's order, as ``consumed_samples`` counts."""
    last_sample: int
    """Position of its last sample."""
    reason: str
    """``loss`` or ``gradient norm`` where that was not finite, or ``loss spike``."""
    value: float
    """The loss or gradient norm of the step."""

    def entry(self) -> dict[str, Any]:
        """Return the fields for JSON, where a value that is not finite has to be text."""
        value = self.value if math.isfinite(self.value) else str(self.value)
        return {**asdict(self), "value": value}


@dataclass(frozen=True)
class History:
    """The past that decides on bad steps to come. With it a resumed run decides as one that was
    never interrupted."""

    skipped: tuple[Skipped, ...] = ()
    """Bad steps in the order in which they were found."""
    good_losses: tuple[float, ...] = ()
    """Losses of the last good steps, newest last; empty without --loss-spike-factor."""
    bad_in_a_row: int = 0

    def first_sample(self, consumed: int, size: Callable[[int], int]) -> int:
        """Return the position at which a step begins after ``consumed`` samples. A step that would
        contain a sample that is left out begins behind that sample. ``size`` gives the number of
        samples of a step that begins at a position."""
        for left_out in sorted(self.skipped, key=lambda entry: entry.first_sample):
            if (
                left_out.first_sample < consumed + size(consumed)
                and consumed <= left_out.last_sample
            ):
                consumed = left_out.last_sample + 1
        return consumed

    def entry(self) -> dict[str, Any]:
        """Return the fields for ``meta.json``."""
        return {**asdict(self), "skipped": [step.entry() for step in self.skipped]}


NO_HISTORY = History()
"""The history of a run without bad steps."""


def read_history(fields: Fields) -> History:
    """Return the history whose ``entry`` has these fields. Problems are added to ``fields``."""
    skipped = []
    for step in fields.entries("skipped"):
        value = step.content.get("value")
        skipped.append(
            Skipped(
                step.integer("iteration"),
                step.integer("first_sample"),
                step.integer("last_sample"),
                step.text("reason"),
                # JSON has no numbers that are not finite.
                float(value) if value in ("nan", "inf", "-inf") else step.number("value"),
            )
        )
    losses = fields.sequence("good_losses", float)
    return History(tuple(skipped), tuple(map(float, losses)), fields.integer("bad_in_a_row"))
