"""What became of a harmed input: one word of six, and the journal of all cases."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from tools.harm.formats import CARRIED
from tools.harm.sandbox import Outcome

Verdict = Literal[
    "refused", "equal", "harmless", "unknowable", "silent", "traceback", "memory", "time"
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
BAD: tuple[Verdict, ...] = ("silent", "traceback", "memory", "time")
"""What must not be."""
MEANING: Mapping[Verdict, str] = {
    "refused": "an error that says what is wrong",
    "equal": "the same result, bit for bit",
    "harmless": "another result that a warning names, or in what nobody computes with",
    "unknowable": "another result without a word, of a format that has no checksums",
    "silent": "another result without a word, though the format can know",
    "traceback": "an error of the program itself",
    "memory": "more memory than an input of this size may take",
    "time": "more time than an input may take",
}
_WARNING = re.compile(
    r"warning|note:|damaged|cannot be|instead|left out|leave out|missing|not understood",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Result:
    """One case of the journal."""

    part: str
    format: str
    case: int
    harm: str
    """What was done."""
    verdict: Verdict
    details: str
    """What differs, or the last line of what was said."""
    seconds: float
    bytes: int

    def line(self) -> str:
        """The case as the table's list shows it."""
        return f"{self.format} --case {self.case} [{self.verdict}] {self.harm} -> {self.details}"


def judge(outcome: Outcome, pristine: Outcome, *, sealed: bool) -> tuple[Verdict, str]:
    """Return the verdict on a harmed input, and its reason."""
    if outcome.end != "done":
        return outcome.end, outcome.last_line[-400:]
    names = {*outcome.values, *pristine.values}
    different = sorted(n for n in names if outcome.values.get(n) != pristine.values.get(n))
    if not different:
        return "equal", ""
    first = different[0]
    change = f"{pristine.values.get(first)} -> {outcome.values.get(first)}"[:160]
    details = f"{len(different)} values differ, the first: {first}: {change}"
    said = new_warnings(outcome.words, pristine.words)
    if said:
        return "harmless", f"{said[0]}; {details}"
    if all(name.startswith(CARRIED) for name in different) and not sealed:
        return "harmless", details
    return ("silent" if sealed else "unknowable"), details


def new_warnings(words: str, usual: str) -> list[str]:
    """Warnings that the pristine input has not caused, numbers apart."""
    known = {_NUMBER.sub("N", line) for line in usual.splitlines()}
    return [
        line.strip()
        for line in words.splitlines()
        if _WARNING.search(line) and _NUMBER.sub("N", line) not in known
    ]


class Journal:
    """Results on the disk, one a line, so that a run that was stopped goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.results: dict[tuple[str, str, int], Result] = {}
        if path.exists():
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    result = Result(**json.loads(line))
                    self.results[result.part, result.format, result.case] = result

    def add(self, result: Result) -> None:
        """Keep a result."""
        self.results[result.part, result.format, result.case] = result
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def __contains__(self, key: tuple[str, str, int]) -> bool:
        return key in self.results


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield the table of verdicts: a row for each part and format, then their sum."""
    rows: dict[tuple[str, str], dict[Verdict, int]] = {}
    for result in results:
        row = rows.setdefault((result.part, result.format), dict.fromkeys(VERDICTS, 0))
        row[result.verdict] += 1
    yield f"| part | format | cases | {' | '.join(VERDICTS)} |"
    yield "|---|---|" + "---:|" * (1 + len(VERDICTS))
    total = dict.fromkeys(VERDICTS, 0)
    for (part, name), row in sorted(rows.items()):
        yield f"| {part} | {name} | {_numbers(row)} |"
        total = {verdict: total[verdict] + row[verdict] for verdict in VERDICTS}
    yield f"| all | | {_numbers(total)} |"


def _numbers(row: Mapping[Verdict, int]) -> str:
    return " | ".join(map(str, (sum(row.values()), *(row[verdict] for verdict in VERDICTS))))


def emptied(folder: Path) -> Path:
    """Return the folder, fresh."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
