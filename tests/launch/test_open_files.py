"""A rank asks for all open files that it may have, and too few for the store are named before anybody connects."""

from __future__ import annotations

import resource
import subprocess
import sys
from functools import partial

import pytest

from tests.refused import refused

RAISES = "from megatron_llama.launch.open_files import raise_limit; import os; print(raise_limit({}))"
ASKS = "from megatron_llama.launch.open_files import require_open_files; require_open_files({}, rank={}, in_launcher={})"


def run(code: str, hard: int) -> subprocess.CompletedProcess[str]:
    """Run code under ``ulimit -Sn 64`` and a hard limit."""
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, hard))
    return subprocess.run([sys.executable, "-c", code], preexec_fn=limit, capture_output=True, text=True, check=False)


def test_the_limit_becomes_the_hard_one() -> None:
    assert run(RAISES.format(0), 500).stdout == "500\n"


def test_the_launcher_that_holds_the_store_gets_it_too() -> None:
    """Whose limit is no rank's."""
    child = ASKS.format(8, 0, True)
    launcher = f"import resource, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True); print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    done = run(launcher, 500)
    assert (done.stdout, done.returncode) == ("(500, 500)\n", 0), done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "rank", "enough"), [(94, 0, False), (93, 0, True), (16384, 1, True)])
def test_too_few_for_the_store(ranks: int, rank: int, enough: bool) -> None:
    """At 500 open files: 128 of the process itself, and four for each rank."""
    done = run(ASKS.format(ranks, rank, False), 500)
    assert done.returncode == (not enough), done.stderr
    if not enough:
        error = refused(done.stderr.splitlines()[-1].partition(": ")[2])
        assert (error.where, error.do[:34]) == ("open files (ulimit -n)", "start the launcher under ulimit -n"), error
        assert "504: 4 connections for each of 94 ranks" in error.expected
