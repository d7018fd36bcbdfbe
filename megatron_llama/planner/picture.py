"""Pages with pictures that need nothing but a browser: tables, bars and timelines as HTML and SVG
in one file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from types import MappingProxyType

WIDTH = 1160
MARGIN = 170
ROW = 20
GAP = 4
"""Pixels: of a drawing, of its labels, of a row, between rows."""
LETTER = 6.2
"""Pixels of a letter of a bar's text."""
COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "#3168be",
        "backward": "#1c8c62",
        "backward_input": "#1c8c62",
        "backward_weight": "#e08214",
        "wait": "#d9dde4",
        "gathers": "#8a63b8",
        "reductions": "#c0504d",
        "pipeline": "#5b8f9e",
        "tp": "#a0742c",
        "cp": "#7a8a2c",
        "updates": "#6b6f76",
        "other": "#9aa0a8",
    }
)
"""Of bars by what they are."""
PALETTE = (
    "#3168be",
    "#c9ced6",
    "#a0742c",
    "#7a8a2c",
    "#5b8f9e",
    "#8a63b8",
    "#6b6f76",
    "#c0504d",
    "#1c8c62",
    "#e08214",
)
"""Of parts of a whole, in order."""
STYLE = (
    "body{font:14px/1.45 system-ui,sans-serif;color:#222831;margin:24px;max-width:1200px}"
    "h1{font-size:20px}h2{font-size:16px;margin-top:28px}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:3px 9px;text-align:right;border-bottom:1px solid #e3e6eb;white-space:nowrap}th{font-weight:600}"
    "td.t,th.t{text-align:left}svg{display:block;margin:6px 0;font:11px system-ui,sans-serif}p{max-width:80em}"
    ".k{display:inline-block;margin-right:14px}.k i{display:inline-block;width:11px;height:11px;margin-right:5px}pre{white-space:pre-wrap}"
    "rect.b{stroke:#fff;stroke-width:.4}text.n{fill:#fff;text-anchor:middle;pointer-events:none}"
)


@dataclass(frozen=True)
class Bar:
    """A box from ``begin`` to ``end``, in whatever the drawing counts."""

    begin: float
    end: float
    colour: str
    text: str = ""
    """Written inside, where there is room."""
    tip: str = ""
    """Shown when the mouse is over it."""


@dataclass(frozen=True)
class BarRow:
    """A row of bars."""

    label: str
    bars: Sequence[Bar]


def page(title: str, parts: Iterable[str]) -> str:
    """A whole file. ``parts``: what ``heading``, ``table`` and the others give."""
    head = f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head>'
    return "\n".join([head, "<body>", f"<h1>{escape(title)}</h1>", *parts, "</body></html>", ""])


def heading(text: str) -> str:
    """Of a section."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Plain text."""
    return f"<p>{escape(text)}</p>"


def code(text: str) -> str:
    """Text to be copied."""
    return f"<pre>{escape(text)}</pre>"


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[int] = (0,)
) -> str:
    """A table. ``words``: columns of text, the others are numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        opened = (
            f'<{tag} class="t">' if place in words else f"<{tag}>" for place in range(len(cells))
        )
        return f"<tr>{''.join(f'{start}{escape(cell)}</{tag}>' for start, cell in zip(opened, cells, strict=True))}</tr>"

    return "\n".join(
        ["<table>", row(head, "th"), *(row(cells, "td") for cells in rows), "</table>"]
    )


def key(names: Iterable[tuple[str, str]]) -> str:
    """What colours mean: (words, colour)."""
    return (
        "<p>"
        + "".join(
            f'<span class="k"><i style="background:{colour}"></i>{escape(words)}</span>'
            for words, colour in names
        )
        + "</p>"
    )


def drawing(
    lanes: Sequence[BarRow], whole: float, unit: str, *, marks: Iterable[tuple[float, str]] = ()
) -> str:
    """Lanes over one axis from 0 to ``whole``, of which ``unit`` is the name. ``marks``: places
    that a line shows, and their names."""
    step = _step(whole)
    scale = (WIDTH - MARGIN - 20) / whole if whole > 0 else 0.0
    bottom = len(lanes) * (ROW + GAP) + GAP
    lines = [f'<svg width="{WIDTH}" height="{bottom + 40}" role="img">']
    lines += _axis(step, whole, scale, bottom, unit)
    for place, lane in enumerate(lanes):
        top = GAP + place * (ROW + GAP)
        lines.append(
            f'<text x="{MARGIN - 8}" y="{top + 14}" text-anchor="end">{escape(lane.label)}</text>'
        )
        lines.append(
            f'<rect x="{MARGIN}" y="{top}" width="{whole * scale:.1f}" height="{ROW}" fill="#f7f8fa"/>'
        )
        lines += [line for bar in _visible(lane.bars, scale) for line in _bar(bar, top, scale)]
    for value, name in marks:
        x = MARGIN + value * scale
        lines.append(
            f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{bottom}" stroke="#c0504d" stroke-dasharray="4 3"/>'
        )
        lines.append(
            f'<text x="{x - 4:.1f}" y="{bottom + 30}" text-anchor="end" fill="#c0504d">{escape(name)}</text>'
        )
    return "\n".join([*lines, "</svg>"])


def _axis(step: float, whole: float, scale: float, bottom: int, unit: str) -> Iterator[str]:
    ticks = int(whole / step + 1e-9) + 1 if step else 1
    for tick in range(ticks):
        x = MARGIN + tick * step * scale
        name = f"{tick * step:g}{f' {unit}' if tick == ticks - 1 else ''}"
        yield f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{bottom}" stroke="#e3e6eb"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle" fill="#808894">{escape(name)}</text>'


def _step(whole: float) -> float:
    """Between two ticks: 1, 2 or 5 times a power of ten, at most ten of them."""
    if whole <= 0:
        return 0.0
    step = 10.0 ** floor(log10(whole) - 1)
    return next(step * factor for factor in (1, 2, 5, 10) if whole <= 10.001 * step * factor)


def _visible(bars: Sequence[Bar], scale: float) -> Iterator[Bar]:
    """Without bars of which another one of that colour has the pixel already: thousands of small
    messages are a file that nobody opens."""
    last: tuple[int, str] | None = None
    for bar in bars:
        place = int(bar.begin * scale), bar.colour
        if place != last or (bar.end - bar.begin) * scale >= 1:
            yield bar
        last = place


def _bar(bar: Bar, top: int, scale: float) -> Iterator[str]:
    x = MARGIN + bar.begin * scale
    width = (bar.end - bar.begin) * scale
    tip = f"<title>{escape(bar.tip)}</title>" if bar.tip else ""
    yield f'<rect class="b" x="{x:.1f}" y="{top}" width="{max(width, 0.3):.1f}" height="{ROW}" fill="{bar.colour}">{tip}</rect>'
    if bar.text and width > LETTER * len(bar.text) + 2:
        yield f'<text class="n" x="{x + width / 2:.1f}" y="{top + 14}">{escape(bar.text)}</text>'
