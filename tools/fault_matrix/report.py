"""What the table says, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.fault_matrix.table import Outcome, Pair, Reach

SLOWEST = 20


@dataclass(frozen=True)
class Matrix:
    """Test files that have been looked at, and what became of faults in them."""

    faults: Sequence[str]
    files: Sequence[Reach]
    pairs: Sequence[Pair]

    @property
    def finds(self) -> dict[str, frozenset[str]]:
        """The faults that each file finds. A file that hangs has found something, too: without the
        fault it ends."""
        found: dict[str, set[str]] = {row.file.path: set() for row in self.files}
        for pair in self.pairs:
            if pair.outcome is not Outcome.SURVIVED:
                found[pair.file.path].add(pair.fault)
        return {path: frozenset(names) for path, names in found.items()}


def cover(finds: Mapping[str, frozenset[str]], seconds: Mapping[str, float]) -> list[str]:
    """Return files that find together all that any finds: always the one next that finds the most
    that is new in a second, and none that those after it have made needless."""
    chosen: list[str] = []
    missing: frozenset[str] = frozenset().union(*finds.values())
    while missing:
        best = max(finds, key=lambda path: len(finds[path] & missing) / max(seconds[path], 0.1))
        chosen.append(best)
        missing -= finds[best]
    for path in sorted(chosen, key=lambda path: -seconds[path]):
        others = frozenset().union(*(finds[other] for other in chosen if other != path))
        if finds[path] <= others:
            chosen.remove(path)
    return chosen


def write_report(matrix: Matrix) -> Iterator[str]:
    """Yield the lines of the report."""
    finds = matrix.finds
    rows = {row.file.path: row for row in matrix.files}
    seconds = {path: row.seconds for path, row in rows.items()}
    found = frozenset().union(*finds.values())
    lines = sum(row.file.lines for row in matrix.files)
    yield f"**{len(found)} of {len(matrix.faults)} faults are found** by {len(rows)} test files"
    yield f"({lines:,} lines, {sum(seconds.values()):,.0f} s one after the other)."
    yield ""
    yield from _faults(matrix, finds, seconds)
    chosen = cover(finds, seconds)
    yield ""
    yield f"**{len(chosen)} files find all of that** ({_size(chosen, rows)}):"
    yield ""
    yield from _files(chosen, rows, finds)
    alone = [
        path
        for path in finds
        if finds[path] - frozenset().union(*(finds[other] for other in finds if other != path))
    ]
    idle = [path for path in finds if path not in alone]
    yield ""
    yield f"**{len(alone)} files find what no other finds** ({_size(alone, rows)}):"
    yield ""
    yield from _files(alone, rows, finds)
    yield ""
    yield f"**{len(idle)} files find nothing that others do not** ({_size(idle, rows)}):"
    yield ""
    yield from _files(idle, rows, finds)
    yield ""
    yield f"**The slowest {SLOWEST}:**"
    yield ""
    yield from _files(sorted(rows, key=lambda path: -seconds[path])[:SLOWEST], rows, finds)
    failing = [test for row in matrix.files for test in row.failed]
    if failing:
        yield ""
        yield f"Left out, since they fail without a fault: {', '.join(failing)}."


def _faults(
    matrix: Matrix, finds: Mapping[str, frozenset[str]], seconds: Mapping[str, float]
) -> Iterator[str]:
    yield "| fault | reached by | found by | cheapest | its test | ends with | not run yet |"
    yield "| --- | ---: | ---: | --- | --- | --- | ---: |"
    for fault in matrix.faults:
        reaching = {row.file.path for row in matrix.files if fault in row.reached}
        pairs = {pair.file.path: pair for pair in matrix.pairs if pair.fault == fault}
        finding = sorted((path for path in finds if fault in finds[path]), key=seconds.__getitem__)
        cheapest = pairs[finding[0]] if finding else None
        test = cheapest.tests[0].partition("::")[2] if cheapest and cheapest.tests else ""
        place = cheapest.file.path if cheapest else "**nobody**"
        error = cheapest.message.partition(":")[0].partition(" ")[0] if cheapest else ""
        left = len(reaching - pairs.keys())
        cells = (fault, len(reaching), len(finding), place, test, error, left)
        escaped = (str(cell).replace("|", "\\|") for cell in cells)  # names of cases have anything
        yield f"| {' | '.join(escaped)} |"


def _files(
    paths: Sequence[str], rows: Mapping[str, Reach], finds: Mapping[str, frozenset[str]]
) -> Iterator[str]:
    yield "| file | lines | s | tests | reaches | finds |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for path in paths:
        row = rows[path]
        numbers = (row.file.lines, f"{row.seconds:.0f}", row.passed, len(row.reached))
        yield f"| {path} | {' | '.join(map(str, numbers))} | {len(finds[path])} |"


def _size(paths: Sequence[str], rows: Mapping[str, Reach]) -> str:
    lines = sum(rows[path].file.lines for path in paths)
    return f"{lines:,} lines, {sum(rows[path].seconds for path in paths):,.0f} s"
