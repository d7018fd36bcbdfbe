"""Figures of a check as rows of a page of documentation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tools.gpucheck.report import Outcome, cell, heading

UNMEASURED = "not measured"
LABELS = ("name", "variant", "contender", "dtype")
"""Columns that say what a row is of."""
_ROW = re.compile(r"^\| `(?P<part>[^`]+)` \| (?P<shows>.*) \| (?P<figure>[^|]*) \|$")


def into(
    page: str, machine: Mapping[str, str], outcomes: Sequence[Outcome]
) -> tuple[str, list[str]]:
    """Return the page with the figures of the parts that passed, and a line for each of them.

    The page has a table with a row for each part: | `part` | what it shows | figure |. Only a
    figure that is ``not measured`` is replaced, so nothing is lost, and doing it twice changes
    nothing. A part that did not pass gives no figure. Raises ValueError for a report without a GPU,
    and where the page lacks a row."""
    if machine.get("device", "none").startswith("none"):
        raise ValueError("the report is of a machine without a GPU: it has no figures")
    lines = page.split("\n")
    rows = {
        found["part"]: number for number, line in enumerate(lines) if (found := _ROW.match(line))
    }
    said = list[str]()
    for outcome in outcomes:
        if not outcome.passed:
            said.append(f"{outcome.name}: {outcome.status}: no figure")
            continue
        if outcome.name not in rows:
            raise ValueError(f"the page has no row | `{outcome.name}` | ... | ... |")
        number = rows[outcome.name]
        found = _ROW.match(lines[number])
        assert found is not None
        if found["figure"] != UNMEASURED:
            said.append(f"{outcome.name}: has a figure already, left as it is")
            continue
        figure = figure_of(machine, outcome)
        lines[number] = f"| `{outcome.name}` | {found['shows']} | {figure} |"
        said.append(f"{outcome.name}: {figure}")
    return "\n".join(lines), said


def figure_of(machine: Mapping[str, str], outcome: Outcome) -> str:
    """Return the rows of a part, who was absent, the machine and the command, in one cell."""
    words = shlex.split(outcome.command)
    command = shlex.join(["python", *words[1:]])
    what = "; ".join(map(_said, outcome.rows)) or "passed"
    absent = "".join(f"; absent: {line}" for line in outcome.absent)
    where = ", ".join(
        value if name == "device" else f"{name} {value}" for name, value in machine.items()
    )
    return f"{what}{absent} ({where}; {outcome.title}; `{command}`)".replace("|", "/")


def _what(name: str, unit: object) -> str:
    """What a number is of, behind it."""
    if name == "rate":
        return str(unit)
    what, _, bytes_in = heading(name).partition(", ")
    return f"{bytes_in} {what}".strip()


def _said(row: Mapping[str, Any]) -> str:
    label = " ".join(str(row[name]) for name in LABELS if row.get(name) is not None)
    unit = row.get("unit")
    values = [
        f"{cell(name, value)} {_what(name, unit)}"
        for name, value in row.items()
        if name not in (*LABELS, "unit") and value is not None
    ]
    return f"{label}: {', '.join(values)}"
