"""Run test files against the seeded faults of a catalogue, and say which of them are worth it.

    python -m tools.fault_matrix reach     each file once: how long it takes, what it could notice
    python -m tools.fault_matrix find      each fault with files that reach it, until one notices
    python -m tools.fault_matrix run       each file with each fault that it could notice
    python -m tools.fault_matrix report    who finds what, in Markdown

``find`` says whether the files find everything, in the least time; ``run``, who else does. Both do
what ``reach`` has not done. In ``run`` cheap files come first, and faults that a file reaches are
planted together until their tests notice something. With ``--stop-after 2`` the report still names
all faults that are found, files that find all of them, and files that find what no other does;
without it, it says who else finds a fault. Every result is appended to the table at once: the same
command goes on with what is missing, and does a test file again that has changed. A fault that has
changed keeps its rows: take them out by hand.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, and no other

from tests.plant import SEEDED, Planted, catalogue
from tools.fault_matrix.report import Matrix, write_report
from tools.fault_matrix.running import TOGETHER, RunError, find, judge, measure_reach
from tools.fault_matrix.table import ROOT, File, Outcome, Pair, Reach, Table, find_test_files

PLANTING = frozenset({"tests/prove/test_faults.py"})
"""Files that plant the catalogue themselves."""
PARTS = ("reach", "find", "run", "report")


@dataclass(frozen=True)
class Work:
    """What is to be looked at."""

    table: Table
    files: Sequence[File]
    catalogue: str
    faults: dict[str, Planted]
    deadline: float
    stop_after: int
    """How many files may find a fault before no other is asked."""

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() > self.deadline

    def reaches(self) -> list[Reach]:
        """Return what is known of the files, the cheapest first."""
        names = [*self.faults]
        known = (self.table.reach(file, self.catalogue, names) for file in self.files)
        return sorted((row for row in known if row is not None), key=lambda row: row.seconds)

    def times_found(self, fault: str) -> int:
        """How many files find a fault."""
        pairs = self.table.pairs(self.files, [fault])
        return sum(pair.outcome is not Outcome.SURVIVED for pair in pairs)

    def wanted(self, reach: Reach) -> list[Planted]:
        """Return the faults that a file has yet to be run with."""
        return [
            fault
            for name, fault in self.faults.items()
            if name in reach.reached
            and self.table.pair(reach.file, name) is None
            and self.times_found(name) < self.stop_after
        ]


def main(argv: list[str] | None = None) -> int:
    """Do one part. Returns 1 if it could not be done for some file; what survives is for the reader
    to judge."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.fault_matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--files", nargs="+", type=Path, default=[ROOT / "tests"], metavar="PATH")
    parser.add_argument("--catalogue", default=SEEDED, metavar="MODULE:NAME")
    parser.add_argument("--faults", nargs="+", metavar="NAME", help="by default the catalogue")
    parser.add_argument("--all", action="store_true", help="with the tests that are marked long")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument(
        "--stop-after",
        type=int,
        default=sys.maxsize,
        metavar="K",
        help="run no further file with a fault that K files have found",
    )
    parser.add_argument(
        "--table", type=Path, default=ROOT / "tests" / "prove" / "fault_matrix.jsonl"
    )
    given = parser.parse_args(argv)
    faults = catalogue(given.catalogue)
    unknown = set(given.faults or ()) - faults.keys()
    if unknown:
        parser.error(f"{given.catalogue} has no {', '.join(sorted(unknown))}")
    work = Work(
        Table(given.table),
        [file for file in find_test_files(given.files, given.all) if file.path not in PLANTING],
        given.catalogue,
        {name: faults[name] for name in given.faults or faults},
        time.monotonic() + 60 * given.minutes,
        given.stop_after,
    )
    if given.part == "report":
        pairs = [*work.table.pairs(work.files, [*work.faults])]
        for line in write_report(Matrix([*work.faults], work.reaches(), pairs)):
            print(line)
        return 0
    errors = [*measure_files(work, [*faults])]
    if given.part == "run":
        errors += judge_files(work)
    if given.part == "find":
        errors += find_faults(work)
    return int(bool(errors))


def measure_files(work: Work, faults: Sequence[str]) -> Iterator[str]:
    """Look at files without a fault, and yield those of which nothing can be said. ``faults``: the
    whole catalogue, for which a run does."""
    unknown = [
        file for file in work.files if work.table.reach(file, work.catalogue, faults) is None
    ]
    waiting = [unknown[begin : begin + TOGETHER] for begin in range(0, len(unknown), TOGETHER)]
    while waiting and not work.late:
        together = waiting.pop(0)
        try:
            reaches = measure_reach(together, work.catalogue, faults)
        except RunError as error:
            if len(together) == 1:
                yield _told(together[0].path, error)
            else:  # one of them has taken the others with it
                waiting[:0] = [[file] for file in together]
            continue
        for reach in reaches:
            work.table.add(reach)
            failing = f", {len(reach.failed)} FAIL" if reach.failed else ""
            print(
                f"{reach.file.path}: {reach.passed} pass{failing}, {reach.seconds:.0f} s, "
                f"reaches {len(reach.reached)}",
                flush=True,
            )


def find_faults(work: Work) -> Iterator[str]:
    """Run each fault with the files that reach it, until one notices or the time is over, and yield
    those of which nothing can be said. Files that have noticed the most others come first."""
    for name, fault in work.faults.items():
        if work.late:
            return
        if work.times_found(name):
            continue
        others = {reach.file: 0 for reach in work.reaches()}
        for pair in work.table.pairs(work.files, [*work.faults]):
            others[pair.file] += pair.outcome is not Outcome.SURVIVED
        asked = [reach for reach in work.reaches() if fault in work.wanted(reach)]
        asked.sort(key=lambda reach: reach.seconds / (1 + others[reach.file]))
        if not asked:
            continue
        try:
            for pair in find(fault, asked):
                _note(work, pair)
        except RunError as error:
            yield _told(name, error)


def judge_files(work: Work) -> Iterator[str]:
    """Run each file with the faults that it reaches, until the time is over, and yield those of
    which nothing more can be said."""
    for reach in work.reaches():
        if work.late:
            return
        try:
            for pairs in judge(reach, work.wanted(reach)):
                for pair in pairs:
                    _note(work, pair)
                if work.late:
                    return
        except RunError as error:
            yield _told(reach.file.path, error)


def _note(work: Work, pair: Pair) -> None:
    work.table.add(pair)
    words = [pair.fault, pair.outcome, *pair.tests, pair.message]
    print(f"{pair.file.path}: {' '.join(words).rstrip()}", flush=True)


def _told(subject: str, error: RunError) -> str:
    print(f"{subject}: {error}", flush=True)
    return subject


if __name__ == "__main__":
    sys.exit(main())
