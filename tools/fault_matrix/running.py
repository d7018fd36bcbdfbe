"""Runs of pytest: test files, with what is planted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.plant import Planted, split_by_targets
from tools.fault_matrix.table import ROOT, File, Outcome, Pair, Reach

BASELINE_SECONDS = 1800.0
"""After which a file without a fault is ended."""
TOGETHER = 20
"""Files in a run without a fault: it costs less than as many runs, and little is lost by an end."""
TIMES, MORE = 3.0, 60.0
"""How much longer a file may take with a fault: that many times, and seconds."""
PASSED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
TESTS_FAILED = (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)


class RunError(Exception):
    """A run that says nothing about tests."""


@dataclass(frozen=True)
class Ended:
    """What a run of pytest left."""

    status: int | None
    """None: it was too late."""
    out: str
    seconds: float
    results: Sequence[Mapping[str, Any]]
    """What became of each part of each test, as ``tests/plant.py`` writes it."""

    @property
    def failed(self) -> tuple[str, ...]:
        """The tests that failed, and files that could not be imported."""
        failures = (result["test"] for result in self.results if result["outcome"] == "failed")
        return tuple(dict.fromkeys(failures))

    @property
    def message(self) -> str:
        """What the first of them said."""
        said = (result["message"] for result in self.results if result["outcome"] == "failed")
        return next(said, "")

    @property
    def outcome(self) -> Outcome:
        """What became of what was planted."""
        if self.status is None:
            return Outcome.LATE
        if self.passed:
            return Outcome.SURVIVED
        if self.failed or self.status < 0:  # a signal: the fault has taken pytest with it
            return Outcome.KILLED
        raise RunError(f"pytest ended with {self.status}, and no test has failed\n{self.out}")

    @property
    def passed(self) -> bool:
        """Whether no test failed."""
        return self.status in PASSED

    def of(self, file: File) -> Ended:
        """Return what is left of one of several files."""
        own = [result for result in self.results if result["file"] == file.path]
        return Ended(self.status, "", sum(result["seconds"] for result in own), own)


def run_pytest(files: Sequence[File], options: Sequence[str], limit: float) -> Ended:
    """Run test files in this order. What they have started ends with them."""
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        results = Path(folder, "results")
        results.touch()
        command = [sys.executable, "-m", "pytest", "-p", "tests.plant", "-p", "no:cacheprovider"]
        # By name: pytest would look for its configuration above all paths on the line.
        command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
        command += ["--results", str(results), "-q", "--tb=short"]
        command += ["--all"] if any(file.long for file in files) else []
        command += [*options, *(file.path for file in files)]
        begin = time.monotonic()
        with Path(folder, "out").open("w+b") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end_group(process)
            seconds = time.monotonic() - begin
            out.seek(0)
            said = out.read().decode(errors="replace")
        lines = results.read_text().splitlines()
        return Ended(status, said, seconds, [json.loads(line) for line in lines])


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure_reach(files: Sequence[File], catalogue: str, faults: Sequence[str]) -> list[Reach]:
    """Run files without a fault, and note which each could notice."""
    with tempfile.TemporaryDirectory(prefix="reach-") as folder:
        names = Path(folder, "names")
        names.touch()
        options = [
            "--catalogue",
            catalogue,
            "--reach",
            str(names),
            "--continue-on-collection-errors",
        ]
        ended = run_pytest(files, options, BASELINE_SECONDS * len(files))
        reached = {tuple(line.split("\t")) for line in names.read_text().splitlines()}
    if ended.outcome is not Outcome.SURVIVED and (
        not ended.failed or ended.status not in TESTS_FAILED
    ):
        raise RunError(f"without a fault, too, it ends with {ended.status}\n{ended.out}")
    return [
        Reach(
            file,
            catalogue,
            tuple(faults),
            round(own.seconds, 1),
            sum(part["outcome"] == "passed" and part["when"] == "call" for part in own.results),
            own.failed,
            tuple(fault for fault in faults if {(file.path, fault), ("", fault)} & reached),
        )
        for file in files
        for own in [ended.of(file)]
    ]


def judge(reach: Reach, faults: Sequence[Planted]) -> Iterator[list[Pair]]:
    """Run a file with faults, and yield what became of them after each run.

    They are planted together first, and in halves where that is noticed: most files that run the
    package at all call what nearly every fault replaces, and notice few."""
    waiting = list(split_by_targets(faults))
    while waiting:
        together = waiting.pop(0)
        ended = _run_with([reach], together)
        if len(together) > 1 and not ended.passed:
            middle = len(together) // 2
            waiting[:0] = [together[:middle], together[middle:]]
            yield []
            continue
        yield [_pair(reach, fault, ended, len(together)) for fault in together]


def find(fault: Planted, reaches: Sequence[Reach]) -> list[Pair]:
    """Run files with a fault, one after the other, until one of them notices, and return what
    became of it in each that was run."""
    ended = _run_with(reaches, [fault])
    paths = [result["file"] for result in ended.results]
    last = len(reaches)
    if ended.outcome is not Outcome.SURVIVED:
        last = max(
            (number for number, reach in enumerate(reaches) if reach.file.path in paths), default=0
        )
    pairs = []
    for number, reach in enumerate(reaches[: last + 1]):
        own = ended.of(reach.file)
        noticed = number == last
        if noticed or own.results:  # before a file that cannot be imported none has been run
            own = replace(own, status=ended.status if noticed else 0)
            pairs.append(_pair(reach, fault, own, 1))
    return pairs


def _pair(reach: Reach, fault: Planted, ended: Ended, together: int) -> Pair:
    seconds = round(ended.seconds, 1)
    tests, message = ended.failed, ended.message
    return Pair(reach.file, fault.name, ended.outcome, seconds, tests, message, together)


def _run_with(reaches: Sequence[Reach], faults: Sequence[Planted]) -> Ended:
    options = ["-x", "--catalogue", reaches[0].catalogue]
    options += [word for fault in faults for word in ("--plant", fault.name)]
    options += [word for reach in reaches for test in reach.failed for word in ("--deselect", test)]
    seconds = sum(reach.seconds for reach in reaches)
    return run_pytest([reach.file for reach in reaches], options, TIMES * seconds + MORE)
