"""An event simulator. It walks the actions of a ``Schedule`` as the runtime does, with passes and
transfers that take time.

The rules are those of ``schedule/replay.py``: a receive is posted and returns, a pass waits
for its message, a send waits until the previous message of its link was taken. Gathers and
reductions run at the same time as passes and may make them longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_llama.schedule import Op, Schedule, ScheduleError, TimedPass, Timeline
from megatron_llama.schedule.actions import (
    RECEIVES,
    SENDS,
    Action,
    Link,
    link_of,
    other_end,
    receive_of,
)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of the passes of one microbatch at one stage."""

    forward: float
    backward_input: float
    backward_weight: float
    gather_forward: float = 0.0
    """Seconds of gathering parameters during each forward pass."""
    gather_backward: float = 0.0
    reduce: float = 0.0
    """Seconds of reducing gradients after each backward pass."""
    slowdown: float = 0.0
    """Delay that simultaneous kernels and communication cause each other, as a share of the shorter
    of the two."""

    def of(self, op: Op) -> float:
        """Return a pass's duration: the longer of kernels and communication, plus a slowdown."""
        if op is Op.FORWARD:
            return self._overlapped(self.forward, self.gather_forward)
        weight = 0.0 if op is Op.BACKWARD_INPUT else self.backward_weight
        if op is Op.BACKWARD_WEIGHT:
            return self._overlapped(weight, self.reduce)
        kernels = self.backward_input + weight
        return self._overlapped(
            kernels, max(self.gather_backward, self.reduce if op is Op.BACKWARD else 0.0)
        )

    @property
    def alone(self) -> StageTimes:
        """The same times without communication."""
        return replace(self, gather_forward=0.0, gather_backward=0.0, reduce=0.0)

    def _overlapped(self, kernels: float, sent: float) -> float:
        return max(kernels, sent) + self.slowdown * min(kernels, sent)


def simulate(schedule: Schedule, times: Sequence[StageTimes], transfer: float) -> Timeline:
    """Return the start and end of every pass. ``times`` has an entry for each stage; ``transfer``
    is the seconds of a message between neighbours.

    Raises ScheduleError for a deadlock, which no validated schedule has."""
    walk = _Walk(schedule, times, transfer)
    cursors = [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while cursors[rank] < len(actions) and walk.perform(rank, actions[cursors[rank]]):
                cursors[rank] += 1
                moved = True
    if any(cursor < len(actions) for cursor, actions in zip(cursors, schedule.ranks, strict=True)):
        raise ScheduleError(f"{schedule.name}: deadlock in the simulation")
    return Timeline(tuple(map(tuple, walk.passes)))


class _Walk:
    """The clock of every rank, the arrivals of messages, and the times at which links are free."""

    def __init__(self, schedule: Schedule, times: Sequence[StageTimes], transfer: float) -> None:
        self.placement = schedule.placement
        self.transfer = transfer
        self.durations = {
            (op, stage): time.of(op) for op in schedule.passes for stage, time in enumerate(times)
        }
        self.clocks = [0.0] * len(schedule.ranks)
        self.passes: list[list[TimedPass]] = [[] for _ in schedule.ranks]
        self.arrives: dict[Action, float] = {}
        self.free: dict[Link, float] = defaultdict(float)
        self.sent: dict[Link, int] = defaultdict(int)
        self.posted: dict[Link, list[float]] = defaultdict(list)

    def perform(self, rank: int, action: Action) -> bool:
        """Carry out the action and return True, or return False if it has to wait for a rank."""
        if action.op in RECEIVES:
            self.posted[link_of(action, self.placement)].append(self.clocks[rank])
            return True
        if action.op in SENDS:
            return self._send(rank, action)
        receive = receive_of(action, self.placement)
        start = self.clocks[rank]
        if receive is not None:
            arrival = self.arrives.get(other_end(receive))
            if arrival is None:
                return False
            start = max(start, arrival)
        self.clocks[rank] = start + self.durations[action.op, action.stage]
        self.passes[rank].append(TimedPass(action, start, self.clocks[rank]))
        return True

    def _send(self, rank: int, action: Action) -> bool:
        link = link_of(action, self.placement)
        before = self.sent[link]
        posted = self.posted[link]
        if len(posted) < before:
            return False
        if before:
            self.clocks[rank] = max(self.clocks[rank], posted[before - 1])
        self.arrives[action] = self.free[link] = (
            max(self.clocks[rank], self.free[link]) + self.transfer
        )
        self.sent[link] += 1
        return True


def tail(ends: Sequence[tuple[float, float]], messages: Sequence[tuple[float, float]]) -> float:
    """Return the seconds from the end of a rank's last pass to the end of its last reduction.

    ``ends`` are (start, end) of the passes that complete gradients; ``messages`` are (share of the
    pass after which the message is ready, seconds), in order of completion."""
    clock = 0.0
    last = max(end for _, end in ends)
    for start, end in ends:
        for share, seconds in messages:
            clock = max(clock, start + share * (end - start)) + seconds / len(ends)
    return max(0.0, clock - last)
