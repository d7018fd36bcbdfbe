"""The rows of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MEASURED: Literal["measured"] = "measured"
COMPUTED: Literal["computed"] = "computed"


@dataclass(frozen=True)
class Row:
    """One figure of a part."""

    part: str
    what: str
    who: str
    """``rank 0``, ``others``, or whom else it concerns."""
    seconds: float | None
    bytes: float | None
    """Bytes of files or messages, as ``what`` says."""
    origin: Literal["measured", "computed"]
    memory: float | None = None
    """Bytes that the process holds more than before."""


def table(rows: Sequence[Row], world: int) -> str:
    """Return the rows of a number of processes as a table in Markdown."""
    lines = [
        f"| {world:,} processes: part | what | who | seconds | bytes | memory | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.3g}"
        cells = (row.part, row.what, row.who, seconds, _size(row.bytes), _size(row.memory))
        lines.append(f"| {' | '.join(cells)} | {row.origin} |")
    return "\n".join(lines)


def _size(count: float | None) -> str:
    if count is None:
        return ""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
