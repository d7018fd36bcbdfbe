"""Pipeline schedules as plain lists of actions, and the proof that they cannot hang.

A rank walks its list. ``RECV_*`` posts a receive and returns at once; a pass waits for the receive it needs; ``SEND_*``
hands a tensor over and returns at once, after the previous message of the same link has been taken (so at most one
sent tensor is kept per link). ``validate`` replays all lists under exactly these rules.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace


class ScheduleError(ValueError):
    """A schedule is incomplete, out of order, or would deadlock."""


class Op(enum.Enum):
    """What one action does. FORWARD tensors flow to the next stage, BACKWARD tensors to the previous one."""

    RECV_FORWARD = "recv_forward"
    FORWARD = "forward"
    SEND_FORWARD = "send_forward"
    RECV_BACKWARD = "recv_backward"
    BACKWARD = "backward"
    SEND_BACKWARD = "send_backward"


@dataclass(frozen=True)
class Action:
    """One step of a rank: an operation on one microbatch at one stage."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op.value}(stage {self.stage}, microbatch {self.microbatch})"


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank; stage s runs on rank s."""

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    passes: tuple[Op, ...] = (Op.FORWARD, Op.BACKWARD)
    """What each microbatch goes through at each stage."""


def forward_only(stages: int, microbatches: int) -> Schedule:
    """Evaluation: every microbatch once through the stages."""
    order = [(Op.FORWARD, microbatch) for microbatch in range(microbatches)]
    return replace(_build("forward_only", stages, microbatches, lambda stage: iter(order)), passes=(Op.FORWARD,))


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., 2019)."""
    return _build("gpipe", stages, microbatches, lambda stage: _passes(microbatches, microbatches))


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """Warm up with as many forwards as stages follow, then alternate (PipeDream-Flush, Narayanan et al., 2021)."""
    return _build("1f1b", stages, microbatches, lambda stage: _passes(microbatches, stages - stage - 1))


