"""Curves over one axis as SVG, thinned so that a million steps are as small as a thousand and no
spike is lost."""

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
"""Of curves, in order, on light and on dark ground; later curves begin again."""
STYLE = "".join(
    f"polyline.c{place} {{ stroke: {colour}; stroke-width: 1.4 }}\n"
    for place, colour in enumerate(COLOURS)
)
"""What the classes of curves mean on a page."""
WIDTH, HEIGHT = 380.0, 208.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 8.0, 22.0
"""Pixels around the field of a chart."""
COLUMNS = 480
"""Into so many columns an axis is divided, more than there are pixels: a page can be enlarged."""
BEYOND = 4.0
"""Values are cut off that lie so many times further out than all others."""
FLAT = 1e-12
"""Values that differ by so little of their size are one value."""
SMALLEST_RANGE = 1e-290
"""The smallest range of an axis: parts of smaller ones are no numbers of fp64."""
TICKS = 5
TIPS = 40
"""If there are more marks they are short, and none says what it is: the list does."""
SHORT = 9.0
"""Pixels of a short mark."""


@dataclass(frozen=True)
class Curve:
    """Values by place."""

    label: str
    x: Floats
    """In ascending order."""
    y: Floats
    """NaN where nothing is known."""
    breaks: Sequence[float] = ()
    """Places between which the curve is not joined."""
    colour: int = 0
    """Its place in COLOURS."""


@dataclass(frozen=True)
class Mark:
    """Something that happened at a place of the axis."""

    x: float
    tip: str
    css_class: str = "restart"
    """``restart``: a line over the whole height; ``skipped``: a small one at the foot."""


@dataclass(frozen=True)
class Axis:
    """The ends of an axis, and in which numbers of the data its unit is written."""

    low: float
    high: float
    unit: str = ""
    scale: float = 1.0

    @property
    def ticks(self) -> Iterator[tuple[float, str]]:
        """The places of ticks and their texts: 1, 2 or 5 times a power of ten."""
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
    """A number of a tick or a caption, in at most four digits: ``0.002``, ``1.5e-05``, ``12.5k``,
    ``3M``."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


def thinned(curve: Curve, low: float, high: float, columns: int) -> Iterator[Curve]:
    """Yield the pieces of a curve between its breaks, each with at most four points for each of
    ``columns`` columns between ``low`` and ``high``: the first, the lowest, the highest and the
    last. What is drawn is then the same."""
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
            part = y[begin:end]
            found = (0, len(part) - 1, int(part.argmin()), int(part.argmax()))
            kept |= {int(begin) + place for place in found}
        places = sorted(kept)
        yield Curve(curve.label, x[places], y[places], colour=curve.colour)


def visible_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the range of values of an axis: all of them, unless a few lie so far out that nothing
    could be seen of the others."""
    found = [curve.y[np.isfinite(curve.y)] for curve in curves]
    values = np.concatenate(found) if found else np.zeros(0)
    if not len(values):
        return 0.0, 1.0
    low = float(values.min())
    high = float(values.max())
    inner_low, usual = (float(one) for one in np.quantile(values, (0.005, 0.995)))
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
    # Nothing here is below zero that is not in the data.
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
    """Return curves over one axis as a part of a page. ``title`` and ``description`` say the same
    to whoever does not see them. Values beyond the visible range are drawn at its edge."""
    canvas = Drawing(WIDTH, HEIGHT)
    up = Axis(*visible_range(curves))
    width = WIDTH - LEFT - RIGHT
    height = HEIGHT - TOP - BOTTOM
    foot = TOP + height

    def at(value: float) -> float:
        return LEFT + width * (value - across.low) / (across.high - across.low)

    def above(value: float) -> float:
        part = (value - up.low) / (up.high - up.low)
        return foot - height * min(max(part, 0.0), 1.0)

    for value, text in up.ticks:
        canvas.line(LEFT, above(value), WIDTH - RIGHT, above(value), css_class="g")
        canvas.text(LEFT - 5, above(value) + 4, text, anchor="end", css_class="s")
    ticks = list(across.ticks)
    for value, text in ticks:
        canvas.line(at(value), foot, at(value), foot + 4, css_class="g")
        # The last one has the unit; it may not stand out of the picture.
        last = (value, text) == ticks[-1]
        words = f"{text} {across.unit}" if last and across.unit else text
        beyond = at(value) + 3 * len(words) > WIDTH
        x = WIDTH - 2 if beyond else at(value)
        canvas.text(x, foot + 16, words, anchor="end" if beyond else "middle", css_class="s")
    for css_class, begin, end in (("restart", TOP, TOP + SHORT), ("skipped", foot - SHORT, foot)):
        own = [one for one in marks if one.css_class == css_class]
        # Of marks in the same pixel one is enough.
        places = {round(at(one.x)): one for one in own if across.low <= one.x <= across.high}
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
