"""``schedule``: a pipeline schedule on a time grid, as text and as a picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType

from megatron_llama.commands.common.configs import ScheduleConfig
from megatron_llama.commands.common.picture import Canvas, Colour, text_width
from megatron_llama.config.parse import Parsed
from megatron_llama.errors import ConfigError, describe
from megatron_llama.plans.schedule import (
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

LETTERS: Mapping[Op, str] = MappingProxyType(
    {Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "B", Op.BACKWARD_WEIGHT: "W"}
)
LINE = 120
"""Columns of text; longer schedules continue below."""
RULER = 5
"""Ticks between two numbers of the time scale."""

Formula = tuple[str, Callable[[int, int, int], Fraction], Callable[[int], int]]
"""(bubble in words, its value for (p, m, v), the fewest microbatches for which it holds, given
p)."""

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


def schedule(parsed: Parsed) -> None:
    """Print the schedule, what it costs, and draw it where ``--png`` says. Raises ConfigError."""
    options = parsed.get(ScheduleConfig)
    plan = schedule_named(
        options.pipeline_schedule,
        ranks=options.pipeline_model_parallel_size,
        microbatches=options.num_microbatches,
        virtual=options.virtual_pipeline_model_parallel_size,
    )
    timeline = simulate(plan, Costs())
    print("\n".join([*_title(plan), *_grid(plan, timeline), *_summary(plan, validate(plan))]))
    if options.png is not None:
        _write(Path(options.png), picture(plan, timeline).png())
        print(f"drawn in {options.png}")


def _title(plan: Schedule) -> Iterator[str]:
    chunks = f" x {plan.virtual} chunks" if plan.virtual > 1 else ""
    yield f"{plan.name}: {len(plan.ranks)} pipeline ranks{chunks}, {plan.microbatches} microbatches (validated)"
    split = Op.BACKWARD_WEIGHT in plan.passes
    backward = "B input gradient, W weight gradient" if split else "B backward, twice as long"
    yield f"F forward, {backward}{', a b ... the chunk of the rank' if plan.virtual > 1 else ''}, . idle"
    yield ""


def _grid(plan: Schedule, timeline: Timeline) -> Iterator[str]:
    """One row per rank and one cell per chunk pass, in as many blocks as the line is too short
    for."""
    ticks = int(timeline.makespan)
    width = len(f"F{plan.microbatches - 1}") + (plan.virtual > 1) + 1
    margin = len(f"rank {len(plan.ranks) - 1}  ")
    per_block = (LINE - margin) // width // RULER * RULER
    rows = [_cells(plan, timeline, rank, ticks, width) for rank in range(len(plan.ranks))]
    for start in range(0, ticks, per_block):
        numbers = "".join(
            f"{tick:<{width * RULER}}"
            for tick in range(start, min(start + per_block, ticks), RULER)
        )
        yield f"{'time':<{margin}}{numbers}".rstrip()
        for rank, cells in enumerate(rows):
            yield f"{f'rank {rank}':<{margin}}{''.join(cells[start : start + per_block])}".rstrip()
        yield ""


def _cells(plan: Schedule, timeline: Timeline, rank: int, ticks: int, width: int) -> list[str]:
    cells = [f"{'.':<{width}}"] * ticks
    for one in timeline.ranks[rank]:
        length = int(one.end - one.start)
        label = f"{LETTERS[one.action.op]}{one.action.microbatch}{_chunk_letter(plan, one.action)}"
        # A pass of several ticks is one box: filled up to the space before the next.
        text = f"{label:<{width}}" if length == 1 else label.ljust(width * length - 1, "-") + " "
        for tick in range(length):
            cells[int(one.start) + tick] = text[width * tick : width * (tick + 1)]
    return cells


def _chunk(plan: Schedule, action: Action) -> int:
    """Which of its rank's chunks an action belongs to."""
    return plan.placement[: action.stage].count(plan.placement[action.stage])


def _chunk_letter(plan: Schedule, action: Action) -> str:
    return chr(ord("a") + _chunk(plan, action)) if plan.virtual > 1 else ""