def schedule_named(name: str, stages: int, microbatches: int) -> Schedule:
    """The schedule of ``--pipeline-schedule``, validated."""
    builders: Mapping[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
    schedule = builders[name](stages, microbatches)
    validate(schedule)
    return schedule


def _passes(microbatches: int, warm_up: int) -> Iterator[tuple[Op, int]]:
    warm_up = min(warm_up, microbatches)
    for microbatch in range(warm_up):
        yield Op.FORWARD, microbatch
    for microbatch in range(warm_up, microbatches):
        yield Op.FORWARD, microbatch
        yield Op.BACKWARD, microbatch - warm_up
    for microbatch in range(microbatches - warm_up, microbatches):
        yield Op.BACKWARD, microbatch


def _build(name: str, stages: int, microbatches: int, passes: Callable[[int], Iterator[tuple[Op, int]]]) -> Schedule:
    ranks = []
    for stage in range(stages):
        order = [Action(op, stage, microbatch) for op, microbatch in passes(stage)]
        ranks.append(tuple(_with_transfers(order, stages)))
    return Schedule(name, stages, microbatches, tuple(ranks))


def _with_transfers(passes: Sequence[Action], stages: int) -> Iterator[Action]:
    """Insert sends right after the pass that produces them and receives one pass ahead of their use, so that a
    transfer has the whole previous pass to hide under."""
    if passes:
        yield from _receive(passes[0], stages)
    for here, following in zip(passes, [*passes[1:], None], strict=True):
        if following is not None:
            yield from _receive(following, stages)
        yield here
        yield from _send(here, stages)


def _receive(action: Action, stages: int) -> Iterator[Action]:
    if action.op is Op.FORWARD and action.stage > 0:
        yield Action(Op.RECV_FORWARD, action.stage, action.microbatch)
    if action.op is Op.BACKWARD and action.stage < stages - 1:
        yield Action(Op.RECV_BACKWARD, action.stage, action.microbatch)


def _send(action: Action, stages: int) -> Iterator[Action]:
    if action.op is Op.FORWARD and action.stage < stages - 1:
        yield Action(Op.SEND_FORWARD, action.stage, action.microbatch)
    if action.op is Op.BACKWARD and action.stage > 0:
        yield Action(Op.SEND_BACKWARD, action.stage, action.microbatch)


def expected_actions(schedule: Schedule, rank: int) -> Counter[Action]:
    """What the rank must do exactly once, in whatever order: every pass, and the transfers around it."""
    passes = (Action(op, rank, m) for m in range(schedule.microbatches) for op in schedule.passes)
    return Counter(act for one in passes for act in (*_receive(one, schedule.stages), one, *_send(one, schedule.stages)))


def validate(schedule: Schedule) -> None:
    """Prove a schedule complete, in order and free of deadlock, or raise ScheduleError naming the actions at fault."""
    if len(schedule.ranks) != schedule.stages:
        raise ScheduleError(f"{schedule.name}: {len(schedule.ranks)} action lists for {schedule.stages} stages")
    for rank in range(schedule.stages):
        _check_complete(schedule, rank)
        _check_local_order(schedule, rank)
    _check_channels(schedule)
    _check_progress(schedule)


def _check_complete(schedule: Schedule, rank: int) -> None:
    found, expected = Counter(schedule.ranks[rank]), expected_actions(schedule, rank)
    missing, extra = expected - found, found - expected
    if missing or extra:
        parts = [f"{word} {', '.join(map(str, acts))}" for word, acts in (("missing", missing), ("unexpected", extra)) if acts]
        raise ScheduleError(f"{schedule.name}, rank {rank}: {'; '.join(parts)}")


def _check_local_order(schedule: Schedule, rank: int) -> None:
    """Receive before pass before send, forward before backward, for every microbatch."""
    at = {action: position for position, action in enumerate(schedule.ranks[rank])}
    chain = (Op.RECV_FORWARD, Op.FORWARD, Op.SEND_FORWARD, Op.RECV_BACKWARD, Op.BACKWARD, Op.SEND_BACKWARD)
    for microbatch in range(schedule.microbatches):
        acts = [Action(op, rank, microbatch) for op in chain]
        needs = [pair for pair in ((0, 1), (1, 2), (1, 4), (3, 4), (4, 5)) if acts[pair[0]] in at and acts[pair[1]] in at]
        for first, second in needs:
            if at[acts[first]] > at[acts[second]]:
                raise ScheduleError(f"{schedule.name}, rank {rank}: {acts[second]} comes before {acts[first]}, which it needs")


def _channel(action: Action) -> tuple[Op, int]:
    """A directed link, named by its send operation and the sending stage."""
    if action.op is Op.RECV_FORWARD:
        return Op.SEND_FORWARD, action.stage - 1
    if action.op is Op.RECV_BACKWARD:
        return Op.SEND_BACKWARD, action.stage + 1
    return action.op, action.stage


def _check_channels(schedule: Schedule) -> None:
    """Messages of one link arrive in the order sent: the k-th receive must expect the k-th microbatch sent."""
    sends: dict[tuple[Op, int], list[Action]] = defaultdict(list)
    receives: dict[tuple[Op, int], list[Action]] = defaultdict(list)
    for actions in schedule.ranks:
        for action in actions:
            if action.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
                sends[_channel(action)].append(action)
            elif action.op in (Op.RECV_FORWARD, Op.RECV_BACKWARD):
                receives[_channel(action)].append(action)
    for channel, sent in sends.items():
        for send, receive in zip(sent, receives[channel], strict=True):
            if send.microbatch != receive.microbatch:
                raise ScheduleError(f"{schedule.name}: {send} meets {receive} on one link; both sides must use one order")


def _check_progress(schedule: Schedule) -> None:
    """Run all ranks as far as they can go; whoever is left waits for something that never comes."""
    links, cursors, moved = _Links(), [0] * schedule.stages, True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while cursors[rank] < len(actions) and links.perform(actions[cursors[rank]], schedule.stages):
                cursors[rank] += 1
                moved = True
    stuck = [actions[cursor] for actions, cursor in zip(schedule.ranks, cursors, strict=True) if cursor < len(actions)]
    if stuck:
        raise ScheduleError(f"{schedule.name}: deadlock, each of these waits for another: {', '.join(map(str, stuck))}")


class _Links:
    """Messages sent and receives posted so far, on every link."""

    def __init__(self) -> None:
        self.sent: dict[tuple[Op, int], set[int]] = defaultdict(set)
        self.posted: Counter[tuple[Op, int]] = Counter()

    def perform(self, action: Action, stages: int) -> bool:
        """Carry out the action, or return False because it must wait."""
        channel = _channel(action)
        if action.op in (Op.FORWARD, Op.BACKWARD):
            return all(need.microbatch in self.sent[_channel(need)] for need in _receive(action, stages))
        if action.op in (Op.RECV_FORWARD, Op.RECV_BACKWARD):
            self.posted[channel] += 1
        elif len(self.sent[channel]) > self.posted[channel]:
            return False
        else:
            self.sent[channel].add(action.microbatch)
        return True
