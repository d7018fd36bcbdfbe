"""The page of ``plan --html``: the table, the pipeline of the fastest layout as the simulator runs
it, where its time and memory go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.fitted import HIGH, LOW
from megatron_llama.planner.links import rank_groups
from megatron_llama.planner.oom_probability import ALLOCATABLE
from megatron_llama.planner.picture import (
    COLOURS,
    PALETTE,
    Bar,
    BarRow,
    code,
    drawing,
    heading,
    key,
    page,
    paragraph,
    table,
)
from megatron_llama.planner.report import PARTS, command, label, losses, mfu
from megatron_llama.planner.simulate import StageTimes, simulate
from megatron_llama.plans.memory import gib
from megatron_llama.plans.schedule import Op, Schedule, TimedPass
from megatron_llama.plans.schedule.actions import send_of
from megatron_llama.plans.timeline_file import GATHERS, PIPELINE, REDUCTIONS, UPDATES

GIB = 2**30
HEAD = (
    "",
    "step s",
    "80 % between",
    "tokens/s/GPU",
    "MFU",
    "memory",
    "OOM",
    "bubble",
    "tp",
    "cp",
    "pp",
    "dp",
    "layout",
)


@dataclass(frozen=True)
class Streams:
    """A schedule with what travels beside its passes."""

    schedule: Schedule
    times: Sequence[StageTimes]
    hop: float
    """Seconds of a message between stages."""
    behind: Sequence[tuple[str, str, float]] = ()
    """What every rank does behind the last pass: lane, words, seconds."""

    def lanes(self) -> tuple[list[list[BarRow]], float]:
        """For each pipeline rank its lanes, in seconds from 0, and the end of the step."""
        timeline = simulate(self.schedule, self.times, self.hop)
        tail = []
        clock = timeline.makespan
        for lane, words, seconds in self.behind:
            tail.append(
                (lane, Bar(clock, clock + seconds, COLOURS[lane], tip=f"{words}: {milli(seconds)}"))
            )
            clock += seconds
        return [self._rank(rank, passes, tail) for rank, passes in enumerate(timeline.ranks)], clock

    def _rank(
        self, rank: int, passes: Sequence[TimedPass], tail: Sequence[tuple[str, Bar]]
    ) -> list[BarRow]:
        beside: dict[str, list[Bar]] = {PIPELINE: [], GATHERS: [], REDUCTIONS: []}
        for one in passes:
            action = one.action
            times = self.times[one.action.stage]
            if self.hop > 0 and send_of(action, self.schedule.placement) is not None:
                beside[PIPELINE].append(_beside(PIPELINE, one.end, self.hop))
            gather = (
                times.gather_forward
                if action.op is Op.FORWARD
                else times.gather_backward * (action.op is not Op.BACKWARD_WEIGHT)
            )
            if gather > 0:
                beside[GATHERS].append(_beside(GATHERS, one.start, gather))
            if times.reduce > 0 and action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                beside[REDUCTIONS].append(_beside(REDUCTIONS, one.start, times.reduce))
        updates = [bar for lane, bar in tail if lane == UPDATES]
        for lane, bar in tail:
            if lane != UPDATES:
                beside[lane].append(bar)
        first = BarRow(f"pp rank {rank}", [*(pass_bar(one) for one in passes), *updates])
        return [first, *(BarRow(lane, bars) for lane, bars in beside.items() if bars)]


def _beside(lane: str, begin: float, seconds: float) -> Bar:
    return Bar(begin, begin + seconds, COLOURS[lane], tip=f"{lane}: {milli(seconds)}")


def pass_bar(one: TimedPass) -> Bar:
    """The box of a pass."""
    op = one.action.op.value
    action = one.action
    words = f"{op.replace('_', ' ')} {action.microbatch}, stage {action.stage}: {milli(one.end - one.start)}"
    return Bar(one.start, one.end, COLOURS[op], str(action.microbatch), words)


def milli(seconds: float) -> str:
    """Milliseconds in a tip."""
    return f"{seconds * 1e3:.3f} ms"


def streams_of(planned: Candidate) -> Streams:
    """The first microbatches of a plan: as many as show the pattern."""
    job = planned.job
    times = planned.stage_times
    axes = rank_groups(planned.job, planned.fit)
    once = max(0.0, planned.step_time.data - job.microbatches * planned.stretched)
    behind = [
        (REDUCTIONS, "exposed gradients and parameters", once),
        (UPDATES, "norm and update", planned.step_time.update),
    ]
    hop = axes.pp.send(job.stream / (job.tp if job.sequence_parallel else 1)) if job.pp > 1 else 0.0
    return Streams(planned.short.schedule, times, hop, [one for one in behind if one[2] > 0])


def plan_page(best: Sequence[Candidate], title: str, near: Sequence[object]) -> str:
    """The whole page. ``near``: published runs that are like the first."""
    return page(title, _parts(best, near))


def _parts(best: Sequence[Candidate], near: Sequence[object]) -> Iterator[str]:
    first = best[0]
    yield table(HEAD, _rows(best), words=(12,))
    yield heading(f"The pipeline of {label(first)}")
    shown = first.short.schedule.microbatches
    whole = first.job.microbatches
    few = (
        f"The first {shown} of {whole} microbatches, then the end of the step. "
        if shown < whole
        else ""
    )
    yield paragraph(
        f"{few}Numbers are microbatches. Every pipeline rank computes; below it is what travels beside that."
    )
    lanes, end = streams_of(first).lanes()
    yield pass_key(first.short.schedule)
    yield drawing([_in_ms(lane) for rank in lanes for lane in rank], end * 1e3, "ms")
    yield heading("Where the time goes")
    yield key(zip((words for _, words in PARTS), cycle(PALETTE), strict=False))
    yield drawing(
        [_time_lane(place, planned) for place, planned in enumerate(best, 1)],
        max(p.seconds for p in best),
        "s",
    )
    yield heading(f"Memory of {label(first)}")
    yield key(zip(first.fullest, cycle(PALETTE), strict=False))
    yield memory_drawing(first)
    if len(best) > 1:
        yield heading("Why the others are slower")
        yield code("\n".join(losses(best)))
    yield heading("Nearest published runs, of other trainers")
    yield code("\n".join(map(str, near)))
    yield heading("Start it with")
    yield code(command(first))


def _rows(best: Sequence[Candidate]) -> Iterator[tuple[str, ...]]:
    for place, planned in enumerate(best, 1):
        step = planned.step_time
        shares = (
            part / step.seconds
            for part in (step.bubble, step.tensor, step.context, step.pipeline, step.data)
        )
        yield (
            str(place),
            f"{step.seconds:.2f}",
            f"{step.seconds * LOW:.2f} to {step.seconds * HIGH:.2f}",
            f"{planned.speed:,.0f}",
            f"{mfu(planned):.0%}",
            gib(sum(planned.fullest.values())),
            f"{planned.oom_probability:.0%}",
            *(f"{share:.1%}" for share in shares),
            label(planned),
        )


def pass_key(schedule: Schedule) -> str:
    """What the colours of a pipeline mean."""
    passes = [(op.value.replace("_", " "), COLOURS[op.value]) for op in schedule.passes]
    return key(
        [*passes, *((lane, COLOURS[lane]) for lane in (PIPELINE, GATHERS, REDUCTIONS, UPDATES))]
    )


def _in_ms(lane: BarRow) -> BarRow:
    return BarRow(
        lane.label, [replace(bar, begin=bar.begin * 1e3, end=bar.end * 1e3) for bar in lane.bars]
    )


def _time_lane(place: int, planned: Candidate) -> BarRow:
    return _stacked(
        str(place), [(words, getattr(planned.step_time, name)) for name, words in PARTS], "s"
    )


def memory_drawing(planned: Candidate) -> str:
    """Bytes of every pipeline rank by component, beside the memory of the device."""
    total = planned.machine.gpu.memory / GIB
    ranks = range(planned.job.pp)
    lanes = [
        _stacked(
            f"pp rank {rank}",
            [(name, size / GIB) for name, size in planned.memory(rank).items()],
            "GiB",
        )
        for rank in ranks
    ]
    largest = max(bar.end for lane in lanes for bar in lane.bars)
    return drawing(
        lanes,
        max(largest, total),
        "GiB",
        marks=[(ALLOCATABLE * total, f"usable of a {planned.machine.gpu.name}")],
    )


def _stacked(name: str, parts: Sequence[tuple[str, float]], unit: str) -> BarRow:
    """Parts of a whole one behind the other, in the colours of PALETTE."""
    bars = []
    begin = 0.0
    for (words, size), colour in zip(parts, cycle(PALETTE), strict=False):
        if size > 0:
            bars.append(Bar(begin, begin + size, colour, tip=f"{words}: {size:.3f} {unit}"))
        begin += size
    return BarRow(name, bars)
