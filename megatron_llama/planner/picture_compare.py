"""The page of ``plan compare --html``: one recorded step and its plan over one axis, and the table
of differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_llama.planner.compare import HEAD, Comparison
from megatron_llama.planner.picture import (
    COLOURS,
    Bar,
    BarRow,
    drawing,
    heading,
    key,
    page,
    paragraph,
    table,
)
from megatron_llama.planner.picture_plan import Streams, milli
from megatron_llama.planner.report import label
from megatron_llama.plans.timeline_file import COMPUTE, ITERATIONS, LANES, UPDATES, WAITS, Span

BESIDE = tuple(lane for lane in LANES if lane not in (ITERATIONS, COMPUTE, WAITS))
"""Lanes of what goes on beside the passes."""


def compare_page(found: Comparison, name: str) -> str:
    """The whole page. ``name``: of the file."""
    return page(f"{name}: measured and planned", _parts(found))


def _parts(found: Comparison) -> Iterator[str]:
    job = found.planned.job
    ranks = f"{found.steps.recorded.ranks} ranks on {found.steps.recorded.device}"
    yield paragraph(f"{label(found.planned)}, {job.microbatches} microbatches, {ranks}.")
    yield paragraph(". ".join(found.verdict()) + ".")
    yield heading(f"Iteration {found.steps.typical}")
    yield paragraph(
        "The first rank of every place in the pipeline as it was measured, and as planned. Numbers are microbatches, pale boxes are waits. "
        "A message ends when somebody has waited for it."
    )
    colours = [(op.value.replace("_", " "), COLOURS[op.value]) for op in found.schedule.passes]
    yield key(
        [
            *colours,
            *((lane, COLOURS["wait" if lane == WAITS else lane]) for lane in (WAITS, *BESIDE)),
        ]
    )
    measured, end = _measured(found)
    planned, planned_end = _planned(found)
    lanes = [lane for pair in zip(measured, planned, strict=True) for rank in pair for lane in rank]
    yield drawing(lanes, max(end, planned_end), "ms")
    yield heading("Differences")
    yield paragraph("Means over ranks and steps, what costs most beyond the plan first.")
    yield table(HEAD, (row.cells for row in found.rows))
    if found.messages:
        yield heading("Messages")
        yield paragraph(
            "From being issued to being there: hidden by passes or not, with waiting for the last rank."
        )
        yield table(HEAD[:-1], (row.cells[:-1] for row in found.messages))


def _measured(found: Comparison) -> tuple[list[list[BarRow]], float]:
    """Of each pipeline rank the lanes of its first rank in one step, in milliseconds, and where
    that ends."""
    steps = found.steps
    pp = found.planned.job.pp
    apart = steps.recorded.ranks // pp
    spans = [
        span
        for span in steps.spans
        if span.details["iteration"] == steps.typical and span.rank % apart == 0
    ]
    zero, end = (
        edge(span.begin if edge is min else span.end for span in spans if span.lane == ITERATIONS)
        for edge in (min, max)
    )
    return [
        _rank(rank, [span for span in spans if span.rank == rank * apart], zero)
        for rank in range(pp)
    ], (end - zero) * 1e3


def _rank(rank: int, spans: Sequence[Span], zero: float) -> list[BarRow]:
    shown = [_bar(span, zero) for lane in (COMPUTE, WAITS) for span in spans if span.lane == lane]
    beside = [(lane, [_bar(span, zero) for span in spans if span.lane == lane]) for lane in BESIDE]
    return [
        BarRow(f"pp rank {rank}, measured", shown),
        *(BarRow(lane, bars) for lane, bars in beside if bars),
    ]


def _bar(span: Span, zero: float) -> Bar:
    colour = (
        "wait"
        if span.lane == WAITS
        else str(span.details.get("op", ""))
        if span.lane == COMPUTE
        else span.lane
    )
    words = f"{span.name}: {milli(span.seconds)}" + (
        f", {span.details['bytes']} bytes" if "bytes" in span.details else ""
    )
    text = str(span.details["microbatch"]) if colour in COLOURS and span.lane == COMPUTE else ""
    return Bar(
        (span.begin - zero) * 1e3,
        (span.end - zero) * 1e3,
        COLOURS.get(colour, COLOURS["other"]),
        text,
        words,
    )


def _planned(found: Comparison) -> tuple[list[list[BarRow]], float]:
    """The same as planned."""
    behind = [(UPDATES, "norm and update", found.scale * found.planned.step_time.update)]
    lanes, end = Streams(found.schedule, found.times, found.hop, behind).lanes()
    return [
        [replace(lane, label=_planned_name(lane.label), bars=_in_ms(lane.bars)) for lane in rank]
        for rank in lanes
    ], end * 1e3


def _planned_name(name: str) -> str:
    return f"{name}, planned"


def _in_ms(bars: Sequence[Bar]) -> list[Bar]:
    return [replace(bar, begin=bar.begin * 1e3, end=bar.end * 1e3) for bar in bars]
