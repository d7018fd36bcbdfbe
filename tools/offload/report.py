"""What was found, as a table with the bounds beside it, and as rows for --json."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.offload.catalogue import Numbers
from tools.offload.ours import Sample


@dataclass(frozen=True)
class Row:
    """One contender: medians over rounds, of one step, each with the least it could be."""

    name: str
    step_ms: float
    step_ms_bound: float
    ratio: float | None
    """Of the time of a step to that of no offload, within rounds. None: nobody ran without
    offload."""
    ratio_bound: float
    idle: float | None
    """Share of the step in which the device waited for the optimizer. None: not known."""
    idle_bound: float
    bus_bytes: float | None
    """That crossed the bus, of an element."""
    bus_bytes_bound: float | None
    update_ms: float | None
    """Of the host's worker, waiting aside."""
    update_ms_bound: float
    kept: float
    """Buckets that were updated ahead of the norm, for good."""
    redone: float
    """Buckets that were updated ahead of the norm, and again."""


@dataclass(frozen=True)
class Bound:
    """The least of one contender: seconds, and bytes of an element."""

    step: float
    update: float
    bus_bytes: float | None


def row_of(
    name: str, samples: Sequence[Sample], base: Sequence[Sample], bound: Bound, numbers: Numbers
) -> Row:
    """``base``: the same rounds without offload."""
    return Row(
        name,
        _median([s.seconds for s in samples]) * 1e3,
        bound.step * 1e3,
        _median([own.seconds / other.seconds for own, other in zip(samples, base, strict=True)])
        if base
        else None,
        bound.step / numbers.compute,
        _known([s.idle_seconds and s.idle_seconds / s.seconds for s in samples]),
        1 - numbers.compute / bound.step,
        _known([s.bus_bytes for s in samples]),
        bound.bus_bytes,
        _known([s.update_seconds and s.update_seconds * 1e3 for s in samples]),
        bound.update * 1e3,
        _median([s.kept for s in samples]),
        _median([s.redone for s in samples]),
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _median(known) if known else None


def table(rows: Sequence[Row], absent: Mapping[str, str]) -> Iterator[str]:
    """For people: figure, then its bound."""
    columns = (
        ("step ms", 16),
        ("of no offload", 16),
        ("device idle", 16),
        ("bus B/element", 16),
        ("host ms", 16),
    )
    yield (
        f"{'contender':<28}"
        + "".join(f"{name:>{width}}" for name, width in columns)
        + "  kept, redone"
    )
    for row in rows:
        cells = (
            _cell(row.step_ms, row.step_ms_bound, "{:.1f}"),
            _cell(row.ratio, row.ratio_bound, "{:.3f}"),
            _cell(row.idle, row.idle_bound, "{:.1%}"),
            _cell(row.bus_bytes, row.bus_bytes_bound, "{:.2f}"),
            _cell(row.update_ms, row.update_ms_bound, "{:.1f}"),
        )
        attempts = f"  {row.kept:.0f}, {row.redone:.0f}" if row.kept or row.redone else ""
        yield f"{row.name:<28}" + "".join(f"{cell:>16}" for cell in cells) + attempts
    yield from (f"{name:<28}{why}" for name, why in absent.items())


def _cell(value: float | None, bound: float | None, form: str) -> str:
    return " / ".join("-" if number is None else form.format(number) for number in (value, bound))