def _summary(plan: Schedule, report: Report) -> Iterator[str]:
    words, value, fewest = FORMULAS[plan.name]
    p = len(plan.ranks)
    m = plan.microbatches
    share = value(p, m, plan.virtual)
    holds = "" if m >= fewest(p) else f", which needs {fewest(p)} microbatches"
    yield f"bubble       {report.bubble_fraction:.2%} of the makespan; formula {words} = {float(share):.2%}{holds}"
    yield f"  per rank   {_row(f'{bubble:.2%}' for bubble in report.bubble_per_rank)}"
    yield f"  inside     {_row(f'{time:.4g}' for time in report.stalled_per_rank)} idle between a rank's first and last pass"
    yield f"makespan     {report.makespan:.6g} forward passes of one microbatch"
    yield f"in flight    {_row(f'{peak:.3g}' for peak in report.peak_in_flight)} microbatches' activations at most"


def _row(values: Iterator[str]) -> str:
    return " ".join(values)


WHITE = (255, 255, 255)
IDLE = (238, 240, 244)
INK = (34, 40, 49)
QUIET = (128, 136, 148)
COLOURS: Mapping[str, Colour] = MappingProxyType(
    {"F": (49, 104, 190), "B": (28, 140, 98), "W": (224, 130, 20)}
)
ROW = 34
GAP = 2
MARGIN = 16
SCALE = 2


def picture(plan: Schedule, timeline: Timeline) -> Canvas:
    """A box for every pass with the number of its microbatch; later chunks of a rank are lighter.
    The rank stands on the left, the time in chunk passes below, and what the colours mean under
    it."""
    ticks = int(timeline.makespan)
    ranks = len(plan.ranks)
    cell = text_width(str(plan.microbatches - 1), SCALE) + 14
    left = MARGIN + text_width(str(ranks - 1), SCALE) + 12
    axis = MARGIN + ranks * ROW
    width = max(left + ticks * cell, left + 3 * (ROW + 24)) + MARGIN + cell // 2
    canvas = Canvas(width, axis + 30 + ROW + MARGIN, WHITE)
    for rank, passes in enumerate(timeline.ranks):
        top = MARGIN + rank * ROW
        canvas.text((MARGIN + left - 12) // 2, top + ROW // 2, str(rank), INK, scale=SCALE)
        canvas.box(left, top + GAP // 2, ticks * cell, ROW - GAP, IDLE)
        for one in passes:
            x = left + int(one.start) * cell
            length = int(one.end - one.start) * cell
            fill, ink = _paint(LETTERS[one.action.op], _chunk(plan, one.action), plan.virtual)
            canvas.box(x + GAP // 2, top + GAP // 2, length - GAP, ROW - GAP, fill, rounded=2)
            canvas.text(
                x + length // 2, top + ROW // 2, str(one.action.microbatch), ink, scale=SCALE
            )
    for tick in range(0, ticks + 1, RULER):
        canvas.box(left + tick * cell, axis + 3, 1, 5, QUIET)
        canvas.text(left + tick * cell, axis + 17, str(tick), QUIET, scale=1)
    for index, letter in enumerate(dict.fromkeys(LETTERS[op] for op in plan.passes)):
        x = left + index * (ROW + 24)
        top = axis + 30
        canvas.box(x, top + 4, ROW - 8, ROW - 8, COLOURS[letter], rounded=2)
        canvas.text(x + (ROW - 8) // 2, top + ROW // 2, letter, WHITE, scale=SCALE)
    return canvas


def _paint(letter: str, chunk: int, chunks: int) -> tuple[Colour, Colour]:
    """(box, number): the full colour for the first chunk, two thirds of the way to white for the
    last."""
    red, green, blue = COLOURS[letter]
    share = 0.66 * chunk / max(1, chunks - 1)
    fill = (
        round(red + share * (255 - red)),
        round(green + share * (255 - green)),
        round(blue + share * (255 - blue)),
    )
    return fill, INK if share > 0.3 else WHITE


def _write(target: Path, data: bytes) -> None:
    beside = target.with_name(f"{target.name}.writing")
    try:
        beside.write_bytes(data)
        os.replace(beside, target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(
            describe(
                "--png", got=error, expected="a file that can be written", do="give another path"
            )
        ) from None
