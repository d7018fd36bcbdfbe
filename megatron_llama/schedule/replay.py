"""The times at which the passes of a schedule run, under exactly the rules of the runtime, with
transfers that take no time.

A rank walks its list of actions. A receive is posted and returns at once. A pass waits until its
input has been sent. A send returns when the previous message of its link has been taken, which is
when the receive of that message was posted: at most one sent tensor is kept per link. A deadlock is
a state in which every rank that is not at its end waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_llama.schedule.actions import (
    RECEIVES,
    SENDS,
    Action,
    Link,
    Op,
    Schedule,
    ScheduleError,
    StagePlacement,
    link_of,
    other_end,
    receive_of,
)


@dataclass(frozen=True)
class Costs:
    """The durations of the passes of one microbatch at one stage, in any unit of time."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1

    def of(self, op: Op) -> float:
        """Return the duration of a pass of this kind."""
        if op is Op.BACKWARD:
            return self.backward_input + self.backward_weight
        return {
            Op.FORWARD: self.forward,
            Op.BACKWARD_INPUT: self.backward_input,
            Op.BACKWARD_WEIGHT: self.backward_weight,
        }[op]


class TimedPass(NamedTuple):
    """A pass with the time at which it starts and ends."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The timed passes of every rank, in order."""

    ranks: tuple[tuple[TimedPass, ...], ...]

    @property
    def makespan(self) -> float:
        """The time at which the last rank is done; the first one begins at 0."""
        return max(passes[-1].end for passes in self.ranks)

    def busy(self, rank: int) -> float:
        """Return the time that a rank computes."""
        return sum(timed.end - timed.start for timed in self.ranks[rank])

    def stalled(self, rank: int) -> float:
        """Return the time that a rank is idle between its first pass and its last: the bubble as
        the zero-bubble papers define it."""
        return self.ranks[rank][-1].end - self.ranks[rank][0].start - self.busy(rank)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run all ranks to the end of their lists and return when each pass ran. Raises ScheduleError
    naming the waits of each rank if they deadlock."""
    replay = _Replay(schedule, costs)
    ranks = schedule.ranks
    cursors = [0] * len(ranks)
    waits = [Action(Op.FORWARD, 0, 0)] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            cursor, awaited = replay.advance(rank, actions, cursors[rank])
            moved = moved or cursor > cursors[rank]
            cursors[rank] = cursor
            if awaited is not None:
                waits[rank] = awaited
    stuck = [rank for rank, actions in enumerate(ranks) if cursors[rank] < len(actions)]
    if stuck:
        parts = [
            f"rank {rank} at {ranks[rank][cursors[rank]]} waits for {waits[rank]}" for rank in stuck
        ]
        raise ScheduleError(f"{schedule.name}: deadlock: {'; '.join(parts)}")
    return Timeline(tuple(map(tuple, replay.passes)))


@dataclass
class _Traffic:
    """The messages and receives of one link so far."""

    sent: list[Action] = field(default_factory=list)
    posted: list[float] = field(default_factory=list)
    """The time at which each receive of this link was posted."""


class _Replay:
    """The clock of every rank, and the sends and receives so far.

    Values that depend on operation and stage alone are computed once: a long schedule has a million
    actions."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        links = defaultdict[Link, _Traffic](_Traffic)
        durations = {op: costs.of(op) for op in schedule.passes}
        kinds = {(op, stage) for actions in schedule.ranks for op, stage, _ in actions}
        self.roles = {
            kind: _role(Action(*kind, 0), schedule.placement, links, durations) for kind in kinds
        }
        self.clocks: list[float] = [0] * len(schedule.ranks)
        self.passes: list[list[TimedPass]] = [[] for _ in schedule.ranks]
        self.sent_at: dict[tuple[Op, int, int], float] = {}

    def advance(
        self, rank: int, actions: tuple[Action, ...], cursor: int
    ) -> tuple[int, Action | None]:
        """Carry out actions from ``cursor`` on until one must wait. Return its position and the
        action of another rank that it waits for, or the end of the list and None."""
        clock = self.clocks[rank]
        sent_at = self.sent_at
        for position in range(cursor, len(actions)):
            action = actions[position]
            op, stage, microbatch = action
            receiving, sending, source, duration = self.roles[op, stage]
            if receiving is not None:
                receiving.posted.append(clock)
            elif sending is not None:
                before = len(sending.sent)
                if len(sending.posted) < before:
                    self.clocks[rank] = clock
                    return position, other_end(sending.sent[-1])
                if before and sending.posted[before - 1] > clock:
                    clock = sending.posted[before - 1]
                sent_at[action] = clock
                sending.sent.append(action)
            else:
                start = clock
                if source is not None:
                    arrival = sent_at.get((*source, microbatch))
                    if arrival is None:
                        self.clocks[rank] = clock
                        return position, Action(*source, microbatch)
                    if arrival > start:
                        start = arrival
                clock = start + duration
                self.passes[rank].append(TimedPass(action, start, clock))
        self.clocks[rank] = clock
        return len(actions), None


_Role = tuple[_Traffic | None, _Traffic | None, tuple[Op, int] | None, float]
"""The properties of a kind of action: the link that it receives from; the link that it sends into;
for a pass the kind of send that it waits for, and its duration."""


def _role(
    action: Action,
    placement: StagePlacement,
    links: dict[Link, _Traffic],
    durations: Mapping[Op, float],
) -> _Role:
    if action.op in RECEIVES:
        return links[link_of(action, placement)], None, None, 0
    if action.op in SENDS:
        return None, links[link_of(action, placement)], None, 0
    receive = receive_of(action, placement)
    return None, None, other_end(receive)[:2] if receive is not None else None, durations[action.op]
