"""That the table of habits in the guide names tests that there are, one for each row."""

from __future__ import annotations

import re

import pytest

from tests.launcher import ROOT

GUIDE = ROOT / "docs" / "guide" / "11-your-own-module.md"
ROWS = [line for line in GUIDE.read_text().partition("## Habits")[2].partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip() for row in ROWS])
def test_each_habit_is_run_by_a_test(row: str) -> None:
    named = re.findall(r"`([a-z_/0-9]+\.py)::(test_[a-z_0-9]+)`", row)
    assert len(named) == 1, row
    [(file, test)] = named
    assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), row
