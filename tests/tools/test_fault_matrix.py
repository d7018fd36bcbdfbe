"""Faults are planted wherever a test runs the package, and the table says what became of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.engine.options import EngineOptions
from tools.fault_matrix.__main__ import main
from tools.fault_matrix.report import cover
from tools.fault_matrix.running import Ended, RunError, run_pytest
from tools.fault_matrix.table import Outcome, find_test_files

from tests.mutations import Mutation, functions, parsed, places
from tests.plant import catalogue, find_targets, split_by_targets
from tests.prove.faults import CATALOGUE
from tests.tools.few_faults import AGAIN

FEW = "tests.tools.few_faults:CATALOGUE"
HOST, NAME, VERSION, NEVER = catalogue(FEW)
EVERYWHERE = """
from megatron_llama.launch import launcher
from tests.harness import Cluster
from tests.launcher import Launcher
from tests.tools.few_faults import name_of

def test_here():
    assert launcher.first_host("a[1-3]") == "a1"

def test_in_a_worker():
    with Cluster() as cluster:
        assert cluster.run(1, name_of) == [""]

def test_in_a_process(tmp_path):
    with Launcher(tmp_path) as server:
        assert "never" not in server.run(["--version"]).ok().out
"""
HEAD = "from megatron_llama.launch import launcher\nfrom megatron_llama.config import version\n"
LOOKS = f'{HEAD}def test_host():\n    launcher.job_name()\n    version.version()\n    assert launcher.first_host("a,b") == "a"\n'
PASSES_BY = f'{HEAD}def test_call():\n    launcher.first_host("a,b")\n    launcher.job_name()\n'
ELSEWHERE = "def test_nothing():\n    pass\n"


def write_tests(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / f"test_{name}.py").write_text(text)
    return folder


def rows_of(table: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in table.read_text().splitlines()]


def outcomes(table: Path) -> dict[tuple[str, str], tuple[str, int]]:
    pairs = [row for row in rows_of(table) if row["kind"] == "Pair"]
    return {(Path(row["file"]["path"]).stem, row["fault"]): (row["outcome"], row["together"]) for row in pairs}


def matrix(part: str, folder: Path, table: Path, *options: str) -> None:
    assert main([part, "--files", str(folder), "--catalogue", FEW, "--table", str(table), *options]) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of three files, and the table of a run."""
    folder = write_tests(tmp_path_factory.mktemp("files"), looks=LOOKS, passes_by=PASSES_BY, elsewhere=ELSEWHERE)
    table = folder / "table.jsonl"
    matrix("run", folder, table)
    return folder, table


OPTIONS = "megatron_llama/engine/options.py", "EngineOptions.largest_message"


def largest_messages() -> list[int]:
    return [EngineOptions(bucket_size=given).largest_message(shards) for given, shards in ((0, 8), (0, 64), (5, 1))]


def test_mutations_are_in_the_code_that_everybody_has() -> None:
    """Each of one small function changes what it returns, says itself when it is reached, and comes off."""
    file, name = OPTIONS
    count = len([*places(dict(functions(parsed(file).body))[name])])
    assert count == 4, "or, *, and two numbers"
    before, whole = largest_messages(), EngineOptions.largest_message.__code__
    for number in range(count):
        mutation = Mutation(file, name, number)
        with mutation.patch():
            assert largest_messages() != before, mutation.name
        assert largest_messages() == before
        reached: list[int] = []
        try:
            mutation.record(partial(reached.append, number))
            assert (largest_messages(), {*reached}) == (before, {number})
        finally:
            EngineOptions.largest_message.__code__ = whole


@pytest.mark.long
def test_processes_that_tests_start_are_planted_too(tmp_path: Path) -> None:
    """One fault shows in this process, one in a worker of the pool, and one in what the launcher starts."""
    (file,) = find_test_files([write_tests(tmp_path, everywhere=EVERYWHERE)], long=False)
    planted = [word for name in catalogue(FEW) for word in ("--plant", name)]
    ended = run_pytest([file], ["--catalogue", FEW, *planted], 300.0)
    assert [test.partition("::")[2] for test in ended.failed] == ["test_here", "test_in_a_worker", "test_in_a_process"], ended.out


