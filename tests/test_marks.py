"""Which tests and cases a run takes, by its options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher import ROOT

TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.long
def test_long(): pass

@pytest.mark.soak
def test_soak(): pass

@pytest.mark.few(3, all=5)
@pytest.mark.parametrize("case", [0, 1, 2, pytest.param(3, marks=pytest.mark.long), 4, 5, 6, 7, 8])
def test_few(case): pass

@pytest.mark.few(1)
@pytest.mark.parametrize("case", "abc")
def test_one(case): pass
"""
FEW = {"plain", "few[0]", "few[5]", "few[8]", "one[a]"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ((), FEW),
        (("--all",), {"plain", "long", "few[0]", "few[2]", "few[4]", "few[6]", "few[8]", "one[a]", "one[b]", "one[c]"}),
        (("--soak",), {"plain", "long", "soak", *(f"few[{case}]" for case in range(9)), "one[a]", "one[b]", "one[c]"}),
        (("test_marks.py::test_few", "test_marks.py::test_long"), {*(f"few[{case}]" for case in range(9)), "long"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_choose(tmp_path: Path, options: tuple[str, ...], taken: set[str]) -> None:
    (tmp_path / "test_marks.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_addoption, pytest_collection_modifyitems\n")
    files = () if any("::" in word for word in options) else ("test_marks.py",)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--rootdir", tmp_path, "-p", "no:cacheprovider", *files, *options]
    listed = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True)
    assert {line.partition("::test_")[2] for line in listed.stdout.splitlines() if "::" in line} == taken, listed.stdout + listed.stderr
