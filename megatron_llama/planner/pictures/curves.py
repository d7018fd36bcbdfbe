"""Curves over one axis as SVG. Curves are thinned: a million steps take no more bytes than a
thousand, and every spike stays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_llama.planner.pictures.svg import Drawing

Floats = NDArray[np.float64]
COLOURS = (
    *("light-dark(#3168be, #6ea8fe)", "light-dark(#c2570c, #f2a65a)"),
    *("light-dark(#1c7c54, #4cc38a)", "light-dark(#8a3fb0, #c79bea)"),
    *("light-dark(#a3273f, #ff8b97)", "light-dark(#0d7f8c, #5fd0dc)"),
    *("light-dark(#7a6a1d, #d9c65b)", "light-dark(#5b6472, #b6bec9)"),
)
"""Colours of curves in order, for light and dark pages. Later curves begin again."""
STYLE = "".join(
    f"polyline.c{place} {{ stroke: {colour}; stroke-width: 1.4 }}\n"
    for place, colour in enumerate(COLOURS)
)
"""CSS of the classes of curves."""
WIDTH, HEIGHT = 380.0, 208.0
"""Size of a chart in pixels."""
# Pixels around the field of a chart.
LEFT = 46.0
RIGHT = 10.0
TOP = 8.0
BOTTOM = 22.0
COLUMNS = 480
"""Columns of an axis. There are more than pixels, since a page can be enlarged."""
BEYOND = 4.0
"""Values that lie this many times further out than all others are cut off."""
FLAT = 1e-12
"""Values whose relative difference is at most this count as one value."""
SMALLEST_RANGE = 1e-290
"""Smallest range of an axis. fp64 cannot divide smaller ranges."""
TICKS = 5
TIPS = 40
"""Most marks that have full height and a tip. More marks are short, without tips."""
SHORT = 9.0
"""Height of a short mark in pixels."""


@dataclass(frozen=True)
class Curve:
    """Values by place."""

    label: str
    x: Floats
    """Places in ascending order."""
    y: Floats
    """Values; NaN where a value is not known."""
    breaks: Sequence[float] = ()
    """Places at which the curve is interrupted."""
    colour: int = 0
    """Index of the colour in COLOURS."""


@dataclass(frozen=True)
class Mark:
    """An incident at a place of the axis."""

    x: float
    tip: str
    css_class: str = "restart"
    """``restart`` for a line over the whole height, ``skipped`` for a short line at the foot."""


@dataclass(frozen=True)
class Axis:
    """The ends of an axis, its unit, and the unit's size in the numbers of the data."""

    low: float
    high: float
    unit: str = ""
    scale: float = 1.0

    @property
    def ticks(self) -> Iterator[tuple[float, str]]:
        """Places of ticks and their texts: multiples of 1, 2 or 5 times a power of ten."""
        low = self.low / self.scale
        high = self.high / self.scale
        step = 10.0 ** math.floor(math.log10((high - low) / TICKS))
        step *= next(
            factor for factor in (1, 2, 5, 10) if high - low <= (TICKS + 0.5) * step * factor
        )
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        for tick in range(first, last + 1):
            yield tick * step * self.scale, short(tick * step)


