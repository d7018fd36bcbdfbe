"""``schedule``: a pipeline schedule on a time grid, as text and as a drawing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType

from megatron_llama.config.parse import Parsed
from megatron_llama.planner.configs import ScheduleConfig
from megatron_llama.planner.outputs import write_drawing, write_page
from megatron_llama.planner.pictures.page import code, page
from megatron_llama.planner.pictures.svg import INK, WHITE, Drawing, ink_on
from megatron_llama.schedule import (
    Action,
    Costs,
    Op,
    Report,
    Schedule,
    Timeline,
    schedule_named,
    simulate,
    validate,
)

LINE = 120
"""Columns of text. Longer schedules continue below."""
RULER = 5
"""Ticks between two numbers of the time scale."""

Formula = tuple[str, Callable[[int, int, int], Fraction], Callable[[int], int]]
"""The bubble in words, its value for (p, m, v), and by p the fewest microbatches for which the
formula holds."""

FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {
        "gpipe": ("(p-1)/(m+p-1)", lambda p, m, v: Fraction(p - 1, m + p - 1), lambda p: 1),
        "1f1b": ("(p-1)/(m+p-1)", lambda p, m, v: Fraction(p - 1, m + p - 1), lambda p: 1),
        "interleaved": (
            "(p-1)/(vm+p-1)",
            lambda p, m, v: Fraction(p - 1, v * m + p - 1),
            lambda p: 1,
        ),
        "zb-h1": ("(p-1)/(3m+p-1)", lambda p, m, v: Fraction(p - 1, 3 * m + p - 1), lambda p: p),
        "zb-v": (
            "(p-1)/(6m+p-1)",
            lambda p, m, v: Fraction(p - 1, 6 * m + p - 1),
            lambda p: 2 * p - 1,
        ),
    }
)
"""Bubbles from the papers, printed next to the simulated bubble."""


def schedule(parsed: Parsed) -> None:
    """Print the schedule and its costs, and draw it into the files of ``--svg`` and ``--html``.
    Raises ConfigError for options that give no schedule and for a file that cannot be written."""
    options = parsed.get(ScheduleConfig)
    plan = schedule_named(
        options.pipeline_schedule,
        ranks=options.pipeline_model_parallel_size,
        microbatches=options.num_microbatches,
        virtual=options.virtual_pipeline_model_parallel_size,
    )
    timeline = simulate(plan, Costs())
    chunks = f" x {plan.virtual} chunks" if plan.virtual > 1 else ""
    split = Op.BACKWARD_WEIGHT in plan.passes
    backward = "B input gradient, W weight gradient" if split else "B backward, twice as long"
    letters = ", a b ... the chunk of the rank" if plan.virtual > 1 else ""
    title = (
        f"{plan.name}: {len(plan.ranks)} pipeline ranks{chunks}, "
        f"{plan.microbatches} microbatches (validated)"
    )
    summary = "\n".join(_summary(plan, validate(plan)))
    print(f"{title}\nF forward, {backward}{letters}, . idle\n")
    print("\n".join([*_grid(plan, timeline), summary]))
    if options.svg is not None:
        write_drawing(options.svg, drawing(plan, timeline).svg() + "\n")
        print(f"drawn in {options.svg}")
    if options.html is not None:
        picture = drawing(plan, timeline).svg(inline=True)
        write_page(options.html, page(title, [picture, code(summary)]))
        print(f"drawn in {options.html}")


def _grid(plan: Schedule, timeline: Timeline) -> Iterator[str]:
    """Yield lines with one row per rank and one cell per chunk pass. A schedule of more than LINE
    columns continues in further blocks of rows below."""
    ticks = int(timeline.makespan)
    width = len(f"F{plan.microbatches - 1}") + (plan.virtual > 1) + 1
    margin = len(f"rank {len(plan.ranks) - 1}  ")
    per_block = (LINE - margin) // width // RULER * RULER
    rows = []
    for passes in timeline.ranks:
        cells = [f"{'.':<{width}}"] * ticks
        for timed in passes:
            length = int(timed.end - timed.start)
            letter = chr(ord("a") + _chunk(plan, timed.action)) if plan.virtual > 1 else ""
            label = f"{timed.action.op.letter}{timed.action.microbatch}{letter}"
            # A pass of several ticks is one box, filled up to the space before the next pass.
            text = (
                f"{label:<{width}}" if length == 1 else label.ljust(width * length - 1, "-") + " "
            )
            for tick in range(length):
                cells[int(timed.start) + tick] = text[width * tick : width * (tick + 1)]
        rows.append(cells)
    for start in range(0, ticks, per_block):
        numbers = "".join(
            f"{tick:<{width * RULER}}"
            for tick in range(start, min(start + per_block, ticks), RULER)
        )
        yield f"{'time':<{margin}}{numbers}".rstrip()
        for rank, cells in enumerate(rows):
            yield f"{f'rank {rank}':<{margin}}{''.join(cells[start : start + per_block])}".rstrip()
        yield ""


def _chunk(plan: Schedule, action: Action) -> int:
    """Return the index of an action's chunk among the chunks of its rank."""
    return plan.placement[: action.stage].count(plan.placement[action.stage])


