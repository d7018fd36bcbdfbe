"""Steps that end after fewer backward passes than they were begun with.

The last step of an epoch has the microbatches that are left, and a loop that accumulates learns of
that with its last batch. By then the step has begun with the plan of a whole one. Its gradients so
far are those of the step: what slots still accumulate is reduced at its end, and sums that were to
be continued are final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron_llama.engine.counting import GradientRounds, PlannedCounting


class EndableCounting(PlannedCounting):
    """The contributions of a planned step that may end after any of its backward passes."""

    def __init__(self, rounds: GradientRounds, label: Callable[[int], str]) -> None:
        super().__init__(rounds, label)
        self._begun: dict[int, Mapping[str, int]] = {}
        """By bucket, the contributions that its round began with."""
        self._final: set[int] = set()
        """The buckets whose last round has been reduced."""
        self._ends_here = False

    def end_early(self) -> None:
        """The step ends here, between two backward passes, and no further one will come."""
        self._ends_here = True
        # A final sum has been added up over the replicas already, and may not be once more.
        # A frozen bucket has no rounds at all, and the gradient of an earlier step.
        self.ended_by_step = tuple(
            b for b in self._begun if b not in self._final and self._rounds.by_bucket[b]
        )

    def begin_round(self, bucket: int, number: int) -> bool:
        is_planned = super().begin_round(bucket, number)
        self._begun[bucket] = dict(self._missing[bucket])
        return is_planned

    def is_last(self, bucket: int, number: int) -> bool:
        if self._ends_here or not super().is_last(bucket, number):
            return False
        self._final.add(bucket)
        return True

    def lacking(self, buckets: Mapping[int, Iterable[str]]) -> dict[int, list[str]]:
        if not self._ends_here:
            return super().lacking(buckets)
        written = self.written
        # A frozen parameter is in no round.
        planned = {
            bucket: {name for one_round in rounds for name in one_round}
            for bucket, rounds in self._rounds.by_bucket.items()
        }
        return {
            bucket: [name for name in names if name in planned[bucket] and name not in written]
            for bucket, names in buckets.items()
        }

    def end_step(self, names: Iterable[str]) -> Sequence[int]:
        if not self._ends_here:
            return ()
        return tuple(b for b, begun in self._begun.items() if self._missing[b] != begun)
