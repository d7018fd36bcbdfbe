"""The table: a line of JSON for each file and catalogue, and for each file and fault. Lines are
appended as soon as something is known, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Outcome(StrEnum):
    """What became of a fault in a test file."""

    KILLED = "killed"
    """A test failed."""
    SURVIVED = "survived"
    LATE = "late"
    """The file did not end in the time that it has."""


@dataclass(frozen=True)
class File:
    """A test file as it stands in this checkout."""

    path: str
    """Relative to the root."""
    blob: str
    """Its hash in git."""
    long: bool
    """Whether the tests that are marked long belong to it."""

    @property
    def lines(self) -> int:
        """How many it has."""
        return len((ROOT / self.path).read_text().splitlines())


@dataclass(frozen=True)
class Reach:
    """How a file does without a fault, and which faults it could notice."""

    file: File
    catalogue: str
    faults: tuple[str, ...]
    """All of the catalogue: one that is added later has not been looked for."""
    seconds: float
    passed: int
    failed: tuple[str, ...]
    """Tests that fail without a fault. They say nothing of any, and are left out."""
    reached: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """What became of one fault in one file."""

    file: File
    fault: str
    outcome: Outcome
    seconds: float
    tests: tuple[str, ...]
    """The first that failed."""
    message: str
    """What it said: a fault may also be found by an error in what a test prepares."""
    together: int
    """How many faults were planted in the run that says so. More than one: none of them was
    noticed."""


class Table:
    """The rows of a file. What is said of a test file that has changed since is left aside."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reach: dict[tuple[File, str], Reach] = {}
        self._pairs: dict[tuple[File, str], Pair] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            self._note(_row(json.loads(line)))

    def add(self, row: Reach | Pair) -> None:
        """Append a row, also to the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kind = {"kind": type(row).__name__}
        with self._path.open("a") as table:
            table.write(json.dumps(kind | asdict(row)) + "\n")
        self._note(row)

    def reach(self, file: File, catalogue: str, faults: Sequence[str]) -> Reach | None:
        """Return what a file reaches of these faults, if that is known."""
        row = self._reach.get((file, catalogue))
        return row if row is not None and set(faults) <= set(row.faults) else None

    def pair(self, file: File, fault: str) -> Pair | None:
        """Return what became of a fault in a file, if that is known."""
        return self._pairs.get((file, fault))

    def pairs(self, files: Sequence[File], faults: Sequence[str]) -> Iterator[Pair]:
        """Yield all that is known of these files and faults."""
        wanted = ((file, fault) for file in files for fault in faults)
        yield from (self._pairs[pair] for pair in wanted if pair in self._pairs)

    def _note(self, row: Reach | Pair) -> None:
        if isinstance(row, Reach):
            self._reach[row.file, row.catalogue] = row
        else:
            self._pairs[row.file, row.fault] = row


def _row(values: dict[str, Any]) -> Reach | Pair:
    kind, file = values.pop("kind"), File(**values.pop("file"))
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    if kind == Reach.__name__:
        return Reach(file, **values | lists)
    return Pair(file, outcome=Outcome(values.pop("outcome")), **values | lists)


def find_test_files(paths: Sequence[Path], long: bool) -> list[File]:
    """Return the test files at paths, which are files and folders, sorted by path."""
    found = {
        file.resolve()
        for path in paths
        for file in (path.rglob("test_*.py") if path.is_dir() else (path,))
    }
    files = sorted(found)
    command = ["git", "hash-object", "--", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [
        File(os.path.relpath(file, ROOT), blob, long)
        for file, blob in zip(files, done.stdout.split(), strict=True)
    ]