def short(value: float) -> str:
    """Return a number in at most four digits: ``0.002``, ``1.5e-05``, ``12.5k``, ``3M``."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


def thinned(curve: Curve, low: float, high: float, columns: int) -> Iterator[Curve]:
    """Yield the pieces of a curve between its breaks. A piece has at most four points in each of
    ``columns`` columns between ``low`` and ``high``: the first, the lowest, the highest and the
    last. The drawing looks the same with these points."""
    known = np.isfinite(curve.y)
    x = curve.x[known]
    y = curve.y[known]
    ends = [0, *np.searchsorted(x, np.sort(np.asarray(curve.breaks, np.float64))), len(x)]
    scale = columns / (high - low)
    for first, last in pairwise(ends):
        if last <= first:
            continue
        column = np.floor((x[first:last] - low) * scale)
        begins = first + np.concatenate([[0], np.flatnonzero(np.diff(column)) + 1])
        kept = set[int]()
        for begin, end in zip(begins, [*begins[1:], last], strict=True):
            values = y[begin:end]
            extremes = (0, len(values) - 1, int(values.argmin()), int(values.argmax()))
            kept |= {int(begin) + place for place in extremes}
        places = sorted(kept)
        yield Curve(curve.label, x[places], y[places], colour=curve.colour)


def visible_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the range of an axis: that of all values, or that of most values if a few lie so far
    out that the others could not be seen."""
    finite = [curve.y[np.isfinite(curve.y)] for curve in curves]
    values = np.concatenate(finite) if finite else np.zeros(0)
    if not len(values):
        return 0.0, 1.0
    low = float(values.min())
    high = float(values.max())
    inner_low, usual = (float(bound) for bound in np.quantile(values, (0.005, 0.995)))
    if high - usual > BEYOND * (usual - low) > 0:
        high = usual + 0.5 * (usual - low)
    if inner_low - low > BEYOND * (high - inner_low) > 0:
        low = inner_low - 0.5 * (high - inner_low)
    if high == low == 0:
        return -1.0, 1.0
    size = max(abs(low), abs(high))
    # A range that fp64 cannot divide into ticks shows one value.
    if high - low <= FLAT * size or high - low < SMALLEST_RANGE:
        rest = max(0.05 * size, SMALLEST_RANGE)
        return low - rest, high + rest
    margin = 0.04 * (high - low)
    # The margin of values that are not negative does not go below zero.
    return (max(low - margin, 0.0) if low >= 0 else low - margin), high + margin


def chart(
    curves: Sequence[Curve],
    across: Axis,
    *,
    title: str,
    description: str,
    marks: Sequence[Mark] = (),
    columns: int = COLUMNS,
) -> str:
    """Return curves over one axis as inline SVG. ``title`` and ``description`` are for readers who
    cannot see the curves. Values beyond the visible range are drawn at its edge."""
    canvas = Drawing(WIDTH, HEIGHT)
    up = Axis(*visible_range(curves))
    width = WIDTH - LEFT - RIGHT
    height = HEIGHT - TOP - BOTTOM
    foot = TOP + height

    def at(value: float) -> float:
        return LEFT + width * (value - across.low) / (across.high - across.low)

    def above(value: float) -> float:
        share = (value - up.low) / (up.high - up.low)
        return foot - height * min(max(share, 0.0), 1.0)

    for value, text in up.ticks:
        canvas.line(LEFT, above(value), WIDTH - RIGHT, above(value), css_class="g")
        canvas.text(LEFT - 5, above(value) + 4, text, anchor="end", css_class="s")
    ticks = list(across.ticks)
    for value, text in ticks:
        canvas.line(at(value), foot, at(value), foot + 4, css_class="g")
        # The last tick has the unit. Its text must stay within the picture.
        last = (value, text) == ticks[-1]
        words = f"{text} {across.unit}" if last and across.unit else text
        beyond = at(value) + 3 * len(words) > WIDTH
        x = WIDTH - 2 if beyond else at(value)
        canvas.text(x, foot + 16, words, anchor="end" if beyond else "middle", css_class="s")
    for css_class, begin, end in (("restart", TOP, TOP + SHORT), ("skipped", foot - SHORT, foot)):
        own = [mark for mark in marks if mark.css_class == css_class]
        # One mark for each pixel is enough.
        places = {round(at(mark.x)): mark for mark in own if across.low <= mark.x <= across.high}
        if len(places) <= TIPS:
            for mark in places.values():
                canvas.line(at(mark.x), begin, at(mark.x), foot, css_class=css_class, tip=mark.tip)
        else:
            canvas.strokes(sorted(places), begin, end, css_class=css_class)
    for curve in curves:
        for piece in thinned(curve, across.low, across.high, columns):
            points = ((at(x), above(y)) for x, y in zip(piece.x, piece.y, strict=True))
            canvas.curve(points, css_class=f"c{curve.colour % len(COLOURS)}")
    return canvas.svg(inline=True, title=title, description=description)
