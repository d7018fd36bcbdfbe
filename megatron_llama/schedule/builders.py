"""The schedules of ``--pipeline-schedule``.

To add one: write a function that yields the passes of one rank in their order, enter it in
``SCHEDULES`` below, and add its name to ``PipelineSchedule`` in ``config/schema.py``. Sends and
receives are inserted, and the result is proved, by ``schedule_named``. The entry also has the
placement of the stages, and facts for the planner.

Each function knows only p (the number of ranks), m (microbatches), v (chunks per rank) and the rank
itself. In the formulas a forward pass (F), an input gradient (B) and a weight gradient (W) last
equally long, and one microbatch through all chunks of a rank is the unit of F. A *bubble* is the
idle share of the makespan over all ranks; where the zero-bubble papers count otherwise, it is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from megatron_llama.config.limits import LARGEST_PASSES, LARGEST_STAGES
from megatron_llama.errors import describe, listing
from megatron_llama.schedule.actions import (
    SPLIT,
    WHOLE,
    Action,
    Op,
    Schedule,
    ScheduleError,
    StagePlacement,
    with_transfers,
)
from megatron_llama.schedule.proof import validate

Pass = tuple[Op, int, int]
"""(operation, number of the rank's chunk, microbatch)."""


# The plans of one run need the same schedule again and again, and a long one takes a second.
@lru_cache(maxsize=4)
def schedule_named(name: str, *, ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Build the schedule of ``--pipeline-schedule`` and prove it. ``virtual``: chunks per rank;
    zb-v always has 2. Raises ScheduleError naming every option that does not fit."""
    problems = schedule_problems(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    if problems:
        raise ScheduleError(
            problems[0]
            if len(problems) == 1
            else listing("This pipeline schedule cannot be built:", problems)
        )
    placement = placement_of(name, ranks, virtual)
    entry = SCHEDULES[name]
    orders = [entry.order(ranks, microbatches, virtual, rank) for rank in range(ranks)]
    return _built(name, microbatches, placement, orders, entry.passes)


def schedule_problems(name: str, *, ranks: int, microbatches: int, virtual: int = 1) -> list[str]:
    """Return every problem that ``schedule_named`` would raise, without building the schedule."""
    too_large = schedule_bound_problem(ranks * _chunks(name, virtual), microbatches)
    if too_large is not None:
        return [too_large]
    return [
        *_placement_problems(name, ranks, virtual),
        *_microbatch_problems(name, ranks, microbatches),
    ]


def schedule_bound_problem(stages: int, microbatches: int) -> str | None:
    """Return the problem of a schedule that is too long to be listed; None if it is not."""
    if stages > LARGEST_STAGES:
        return describe(
            "pipeline ranks x chunks",
            got=f"{stages:,}",
            expected=f"at most {LARGEST_STAGES:,} stages",
            do="give smaller --pipeline-model-parallel-size and "
            "--virtual-pipeline-model-parallel-size",
        )
    passes = 2 * stages * microbatches  # forward and backward
    if passes > LARGEST_PASSES:
        return describe(
            "stages x microbatches",
            got=f"{stages:,} x {microbatches:,}",
            expected=f"at most {LARGEST_PASSES // 2:,}",
            do="raise --micro-batch-size, or lower --global-batch-size",
        )
    return None


def placement_of(name: str, ranks: int, virtual: int) -> StagePlacement:
    """Return the pipeline rank of each stage: around the ranks ``virtual`` times, or for zb-v down
    and up again.

    Raises ScheduleError naming every option that does not fit."""
    too_large = schedule_bound_problem(ranks * _chunks(name, virtual), 1)
    problems = [too_large] if too_large else list(_placement_problems(name, ranks, virtual))
    if problems:
        raise ScheduleError(
            problems[0]
            if len(problems) == 1
            else listing("This pipeline cannot be built:", problems)
        )
    if SCHEDULES[name].folded:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * virtual


def forward_only(placement: StagePlacement, microbatches: int) -> Schedule:
    """Build an evaluation's schedule: every microbatch once through the stages of any placement.

    Every pass is taken to last one tick. At each tick a rank runs the pass furthest down the
    pipeline whose input is there, so that no tensors queue up between ranks. The makespan in chunks
    is vm + p - 1 around the ranks (m a multiple of p), 2m + 2(p-1) down and up a V."""
    done = [0] * len(placement)  # microbatches that have passed each stage
    ranks = max(placement) + 1
    orders: list[list[Pass]] = [[] for _ in range(ranks)]
    chunk = [placement[:stage].count(rank) for stage, rank in enumerate(placement)]
    while min(done) < microbatches:
        supply = [microbatches, *done[:-1]]
        ready = {
            placement[stage]: stage for stage, before in enumerate(supply) if done[stage] < before
        }
        for rank, stage in ready.items():
            orders[rank].append((Op.FORWARD, chunk[stage], done[stage]))
            done[stage] += 1
    return _built("forward_only", microbatches, placement, orders, (Op.FORWARD,))


def _built(
    name: str,
    microbatches: int,
    placement: StagePlacement,
    orders: Iterable[Iterable[Pass]],
    passes: tuple[Op, ...],
) -> Schedule:
    """Turn chunks into stages, insert the transfers, and prove the schedule."""
    ranks = []
    for rank, order in enumerate(orders):
        stages = [stage for stage, place in enumerate(placement) if place == rank]
        ranks.append(
            tuple(
                with_transfers(
                    [Action(op, stages[chunk], microbatch) for op, chunk, microbatch in order],
                    placement,
                )
            )
        )
    schedule = Schedule(name, microbatches, placement, tuple(ranks), passes)
    validate(schedule)
    return schedule


def _gpipe(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """Yield all forwards, then all backwards (Huang et al., 2019). Bubble (p-1)/(m+p-1); m
    microbatches in flight."""
    yield from ((Op.FORWARD, 0, i) for i in range(m))
    yield from ((Op.BACKWARD, 0, i) for i in range(m))


def _one_forward_one_backward(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """Warm up with as many forwards as ranks follow, then alternate (PipeDream-Flush, Narayanan et
    al., 2021).

    Bubble (p-1)/(m+p-1); p - rank microbatches in flight."""
    forwards = [(Op.FORWARD, 0, i) for i in range(m)]
    yield from _alternating(forwards, [(Op.BACKWARD, 0, i) for i in range(m)], p - rank - 1)


def _interleaved(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """Yield 1F1B over v chunks per rank, p microbatches at a time through each chunk (Narayanan et
    al., 2021, section 2.2).

    Bubble (p-1)/(vm+p-1); 2(p - rank - 1) + (v-1)p + 1 chunks in flight."""
    forwards = [
        (Op.FORWARD, chunk, group + i)
        for group in range(0, m, p)
        for chunk in range(v)
        for i in range(p)
    ]
    backwards = [
        (Op.BACKWARD, chunk, group + i)
        for group in range(0, m, p)
        for chunk in reversed(range(v))
        for i in range(p)
    ]
    yield from _alternating(forwards, backwards, 2 * (p - rank - 1) + (v - 1) * p)


def _alternating(forwards: list[Pass], backwards: list[Pass], ahead: int) -> Iterator[Pass]:
    """Yield all forwards in order, and after the first ``ahead`` a backward behind each."""
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


def _zb_h1(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """Yield 1F1B in which rank r puts off its weight gradients by r microbatches (ZB-H1 of Qi et
    al., 2023).

    Makespan 3m + p - 1 for m >= p, hence a bubble of (p-1)/(3m+p-1), a third of 1F1B's; the papers
    write its length, (p-1)(F+B-W). At most p microbatches in flight on every rank, as on the first
    rank of 1F1B."""
    ahead = min(p - rank - 1, m)
    yield from ((Op.FORWARD, 0, i) for i in range(ahead))
    for i in range(m):
        if ahead + i < m:
            yield Op.FORWARD, 0, ahead + i
        yield Op.BACKWARD_INPUT, 0, i
        if i >= rank:
            yield Op.BACKWARD_WEIGHT, 0, i - rank
    yield from ((Op.BACKWARD_WEIGHT, 0, i) for i in range(max(0, m - rank), m))


def _zb_v(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """Yield ZB-V: two chunks per rank in the shape of a V, with the loss on rank 0 again (Qi et
    al., 2023 and 2024).

    For m >= 2p - 1 no rank is idle between its first pass and its last: no bubble by the definition
    of the papers, in which a rank may begin its next step while others finish this one. Rank r
    begins r chunks after rank 0, so the makespan is 3m + (p-1)/2, and its idle share
    (p-1)/(6m+p-1). At most p microbatches in flight, as in 1F1B. With fewer microbatches it is the
    schedule for 2p - 1 without the passes of the missing ones."""
    return (step for step in _full_zb_v(p, max(m, 2 * p - 1), rank) if step[2] < m)


def _full_zb_v(p: int, m: int, rank: int) -> Iterator[Pass]:
    down = iter([(Op.FORWARD, 0, i) for i in range(m)])
    up = iter([(Op.FORWARD, 1, i) for i in range(m)])
    first = [iter([(Op.BACKWARD_INPUT, chunk, i) for i in range(m)]) for chunk in (0, 1)]
    late: list[Pass] = []
    """Weight gradients put off, oldest first."""

    def gradient(chunk: int) -> Pass:
        op, _, i = next(first[chunk])
        late.append((Op.BACKWARD_WEIGHT, chunk, i))
        return op, chunk, i

    # Until the first microbatch comes back up, only forwards; 2p - 1 chunks are in flight on every
    # rank then.
    for _ in range(2 * (p - rank) - 1):
        yield next(down)
    for _ in range(rank):
        yield next(up)
        yield next(down)
    for _ in range(p - rank):
        yield next(up)
        yield gradient(1)
        yield late.pop(0)
    for _ in range(m - p):
        yield from (step for step in (next(down, None),) if step)
        yield gradient(0)
        yield late.pop(0)
        yield next(up)
        yield gradient(1)
        yield late.pop(0)
    # The other ranks wait for these, and no pass is left to begin: weight gradients last.
    for _ in range(rank):
        yield gradient(0)
        yield gradient(1)
    for _ in range(p - rank):
        yield gradient(0)
        yield late.pop(0)
    yield from late


Order = Callable[[int, int, int, int], Iterator[Pass]]
"""(ranks, microbatches, chunks per rank, rank) -> the passes of that rank."""


@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule, and facts about it for the planner."""

    order: Order
    passes: tuple[Op, ...]
    bubble: float = 1.0
    """The length of the bubble, relative to 1F1B with the same number of chunks."""
    several_chunks: bool = False
    """Whether --virtual-pipeline-model-parallel-size gives the chunks of each rank, 2 or more."""
    folded: bool = False
    """Whether the stages go down the ranks and up again, with 2 chunks on each rank."""
    keeps_every_microbatch: bool = False
    """Whether the memory for activations grows with every microbatch."""

    def chunks(self, virtual: int) -> int:
        """Return the chunks of each rank, ``virtual`` being the option's value."""
        return 2 if self.folded else virtual


SCHEDULES: Mapping[str, ScheduleEntry] = MappingProxyType(
    {
        "gpipe": ScheduleEntry(_gpipe, WHOLE, keeps_every_microbatch=True),
        "1f1b": ScheduleEntry(_one_forward_one_backward, WHOLE),
        "interleaved": ScheduleEntry(_interleaved, WHOLE, several_chunks=True),
        "zb-h1": ScheduleEntry(_zb_h1, SPLIT, bubble=1 / 3),
        "zb-v": ScheduleEntry(_zb_v, SPLIT, bubble=1 / 3, folded=True),
    }
)


def _chunks(name: str, virtual: int) -> int:
    """Return the chunks of each rank, even for an unknown schedule, which is refused later."""
    return SCHEDULES[name].chunks(virtual) if name in SCHEDULES else virtual


def _placement_problems(name: str, ranks: int, virtual: int) -> Iterator[str]:
    if name not in SCHEDULES:
        yield describe(
            "--pipeline-schedule",
            got=name,
            expected=f"one of {', '.join(SCHEDULES)}",
            do="choose one",
        )
    if ranks < 1:
        yield describe(
            "--pipeline-model-parallel-size",
            got=ranks,
            expected="1 or more",
            do="give the number of pipeline ranks",
        )
    where = "--virtual-pipeline-model-parallel-size"
    entry = SCHEDULES.get(name)
    several_chunks = entry is not None and entry.several_chunks
    folded = entry is not None and entry.folded
    if several_chunks and virtual < 2:
        do = "give 2, or choose --pipeline-schedule 1f1b"
        yield describe(
            where,
            got=virtual,
            expected=f"2 or more chunks per rank with --pipeline-schedule {name}",
            do=do,
        )
    elif folded and virtual not in (1, 2):
        yield describe(
            where,
            got=virtual,
            expected=f"2 chunks per rank with --pipeline-schedule {name}",
            do="leave it out",
        )
    elif not several_chunks and not folded and virtual != 1:
        do = "leave it out, or choose --pipeline-schedule interleaved"
        yield describe(
            where, got=virtual, expected=f"1 chunk per rank with --pipeline-schedule {name}", do=do
        )


def _microbatch_problems(name: str, ranks: int, microbatches: int) -> Iterator[str]:
    where = "number of microbatches, global_batch_size / (micro_batch_size x dp)"
    if microbatches < 1:
        yield describe(
            where, got=microbatches, expected="1 or more", do="raise --global-batch-size"
        )
    elif name == "interleaved" and ranks >= 1 and microbatches % ranks:
        below = microbatches // ranks * ranks
        above = -(-microbatches // ranks) * ranks
        near = f"{below} or {above}" if below else str(above)
        expected = (
            f"a multiple of --pipeline-model-parallel-size {ranks} with --pipeline-schedule "
            "interleaved"
        )
        do = f"choose {near} (change --global-batch-size), or another --pipeline-schedule"
        yield describe(where, got=microbatches, expected=expected, do=do)
