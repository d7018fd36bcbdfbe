"""The comparisons of proofs and whether they hold, as lines for a terminal, JSON, and a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import dedent
from typing import Any

from megatron_llama.errors import counted
from megatron_llama.planner.pictures.page import Cell, html_table
from megatron_llama.planner.pictures.page import page as html_page
from megatron_llama.planner.pictures.svg import Drawing
from megatron_llama.prove.compare import Row
from megatron_llama.prove.locate import Location
from megatron_llama.prove.proof import CheckResult, Proof, used

VERSION = 2
"""Version of the JSON. It changes when a key changes its meaning or is removed."""
_NAMED_ROWS = 5
"""Most failed rows of each group that the terminal shows."""


@dataclass(frozen=True)
class Group:
    """All rows of one check about one quantity."""

    what: str
    rows: tuple[Row, ...]

    @property
    def worst(self) -> Row:
        """The row furthest beyond its bound, or nearest to it. NaN is furthest."""
        return max(self.rows, key=used)

    @property
    def failed(self) -> tuple[Row, ...]:
        """The rows that do not hold, earliest step first."""
        return tuple(sorted((row for row in self.rows if not row.holds), key=_step))

    @property
    def worst_of_steps(self) -> dict[int, Row]:
        """The worst row of each step, for rows that belong to a step."""
        steps = sorted({row.step for row in self.rows if row.step is not None})
        return {
            step: Group(self.what, tuple(row for row in self.rows if row.step == step)).worst
            for step in steps
        }


def groups(check: CheckResult) -> list[Group]:
    """Return the rows of a check by quantity, in the order of their first rows."""
    names = dict.fromkeys(row.what for row in check.rows)
    return [Group(name, tuple(row for row in check.rows if row.what == name)) for name in names]


def _step(row: Row) -> int:
    return -1 if row.step is None else row.step


def _place(row: Row) -> str:
    """Return the step and the tensor of a row in words."""
    step = [] if row.step is None else [f"step {row.step}"]
    return ", ".join([*step, *([row.tensor] if row.tensor else [])])


def _numbers(row: Row) -> tuple[str, str]:
    """Return the deviation and its bound, in words if the values have to be equal to the bit."""
    if row.bound == 0.0:
        return "equal" if row.got == 0.0 else "differs", "equal"
    return f"{row.got:.1e}", f"{row.bound:.1e}"


def summary(proof: Proof) -> str:
    """Return one line with the case, the verdict, the checks that did not run, and the time."""
    ran = [check for check in proof.checks if not check.not_run]
    failed = [check.name for check in ran if not check.holds]
    held = f"{counted(len(ran), 'check')} hold" if ran else "nothing was compared"
    verdict = f"DIFFERS in {', '.join(failed)}" if failed else held
    missing = [check.name for check in proof.checks if check.not_run]
    more = f"; not run: {', '.join(missing)}" if missing else ""
    ranks = counted(proof.case.world_size, "process", "processes")
    return f"{proof.case.name} ({ranks}): {verdict}{more}; {proof.seconds:.0f} s"


def lines(proof: Proof) -> Iterator[str]:
    """Yield lines for a terminal: a line with the worst row for each quantity, then the rows that
    do not hold, and where the difference begins."""
    table = [("check", "what", "got", "bound", "", "worst at")]
    for check in proof.checks:
        name = check.name
        if check.not_run:
            table.append((name, f"not run: {check.not_run}", "", "", "", ""))
        for group in groups(check):
            worst = group.worst
            place = _place(worst)
            if len(group.rows) > 1:
                place += f"{', ' if place else ''}of {len(group.rows):,} compared"
            verdict = "holds" if not group.failed else "DIFFERS"
            table.append((name, group.what, *_numbers(worst), verdict, place))
            name = ""
        if check.partly:
            table.append((name, f"not compared: {check.partly}", "", "", "", ""))
    yield summary(proof)
    yield from _aligned(table)
    for check in proof.checks:
        for group in groups(check):
            yield from _failures(check, group)
    if proof.location is not None:
        yield from _located(proof.location)


def _aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield lines with aligned columns. A sentence in the second column may run over the others."""
    widths = [max(len(row[place]) for row in table if place != 1 or row[2]) for place in range(5)]
    for row in table:
        cells = [row[place].ljust(width) for place, width in enumerate(widths)]
        cells[2:4] = [row[place].rjust(widths[place]) for place in (2, 3)]
        yield f"  {'  '.join([*cells, row[5]]).rstrip()}"


