"""Pictures for pages and files: rows of bars over one axis, which are timelines or parts of a
whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, log10
from types import MappingProxyType

from megatron_llama.planner.pictures.page import BARS, key
from megatron_llama.planner.pictures.svg import Drawing, ink_on

WIDTH = 1160
"""Pixels of a drawing."""
MARGIN = 170
"""Pixels of the labels on its left."""
ROW = 20
GAP = 4
"""Pixels of a row, and between two rows."""
LETTER = 6.2
"""Pixels of a letter of a bar's text."""
GREY = "#69707c"
RED = "#c0504d"
COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "#3168be",
        "backward": "#167a54",
        "backward_input": "#167a54",
        "backward_weight": "#e08214",
        "wait": "#d9dde4",
        "gathers": "#8a63b8",
        "reductions": RED,
        "pipeline": "#5b8f9e",
        "tp": "#a0742c",
        "cp": "#7a8a2c",
        "updates": "#6b6f76",
        "other": "#9aa0a8",
    }
)
"""Colours of bars by what they are."""
PALETTE = (
    *("#3168be", "#c9ced6", "#a0742c", "#7a8a2c", "#5b8f9e"),
    *("#8a63b8", "#6b6f76", RED, "#167a54", "#e08214"),
)
"""Colours of the parts of a whole, in order."""


@dataclass(frozen=True)
class Bar:
    """A box from ``begin`` to ``end``, in the unit of its drawing."""

    begin: float
    end: float
    colour: str
    text: str = ""
    """Written inside, if there is room."""
    tip: str = ""
    """Shown while the mouse is over it."""


@dataclass(frozen=True)
class BarRow:
    """Bars in a row, with a label on its left."""

    label: str
    bars: Sequence[Bar]

    def scaled(self, factor: float) -> BarRow:
        """Return the row in a unit ``factor`` times smaller."""
        bars = [replace(one, begin=one.begin * factor, end=one.end * factor) for one in self.bars]
        return BarRow(self.label, bars)


@dataclass(frozen=True)
class Chart:
    """Rows over one axis, and what their colours mean."""

    rows: Sequence[BarRow]
    whole: float
    """The end of the axis, which begins at 0."""
    unit: str
    names: Sequence[tuple[str, str]]
    """Words and their colours."""

    def inline(self) -> Iterator[str]:
        """Yield the parts of a page: the key and the rows."""
        yield key(self.names)
        yield drawing(self.rows, self.whole, self.unit)

    def svg(self, title: str) -> str:
        """Return a file of its own, with the title and the key above the rows."""
        top = 2 * (ROW + GAP)
        canvas = Drawing(WIDTH, top + _height(self.rows))
        canvas.box(0, 0, WIDTH, top + _height(self.rows), fill="#ffffff")
        canvas.text(GAP, 16, title, size=15)
        x = float(GAP)
        for words, colour in self.names:
            canvas.box(x, ROW + GAP, 11, 11, fill=colour)
            canvas.text(x + 16, ROW + GAP + 10, words, size=11)
            x += 30 + LETTER * len(words)
        _draw(canvas, top, self.rows, self.whole, self.unit, ())
        return canvas.svg(style=f"{BARS}text {{ font-size: 11px }}") + "\n"


@dataclass(frozen=True)
class Frame:
    """The size of a drawing."""

    width: float = WIDTH
    """Pixels."""
    margin: float = MARGIN
    """Pixels of the labels on the left."""
    ticks: int = 10
    """So many at most."""


WIDE = Frame()
NARROW = Frame(380, 66, 5)
"""Fits on a telephone."""


def drawing(
    rows: Sequence[BarRow],
    whole: float,
    unit: str,
    *,
    marks: Iterable[tuple[float, str]] = (),
    frame: Frame = WIDE,
    title: str = "",
) -> str:
    """Return rows over one axis from 0 to ``whole`` in ``unit``. ``marks`` are places that a line
    shows, and their names; ``title`` is what a screen reader says."""
    canvas = Drawing(frame.width, _height(rows))
    _draw(canvas, 0, rows, whole, unit, marks, frame)
    return f'<div class="wide">{canvas.svg(inline=True, title=title)}</div>'


def _height(rows: Sequence[BarRow]) -> int:
    """Pixels of the rows and of the axis below them."""
    return len(rows) * (ROW + GAP) + GAP + 40


def _draw(
    canvas: Drawing,
    offset: float,
    rows: Sequence[BarRow],
    whole: float,
    unit: str,
    marks: Iterable[tuple[float, str]],
    frame: Frame = WIDE,
) -> None:
    """Draw the rows ``offset`` pixels below the upper edge."""
    left = frame.margin
    scale = (frame.width - left - 20) / whole if whole > 0 else 0.0
    bottom = offset + len(rows) * (ROW + GAP) + GAP
    step = _tick(whole, frame.ticks)
    ticks = int(whole / step + 1e-9) + 1 if step else 1
    for tick in range(ticks):
        x = left + tick * step * scale
        name = f"{tick * step:g}{f' {unit}' if tick == ticks - 1 else ''}"
        canvas.line(x, offset, x, bottom, css_class="g")
        canvas.text(x, bottom + 14, name, fill=GREY, anchor="middle", css_class="axis")
    for place, row in enumerate(rows):
        top = offset + GAP + place * (ROW + GAP)
        canvas.text(left - 8, top + 14, row.label, anchor="end", css_class="ink")
        canvas.box(left, top, whole * scale, ROW, css_class="r")
        for bar in _visible(row.bars, scale):
            x = left + bar.begin * scale
            width = (bar.end - bar.begin) * scale
            canvas.box(x, top, max(width, 0.3), ROW, fill=bar.colour, tip=bar.tip, css_class="b")
            if bar.text and width > LETTER * len(bar.text) + 2:
                ink = ink_on(bar.colour)
                middle = x + width / 2
                canvas.text(middle, top + 14, bar.text, fill=ink, anchor="middle", css_class="n")
    for value, name in marks:
        x = left + value * scale
        canvas.line(x, offset, x, bottom, stroke=RED, dashes="4 3")
        canvas.text(x - 4, bottom + 30, name, fill=RED, anchor="end", css_class="mark")


def _tick(whole: float, count: int) -> float:
    """The distance of two ticks: 1, 2 or 5 times a power of ten, for at most ``count`` of them."""
    if whole <= 0:
        return 0.0
    step = 10.0 ** floor(log10(whole) - 1)
    fits = (step * factor for factor in (1, 2, 5, 10, 20, 50))
    return next(distance for distance in fits if whole <= (count + 0.01) * distance)


def _visible(bars: Sequence[Bar], scale: float) -> Iterator[Bar]:
    """The bars without those whose pixel another one of their colour has already: no browser opens
    a file with hundreds of thousands of small messages."""
    last: tuple[int, str] | None = None
    for bar in bars:
        place = int(bar.begin * scale), bar.colour
        if place != last or (bar.end - bar.begin) * scale >= 1:
            yield bar
        last = place
