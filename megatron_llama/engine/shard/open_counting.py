"""Counts gradients of a user's model whose rounds are unknown, and learns the rounds.

[Note: open counting] It is unknown which contribution to a bucket is its last one, so a bucket ends
a round when another bucket needs its slot, at the end of a backward pass, or at the end of the
step. A missing contribution counts as zero. A backward pass that comes back to a bucket after that
makes another round of it, and rounds are summed. The rounds of a step are the plan of the next ones
(``engine/counting.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from megatron_llama.engine.counting import Counting, GradientRounds
from megatron_llama.engine.gradients import GradientBuckets
from megatron_llama.engine.plan.buckets import Slot


class OpenCounting(Counting):
    """The contributions of a step whose rounds are found out."""

    allows_unused = False
    """Whether parameters may have no contribution in a step."""

    def __init__(
        self, gradients: GradientBuckets, agree: Callable[[int], None], frozen: Collection[str] = ()
    ) -> None:
        """``agree`` is called before a bucket is reduced because another one needs its slot. That
        follows from what this rank has written, so ranks that may differ in it have to agree here:
        it raises on all of them if they do. ``frozen`` are parameters that get no gradients."""
        super().__init__()
        self._agree = agree
        self._each_pass = gradients.reduce_every_microbatch
        self._frozen = frozenset(frozen)
        buckets = gradients.bucket_plan.buckets
        self.ended_by_step = [
            bucket
            for bucket in gradients.trainable
            if any(placed.spec.name not in self._frozen for placed in buckets[bucket].placements)
        ]
        self.sequence: list[str] = []
        """The parameters of this backward pass's contributions, one by one. Ranks with the same
        sequence reduce the same buckets in the same order, now and by the rounds that are
        recorded."""
        self._counts: dict[int, dict[str, int]] = {bucket: {} for bucket in gradients.trainable}
        """By bucket and parameter, contributions of this round."""
        self._ended: dict[int, list[Mapping[str, int]]] = {b: [] for b in gradients.trainable}
        """By bucket, the rounds that have ended."""

    def begin_round(self, bucket: int, number: int) -> bool:
        if number:
            self._ended[bucket].append(self._counts[bucket])
        self._counts[bucket] = {}
        return True

    def is_last(self, bucket: int, number: int) -> bool:
        return False  # only the end of the step shows that

    def make_way(self, holder: int, slot: Slot, *, bucket: int, name: str) -> None:
        # Ranks that disagree whose turn it is would add up different buckets.
        self._agree(holder)

    def end_step(self, names: Iterable[str]) -> Sequence[int]:
        if self.this_pass:
            self.end_pass(names)
        return self._written_buckets()

    def lacking(self, buckets: Mapping[int, Iterable[str]]) -> dict[int, list[str]]:
        known = self.written | self._frozen
        return {
            bucket: [name for name in names if name not in known]
            for bucket, names in buckets.items()
            if bucket in self.ended_by_step
        }

    def rounds(self) -> GradientRounds:
        return GradientRounds(
            by_bucket={bucket: tuple(ended) for bucket, ended in self._ended.items()},
            passes=tuple(self.passes),
        )

    def _written_buckets(self) -> Sequence[int]:
        """Return the buckets that have contributions in their round, in the order of the plan."""
        return tuple(bucket for bucket, counts in self._counts.items() if counts)

    def _is_complete_with(self, bucket: int, name: str) -> bool:
        counts = self._counts[bucket]
        counts[name] = counts.get(name, 0) + 1
        self.sequence.append(name)
        return False

    def _end_pass(self, number: int, names: Iterable[str]) -> Sequence[int]:
        self.sequence = []
        # Slots that accumulate until the end of the step have nothing to send yet.
        return self._written_buckets() if self._each_pass else ()


class UnusedCounting(OpenCounting):
    """The contributions of a step in which ranks may leave out different parameters.

    Slots accumulate all through the step, and every bucket is reduced at its end, in the order of
    the plan: no rank can issue another order. That takes a gradient slot for each bucket, and no
    reduction is overlapped. A parameter without a contribution has a gradient of zero."""

    allows_unused = True

    def __init__(
        self, gradients: GradientBuckets, agree: Callable[[int], None], frozen: Collection[str] = ()
    ) -> None:
        """Raises ValueError for buckets that share slots or are reduced after every microbatch."""
        slots = {gradients.bucket_plan.gradient_slots[bucket] for bucket in gradients.trainable}
        if gradients.reduce_every_microbatch or len(slots) < len(gradients.trainable):
            raise ValueError(
                "unused parameters need a gradient slot for each bucket, for all steps"
            )
        super().__init__(gradients, agree, frozen)

    def end_step(self, names: Iterable[str]) -> Sequence[int]:
        super().end_step(names)
        return self.ended_by_step

    def lacking(self, buckets: Mapping[int, Iterable[str]]) -> dict[int, list[str]]:
        return {}  # their gradients are zero, so that weight decay and moments go on
