"""The page of ``report``: one run, or several runs next to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType

import numpy as np

from megatron_llama.engine.plan.memory import sized
from megatron_llama.errors import counted
from megatron_llama.planner.pictures import curves, page
from megatron_llama.planner.pictures.bars import GREY, NARROW, PALETTE, Bar, BarRow, drawing
from megatron_llama.planner.pictures.curves import COLOURS, Axis, Curve, Mark, chart, short
from megatron_llama.planner.run.folder import SECONDS, Floats, time_of
from megatron_llama.planner.run.incidents import Incident
from megatron_llama.planner.run.planned import PEAK, STEP, ComparedNumber, Planned
from megatron_llama.planner.run.summary import Summary, differences, number

BYTES = 1_000_000
"""Bytes that a page stays below, if one of LIMITS allows it."""
POINT = 12
"""Bytes of a point of a curve."""
PROBLEMS = 20
"""Most lines shown of those that were not understood."""
STYLE = f"""{curves.STYLE}
.charts {{ display: grid; gap: 18px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)) }}
figure {{ margin: 0 }} figure svg {{ width: 100% }}
figcaption {{ font-size: 14px }} figcaption span {{ display: block }}
.restart {{ stroke: var(--soft); stroke-dasharray: 3 3 }}
path.restart {{ stroke-dasharray: none }}
.skipped {{ stroke: var(--bad); stroke-width: 2 }}
details {{ margin-top: 14px }} summary {{ cursor: pointer }}
td.error, td.fault, td.gap, td.skip, td.rollback {{ color: var(--bad) }}
"""
KNOWN = frozenset(
    {
        *("iteration", "consumed_samples", "lm_loss", "loss", "grad_norm", "loss_scale", SECONDS),
        *("skipped_iterations", "learning_rate", "global_batch_size", "eta_seconds"),
        *("tokens_per_second", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu"),
        *("exposed_comm_ms", "elapsed_ms", "peak_memory_bytes", "data_parallel_bytes"),
        *("compute_ms_min", "compute_ms_median", "compute_ms_max", "slowest_rank"),
    }
)
"""Columns that do not belong to the run's objective. All others get a chart of their own."""
UNITS: Mapping[str, Callable[[float], str]] = MappingProxyType(
    {
        "s": lambda value: f"{value * 1e3:,.1f} ms" if value < 10 else f"{value:,.1f} s",
        "bytes": lambda value: sized(round(value)),
        "share": lambda value: f"{value:.1%}",
        "tokens/s": lambda value: f"{value:,.0f}",
    }
)


@dataclass(frozen=True)
class Limits:
    """Amounts of data that a page shows."""

    points: int
    """Bytes for the points of all curves."""
    listed: int
    """Most incidents of each run. If there are more, half are the first and half the last."""
    options: bool
    """Whether all options are shown, or only those that are not the default."""


LIMITS = (
    Limits(500_000, 200, True),
    Limits(400_000, 60, True),
    Limits(300_000, 60, False),
    Limits(200_000, 20, False),
    Limits(100_000, 6, False),
)
"""The page uses the first entry with which it is small enough, or the last."""


@dataclass(frozen=True)
class _Wanted:
    """A chart to draw, if any run has the column."""

    title: str
    column: str
    evaluated: bool = False
    """Whether the column is one of the evaluations."""
    by_time: bool = False
    scale: float = 1.0
    """Factor on the values of the column."""


def report_page(summaries: Sequence[Summary]) -> str:
    """Return the whole HTML file."""
    names = ", ".join(summary.name for summary in summaries)
    for limits in LIMITS:
        text = page.page(names, _parts(summaries, limits), style=STYLE)
        if len(text.encode()) < BYTES:
            break
    return text


def _parts(summaries: Sequence[Summary], limits: Limits) -> Iterator[str]:
    several = len(summaries) > 1
    yield _numbers(summaries)
    if several:
        yield page.heading("What differs")
        differing = differences(summaries)
        head = ["", *(summary.name for summary in summaries)]
        rows = [[name, *values] for name, values in differing.items()]
        columns = range(1, len(head))
        yield (
            page.table(head, rows, sentences=columns)
            if rows
            else page.paragraph("Nothing in options, processes, device or versions.")
        )
    yield from _charts(summaries, limits.points)
    yield page.heading("Plan and measurement")
    for summary in summaries:
        yield from _title(summary, several)
        yield from _plan(summary.plan)
    yield page.heading("Restarts and faults")
    for summary in summaries:
        yield from _title(summary, several)
        yield from _incidents(summary, limits.listed)
    yield page.heading("Data")
    for summary in summaries:
        yield from _title(summary, several)
        yield from _data(summary)
    yield page.heading("Configuration")
    for summary in summaries:
        yield from _title(summary, several)
        yield from _configuration(summary, everything=limits.options)
    unread = [(summary, problem) for summary in summaries for problem in summary.run.problems]
    if unread:
        yield page.heading("Not understood")
        shown = [f"{summary.name}/{problem}" for summary, problem in unread[:PROBLEMS]]
        more = len(unread) - len(shown)
        yield page.code(
            "\n".join([*shown, *([f"and {counted(more, 'line')} more"] if more else [])])
        )


