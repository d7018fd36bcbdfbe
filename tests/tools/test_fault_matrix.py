"""Faults are planted wherever a test runs the package, and the table says what became of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tools.fault_matrix.__main__ import main
from tools.fault_matrix.report import cover
from tools.fault_matrix.running import Ended, RunError, run_pytest
from tools.fault_matrix.table import Outcome, find_test_files

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
        ("test_looks", HOST): ("killed", 1), ("test_looks", NAME): ("survived", 2), ("test_looks", VERSION): ("survived", 2),
        ("test_passes_by", HOST): ("survived", 2), ("test_passes_by", NAME): ("survived", 2),
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


def test_a_file_that_hangs_has_noticed() -> None:
    """And so has one that takes pytest with it. When pytest cannot begin, nobody has."""
    outcomes = [Ended(status, "", 1.0, ()).outcome for status in (None, 0, 5, -11)]
    assert outcomes == [Outcome.LATE, Outcome.SURVIVED, Outcome.SURVIVED, Outcome.KILLED]
    with pytest.raises(RunError, match="pytest ended with 1, and no test has failed\nAttributeError"):
        _ = Ended(1, "AttributeError: no such target", 1.0, ()).outcome


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
