"""Real torchrun: a run whose rank is killed starts again by itself, and nobody can tell from what it leaves."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.product import DP2, Product, assert_same_state, exact_curve, steps
from tests.launcher import LAUNCHERS, POLL, ROOT, TIMEOUT

ITERS = 60


@contextmanager
def torchrun(folder: Path, rendezvous: Sequence[str], command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Two ranks, restarted up to three times. Killed with all of them when the block is left."""
    options = ["--nproc-per-node", "2", "--max-restarts", "3", *rendezvous]
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHERS} | {"OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "megatron_llama", *command]
    with (folder / "torchrun.out").open("wb") as out:
        process = subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank: a child of the launcher with that rank in its environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == launcher and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    return int(entry.name)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while it was looked at
    raise AssertionError(f"rank {rank} is not there")


def quiet_port() -> str:
    """A port that the system gives to nobody in the seconds until torchrun listens there."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return str(random.randrange(first // 2, first))


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("static", marks=pytest.mark.soak), "standalone"])
def test_a_killed_rank_restarts_the_run(kind: str, product: Product, tmp_path: Path) -> None:
    """At step 20 of a run that saves every 8: resumed from 16, by the ranks of a second attempt under the same launcher."""
    folder, straight = tmp_path / "killed", tmp_path / "straight"
    options = {"train_iters": ITERS, "lr_decay_iters": ITERS, "num_layers": 2, "save_interval": 8, **DP2.options}
    rendezvous = ["--standalone"] if kind == "standalone" else ["--master-addr", "127.0.0.1", "--master-port", quiet_port()]
    with torchrun(tmp_path, rendezvous, product.command(save=folder, load=folder, **options)) as process:
        deadline, killed = time.monotonic() + TIMEOUT, False
        while process.poll() is None and time.monotonic() < deadline:
            if not killed and len(steps(folder)) >= 20:
                os.kill(rank_of(process.pid, 1), signal.SIGKILL)
                killed = True
            time.sleep(POLL)
        assert killed and process.poll() == 0, (tmp_path / "torchrun.out").read_text()
    printed = (tmp_path / "torchrun.out").read_text()
    assert "rank 1: got no answer" in printed or "Signal 9 (SIGKILL)" in printed or "exitcode: -9" in printed, printed
    assert printed.count(" iteration 17/") == 2, "steps behind the last save are taken again"
    product.launcher.run(product.command(save=straight, **options), 2).ok()
    assert exact_curve(folder) == exact_curve(straight)
    assert_same_state(folder / f"iter_{ITERS:07d}", straight / f"iter_{ITERS:07d}")
