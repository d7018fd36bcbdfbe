"""The proof that a schedule is complete, in order and cannot deadlock, made before anything runs.

Schedules are plain lists that anyone may write, so the proof trusts nothing: each pass and each
transfer happens exactly once, no pass comes before what it needs, both ends of a link use one
order, and a simulation under the runtime's rules reaches the end. The runtime has two transports
with different rules for a first message, and the proof is made for both: over gloo (``replay.py``)
every rank is connected before it begins, over NCCL (``connections.py``) the first use of a link
waits for the other end's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

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
    receive_before,
    send_after,
)
from megatron_llama.schedule.connections import connection_order, prove_first_uses
from megatron_llama.schedule.replay import Costs, Timeline, simulate


@dataclass(frozen=True)
class Report:
    """The costs of a schedule if F, B and W last equally long and transfers take no time.

    The unit of time is the forward pass of one microbatch through all layers of a rank."""

    makespan: float
    """Time from the first pass of any rank to the last."""
    bubble_fraction: float
    """Idle share of the makespan, over all ranks."""
    bubble_per_rank: tuple[float, ...]
    """Idle share of the makespan of each rank."""
    stalled_per_rank: tuple[float, ...]
    """Idle time of each rank between its first pass and its last: 0 is zero bubble as Qi et al.
    (2023) define it."""
    peak_in_flight: tuple[float, ...]
    """The most activations that each rank holds, in microbatches of all its layers. They live from
    the forward pass to the weight gradient; a schedule without backward keeps none."""


def validate(schedule: Schedule) -> Report:
    """Prove a schedule complete, in order and free of deadlock, over gloo and over NCCL with the
    connections that ``build_mesh`` makes, and return its costs. Raises ScheduleError naming the
    actions at fault."""
    _check_shape(schedule)
    for rank in range(len(schedule.ranks)):
        _check_complete(schedule, rank)
        _check_local_order(schedule, rank)
    _check_links(schedule)
    prove_first_uses(schedule, connection_order(schedule.placement))
    return _report(schedule, simulate(schedule, Costs()))


def _check_shape(schedule: Schedule) -> None:
    ranks = len(schedule.ranks)
    placement = schedule.placement
    counts = Counter(placement)
    if set(counts) != set(range(ranks)) or len(set(counts.values())) != 1:
        raise ScheduleError(
            f"{schedule.name}: {ranks} action lists for stages on ranks {placement}; each "
            "rank needs equally many stages"
        )
    if schedule.passes not in ((Op.FORWARD,), WHOLE, SPLIT):
        passes = ", ".join(op.value for op in schedule.passes)
        expected = "forward, forward and backward, or forward, backward_input and backward_weight"
        raise ScheduleError(f"{schedule.name}: the passes are {passes}, expected {expected}")
    if schedule.microbatches < 1:
        raise ScheduleError(
            f"{schedule.name}: {schedule.microbatches} microbatches, expected 1 or more"
        )


def _kinds(schedule: Schedule, rank: int) -> Iterator[tuple[Op, int]]:
    """Yield (operation, stage) of the rank's passes, in the order of the data flow."""
    for stage in range(schedule.stages):
        if schedule.placement[stage] == rank:
            yield from ((op, stage) for op in schedule.passes)


def _transfers(schedule: Schedule, rank: int) -> Iterator[tuple[Op, int]]:
    """Yield (operation, stage) of the rank's sends and receives."""
    for op, stage in _kinds(schedule, rank):
        for transfer in (
            receive_before(op, stage, schedule.placement),
            send_after(op, stage, schedule.placement),
        ):
            if transfer is not None:
                yield transfer, stage


def _check_complete(schedule: Schedule, rank: int) -> None:
    """Check that each pass and each transfer around it occurs exactly once, in any order."""
    actions = schedule.ranks[rank]
    kinds = (*_kinds(schedule, rank), *_transfers(schedule, rank))
    expected = {
        (op, stage, microbatch)
        for op, stage in kinds
        for microbatch in range(schedule.microbatches)
    }
    if len(actions) == len(expected) and set(actions) == expected:
        return
    listed = Counter(actions)
    wanted = Counter(Action(*action) for action in expected)
    differing = [
        (word, acts)
        for word, acts in (("missing", wanted - listed), ("unexpected", listed - wanted))
        if acts
    ]
    parts = [f"{word} {', '.join(map(str, sorted(acts, key=str)))}" for word, acts in differing]
    raise ScheduleError(f"{schedule.name}, rank {rank}: {'; '.join(parts)}")


