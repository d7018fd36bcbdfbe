"""The trace of one step, recorded by ``megatron_llama.planner.trace``: integers and words, written
as JSON and read without torch."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from megatron_llama.config.lines import parse_json
from megatron_llama.errors import ConfigError, describe

FORMAT = 1


@dataclass(frozen=True)
class Operator:
    """An operator with the shapes of its inputs."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the input tensors."""
    dtype: str
    flops: int
    """FLOPs of matrix products and attention, with half of the causal scores."""
    bytes: int
    """Bytes read and written."""


@dataclass(frozen=True)
class Message:
    """A collective or a transfer that a rank issues."""

    axis: str
    operation: str
    bytes: int
    """Bytes of the full (gathered) tensor."""


@dataclass(frozen=True)
class ActionSegment:
    """Calls and memory of one action of the schedule. Equal segments are listed once."""

    calls: tuple[int, ...]
    """Calls in order: operator n of the list as n, message n as -1 - n."""
    allocated: int
    """Bytes of storages made in the action."""
    freed: int
    """Bytes of storages freed in the action."""
    peak: int
    """Peak bytes in excess of the bytes at the beginning of the action."""


@dataclass(frozen=True)
class TracedAction:
    """An action that was carried out."""

    action: str
    """Name in the schedule; ``the start`` before the first action and ``the update`` after the
    last."""
    segment: int
    live: int
    """Bytes in addition to the state at the beginning of the action."""


@dataclass(frozen=True)
class Lifetime:
    """Storages that outlive the action that made them."""

    made: int
    """Index of that action among the traced ones; -1 for storages made before the step."""
    ended: int
    """Index of the action in which they were freed; -1 for storages alive after the step."""
    count: int
    bytes: int
    """Sum of the bytes of these storages."""


@dataclass(frozen=True)
class StageTrace:
    """The step of one pipeline rank, which stands for all ranks that do the same."""

    ranks: tuple[int, ...]
    """All pipeline ranks that do the same."""
    layers: tuple[tuple[int, int], ...]
    """First block and number of blocks of each stage of the first of these ranks."""
    groups: dict[str, tuple[int, ...]]
    """Global ranks of each axis, for the first of these ranks with dp, cp and tp rank 0."""
    state: dict[str, int]
    """Bytes between steps and of the step's batches, by component."""
    actions: tuple[TracedAction, ...]
    """The actions of the whole step."""
    traced: tuple[str, ...]
    """The actions that were carried out, by this rank or by another rank with the same layers."""
    lifetimes: tuple[Lifetime, ...]
    """Lifetimes in these actions."""


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a step."""

    action: str
    bytes: int
    """Bytes of the state and of everything else."""
    kept: int
    """Bytes made by earlier actions of the step: activations, messages, gradients between
    stages."""
    working: int
    """Bytes made by the action itself."""


@dataclass(frozen=True)
class Trace:
    """A step of a whole run: one ``StageTrace`` for each kind of pipeline rank."""

    label: str
    """Model and layout, for people."""
    world_size: int
    microbatches: int
    """Microbatches of each data-parallel rank."""
    operators: tuple[Operator, ...]
    messages: tuple[Message, ...]
    segments: tuple[ActionSegment, ...]
    stages: tuple[StageTrace, ...]

    def stage_of(self, rank: int) -> StageTrace:
        """Return the trace of a pipeline rank."""
        return next(stage for stage in self.stages if rank in stage.ranks)

    def _calls(self, stage: StageTrace) -> Counter[int]:
        """Return how often each call of ``ActionSegment.calls`` occurs in the step."""
        counts = Counter[int]()
        for segment, times in Counter(done.segment for done in stage.actions).items():
            for call in self.segments[segment].calls:
                counts[call] += times
        return counts

    def operator_calls(self, stage: StageTrace) -> Counter[Operator]:
        """Return how often each operator runs in the step."""
        calls = self._calls(stage).items()
        return Counter({self.operators[call]: times for call, times in calls if call >= 0})

    def flops(self, stage: StageTrace) -> int:
        """Return the FLOPs of the whole step."""
        return sum(operator.flops * count for operator, count in self.operator_calls(stage).items())

    def traffic(self, stage: StageTrace) -> dict[tuple[str, str], tuple[int, int]]:
        """Return (messages, bytes) of the whole step by (axis, operation), counted as by a
        recorder."""
        totals: dict[tuple[str, str], tuple[int, int]] = {}
        for call, times in self._calls(stage).items():
            if call < 0:
                message = self.messages[-1 - call]
                kind = message.axis, message.operation
                calls, size = totals.get(kind, (0, 0))
                totals[kind] = calls + times, size + times * message.bytes
        return totals

    def peak(self, stage: StageTrace) -> Peak:
        """Return the fullest moment, the first if there are several."""
        done = max(
            stage.actions, key=lambda action: action.live + self.segments[action.segment].peak
        )
        working = self.segments[done.segment].peak
        return Peak(
            done.action, sum(stage.state.values()) + done.live + working, done.live, working
        )

    def kept(self, stage: StageTrace) -> int:
        """Return the most bytes in addition to the state between two actions."""
        return max(done.live for done in stage.actions)

    def to_json(self) -> str:
        """Return the trace as one line."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Trace:
        """Return the trace in a text of ``to_json``. Raises ConfigError for any other text."""
        try:
            fields = parse_json(text)
            if fields.pop("format") != FORMAT:
                raise ValueError("another version")
            return Trace(
                fields["label"],
                fields["world_size"],
                fields["microbatches"],
                tuple(
                    Operator(**{**operator, "shapes": tuple(map(tuple, operator["shapes"]))})
                    for operator in fields["operators"]
                ),
                tuple(Message(**message) for message in fields["messages"]),
                tuple(
                    ActionSegment(**{**segment, "calls": tuple(segment["calls"])})
                    for segment in fields["segments"]
                ),
                tuple(map(_stage, fields["stages"])),
            )
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(
                describe(
                    "trace", got=error, expected="what plan trace --json wrote", do="trace again"
                )
            ) from None


def _stage(fields: dict[str, Any]) -> StageTrace:
    return StageTrace(
        ranks=tuple(fields["ranks"]),
        layers=tuple(map(tuple, fields["layers"])),
        groups={axis: tuple(ranks) for axis, ranks in fields["groups"].items()},
        state=fields["state"],
        actions=tuple(TracedAction(**action) for action in fields["actions"]),
        traced=tuple(fields["traced"]),
        lifetimes=tuple(Lifetime(**lifetime) for lifetime in fields["lifetimes"]),
    )