def _title(summary: Summary, several: bool) -> Iterator[str]:
    if several:
        yield f"<h3>{escape(summary.name)}</h3>"


def _numbers(summaries: Sequence[Summary]) -> str:
    """Return the first table, with a column for each run."""
    tables = [dict(summary.rows()) for summary in summaries]
    names = dict.fromkeys(name for rows in tables for name in rows)
    table = [[name, *(rows.get(name, "") for rows in tables)] for name in names]
    return page.table(["", *(summary.name for summary in summaries)], table)


def _charts(summaries: Sequence[Summary], budget: int) -> Iterator[str]:
    several = len(summaries) > 1
    losses = sorted({summary.run.loss for summary in summaries})
    wanted = [_Wanted(name.replace("_", " "), name) for name in losses]
    wanted += [
        _Wanted("validation loss", "validation_loss", evaluated=True),
        _Wanted("gradient norm", "grad_norm"),
        _Wanted("learning rate", "learning_rate"),
        _Wanted("samples of a step", "global_batch_size"),
        _Wanted("loss scale", "loss_scale"),
    ]
    others = dict.fromkeys(name for summary in summaries for name in summary.run.steps)
    wanted += [_Wanted(name, name) for name in others if name not in KNOWN]
    speed = [
        _Wanted("tokens/s", "tokens_per_second", by_time=True),
        _Wanted("MFU (%)", "mfu", by_time=True, scale=100),
        _Wanted("step (ms)", "elapsed_ms", by_time=True),
        _Wanted("exposed communication (ms)", "exposed_comm_ms", by_time=True),
        _Wanted("peak memory of rank 0 (GiB)", "peak_memory_bytes", by_time=True, scale=2**-30),
    ]
    drawn = [[figure for figure in group if _has(summaries, figure)] for group in (wanted, speed)]
    count = max(1, sum(map(len, drawn)))
    columns = min(curves.COLUMNS, max(40, budget // POINT // 4 // count // len(summaries)))
    for title, group in zip(("Curves", "Speed over time"), drawn, strict=True):
        if not group:
            continue
        yield page.heading(title)
        if several:
            colours = [(summary.name, _colour(place)) for place, summary in enumerate(summaries)]
            yield page.key(colours)
        yield '<div class="charts">'
        for figure in group:
            yield _figure(summaries, figure, columns)
        yield "</div>"
    marks = (
        ""
        if several
        else "Dashed lines, or marks at the top, are restarts and returns to a checkpoint; red "
        "marks at the foot are steps that were left out. "
    )
    yield page.paragraph(f"{marks}Values far beyond all others are drawn at the edge.")


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _has(summaries: Sequence[Summary], wanted: _Wanted) -> bool:
    """Whether a chart has values. A loss scale or batch size that never changes has no chart."""
    columns = [_values(run, wanted)[1] for run in summaries]
    values = np.concatenate(columns)
    values = values[np.isfinite(values)]
    if not len(values) or (wanted.by_time and all(_begin(run) is None for run in summaries)):
        return False
    return wanted.column not in ("loss_scale", "global_batch_size") or bool(np.ptp(values))


def _begin(summary: Summary) -> float | None:
    """Return the time of the first event or line, whichever is earlier; None if unknown."""
    known = [event.seconds for event in summary.run.starts[:1]]
    times = summary.run.column(SECONDS)
    times = times[np.isfinite(times)]
    known += [float(times[0])] if len(times) else []
    return min(known, default=None)


def _values(summary: Summary, wanted: _Wanted) -> tuple[Floats, Floats]:
    """Return the places and the values of a chart."""
    lines = summary.run.evaluations if wanted.evaluated else summary.run.steps
    column = lines.get(wanted.column)
    if column is None:
        return np.zeros(0), np.zeros(0)
    if not wanted.by_time:
        return lines["iteration"], column * wanted.scale
    begin = _begin(summary)
    times = _spread(summary.run.column(SECONDS) - (begin or 0.0))
    known = np.isfinite(times)
    # The curve may not run backwards if the clock was set back.
    ascending: Floats = np.maximum.accumulate(times[known])
    return ascending, (column * wanted.scale)[known]


def _spread(times: Floats) -> Floats:
    """Return times with the lines of one second spread evenly: the log has whole seconds."""
    if not len(times):
        return times
    begins = np.flatnonzero(np.diff(times, prepend=np.nan) != 0)
    counts = np.diff(np.append(begins, len(times)))
    place = np.arange(len(times)) - np.repeat(begins, counts)
    spread: Floats = times + place / np.repeat(counts, counts)
    return spread


def _figure(summaries: Sequence[Summary], wanted: _Wanted, columns: int) -> str:
    drawn = []
    marks: list[Mark] = []
    single = len(summaries) == 1
    for place, summary in enumerate(summaries):
        x, y = _values(summary, wanted)
        moves = list(_moves(summary, wanted.by_time))
        breaks = [at for at, _ in moves] if wanted.by_time else ()
        drawn.append(Curve(summary.name, x, y, breaks, place))
        if single:
            marks += [Mark(at, words) for at, words in moves]
            marks += _left_out(summary, wanted)
    ends = [float(curve.x[end]) for curve in drawn if len(curve.x) for end in (0, -1)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    # A single line has no extent: its axis begins at the start.
    low = 0.0 if low < 0.3 * high or low == high else low
    across = _time_axis(low, high) if wanted.by_time else Axis(low, max(high, low + 1))
    said = [_said(curve) for curve in drawn if np.isfinite(curve.y).any()]
    caption = said[0] if single else ""
    description = "; ".join(
        f"{curve.label}: {words}" for curve, words in zip(drawn, said, strict=False)
    )
    along = "time since the start" if wanted.by_time else "iteration"
    drawing_ = chart(
        drawn,
        across,
        title=f"{wanted.title} by {along}",
        description=said[0] if single else description,
        marks=marks,
        columns=columns,
    )
    words = f'<b>{escape(wanted.title)}</b><span class="soft">{escape(caption)}</span>'
    return f"<figure><figcaption>{words}</figcaption>{drawing_}</figure>"


def _said(curve: Curve) -> str:
    """Return the last, lowest and highest value of a curve in words."""
    known = curve.y[np.isfinite(curve.y)]
    low, high = short(float(known.min())), short(float(known.max()))
    return f"last {short(float(known[-1]))}, lowest {low}, highest {high}"


def _moves(summary: Summary, by_time: bool) -> Iterator[tuple[float, str]]:
    """Yield the places of restarts and rollbacks on the axis, with their words."""
    begin = _begin(summary) or 0.0
    for incident in summary.incidents.listed:
        if incident.kind in ("restart", "rollback"):
            at = incident.seconds if by_time else incident.iteration
            if at is not None:
                place = at - begin if by_time else float(at)
                yield place, f"{_at(incident)}: {incident.words}"


def _left_out(summary: Summary, wanted: _Wanted) -> list[Mark]:
    """Return marks of steps that were left out: bad steps by their file, others by the log."""
    begin = _begin(summary) or 0.0
    marks = [
        Mark(
            (incident.seconds or 0.0) - begin if wanted.by_time else float(incident.iteration or 0),
            f"{_at(incident)}: {incident.words}",
            "skipped",
        )
        for incident in summary.incidents.listed
        if incident.kind == "skip" and incident.iteration is not None
    ]
    if not wanted.by_time and summary.incidents.overflows:
        where = summary.run.steps["iteration"][summary.run.column("skipped_iterations") > 0]
        marks += [Mark(float(at), f"skipped until iteration {at:.0f}", "skipped") for at in where]
    return marks


def _at(incident: Incident) -> str:
    if incident.iteration is not None:
        return f"iteration {incident.iteration:,}"
    return "" if incident.seconds is None else time_of(incident.seconds)


def _time_axis(low: float, high: float) -> Axis:
    for scale, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if high >= 3 * scale:
            return Axis(low, high, unit, scale)
    return Axis(low, max(high, low + 1.0), "s")


def _plan(plan: Planned | str) -> Iterator[str]:
    if isinstance(plan, str):
        yield page.paragraph(plan)
        return
    yield page.table(
        ["", "planned", "measured", "measured / planned"],
        [
            _compared_cells(row)
            for row in plan.compared()
            if row.planned is not None or row.measured is not None
        ],
    )
    for note in plan.notes():
        yield page.paragraph(note)
    measured = {row.what: row.measured for row in plan.compared()}
    # On a host the measured peak includes Python and torch. Its bar would dwarf the plan's.
    peak = None if plan.is_host else measured[PEAK]
    yield '<div class="charts">'
    yield from _bars("Memory of rank 0", plan.memory, peak, "MiB", 2.0**-20)
    if plan.known:
        yield from _bars("Time of a step", plan.step_parts, measured[STEP], "ms", 1e3)
    yield "</div>"


def _compared_cells(row: ComparedNumber) -> list[str]:
    words = UNITS[row.unit]
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    known = ["?" if value is None else words(value) for value in (row.planned, row.measured)]
    return [row.what, *known, ratio]


def _bars(
    title: str, parts: Mapping[str, float], measured: float | None, unit: str, scale: float
) -> Iterator[str]:
    """Yield a figure: the parts of a plan as one bar with a key, and a bar of the measurement."""
    bars = []
    begin = 0.0
    names = []
    for place, (name, value) in enumerate(item for item in parts.items() if item[1] > 0):
        size = value * scale
        colour = PALETTE[place % len(PALETTE)]
        tip = f"{name}: {size:,.3g} {unit}"
        bars.append(Bar(begin, begin + size, colour, "", tip))
        names.append((tip, colour))
        begin += size
    if bars:
        rows = [BarRow("planned", bars)]
        if measured is not None:
            whole = measured * scale
            rows.append(BarRow("measured", [Bar(0.0, whole, GREY, "", f"{whole:,.4g} {unit}")]))
            begin = max(begin, whole)
        words = f"{title}: {', '.join(tip for tip, _ in names)}"
        drawn = drawing(rows, begin, unit, frame=NARROW, title=words)
        caption = f"<figcaption><b>{escape(title)}</b></figcaption>"
        yield f"<figure>{caption}{drawn}{page.key(names)}</figure>"


def _incidents(summary: Summary, limit: int) -> Iterator[str]:
    incidents = summary.incidents
    listed = incidents.listed
    if not listed:
        yield page.paragraph("Nothing is known of restarts and faults: there is no events.jsonl.")
        return
    sums = [
        counted(incidents.restarts, "restart"),
        f"{counted(incidents.repeated, 'step')} done again",
        f"{counted(len(summary.run.skipped), 'bad step')} left out",
        f"{counted(incidents.overflows, 'overflow')}",
        f"{number(incidents.down_seconds, '.0f')} s between a process and the next",
    ]
    yield page.paragraph(f"{', '.join(sums)}.")
    half = limit // 2
    shown = listed if len(listed) <= limit else (*listed[:half], *listed[-half:])
    rows = [
        (
            ("" if incident.seconds is None else escape(time_of(incident.seconds)), "k"),
            ("" if incident.iteration is None else f"{incident.iteration:,}", "n"),
            (incident.kind, incident.kind),
            (escape(incident.words), "s"),
        )
        for incident in shown
    ]
    if len(shown) < len(listed):
        left = f"{len(listed) - len(shown):,} more, not shown"
        rows.insert(half, (("", ""), ("", "n"), ("", ""), (left, "s")))
    head = (("time", ""), ("iteration", "n"), ("", ""), ("", ""))
    yield page.html_table(head, rows)
    if incidents.is_open:
        yield page.paragraph(
            "The newest process has not said that it ended: it runs, or was killed."
        )


def _data(summary: Summary) -> Iterator[str]:
    if not summary.datasets:
        yield page.paragraph("Nothing is known of the datasets.")
        return
    rows = [
        [
            dataset.name,
            f"{dataset.share:.1%}",
            "?" if dataset.samples is None else f"{dataset.samples:,}",
            f"{dataset.read:,}",
            f"{dataset.tokens:,}",
            number(dataset.passes, ".3g"),
        ]
        for dataset in summary.datasets
    ]
    yield page.table(["", "share", "samples", "samples read", "tokens read", "passes"], rows)
    entry = summary.run.starts[-1].details["data"][0].get("is")
    if isinstance(entry, Mapping):
        facts = [(name, value) for name, value in entry.items() if isinstance(value, int | str)]
        yield page.paragraph(", ".join(f"{name}: {value}" for name, value in facts) + ".")


def _configuration(summary: Summary, *, everything: bool) -> Iterator[str]:
    facts = summary.described() | summary.surroundings()
    if facts:
        yield page.table(["", ""], facts.items(), sentences=(1,))
    options = summary.options()
    if not options:
        yield page.paragraph("No configuration was found.")
        return
    yield "<h3>Options that are not the default</h3>"
    changed = summary.changed_options()
    yield page.table(["", ""], [list(item) for item in changed.items()], sentences=(1,))
    if everything:
        rows = [list(item) for item in options.items()]
        every = page.table(["", ""], rows, sentences=(1,))
        yield page.details(f"all {len(options)} options", [every])
