"""The page of ``plan --html``: the table, the simulated pipeline of the fastest layout, and its
time and memory by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from megatron_llama.engine.plan.memory import sized
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.fitted import HIGH, LOW
from megatron_llama.planner.oom_probability import ALLOCATABLE
from megatron_llama.planner.pictures.bars import COLOURS, PALETTE, Bar, BarRow, Chart, drawing
from megatron_llama.planner.pictures.page import code, heading, key, page, paragraph, table
from megatron_llama.planner.report import (
    HEADS,
    command,
    described,
    label,
    legend,
    losses,
    mfu,
    near_heading,
    parts_of,
    shares_of,
)
from megatron_llama.planner.simulate import StageTimes, simulate
from megatron_llama.schedule import Op, Schedule, TimedPass
from megatron_llama.schedule.actions import send_of
from megatron_llama.train.run.timeline_file import GATHERS, PIPELINE, REDUCTIONS, UPDATES

GIB = 2**30
HEAD = (*("", "step (s)", "80 % between (s)", "tokens/s/GPU", "MFU", "memory/GPU", "OOM"),)
"""Heads of the table before those of shares and layout."""


@dataclass(frozen=True)
class PlannedTimeline:
    """The passes of a schedule, with the messages that travel at the same time."""

    schedule: Schedule
    times: Sequence[StageTimes]
    hop: float
    """Seconds of a message between stages."""
    end: Sequence[tuple[str, str, float]] = ()
    """Work of every rank after the last pass: lane, words, seconds."""

    def rows(self) -> tuple[list[list[BarRow]], float]:
        """Return the rows of each pipeline rank, and the end of the step, in milliseconds."""
        timeline = simulate(self.schedule, self.times, self.hop)
        clock = timeline.makespan
        last = []
        for lane, words, seconds in self.end:
            last.append((lane, _bar(lane, words, clock, seconds)))
            clock += seconds
        ranks = [self._rank(rank, passes, last) for rank, passes in enumerate(timeline.ranks)]
        return [[row.scaled(1e3) for row in rows] for rows in ranks], clock * 1e3

    def _rank(
        self, rank: int, passes: Sequence[TimedPass], last: Sequence[tuple[str, Bar]]
    ) -> list[BarRow]:
        compute: list[Bar] = []
        messages: dict[str, list[Bar]] = {PIPELINE: [], GATHERS: [], REDUCTIONS: []}
        for timed in passes:
            action = timed.action
            op = action.op
            times = self.times[action.stage]
            seconds = timed.end - timed.start
            words = f"{op.value.replace('_', ' ')} {action.microbatch}, stage {action.stage}"
            compute.append(_bar(op.value, words, timed.start, seconds, str(action.microbatch)))
            gather = 0.0 if op is Op.BACKWARD_WEIGHT else times.gather_backward
            gather = times.gather_forward if op is Op.FORWARD else gather
            if self.hop > 0 and send_of(action, self.schedule.placement) is not None:
                messages[PIPELINE].append(_bar(PIPELINE, PIPELINE, timed.end, self.hop))
            if gather > 0:
                messages[GATHERS].append(_bar(GATHERS, GATHERS, timed.start, gather))
            if times.reduce > 0 and op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                messages[REDUCTIONS].append(_bar(REDUCTIONS, REDUCTIONS, timed.start, times.reduce))
        for lane, bar in last:
            (compute if lane == UPDATES else messages[lane]).append(bar)
        first = BarRow(f"pp rank {rank}", compute)
        return [first, *(BarRow(lane, bars) for lane, bars in messages.items() if bars)]


def _bar(kind: str, words: str, begin: float, seconds: float, text: str = "") -> Bar:
    tip = f"{words}: {milliseconds(seconds)}"
    return Bar(begin, begin + seconds, COLOURS[kind], text, tip)


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds for a tip."""
    return f"{seconds * 1e3:.3f} ms"


def plan_page(best: Sequence[Candidate], title: str, near: Sequence[object]) -> str:
    """Return the whole page. ``near`` are published runs similar to the first layout."""
    return page(title, _parts(best, near))


