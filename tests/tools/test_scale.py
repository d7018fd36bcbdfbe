"""What grows with the number of processes: the table's figures, and that they say what was measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from tools.scaling import data
from tools.scaling.rows import COMPUTED, Row
from tools.scaling.start import start
from tools.scaling.watch import watch

from tests.launcher import ROOT


def by_word(rows: list[Row]) -> Callable[[str], Row]:
    def found(words: str) -> Row:
        (row,) = (row for row in rows if words in row.what)
        return row

    return found


@pytest.mark.long
def test_a_start() -> None:
    """Requests that the others make do not grow, and rank 0's are five for each."""
    small, large = (by_word(start(world)) for world in (64, 128))
    assert small("requests each").what == large("requests each").what == "rendezvous: 4 requests each"
    counts = [int(row.what.split()[1]) for found in (small, large) for row in (found("rendezvous: 3") if found is small else found("rendezvous: 6"),)]
    assert counts == [5 * 63, 5 * 127]
    assert large("agreement, hidden").seconds == pytest.approx(127 / 63 * (small("agreement, hidden").seconds or 0))
    assert large("agreement, hidden").origin == COMPUTED
    assert large("NCCL communicators").memory and large("ulimit -n 640").origin == COMPUTED


@pytest.mark.long
def test_a_watch_names_the_rank_that_is_dead() -> None:
    few, many = (watch(world) for world in (64, 640))
    assert [row.what for row in few if row.who == "others"] == [row.what for row in many if row.who == "others"], "they ask no more often"
    assert all((row.seconds or 0) < 15 for row in many)


@pytest.mark.long
def test_data_is_held_once_by_a_machine() -> None:
    """Eight bytes of each document and four of each sample are in the file, and next to nothing in a process."""
    documents = 4_000_000
    own, shared, file = (
        next(row for row in data._opened(documents) if words in row.what and row.who in ("others", "a machine")) for words in ("of its own", "shared", "file")
    )
    assert (own.memory or 0) > 12 * documents and (shared.memory or 0) < 12 * documents / 3, "a fixed part stays"
    assert 12 * documents < (file.bytes or 0) < 17 * documents


@pytest.mark.long
def test_the_command() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "scale.py"), "--world", "16", "--part", "watch"], capture_output=True, text=True, timeout=300, check=True)
    assert "| watch | right rank named after another fails | all |" in done.stdout and "| computed |" in done.stdout