def _summary(plan: Schedule, report: Report) -> Iterator[str]:
    p = len(plan.ranks)
    m = plan.microbatches
    published = ""
    if plan.name in FORMULAS:
        words, value, fewest = FORMULAS[plan.name]
        holds = "" if m >= fewest(p) else f", which needs {fewest(p)} microbatches"
        published = f"; formula {words} = {float(value(p, m, plan.virtual)):.2%}{holds}"
    bubbles = " ".join(f"{bubble:.2%}" for bubble in report.bubble_per_rank)
    stalls = " ".join(f"{time:.4g}" for time in report.stalled_per_rank)
    peaks = " ".join(f"{peak:.3g}" for peak in report.peak_in_flight)
    yield f"bubble       {report.bubble_fraction:.2%} of the makespan{published}"
    yield f"  per rank   {bubbles}"
    yield f"  inside     {stalls} idle between a rank's first and last pass"
    yield f"makespan     {report.makespan:.6g} forward passes of one microbatch"
    yield f"in flight    {peaks} microbatches' activations at most"


IDLE = "#eef0f4"
GREY = "#69707c"
COLOURS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {"F": (49, 104, 190), "B": (22, 122, 84), "W": (224, 130, 20)}
)
ROW = 34
GAP = 2
MARGIN = 16
DIGIT = 10
"""Pixels: height of a row, gap between boxes, margin of the drawing, width of a digit."""


def drawing(plan: Schedule, timeline: Timeline) -> Drawing:
    """Return a drawing of the schedule: a box for each pass with its microbatch, lighter for later
    chunks of a rank. Ranks are on the left, the time in chunk passes is below, and a key of the
    colours under it."""
    ticks = int(timeline.makespan)
    ranks = len(plan.ranks)
    cell = DIGIT * len(str(plan.microbatches - 1)) + 14
    left = MARGIN + DIGIT * len(str(ranks - 1)) + 12
    axis = MARGIN + ranks * ROW
    width = max(left + ticks * cell, left + 3 * (ROW + 24)) + MARGIN + cell // 2
    height = axis + 30 + ROW + MARGIN
    canvas = Drawing(width, height)
    canvas.box(0, 0, width, height, fill=WHITE, css_class="ground")

    def centred(
        x: float, middle: float, words: str, ink: str, size: int, css_class: str = ""
    ) -> None:
        # Digits are about 0.7 of the font's size high, and ``text`` takes their lower end.
        lower = middle + 0.35 * size
        canvas.text(x, lower, words, fill=ink, anchor="middle", size=size, css_class=css_class)

    for rank, passes in enumerate(timeline.ranks):
        top = MARGIN + rank * ROW
        centred((MARGIN + left - 12) / 2, top + ROW / 2, str(rank), INK, 15, "ink")
        canvas.box(left, top + GAP / 2, ticks * cell, ROW - GAP, fill=IDLE, css_class="faint")
        for timed in passes:
            x = left + int(timed.start) * cell
            length = int(timed.end - timed.start) * cell
            # The first chunk has the full colour, the last one is two thirds of the way to white.
            pale = 0.66 * _chunk(plan, timed.action) / max(1, plan.virtual - 1)
            colour = COLOURS[timed.action.op.letter]
            fill = "#" + "".join(f"{round(tint + pale * (255 - tint)):02x}" for tint in colour)
            edge = x + GAP / 2
            canvas.box(edge, top + GAP / 2, length - GAP, ROW - GAP, fill=fill, rounded=2)
            number = str(timed.action.microbatch)
            centred(x + length / 2, top + ROW / 2, number, ink_on(fill), 15)
    for tick in range(0, ticks + 1, RULER):
        x = left + tick * cell
        canvas.line(x, axis + 3, x, axis + 8, stroke=GREY)
        centred(x, axis + 17, str(tick), GREY, 11, "axis")
    for index, letter in enumerate(dict.fromkeys(op.letter for op in plan.passes)):
        x = left + index * (ROW + 24)
        fill = "#" + "".join(f"{tint:02x}" for tint in COLOURS[letter])
        canvas.box(x, axis + 34, ROW - 8, ROW - 8, fill=fill, rounded=2)
        centred(x + (ROW - 8) / 2, axis + 30 + ROW / 2, letter, ink_on(fill), 15)
    return canvas
