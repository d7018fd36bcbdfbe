"""What the parts found: one JSON file, and tables for docs/performance.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.gpucheck.parts import Part

PASSED = "passed"
CANNOT = "did not run"
BEGUN = "the check ended in it"
"""What the report says of a part that has begun, until it ends."""


@dataclass(frozen=True)
class Outcome:
    """Of one part."""

    name: str
    title: str
    command: str
    status: str
    """``passed``, ``failed with N``, ``took too long``, or ``did not run: WHY``."""
    seconds: float
    rows: tuple[Mapping[str, Any], ...] = ()
    absent: tuple[str, ...] = ()
    """What took no part in it, and why."""
    tail: str = ""
    """The end of what it said, where it did not pass."""

    @property
    def passed(self) -> bool:
        """Whether all of it worked."""
        return self.status == PASSED


def rows_of(part: Part) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """What a part wrote, a list of rows or an object with some and with those who were ``absent``,
    as far as it came: a part may fail behind its first rows."""
    path = Path(part.json) if part.json is not None else None
    if path is None or not path.exists():
        return (), ()
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return (), ()
    found = found if isinstance(found, dict) else {"rows": found}
    rows = found.get("rows")
    absent = found.get("absent")
    missing = (
        tuple(f"{name}: {why}" for name, why in absent.items()) if isinstance(absent, dict) else ()
    )
    return tuple(row for row in rows if isinstance(row, dict)) if isinstance(
        rows, list
    ) else (), missing


def write(path: Path, machine: Mapping[str, str], outcomes: Sequence[Outcome]) -> None:
    """The whole check as JSON. Whatever happens meanwhile, the file is whole: the old one or the
    new one."""
    parts = [asdict(outcome) for outcome in outcomes]
    beside = path.with_name(path.name + ".new")
    with beside.open("w") as file:
        file.write(json.dumps({"machine": dict(machine), "parts": parts}, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read(path: Path) -> tuple[dict[str, str], list[Outcome]]:
    """What ``write`` wrote. Raises ValueError for another file."""
    try:
        found = json.loads(path.read_text())
        lists = ("rows", "absent")
        return dict(found["machine"]), [
            Outcome(**part | {name: tuple(part[name]) for name in lists}) for part in found["parts"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no report of this tool: {error!r}") from error


def markdown(machine: Mapping[str, str], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Lines: the machine, one table for the parts, and one for the rows of each that has some, with
    who was absent and, where it did not pass, the end of what it said. Never a figure for what
    failed."""
    yield "; ".join(f"{name} {value}" for name, value in machine.items()) + "."
    yield from ("", "| part | result | seconds | command |", "|---|---|---|---|")
    for outcome in outcomes:
        yield (
            f"| {outcome.title} | {outcome.status} | {outcome.seconds:.0f} | `{outcome.command}` |"
        )
    for outcome in outcomes:
        if outcome.rows or outcome.absent or outcome.tail:
            yield from (
                "",
                f"{outcome.title}" + ("" if outcome.passed else f" ({outcome.status})") + ":",
            )
        if outcome.rows:
            yield from ("", *_table(outcome.rows))
        if outcome.absent:
            yield from ("", *(f"- absent: {line}" for line in outcome.absent))
        if outcome.tail:
            yield from ("", *(f"    {line}" for line in outcome.tail.splitlines()))


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield "| " + " | ".join(heading(name) for name in columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(cell(name, row.get(name)) for name in columns) + " |"


def heading(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ") + (
        ", GiB" if name.endswith("_bytes") else ""
    )


def cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return f"{value / 2**30:.2f}"
    if name.startswith(("mfu", "of_")) and isinstance(value, float):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