def _parts(best: Sequence[Candidate], near: Sequence[object]) -> Iterator[str]:
    first = best[0]
    columns = shares_of(best)
    head = (*HEAD, *(HEADS[name] for name in columns), "layout")
    yield table(head, _table_rows(best, columns), words=(), sentences=(len(head) - 1,))
    yield paragraph(legend(columns))
    yield heading(f"The run in {label(first)}")
    yield table(("", ""), described(first).items(), sentences=(1,))
    yield heading(f"The pipeline of {label(first)}")
    yield from _pipeline(first)
    yield heading("Where the time goes")
    yield key(zip((words for _, words in parts_of(best)), cycle(PALETTE), strict=False))
    times = []
    for place, candidate in enumerate(best, 1):
        parts = [(words, getattr(candidate.step_time, name)) for name, words in parts_of(best)]
        times.append(_stacked(str(place), parts, "s"))
    yield drawing(times, max(candidate.seconds for candidate in best), "s")
    yield heading(f"Memory of {label(first)}")
    yield key(zip(first.fullest, cycle(PALETTE), strict=False))
    yield _memory(first)
    if len(best) > 1:
        yield heading("Why the others are slower")
        yield code("\n".join(losses(best)))
    yield heading(near_heading(first).capitalize())
    yield code("\n".join(map(str, near)))
    yield heading("Start it with")
    yield code(command(first))


def _table_rows(best: Sequence[Candidate], columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for place, candidate in enumerate(best, 1):
        step = candidate.step_time
        yield (
            str(place),
            f"{step.seconds:.2f}",
            f"{step.seconds * LOW:.2f} to {step.seconds * HIGH:.2f}",
            f"{candidate.speed:,.0f}",
            f"{mfu(candidate):.0%}",
            sized(candidate.needed),
            f"{candidate.oom_probability:.0%}",
            *(f"{getattr(step, name) / step.seconds:.1%}" for name in columns),
            label(candidate),
        )


def _pipeline(candidate: Candidate) -> Iterator[str]:
    """Yield the chart of the first microbatches, which show the pattern, and of the step's end."""
    job = candidate.job
    schedule = candidate.short.schedule
    shown = schedule.microbatches
    few = f"The first {shown} of {job.microbatches} microbatches, then the end of the step. "
    yield paragraph(
        f"{few if shown < job.microbatches else ''}Numbers are microbatches. "
        "Every pipeline rank computes; below it is what travels meanwhile."
    )
    yield from pipeline_chart(candidate).inline()


def pipeline_chart(candidate: Candidate) -> Chart:
    """Return a chart of the pipeline ranks in the simulated first microbatches."""
    job = candidate.job
    schedule = candidate.short.schedule
    colours = [(op.value.replace("_", " "), COLOURS[op.value]) for op in schedule.passes]
    lanes = [(lane, COLOURS[lane]) for lane in (PIPELINE, GATHERS, REDUCTIONS, UPDATES)]
    once = max(0.0, candidate.step_time.data - job.microbatches * candidate.stretched)
    end = (
        (REDUCTIONS, "exposed gradients and parameters", once),
        (UPDATES, "norm and update", candidate.step_time.update),
    )
    rows, length = PlannedTimeline(
        schedule,
        candidate.stage_times,
        candidate.hop if job.pp > 1 else 0.0,
        [entry for entry in end if entry[2] > 0],
    ).rows()
    return Chart([row for rank in rows for row in rank], length, "ms", [*colours, *lanes])


def _memory(candidate: Candidate) -> str:
    """Return a drawing of each pipeline rank's memory by component, and of the device's memory."""
    total = candidate.machine.gpu.memory / GIB
    rows = []
    for rank in range(candidate.job.pp):
        parts = [(name, size / GIB) for name, size in candidate.memory(rank).items()]
        rows.append(_stacked(f"pp rank {rank}", parts, "GiB"))
    largest = max(bar.end for row in rows for bar in row.bars)
    usable = (ALLOCATABLE * total, f"usable of a {candidate.machine.gpu.name}")
    return drawing(rows, max(largest, total), "GiB", marks=[usable])


def _stacked(name: str, parts: Sequence[tuple[str, float]], unit: str) -> BarRow:
    """Return a row of the parts of a whole, in the colours of PALETTE."""
    bars = []
    begin = 0.0
    for (words, size), colour in zip(parts, cycle(PALETTE), strict=False):
        if size > 0:
            bars.append(Bar(begin, begin + size, colour, tip=f"{words}: {size:.3f} {unit}"))
        begin += size
    return BarRow(name, bars)