def _failures(check: CheckResult, group: Group) -> Iterator[str]:
    """Yield lines with the first rows of a group that do not hold."""
    failed = group.failed
    if not failed:
        return
    yield (
        f"  {check.name}, {group.what}: {len(failed):,} of {len(group.rows):,} differ"
        + (", the first:" if len(failed) > _NAMED_ROWS else ":")
    )
    for row in failed[:_NAMED_ROWS]:
        place = _place(row)
        got, bound = _numbers(row)
        yield f"    got {got}, bound {bound}{f' at {place}' if place else ''}"
        yield from (f"      {line}" for line in row.note.splitlines())


def _located(location: Location) -> Iterator[str]:
    yield f"  where it begins: {location.where}"
    if location.named:
        yield f"  it holds without: {', '.join(location.named)}"
    rest = [axis.name for axis in location.axes if not axis.holds]
    if rest:
        yield f"  it differs also without: {', '.join(rest)}"
    if location.not_tried:
        yield f"  no time was left to try without: {', '.join(location.not_tried)}"
    if location.needed:
        yield f"  it cannot be run or compared without: {', '.join(location.needed)}"


def as_json(proofs: Sequence[Proof]) -> dict[str, Any]:
    """Return the contents of the lines for programs.

    Keys: ``version``; ``holds``, whether every check that ran holds; ``seconds``; ``cases``, one
    for each proof, with ``name``, ``world_size``, ``sft``, ``options``, ``notes`` (``option``,
    ``yours``, ``here``, ``why``), ``holds``, ``seconds``, ``checks`` and ``location``. A check has
    ``name``, ``holds``, ``seconds``, ``not_run`` (the reason, or null), ``partly`` (what was not
    compared and why, or null) and ``groups``: ``what``, ``compared`` (how many rows), ``differ``
    (how many of them do not hold), ``worst`` (a row), ``steps`` (the worst row of each step) and
    ``failed`` (the rows that do not hold, earliest first). A row has ``got``, ``bound``, ``step``,
    ``tensor`` and ``note``, each null if it has none. Numbers that are not finite are the strings
    ``inf`` and ``nan``, since JSON has no such numbers. A location has ``row``, ``where``, ``axes``
    (``name``, ``off``, ``holds``), ``named`` (axes without which it holds), ``not_tried`` (axes for
    which no time was left) and ``needed`` (axes without which it cannot be run or compared).
    """
    return {
        "version": VERSION,
        "holds": all(proof.holds for proof in proofs),
        "seconds": sum(proof.seconds for proof in proofs),
        "cases": [_case(proof) for proof in proofs],
    }


def _case(proof: Proof) -> dict[str, Any]:
    case = proof.case
    return {
        "name": case.name,
        "world_size": case.world_size,
        "sft": case.sft,
        "options": dict(case.options),
        "notes": [
            {"option": note.option, "yours": note.yours, "here": note.here, "why": note.why}
            for note in case.notes
        ],
        "holds": proof.holds,
        "seconds": proof.seconds,
        "checks": [_check(check) for check in proof.checks],
        "location": None if proof.location is None else _location(proof.location),
    }


def _check(check: CheckResult) -> dict[str, Any]:
    return {
        "name": check.name,
        "holds": check.holds,
        "seconds": check.seconds,
        "not_run": check.not_run or None,
        "partly": check.partly or None,
        "groups": [
            {
                "what": group.what,
                "compared": len(group.rows),
                "differ": len(group.failed),
                "worst": _row(group.worst),
                "steps": [_row(row) for row in group.worst_of_steps.values()],
                "failed": [_row(row) for row in group.failed],
            }
            for group in groups(check)
        ],
    }


def _location(location: Location) -> dict[str, Any]:
    return {
        "row": _row(location.row),
        "where": location.where,
        "axes": [
            {"name": axis.name, "off": dict(axis.off), "holds": axis.holds}
            for axis in location.axes
        ],
        "named": list(location.named),
        "not_tried": list(location.not_tried),
        "needed": list(location.needed),
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "got": _finite(row.got),
        "bound": _finite(row.bound),
        "step": row.step,
        "tensor": row.tensor,
        "note": row.note or None,
    }


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


_CHART_HEIGHT = 90.0
_BAR = 14.0
_BAR_STEP = 22.0
_CHART_MARGIN = 64.0
_FLOOR, _CEILING = -4.0, 6.0
"""Foot of a bar and its largest height, in powers of ten of the bound."""


def verdict(proofs: Sequence[Proof]) -> str:
    """Return the last line, which says whether all comparisons hold and each case has some."""
    failed = [proof.case.name for proof in proofs if proof.rows and not proof.holds]
    if failed:
        return f"DIFFERS: {', '.join(failed)}"
    unproven = [proof.case.name for proof in proofs if not proof.rows]
    if unproven:
        return f"NOT PROVEN: nothing was compared of {', '.join(unproven)}; give a larger --budget"
    missing = [check for proof in proofs for check in proof.checks if check.not_run]
    more = f"; {counted(len(missing), 'check was', 'checks were')} not run" if missing else ""
    return f"holds: everything that was compared{more}"


