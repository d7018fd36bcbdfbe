"""What one step does, as traced (``megatron_llama.planner.trace``): integers and words, written as
JSON and read without torch."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from megatron_llama.errors import ConfigError, describe

FORMAT = 1


@dataclass(frozen=True)
class Operator:
    """A call of an operator with these shapes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors that go in."""
    dtype: str
    flops: int
    """Of matrix products and attention; half of a causal square of scores."""
    bytes: int
    """Read and written."""


@dataclass(frozen=True)
class Message:
    """A collective or a transfer that a rank issues."""

    axis: str
    operation: str
    bytes: int
    """Of the full (gathered) tensor."""


@dataclass(frozen=True)
class ActionSegment:
    """What happens in one action. Equal ones are listed once."""

    calls: tuple[int, ...]
    """In order: operator n of the list as n, message n as -1 - n."""
    allocated: int
    """Bytes of storages made here."""
    freed: int
    """Bytes of storages that end here."""
    peak: int
    """Most bytes above those that were there when it began."""


@dataclass(frozen=True)
class TracedAction:
    """An action that was carried out."""

    action: str
    """As the schedule writes it, ``the start`` before the first and ``the update`` behind the
    last."""
    segment: int
    live: int
    """Bytes beside the state when it began."""


@dataclass(frozen=True)
class Lifetime:
    """Storages that outlive the action that made them."""

    made: int
    """Index of that action among the traced ones; -1: before the step."""
    ended: int
    """Index of the action in which they were freed; -1: still there at the end of the step."""
    count: int
    bytes: int
    """Of all of them."""


@dataclass(frozen=True)
class StageTrace:
    """The step of a pipeline rank, and of those that do the same."""

    ranks: tuple[int, ...]
    """Pipeline ranks that it stands for."""
    layers: tuple[tuple[int, int], ...]
    """First block and number of blocks of each stage of the first of them."""
    groups: dict[str, tuple[int, ...]]
    """Global ranks of every axis, for the first of them, where dp, cp and tp are 0."""
    state: dict[str, int]
    """Bytes that are there between steps, and its batches, by component."""
    actions: tuple[TracedAction, ...]
    """Of the whole step."""
    traced: tuple[str, ...]
    """The actions that were really carried out, of this rank or of another one with the same
    layers."""
    lifetimes: tuple[Lifetime, ...]
    """Of these."""


@dataclass(frozen=True)
class Peak:
    """The moment of a step at which most bytes are there."""

    action: str
    bytes: int
    """All of them."""
    kept: int
    """Made by earlier actions of the step: activations, messages, gradients between stages."""
    working: int
    """Made by the action itself."""


@dataclass(frozen=True)
class Trace:
    """A step of a whole run: one ``StageTrace`` for each kind of pipeline rank."""

    label: str
    """Model and layout, for people."""
    world_size: int
    microbatches: int
    """Of each data-parallel rank."""
    operators: tuple[Operator, ...]
    messages: tuple[Message, ...]
    segments: tuple[ActionSegment, ...]
    stages: tuple[StageTrace, ...]

    def stage_of(self, rank: int) -> StageTrace:
        """That of a pipeline rank."""
        return next(stage for stage in self.stages if rank in stage.ranks)

    def operator_calls(self, stage: StageTrace) -> Counter[Operator]:
        """How often each operator runs in the step."""
        counts: Counter[Operator] = Counter()
        for segment, times in Counter(done.segment for done in stage.actions).items():
            for call in self.segments[segment].calls:
                if call >= 0:
                    counts[self.operators[call]] += times
        return counts

    def flops(self, stage: StageTrace) -> int:
        """Of the whole step."""
        return sum(operator.flops * count for operator, count in self.operator_calls(stage).items())

    def traffic(self, stage: StageTrace) -> dict[tuple[str, str], tuple[int, int]]:
        """Messages and bytes of the whole step by (axis, operation), as a recorder counts them."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for segment, times in Counter(done.segment for done in stage.actions).items():
            for call in self.segments[segment].calls:
                if call < 0:
                    message = self.messages[-1 - call]
                    calls, size = found.get((message.axis, message.operation), (0, 0))
                    found[message.axis, message.operation] = (
                        calls + times,
                        size + times * message.bytes,
                    )
        return found

    def peak(self, stage: StageTrace) -> Peak:
        """The fullest moment, the first of several."""
        done = max(stage.actions, key=lambda one: one.live + self.segments[one.segment].peak)
        working = self.segments[done.segment].peak
        return Peak(
            done.action, sum(stage.state.values()) + done.live + working, done.live, working
        )

    def kept(self, stage: StageTrace) -> int:
        """Most bytes beside the state that are there between two actions."""
        return max(done.live for done in stage.actions)

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Trace:
        """What ``to_json`` wrote. Raises ConfigError for anything else."""
        try:
            fields = json.loads(text)
            if fields.pop("format") != FORMAT:
                raise ValueError("another version")
            return _trace(fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                describe(
                    "trace", got=error, expected="what plan trace --json wrote", do="trace again"
                )
            ) from None


def _trace(fields: dict[str, Any]) -> Trace:
    return Trace(
        fields["label"],
        fields["world_size"],
        fields["microbatches"],
        tuple(
            Operator(**{**one, "shapes": tuple(map(tuple, one["shapes"]))})
            for one in fields["operators"]
        ),
        tuple(Message(**one) for one in fields["messages"]),
        tuple(ActionSegment(**{**one, "calls": tuple(one["calls"])}) for one in fields["segments"]),
        tuple(map(_stage, fields["stages"])),
    )


def _stage(fields: dict[str, Any]) -> StageTrace:
    return StageTrace(
        ranks=tuple(fields["ranks"]),
        layers=tuple(map(tuple, fields["layers"])),
        groups={axis: tuple(ranks) for axis, ranks in fields["groups"].items()},
        state=fields["state"],
        actions=tuple(TracedAction(**one) for one in fields["actions"]),
        traced=tuple(fields["traced"]),
        lifetimes=tuple(Lifetime(**one) for one in fields["lifetimes"]),
    )
