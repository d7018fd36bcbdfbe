"""Counts of numbers as bars, for a terminal and as a page."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_llama.planner.pictures.svg import Drawing

_STEPS = (1, 2, 5)


@dataclass(frozen=True)
class Bar:
    """The count of numbers from ``low`` to ``high``, both included."""

    low: int
    high: int
    count: int


def bars(counts: Mapping[int, int], most: int = 20) -> list[Bar]:
    """Return at most ``most`` bars of equal round width: 1, 2 or 5 times a power of ten."""
    if not counts:
        return []
    least = min(counts)
    largest = max(counts)
    width = 1
    steps = (step * 10**power for power in range(19) for step in _STEPS)
    while largest // width - least // width >= most:
        width = next(steps)
    totals: Counter[int] = Counter()
    for number, count in counts.items():
        totals[number // width] += count
    return [
        Bar(index * width, index * width + width - 1, totals[index])
        for index in range(least // width, largest // width + 1)
    ]


def quantiles(counts: Mapping[int, int]) -> str:
    """Return words with the least, median, 90 %, 99 % and largest number, and the mean."""
    total = sum(counts.values())
    numbers = sorted(counts)
    values = {}
    for name, share in (("median", 0.5), ("90 %", 0.9), ("99 %", 0.99)):
        seen = 0
        for number in numbers:
            seen += counts[number]
            if seen >= share * total:
                values[name] = number
                break
    mean = sum(number * count for number, count in counts.items()) / total
    middle = ", ".join(f"{name} {number:,}" for name, number in values.items())
    return f"least {numbers[0]:,}, {middle}, most {numbers[-1]:,}, mean {mean:,.1f}"


def text_bars(counts: Mapping[int, int], width: int = 50) -> Iterator[str]:
    """Yield a line of text for each bar."""
    drawn = bars(counts)
    largest = max((bar.count for bar in drawn), default=1)
    places = [
        f"{bar.low:,}-{bar.high:,}" if bar.high > bar.low else f"{bar.low:,}" for bar in drawn
    ]
    for bar, place in zip(drawn, places, strict=True):
        yield (
            f"{place:>{max(map(len, places))}} {bar.count:>8,} "
            f"{'#' * -(-bar.count * width // largest)}"
        ).rstrip()


def page(title: str, lines: Iterable[str], charts: Sequence[tuple[str, Mapping[int, int]]]) -> str:
    """Return an HTML page without scripts or other files: some lines, then a chart for each name
    and its counts."""
    parts = [f"<h1>{html.escape(title)}</h1>", "<pre>", *map(html.escape, lines), "</pre>"]
    for name, counts in charts:
        parts += [f"<h2>{html.escape(name)}</h2>"]
        if counts:
            parts += [f"<p>{html.escape(quantiles(counts))}</p>", _chart(bars(counts, 40))]
    style = (
        "body{font:14px sans-serif;margin:2em;max-width:60em}rect{fill:#3b6ea5}text{font:11px "
        "sans-serif}"
    )
    head = (
        '<!doctype html><html lang="en"><meta '
        f'charset="utf-8"><title>{html.escape(title)}</title><style>{style}</style>'
    )
    return "\n".join([head, *parts, "</html>"]) + "\n"


def _chart(drawn: Sequence[Bar], width: int = 800, height: int = 200) -> str:
    """Return the bars as an SVG element, with about ten of their lower ends written below."""
    drawing = Drawing(width, height + 20)
    largest = max(bar.count for bar in drawn)
    step = width / len(drawn)
    for index, bar in enumerate(drawn):
        tall = bar.count * height / largest
        tip = f"{bar.low:,} to {bar.high:,}: {bar.count:,}"
        drawing.box(index * step + 1, height - tall, max(step - 2, 1), tall, tip=tip)
        if index % -(-len(drawn) // 10) == 0:
            drawing.text(index * step, height + 15, f"{bar.low:,}")
    return drawing.svg()
