"""The page of ``plan compare --html``: one recorded step and its plan over one axis, and a table of
differences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_llama.planner.compare import HEAD, Comparison
from megatron_llama.planner.pictures.bars import COLOURS, Bar, BarRow, Chart
from megatron_llama.planner.pictures.page import heading, page, paragraph, table
from megatron_llama.planner.pictures.plan_page import PlannedTimeline, milliseconds
from megatron_llama.planner.report import label
from megatron_llama.train.run.timeline_file import COMPUTE, ITERATIONS, LANES, UPDATES, WAITS, Span

MESSAGES = tuple(lane for lane in LANES if lane not in (ITERATIONS, COMPUTE, WAITS))
"""Lanes of work that runs at the same time as passes."""


def compare_page(found: Comparison, name: str) -> str:
    """Return the whole page. ``name`` is the name of the recorded file."""
    return page(f"{name}: measured and planned", _parts(found))


def _parts(comparison: Comparison) -> Iterator[str]:
    candidate = comparison.candidate
    recorded = comparison.steps.recorded
    microbatches = f"{candidate.job.microbatches} microbatches"
    yield paragraph(
        f"{label(candidate)}, {microbatches}, {recorded.ranks} ranks on {recorded.device}."
    )
    yield paragraph(f"{'. '.join(comparison.verdict())}.")
    yield heading(f"Iteration {comparison.steps.typical}")
    yield paragraph(
        "The first rank of every place in the pipeline as it was measured, and as planned. "
        "Numbers are microbatches, pale boxes are waits. "
        "A message ends when somebody has waited for it."
    )
    yield from steps_chart(comparison).inline()
    yield heading("Differences")
    yield paragraph("Means over ranks and steps, what costs most beyond the plan first.")
    yield table(HEAD, (row.cells for row in comparison.rows))
    if comparison.messages:
        yield heading("Messages")
        yield paragraph(
            "From being issued to being there: hidden by passes or not, "
            "with waiting for the last rank."
        )
        yield table(HEAD[:-1], (row.cells[:-1] for row in comparison.messages))


def steps_chart(found: Comparison) -> Chart:
    """Return one recorded step and its plan over one axis."""
    colours = [(op.value.replace("_", " "), COLOURS[op.value]) for op in found.schedule.passes]
    lanes = [(lane, COLOURS[lane]) for lane in MESSAGES]
    names = [*colours, (WAITS, COLOURS["wait"]), *lanes]
    measured, length = _measured(found)
    update = (UPDATES, "norm and update", found.scale * found.candidate.step_time.update)
    planned, end = PlannedTimeline(found.schedule, found.times, found.hop, [update]).rows()
    rows = []
    for recorded, plan in zip(measured, planned, strict=True):
        rows += [*recorded, *(replace(row, label=f"{row.label}, planned") for row in plan)]
    return Chart(rows, max(length, end), "ms", names)


def _measured(comparison: Comparison) -> tuple[list[list[BarRow]], float]:
    """Return for each pipeline rank the rows of its first rank in one step, and the end of the
    step, in milliseconds."""
    steps = comparison.steps
    pp = comparison.candidate.job.pp
    stride = steps.recorded.ranks // pp
    spans = [
        span
        for span in steps.spans
        if span.details["iteration"] == steps.typical and span.rank % stride == 0
    ]
    begin = min(span.begin for span in spans if span.lane == ITERATIONS)
    end = max(span.end for span in spans if span.lane == ITERATIONS)
    rows = []
    for rank in range(pp):
        own = [span for span in spans if span.rank == rank * stride]
        bars = {
            lane: [_bar(span, begin) for span in own if span.lane == lane]
            for lane in (COMPUTE, WAITS, *MESSAGES)
        }
        first = BarRow(f"pp rank {rank}, measured", bars[COMPUTE] + bars[WAITS])
        rows.append([first, *(BarRow(lane, bars[lane]) for lane in MESSAGES if bars[lane])])
    return rows, (end - begin) * 1e3


def _bar(span: Span, zero: float) -> Bar:
    kinds = {WAITS: "wait", COMPUTE: str(span.details.get("op", ""))}
    kind = kinds.get(span.lane, span.lane)
    size = f", {span.details['bytes']} bytes" if "bytes" in span.details else ""
    shown = span.lane == COMPUTE and kind in COLOURS
    return Bar(
        (span.begin - zero) * 1e3,
        (span.end - zero) * 1e3,
        COLOURS.get(kind, COLOURS["other"]),
        str(span.details["microbatch"]) if shown else "",
        f"{span.name}: {milliseconds(span.seconds)}{size}",
    )
