"""The proof that a schedule is complete, in order and cannot hang, made before anything runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_llama.schedule.actions import (
    RECEIVES,
    SENDS,
    SPLIT,
    WHOLE,
    Action,
    Link,
    Op,
    Schedule,
    ScheduleError,
    link_of,
    receive_of,
    send_of,
)
from megatron_llama.schedule.replay import Costs, Timeline, simulate


@dataclass(frozen=True)
class Report:
    """What a schedule costs if F, B and W last equally long and transfers take no time.

    The unit of time is the forward pass of one microbatch through all layers of a rank."""

    makespan: float
    """From the first pass of any rank to the last."""
    bubble_fraction: float
    """Idle share of the makespan, over all ranks."""
    bubble_per_rank: tuple[float, ...]
    """Idle share of the makespan, of each rank."""
    stalled_per_rank: tuple[float, ...]
    """Idle time of each rank between its first pass and its last: 0 is zero bubble as Qi et al. (2023) define it."""
    peak_in_flight: tuple[float, ...]
    """Most activations that each rank holds, in microbatches of all its layers. They live from the forward pass to the
    weight gradient; a schedule without backward keeps none."""


def validate(schedule: Schedule) -> Report:
    """Prove a schedule complete, in order and free of deadlock. Raises ScheduleError naming the actions at fault."""
    _check_shape(schedule)
    for rank in range(len(schedule.ranks)):
        _check_complete(schedule, rank)
        _check_local_order(schedule, rank)
    _check_links(schedule)
    return _report(schedule, simulate(schedule, Costs()))


def _check_shape(schedule: Schedule) -> None:
    ranks, placement = len(schedule.ranks), schedule.placement
    counts = Counter(placement)
    if set(counts) != set(range(ranks)) or len(set(counts.values())) != 1:
        raise ScheduleError(f"{schedule.name}: {ranks} action lists for stages on ranks {placement}; each rank needs equally many stages")
    if schedule.passes not in ((Op.FORWARD,), WHOLE, SPLIT):
        found = ", ".join(op.value for op in schedule.passes)
        expected = "forward, forward and backward, or forward, backward_input and backward_weight"
        raise ScheduleError(f"{schedule.name}: the passes are {found}, expected {expected}")
    if schedule.microbatches < 1:
        raise ScheduleError(f"{schedule.name}: {schedule.microbatches} microbatches, expected 1 or more")


def _passes(schedule: Schedule, rank: int) -> Iterator[Action]:
    """Every pass that the rank must do, by stage and microbatch in order of the data flow."""
    for stage in range(schedule.stages):
        if schedule.placement[stage] == rank:
            yield from (Action(op, stage, microbatch) for microbatch in range(schedule.microbatches) for op in schedule.passes)


def _check_complete(schedule: Schedule, rank: int) -> None:
    """Every pass exactly once, and the transfers around it, in whatever order."""
    passes, placement = list(_passes(schedule, rank)), schedule.placement
    transfers = [act for one in passes for act in (receive_of(one, placement), send_of(one, placement)) if act is not None]
    found, expected = Counter(schedule.ranks[rank]), Counter([*passes, *transfers])
    missing, extra = expected - found, found - expected
    if missing or extra:
        parts = [f"{word} {', '.join(map(str, acts))}" for word, acts in (("missing", missing), ("unexpected", extra)) if acts]
        raise ScheduleError(f"{schedule.name}, rank {rank}: {'; '.join(parts)}")


def _check_local_order(schedule: Schedule, rank: int) -> None:
    """What a rank owes to itself: a pass comes after what it works on, and gradients add up in order of microbatches."""
    at = {action: position for position, action in enumerate(schedule.ranks[rank])}
    for action in _passes(schedule, rank):
        for first, second in _pairs(action, schedule):
            if first in at and second in at and at[first] > at[second]:
                raise ScheduleError(f"{schedule.name}, rank {rank}: {second} comes before {first}, which it needs")
        if action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT) and action.microbatch > 0:
            before = Action(action.op, action.stage, action.microbatch - 1)
            if at[before] > at[action]:
                raise ScheduleError(f"{schedule.name}, rank {rank}: {action} comes before {before}; gradients add up in that order")


def _pairs(action: Action, schedule: Schedule) -> Iterator[tuple[Action, Action]]:
    """(needed, action) and (action, what needs it) around a pass. Those of other ranks are not in this rank's list."""
    stage, microbatch = action.stage, action.microbatch
    receive, send = receive_of(action, schedule.placement), send_of(action, schedule.placement)
    if receive is not None:
        yield receive, action
    if send is not None:
        yield action, send
    if action.op is Op.FORWARD:
        yield Action(Op.FORWARD, stage - 1, microbatch), action
    elif action.op is Op.BACKWARD_WEIGHT:
        yield Action(Op.BACKWARD_INPUT, stage, microbatch), action
    else:
        yield Action(Op.FORWARD, stage, microbatch), action
        yield Action(action.op, stage + 1, microbatch), action


def _check_links(schedule: Schedule) -> None:
    """Messages of one link arrive in the order sent: the k-th receive must expect the k-th message."""
    sends: dict[Link, list[Action]] = defaultdict(list)
    receives: dict[Link, list[Action]] = defaultdict(list)
    for actions in schedule.ranks:
        for action in actions:
            if action.op in SENDS:
                sends[link_of(action, schedule.placement)].append(action)
            elif action.op in RECEIVES:
                receives[link_of(action, schedule.placement)].append(action)
    for link, sent in sends.items():
        step = 1 if link[0] is Op.SEND_FORWARD else -1
        for send, receive in zip(sent, receives[link], strict=True):
            if (send.stage + step, send.microbatch) != (receive.stage, receive.microbatch):
                raise ScheduleError(f"{schedule.name}: {send} meets {receive} on one link; both sides must use one order")


def _report(schedule: Schedule, timeline: Timeline) -> Report:
    """``timeline``: of chunks that last 1."""
    ranks, chunks, makespan = range(len(schedule.ranks)), schedule.virtual, timeline.makespan
    idle = tuple(makespan - timeline.busy(rank) for rank in ranks)
    keeps = len(schedule.passes) > 1
    return Report(
        makespan=makespan / chunks,
        bubble_fraction=sum(idle) / (makespan * len(ranks)),
        bubble_per_rank=tuple(time / makespan for time in idle),
        stalled_per_rank=tuple(timeline.stalled(rank) / chunks for rank in ranks),
        peak_in_flight=tuple(max(_in_flight(actions)) / chunks if keeps else 0.0 for actions in schedule.ranks),
    )


def _in_flight(actions: tuple[Action, ...]) -> Iterator[int]:
    """After each action: how many (stage, microbatch) have run forward and not all of their backward."""
    live = 0
    for action in actions:
        live += {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}.get(action.op, 0)
        yield live