def _check_local_order(schedule: Schedule, rank: int) -> None:
    """Check one rank alone: a pass comes after those that it needs, and gradients add up in order
    of microbatches."""
    where = {action: position for position, action in enumerate(schedule.ranks[rank])}
    everyone = range(schedule.microbatches)
    placement = schedule.placement

    def at(op: Op, stage: int) -> list[int]:
        """Return the position of an operation on each microbatch."""
        return [where[Action(op, stage, microbatch)] for microbatch in everyone]

    for op, stage in _kinds(schedule, rank):
        for first, second in _pairs(op, stage, schedule):
            if placement[first[1]] == placement[second[1]] == rank:
                for microbatch, (one, other) in enumerate(
                    zip(at(*first), at(*second), strict=True)
                ):
                    if one > other:
                        needed = Action(*first, microbatch)
                        early = Action(*second, microbatch)
                        raise ScheduleError(
                            f"{schedule.name}, rank {rank}: {early} comes before {needed}, "
                            "which it needs"
                        )
        if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            for microbatch, (one, other) in enumerate(pairwise(at(op, stage))):
                if one > other:
                    before = Action(op, stage, microbatch)
                    action = Action(op, stage, microbatch + 1)
                    raise ScheduleError(
                        f"{schedule.name}, rank {rank}: {action} comes before {before}; "
                        "gradients add up in that order"
                    )


PassKind = tuple[Op, int]
"""An operation at a stage, of any microbatch."""


def _pairs(op: Op, stage: int, schedule: Schedule) -> Iterator[tuple[PassKind, PassKind]]:
    """Yield (needed, pass) and (pass, the pass that needs it) around the passes of a stage. Passes
    of other ranks are not in this rank's list."""
    receive = receive_before(op, stage, schedule.placement)
    send = send_after(op, stage, schedule.placement)
    if receive is not None:
        yield (receive, stage), (op, stage)
    if send is not None:
        yield (op, stage), (send, stage)
    if op is Op.FORWARD and stage > 0:
        yield (Op.FORWARD, stage - 1), (op, stage)
    elif op is Op.BACKWARD_WEIGHT:
        yield (Op.BACKWARD_INPUT, stage), (op, stage)
    elif op is not Op.FORWARD:
        yield (Op.FORWARD, stage), (op, stage)
        if stage + 1 < schedule.stages:
            yield (op, stage + 1), (op, stage)


def _check_links(schedule: Schedule) -> None:
    """Check each link: messages arrive in the order sent, so the k-th receive must expect the
    k-th."""
    sends: dict[Link, list[Action]] = defaultdict(list)
    receives: dict[Link, list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for ops, ends in ((SENDS, sends), (RECEIVES, receives)):
            kinds = [kind for kind in _transfers(schedule, rank) if kind[0] in ops]
            lists = {kind: ends[link_of(Action(*kind, 0), schedule.placement)] for kind in kinds}
            for action in actions:
                op, stage, _ = action
                if (op, stage) in lists:
                    lists[op, stage].append(action)
    for link, sent in sends.items():
        step = 1 if link[0] is Op.SEND_FORWARD else -1
        for send, receive in zip(sent, receives[link], strict=True):
            if send.stage + step != receive.stage or send.microbatch != receive.microbatch:
                raise ScheduleError(
                    f"{schedule.name}: {send} meets {receive} on one link; both sides must "
                    "use one order"
                )


def _report(schedule: Schedule, timeline: Timeline) -> Report:
    """Return the report of a ``timeline`` of chunks that last 1."""
    ranks = range(len(schedule.ranks))
    chunks = schedule.virtual
    makespan = timeline.makespan
    idle = tuple(makespan - timeline.busy(rank) for rank in ranks)
    keeps = len(schedule.passes) > 1
    return Report(
        makespan=makespan / chunks,
        bubble_fraction=sum(idle) / (makespan * len(ranks)),
        bubble_per_rank=tuple(time / makespan for time in idle),
        stalled_per_rank=tuple(timeline.stalled(rank) / chunks for rank in ranks),
        peak_in_flight=tuple(
            max(_in_flight(actions)) / chunks if keeps else 0.0 for actions in schedule.ranks
        ),
    )


def _in_flight(actions: tuple[Action, ...]) -> Iterator[int]:
    """Yield, after each action, how many (stage, microbatch) have run forward and not all of their
    backward."""
    live = 0
    changes = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}
    for action in actions:
        live += changes.get(action.op, 0)
        yield live
