"""When a bucket has all gradients of a round: the contributions of a step, counted by a plan or
open.

``PlannedCounting`` knows the contributions of every round, and a bucket is complete with the last
of them. ``OpenCounting`` learns them: nobody knows which contribution is the last, so a bucket ends
a round when another one needs its slot, at the end of a backward pass, or at the end of the step.
What it has seen is the plan of the steps that follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GradientRounds:
    """Which contributions a step has. A parameter that is not in a mapping has none."""

    by_bucket: Mapping[int, Sequence[Mapping[str, int]]]
    """For each trainable bucket its rounds: the contributions to each parameter after which the
    bucket is reduced."""
    passes: Sequence[Mapping[str, int]]
    """For each backward pass of the step, the contributions to each parameter."""


class Counting(ABC):
    """The contributions of one step."""

    is_open: bool
    """Whether a bucket ends a round by what others need, and not by what it has."""

    def __init__(self) -> None:
        self.this_pass: dict[str, int] = {}
        """By parameter, contributions of this backward pass."""
        self.passes: list[Mapping[str, int]] = []
        """The backward passes that have ended."""
        self.sequence: list[str] = []
        """The parameters of this pass's contributions, one by one, where counting is open."""

    @property
    def written(self) -> set[str]:
        """The parameters that have had a contribution in this step."""
        return {name for one_pass in (*self.passes, self.this_pass) for name in one_pass}

    def count(self, bucket: int, name: str) -> bool:
        """Count a contribution. Returns whether its bucket is complete with it."""
        self.this_pass[name] = self.this_pass.get(name, 0) + 1
        return self._is_complete_with(bucket, name)

    def end_pass(self, names: Iterable[str]) -> None:
        """End a backward pass. ``names`` are those of all trainable parameters. Raises RuntimeError
        if parameters have had other contributions than planned."""
        ended = self.this_pass
        number = len(self.passes)
        self.this_pass = {}
        self.sequence = []
        self.passes.append(ended)
        self._check_pass(number, ended, names)

    @abstractmethod
    def begin_round(self, bucket: int, number: int) -> bool:
        """Begin a bucket's round ``number``, after as many. Returns whether it has that round."""

    @abstractmethod
    def is_last(self, bucket: int, number: int) -> bool:
        """Whether a bucket is known to have no round after the first ``number``."""

    @abstractmethod
    def lacking(self, buckets: Mapping[int, Iterable[str]]) -> dict[int, list[str]]:
        """Returns the parameters that still lack a contribution, of those that each bucket has."""

    @abstractmethod
    def rounds(self) -> GradientRounds:
        """Returns the rounds of this step, which has ended."""

    @abstractmethod
    def _is_complete_with(self, bucket: int, name: str) -> bool: ...

    @abstractmethod
    def _check_pass(self, number: int, ended: Mapping[str, int], names: Iterable[str]) -> None: ...


class PlannedCounting(Counting):
    """The contributions of a step whose rounds are known."""

    is_open = False

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

    def lacking(self, buckets: Mapping[int, Iterable[str]]) -> dict[int, list[str]]:
        return {bucket: list(self._missing[bucket]) for bucket in buckets}

    def rounds(self) -> GradientRounds:
        return self._rounds

    def _is_complete_with(self, bucket: int, name: str) -> bool:
        missing = self._missing[bucket]
        if name not in missing:
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

    def _check_pass(self, number: int, ended: Mapping[str, int], names: Iterable[str]) -> None:
        passes = self._rounds.passes
        if number >= len(passes):
            raise RuntimeError(
                f"backward pass {number + 1} of a step: got one more, expected {len(passes)}"
            )
        expected = passes[number]
        if ended == expected:
            return
        differing = [
            f"{name} ({ended.get(name, 0)} instead of {expected.get(name, 0)})"
            for name in names
            if ended.get(name, 0) != expected.get(name, 0)
        ]
        raise RuntimeError(
            f"backward pass {number + 1} of {len(passes)} ended with other gradients than planned: "
            f"{', '.join(differing)}"
        )


class OpenCounting(Counting):
    """The contributions of a step whose rounds are found out."""

    is_open = True

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[int, dict[str, int]] = {}
        """By bucket and parameter, contributions of this round."""
        self._ended: dict[int, list[Mapping[str, int]]] = {}
        """By bucket, the rounds that have ended."""

    def begin_round(self, bucket: int, number: int) -> bool:
        ended = self._ended.setdefault(bucket, [])
        if number:
            ended.append(self._counts[bucket])
        self._counts[bucket] = {}
        return True

    def is_last(self, bucket: int, number: int) -> bool:
        return False  # only the end of the step shows that

    def lacking(self, buckets: Mapping[int, Iterable[str]]) -> dict[int, list[str]]:
        written = self.written
        return {
            bucket: [name for name in names if name not in written]
            for bucket, names in buckets.items()
        }

    def rounds(self) -> GradientRounds:
        return GradientRounds(
            by_bucket={bucket: tuple(ended) for bucket, ended in self._ended.items()},
            passes=tuple(self.passes),
        )

    def _is_complete_with(self, bucket: int, name: str) -> bool:
        counts = self._counts[bucket]
        counts[name] = counts.get(name, 0) + 1
        self.sequence.append(name)
        return False

    def _check_pass(self, number: int, ended: Mapping[str, int], names: Iterable[str]) -> None:
        """Any pass will do: there is no plan."""