def page(proofs: Sequence[Proof], title: str) -> str:
    """Return a whole HTML file that needs only a browser, in its light or dark colours."""
    kind = "good" if all(proof.holds for proof in proofs) else "bad"
    outcome = f'<span class="{kind}">{escape(verdict(proofs))}</span>'
    body = (html for proof in proofs for html in _section(proof))
    return html_page(title, [f"<p>{outcome}</p>", *body])


def _section(proof: Proof) -> Iterator[str]:
    """Yield the parts of a page about one case."""
    yield f"<h2>{escape(summary(proof))}</h2>"
    if proof.location is not None:
        yield "".join(f"<p>{escape(line.strip())}</p>" for line in _located(proof.location))
    head = (("check", ""), ("what", ""), ("", ""), ("got", "n"), ("bound", "n"), ("worst at", ""))
    yield html_table(head, [row for check in proof.checks for row in _check_rows(check)])
    charts = [
        (check, group)
        for check in proof.checks
        for group in groups(check)
        if len(group.worst_of_steps) > 1 and group.worst.got != 0 and group.worst.bound > 0
    ]
    if charts:
        yield "<h3>The worst of each step, as a part of its bound (the dashed line)</h3>"
    for check, group in charts:
        yield f'<p class="soft">{escape(f"{check.name}: {group.what}")}</p>{_chart(group)}'
    for check in proof.checks:
        for group in groups(check):
            failed = list(_failures(check, group))
            if failed:
                rows = escape(dedent("\n".join(failed[1:])))
                yield f"<p>{escape(failed[0].strip())}</p><pre>{rows}</pre>"
    if proof.case.notes:
        yield "<h3>What was run</h3>"
        cells = [
            (
                (f"<code>{escape(note.option)}</code>", "k"),
                (f"<code>{escape(note.yours)}</code>", ""),
                (f"<code>{escape(note.here)}</code>", ""),
                (escape(note.why), "s"),
            )
            for note in proof.case.notes
        ]
        top = (("option", ""), ("yours", ""), ("here", ""), ("why", ""))
        yield html_table(top, cells)
    options = " ".join(f"{name}={value!r}" for name, value in proof.case.options.items())
    yield f"<h3>Its options</h3><p><code>{escape(options)}</code></p>"


def _check_rows(check: CheckResult) -> Iterator[tuple[Cell, ...]]:
    name = escape(check.name)
    if check.not_run:
        reason = f'<span class="soft">not run: {escape(check.not_run)}</span>'
        yield ((name, "k"), (reason, ""))
    for group in groups(check):
        worst = group.worst
        verdict = ("DIFFERS", "bad") if group.failed else ("holds", "good")
        yield (
            (name, "k"),
            (escape(group.what), "k"),
            verdict,
            *((number, "n") for number in _numbers(worst)),
            (f'{escape(_place(worst))} <span class="soft">of {len(group.rows):,}</span>', "s"),
        )
        name = ""
    if check.partly:
        left = f'<span class="soft">not compared: {escape(check.partly)}</span>'
        yield ((name, "k"), (left, ""))


def _chart(group: Group) -> str:
    """Return a chart with a bar for each step, on a logarithmic scale from 1/10000 of the bound."""
    steps = group.worst_of_steps
    ceiling = max(1.0, *(_power(row) for row in steps.values()))
    scale = _CHART_HEIGHT / (ceiling - _FLOOR)
    width = _CHART_MARGIN + _BAR_STEP * len(steps) + 8
    canvas = Drawing(width, _CHART_HEIGHT + 26)
    line = 4 + scale * ceiling
    for number, (step, row) in enumerate(steps.items()):
        height = max(0.0, scale * (_power(row) - _FLOOR))
        x = _CHART_MARGIN + _BAR_STEP * number
        got, bound = _numbers(row)
        tip = f"step {step}: {got}, bound {bound}{f', {row.tensor}' if row.tensor else ''}"
        kind = "ok" if row.holds else "no"
        canvas.box(x, 4 + _CHART_HEIGHT - height, _BAR, height, tip=tip, css_class=kind)
        canvas.text(x + _BAR / 2, _CHART_HEIGHT + 18, str(step), anchor="middle", css_class="s")
    canvas.line(_CHART_MARGIN - 4, line, width, line, stroke="currentColor", dashes="4 3")
    canvas.text(_CHART_MARGIN - 10, line + 4, "bound", anchor="end", css_class="s")
    return canvas.svg(inline=True)


def _power(row: Row) -> float:
    """Return the deviation as a power of ten of its bound, within the limits of the chart."""
    excess = used(row)
    if excess in (0.0, math.inf):
        return _CEILING if excess else _FLOOR
    return min(max(math.log10(excess), _FLOOR), _CEILING)