def test_a_file_finds_what_it_looks_at(run: tuple[Path, Path]) -> None:
    _, table = run
    assert outcomes(table) == {
        ("test_looks", HOST): ("killed", 1),
        ("test_looks", NAME): ("survived", 2),
        ("test_looks", VERSION): ("survived", 2),
        ("test_passes_by", HOST): ("survived", 2),
        ("test_passes_by", NAME): ("survived", 2),
    }
    (killed,) = (row for row in rows_of(table) if row.get("outcome") == "killed")
    assert [test.partition("::")[2] for test in killed["tests"]] == ["test_host"]
    assert killed["message"].startswith("AssertionError: assert 'nowhere' == 'a'")


def test_what_is_in_the_table_is_not_run_again(run: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, table = run
    copy = tmp_path / "table.jsonl"
    lines = table.read_text().splitlines()
    copy.write_text("\n".join(lines) + "\n")
    matrix("run", folder, copy)
    assert capsys.readouterr().out == "" and copy.read_text().splitlines() == lines
    # Interrupted before its last row: that one pair is done, and no other.
    copy.write_text("\n".join(lines[:-1]) + "\n")
    matrix("run", folder, copy)
    assert len(capsys.readouterr().out.splitlines()) == 1 and outcomes(copy).keys() == outcomes(table).keys()


@pytest.mark.long
def test_a_file_that_has_changed_is_run_again(run: tuple[Path, Path], tmp_path: Path) -> None:
    _, table = run
    before = rows_of(table)
    copy = tmp_path / "table.jsonl"
    copy.write_text(table.read_text())
    folder = write_tests(tmp_path, looks=LOOKS)
    matrix("run", folder, copy, "--faults", NAME)  # another place: nothing is known of it
    matrix("run", write_tests(tmp_path, looks=LOOKS + "\n"), copy, "--faults", NAME)
    blobs = [row["file"]["blob"] for row in rows_of(copy)[len(before) :] if row["kind"] == "Pair"]
    assert len(blobs) == len(set(blobs)) == 2


@pytest.mark.long
def test_no_more_files_are_asked_than_is_wanted(tmp_path: Path) -> None:
    """The first is the cheapest, whichever that is."""
    folder = write_tests(tmp_path, one=LOOKS, two=LOOKS)
    table = tmp_path / "table.jsonl"
    matrix("run", folder, table, "--faults", HOST, "--stop-after", "1")
    assert [outcome for outcome, _ in outcomes(table).values()] == ["killed"]
    matrix("run", folder, table, "--faults", NAME, "--minutes", "0")
    assert len(outcomes(table)) == 1


def test_a_fault_is_asked_of_files_until_one_notices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those before it have not; the one that finds many is asked first the next time."""
    slow = "import time\n" + LOOKS.replace("    version", "    assert launcher.job_name() != \"nobody's\"\n    version")
    folder = write_tests(tmp_path, looks=PASSES_BY, slow=slow, third=slow.replace("time\n", "time\ntime.perf_counter()\n"))
    table = tmp_path / "table.jsonl"
    matrix("find", folder, table)
    killed = {fault: file for (file, fault), (outcome, _) in outcomes(table).items() if outcome == "killed"}
    assert killed.keys() == {HOST, NAME} and len({*killed.values()}) == 1 and killed[HOST] != "test_looks"
    assert {outcomes(table)[file, VERSION][0] for file in ("test_slow", "test_third")} == {"survived"}
    lines = table.read_text()
    capsys.readouterr()
    matrix("find", folder, table)
    assert capsys.readouterr().out == "" and table.read_text() == lines


@pytest.mark.long
def test_tests_that_fail_without_a_fault_find_none(tmp_path: Path) -> None:
    broken = PASSES_BY + "\ndef test_broken():\n    assert False\n"
    table = tmp_path / "table.jsonl"
    matrix("run", write_tests(tmp_path, broken=broken), table, "--faults", HOST)
    assert outcomes(table) == {("test_broken", HOST): ("survived", 1)}
    assert rows_of(table)[0]["failed"][0].endswith("::test_broken")


def test_failures_are_told_by_test_and_message(tmp_path: Path) -> None:
    """Also where a name looks like the end of one, in what a test prepares, and in files that cannot be imported."""
    fails = """
import pytest

@pytest.fixture
def missing():
    raise LookupError("no - no")

@pytest.mark.parametrize("words", ["one - two"])
def test_words(words, missing):
    pass
"""
    files = find_test_files([write_tests(tmp_path, fails=fails, imports="import nonesuch\n")], long=False)
    ended = [run_pytest([file], [], 60.0) for file in files]
    assert [[test.partition("::")[2] for test in run.failed] for run in ended] == [["test_words[one - two]"], [""]]
    assert [run.message for run in ended] == ["LookupError: no - no", "ModuleNotFoundError: No module named 'nonesuch'"]
    assert {run.outcome for run in ended} == {Outcome.KILLED}


def test_a_run_leaves_out_what_pyproject_leaves_out(tmp_path: Path) -> None:
    gpu = "import pytest\n@pytest.mark.gpu\ndef test_gpu(): assert False\ndef test_other(): pass\n"
    ended = run_pytest(find_test_files([write_tests(tmp_path, gpu=gpu)], long=False), [], 60.0)
    assert ended.passed and len({part["test"] for part in ended.results}) == 1


def test_a_file_that_hangs_has_noticed() -> None:
    """And so has one that takes pytest with it. When pytest cannot begin, nobody has."""
    outcomes = [Ended(status, "", 1.0, ()).outcome for status in (None, 0, 5, -11)]
    assert outcomes == [Outcome.LATE, Outcome.SURVIVED, Outcome.SURVIVED, Outcome.KILLED]
    with pytest.raises(RunError, match="pytest ended with 1, and no test has failed\nAttributeError"):
        _ = Ended(1, "AttributeError: no such target", 1.0, ()).outcome


@pytest.mark.long
def test_a_run_goes_on_behind_a_file_that_cannot_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tests(tmp_path, dies="import os\nos._exit(1)\n", looks=LOOKS)
    table = tmp_path / "table.jsonl"
    assert main(["run", "--files", str(folder), "--catalogue", FEW, "--table", str(table), "--faults", HOST]) == 1
    assert "test_dies.py: pytest ended with 1, and no test has failed" in capsys.readouterr().out
    assert outcomes(table) == {("test_looks", HOST): ("killed", 1)}


@pytest.mark.long
def test_a_file_that_does_not_end_is_ended(tmp_path: Path) -> None:
    (file,) = find_test_files([write_tests(tmp_path, endless="import time\ndef test_wait():\n    time.sleep(60)\n")], long=False)
    ended = run_pytest([file], [], 3.0)
    assert ended.status is None and ended.seconds < 30


def test_the_report_counts(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder, table = run
    matrix("report", folder, table)
    said = capsys.readouterr().out
    assert said.startswith("**1 of 4 faults are found** by 3 test files\n(13 lines, ")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines() if line.startswith("|")]
    faults = {row[0]: row[1:] for row in cells if row[0] in catalogue(FEW)}
    assert [(row[0], row[1], *row[3:]) for row in faults.values()] == [
        ("2", "1", "test_host", "AssertionError", "0"),
        ("2", "0", "", "", "0"),
        ("1", "0", "", "", "0"),
        ("0", "0", "", "", "0"),
    ]
    assert faults[NEVER][2] == "**nobody**" and faults[HOST][2].endswith("test_looks.py")
    assert "**1 files find all of that** (6 lines, " in said and "**2 files find nothing that others do not** (" in said


@pytest.mark.parametrize(
    ("finds", "seconds", "chosen"),
    [
        ({"a": "xy", "b": "z", "c": "xyz"}, {"a": 1.0, "b": 1.0, "c": 9.0}, ["a", "b"]),
        ({"a": "xy", "b": "z", "c": "xyz"}, {"a": 3.0, "b": 3.0, "c": 2.0}, ["c"]),
        ({"a": "x", "b": "xy", "c": ""}, {"a": 1.0, "b": 3.0, "c": 0.1}, ["b"]),
        ({"a": ""}, {"a": 1.0}, []),
    ],
)
def test_few_cheap_files_find_everything(finds: dict[str, str], seconds: dict[str, float], chosen: Sequence[str]) -> None:
    assert cover({path: frozenset(faults) for path, faults in finds.items()}, seconds) == chosen


def test_faults_that_replace_the_same_are_planted_apart() -> None:
    assert [[fault.name for fault in faults] for faults in split_by_targets(AGAIN)] == [[HOST, NAME, VERSION, NEVER], ["first_host backwards"]]


def test_every_seeded_fault_has_a_target() -> None:
    """Looking at them plants none."""
    before = {target.name: getattr(target.owner, target.attribute) for fault in CATALOGUE for target in find_targets(fault)}
    assert all(find_targets(fault) for fault in CATALOGUE)
    after = {target.name: getattr(target.owner, target.attribute) for fault in CATALOGUE for target in find_targets(fault)}
    assert before == after and "megatron_llama.engine.optimizer.GradientBuckets" in before
    assert sorted(fault.name for faults in split_by_targets(CATALOGUE) for fault in faults) == sorted(fault.name for fault in CATALOGUE)
