"""Rows of bars over one axis, for pages and files: timelines, or parts of a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, log10
from types import MappingProxyType

from megatron_llama.planner.pictures.page import BARS, key
from megatron_llama.planner.pictures.svg import Drawing, ink_on

WIDTH = 1160
"""Width of a drawing in pixels."""
MARGIN = 170
"""Width of the labels on the left in pixels."""
ROW = 20
GAP = 4
"""Height of a row, and of the gap between two rows, in pixels."""
LETTER = 6.2
"""Width of a letter of a bar's text in pixels."""
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
        "ep": "#c08497",
        "updates": "#6b6f76",
        "other": "#9aa0a8",
    }
)
"""Colours of bars by kind."""
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
    """Text inside the bar, shown if there is room."""
    tip: str = ""
    """Text shown while the mouse is over the bar."""


@dataclass(frozen=True)
class BarRow:
    """Bars in a row, with a label on the left."""

    label: str
    bars: Sequence[Bar]

    def scaled(self, factor: float) -> BarRow:
        """Return the row in a unit ``factor`` times smaller."""
        bars = [replace(bar, begin=bar.begin * factor, end=bar.end * factor) for bar in self.bars]
        return BarRow(self.label, bars)


@dataclass(frozen=True)
class Chart:
    """Rows over one axis, and the meaning of their colours."""

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
        """Return an SVG file with the title and the key above the rows."""
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
    """Width in pixels."""
    margin: float = MARGIN
    """Width of the labels on the left in pixels."""
    ticks: int = 10
    """Most ticks of the axis."""


WIDE = Frame()
NARROW = Frame(380, 66, 5)
"""Frame that fits on a phone."""


def drawing(
    rows: Sequence[BarRow],
    whole: float,
    unit: str,
    *,
    marks: Iterable[tuple[float, str]] = (),
    frame: Frame = WIDE,
    title: str = "",
) -> str:
    """Return rows over one axis from 0 to ``whole`` in ``unit``, as HTML. ``marks`` are places with
    vertical lines, and their names; ``title`` is for screen readers."""
    canvas = Drawing(frame.width, _height(rows))
    _draw(canvas, 0, rows, whole, unit, marks, frame)
    return f'<div class="wide">{canvas.svg(inline=True, title=title)}</div>'


def _height(rows: Sequence[BarRow]) -> int:
    """Return the height of the rows and of the axis below them in pixels."""
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
    """Return the distance of ticks: 1, 2 or 5 times a power of ten, for at most ``count`` ticks."""
    if whole <= 0:
        return 0.0
    step = 10.0 ** floor(log10(whole) - 1)
    fits = (step * factor for factor in (1, 2, 5, 10, 20, 50))
    return next(distance for distance in fits if whole <= (count + 0.01) * distance)


def _visible(bars: Sequence[Bar], scale: float) -> Iterator[Bar]:
    """Yield the bars, without small ones in the same pixel and colour as the bar before: no browser
    opens a file with hundreds of thousands of small messages."""
    last: tuple[int, str] | None = None
    for bar in bars:
        place = int(bar.begin * scale), bar.colour
        if place != last or (bar.end - bar.begin) * scale >= 1:
            yield bar
        last = place
