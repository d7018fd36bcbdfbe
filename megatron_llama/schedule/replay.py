"""When every pass of a schedule runs, under exactly the rules of the runtime, with transfers that take no time.

A rank walks its list. A receive is posted and returns at once. A pass waits until what it receives has been sent. A send
returns when the previous message of its link has been taken, which is when its receive was posted: at most one sent tensor
is kept per link. Ranks that all wait are a deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megatron_llama.schedule.actions import RECEIVES, SENDS, Action, Link, Op, Schedule, ScheduleError, link_of, other_end, receive_of


@dataclass(frozen=True)
class Costs:
    """How long the passes of one microbatch at one stage last, in any unit."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1

    def of(self, op: Op) -> float:
        """The duration of a pass."""
        if op is Op.BACKWARD:
            return self.backward_input + self.backward_weight
        return {Op.FORWARD: self.forward, Op.BACKWARD_INPUT: self.backward_input, Op.BACKWARD_WEIGHT: self.backward_weight}[op]


@dataclass(frozen=True)
class TimedPass:
    """A pass with the time at which it starts and ends."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The passes of every rank, in order."""

    ranks: tuple[tuple[TimedPass, ...], ...]

    @property
    def makespan(self) -> float:
        """When the last rank is done; the first begins at 0."""
        return max(passes[-1].end for passes in self.ranks)

    def busy(self, rank: int) -> float:
        """Time that a rank computes."""
        return sum(one.end - one.start for one in self.ranks[rank])

    def stalled(self, rank: int) -> float:
        """Time that a rank is idle between its first pass and its last: the bubble as the zero-bubble papers define it."""
        return self.ranks[rank][-1].end - self.ranks[rank][0].start - self.busy(rank)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run all ranks as far as they can go. Raises ScheduleError naming who waits for what if not all reach their end."""
    replay = _Replay(schedule, costs)
    cursors, moved = [0] * len(schedule.ranks), True
    waits: dict[int, Action] = {}
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while cursors[rank] < len(actions):
                awaited = replay.perform(rank, actions[cursors[rank]])
                if awaited is not None:
                    waits[rank] = awaited
                    break
                cursors[rank] += 1
                moved = True
    stuck = [rank for rank, actions in enumerate(schedule.ranks) if cursors[rank] < len(actions)]
    if stuck:
        parts = [f"rank {rank} at {schedule.ranks[rank][cursors[rank]]} waits for {waits[rank]}" for rank in stuck]
        raise ScheduleError(f"{schedule.name}: deadlock: {'; '.join(parts)}")
    return Timeline(tuple(map(tuple, replay.passes)))


class _Replay:
    """The clock of every rank, and what has been sent and posted so far."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.placement = schedule.placement
        self.duration = {op: costs.of(op) for op in schedule.passes}
        self.clocks: list[float] = [0] * len(schedule.ranks)
        self.passes: list[list[TimedPass]] = [[] for _ in schedule.ranks]
        self.sent_at: dict[Action, float] = {}
        self.sends: dict[Link, list[Action]] = defaultdict(list)
        self.posted_at: dict[Link, list[float]] = defaultdict(list)

    def perform(self, rank: int, action: Action) -> Action | None:
        """Carry out the action, or return the one of another rank that it must wait for."""
        if action.op in RECEIVES:
            self.posted_at[link_of(action, self.placement)].append(self.clocks[rank])
            return None
        if action.op in SENDS:
            return self._send(rank, action)
        receive = receive_of(action, self.placement)
        start = self.clocks[rank]
        if receive is not None:
            send = other_end(receive)
            if send not in self.sent_at:
                return send
            start = max(start, self.sent_at[send])
        self.clocks[rank] = start + self.duration[action.op]
        self.passes[rank].append(TimedPass(action, start, self.clocks[rank]))
        return None

    def _send(self, rank: int, action: Action) -> Action | None:
        link = link_of(action, self.placement)
        before, posted = self.sends[link], self.posted_at[link]
        if len(posted) < len(before):
            return other_end(before[-1])
        if before:
            self.clocks[rank] = max(self.clocks[rank], posted[len(before) - 1])
        self.sent_at[action] = self.clocks[rank]
        before.append(action)
        return None
