"""Counts the contributions of a step, and so when a bucket has all gradients of a round.

``PlannedCounting`` knows the contributions of every round, and a bucket is complete with the last
of them. For our own model they follow from the bucket plan. ``engine/shard/open_counting.py``
learns them from a user's model in one step; they are the plan of the steps that follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_llama.engine.plan.buckets import Bucket, Slot


@dataclass(frozen=True)
class GradientRounds:
    """The contributions of a step. A parameter that is not in a mapping has none."""

    by_bucket: Mapping[int, Sequence[Mapping[str, int]]]
    """For each trainable bucket its rounds: the contributions to each parameter after which the
    bucket is reduced."""
    passes: Sequence[Mapping[str, int]]
    """For each backward pass of the step, the contributions to each parameter."""


def planned_rounds(
    buckets: Iterable[Bucket], microbatches: int, *, reduce_every_microbatch: bool
) -> GradientRounds:
    """Return the rounds of a step in which each microbatch has the contributions of the bucket
    plan. ``buckets`` are the trainable ones."""
    buckets = tuple(buckets)
    # If slots accumulate, all microbatches are one round.
    in_round = 1 if reduce_every_microbatch else microbatches
    one_pass = {p.spec.name: p.spec.contributions for b in buckets for p in b.placements}
    return GradientRounds(
        by_bucket={
            bucket.index: [
                {p.spec.name: p.spec.contributions * in_round for p in bucket.placements}
            ]
            * (microbatches // in_round)
            for bucket in buckets
        },
        passes=[one_pass] * microbatches,
    )


class Counting(ABC):
    """The contributions of one step, and which of them end a round of a bucket."""

    ended_by_step: Sequence[int] = ()
    """The buckets whose last round only the end of the step shows."""

    def __init__(self) -> None:
        self.this_pass: dict[str, int] = {}
        """By parameter, contributions since the last ``end_pass``. That is not called for our own
        model: they are those of the whole step."""
        self.passes: list[Mapping[str, int]] = []
        """The backward passes that have ended."""

    @property
    def written(self) -> set[str]:
        """The parameters that have had a contribution in this step."""
        return {name for one_pass in (*self.passes, self.this_pass) for name in one_pass}

    def count(self, bucket: int, name: str) -> bool:
        """Count a contribution. Returns whether its bucket is complete with it."""
        self.this_pass[name] = self.this_pass.get(name, 0) + 1
        return self._is_complete_with(bucket, name)

    def end_pass(self, names: Iterable[str]) -> Sequence[int]:
        """End a backward pass. ``names`` are those of all trainable parameters. Returns the buckets
        whose round ends with the pass, in the order of the plan. Raises RuntimeError if parameters
        have had other contributions than planned."""
        number = len(self.passes)
        self.passes.append(self.this_pass)
        self.this_pass = {}
        return self._end_pass(number, names)

    def end_step(self, names: Iterable[str]) -> Sequence[int]:
        """End the step. Returns the buckets whose last round ends with it, in the order of the
        plan."""
        return ()

    @abstractmethod
    def begin_round(self, bucket: int, number: int) -> bool:
        """Begin the round of a bucket that follows its first ``number`` ones. Returns whether the
        step has such a round."""

    @abstractmethod
    def is_last(self, bucket: int, number: int) -> bool:
        """Whether a bucket is known to have no round after the first ``number``."""

    @abstractmethod
    def make_way(self, holder: int, slot: Slot, *, bucket: int, name: str) -> None:
        """End the round of ``holder`` as it is: a contribution to ``name``, in ``bucket``, needs
        its slot. Raises RuntimeError where that round is planned and has not ended."""

    @abstractmethod
    def lacking(self, buckets: Mapping[int, Iterable[str]]) -> dict[int, list[str]]:
        """Return the parameters that still lack a contribution, of those that each bucket has."""

    @abstractmethod
    def rounds(self) -> GradientRounds:
        """Return the rounds of this step, which has ended."""

    @abstractmethod
    def _is_complete_with(self, bucket: int, name: str) -> bool: ...

    @abstractmethod
    def _end_pass(self, number: int, names: Iterable[str]) -> Sequence[int]: ...


class PlannedCounting(Counting):
    """The contributions of a step whose rounds are known."""

    def __init__(self, rounds: GradientRounds, label: Callable[[int], str]) -> None:
        """``label`` names a bucket in messages."""
        super().__init__()
        self._rounds = rounds
        self._label = label
        self._missing: dict[int, dict[str, int]] = {}
        """By bucket and parameter, contributions that this round still needs."""

    def begin_round(self, bucket: int, number: int) -> bool:
        rounds = self._rounds.by_bucket[bucket]
        is_planned = number < len(rounds)
        self._missing[bucket] = dict(rounds[number]) if is_planned else {}
        return is_planned

    def is_last(self, bucket: int, number: int) -> bool:
        return number == len(self._rounds.by_bucket[bucket])

    def make_way(self, holder: int, slot: Slot, *, bucket: int, name: str) -> None:
        # A wait would last for ever: the missing contribution comes from the thread that waits.
        raise RuntimeError(
            f"{name}: {self._label(bucket)} needs gradient slot {slot} "
            f"while {self._label(holder)} still misses {', '.join(self._missing[holder])}"
        )

    def lacking(self, buckets: Mapping[int, Iterable[str]]) -> dict[int, list[str]]:
        return {bucket: list(self._missing[bucket]) for bucket in buckets}

    def rounds(self) -> GradientRounds:
        return self._rounds

    def _is_complete_with(self, bucket: int, name: str) -> bool:
        missing = self._missing[bucket]
        if name not in missing:
            # The slot may be on its way to other ranks: this would be lost, or sent in part.
            passes = self._rounds.passes
            planned = passes[min(len(self.passes), len(passes) - 1)].get(name, 0)
            raise RuntimeError(
                f"{name}: more gradients than the {planned} planned for each microbatch, "
                f"in {self._label(bucket)}"
            )
        missing[name] -= 1
        if missing[name] == 0:
            del missing[name]
        return not missing

    def _end_pass(self, number: int, names: Iterable[str]) -> Sequence[int]:
        passes = self._rounds.passes
        if number >= len(passes):
            raise RuntimeError(
                f"backward pass {number + 1} of a step: got one more, expected {len(passes)}"
            )
        ended = self.passes[number]
        expected = passes[number]
        if ended == expected:
            return ()  # complete buckets have been reduced at their last contribution
        differing = [
            f"{name} ({ended.get(name, 0)} instead of {expected.get(name, 0)})"
            for name in names
            if ended.get(name, 0) != expected.get(name, 0)
        ]
        raise RuntimeError(
            f"backward pass {number + 1} of {len(passes)} ended with other gradients than planned: "
            f"{', '.join(differing)}"
        )
