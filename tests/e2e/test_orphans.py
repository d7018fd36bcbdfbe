"""Real torchrun that cannot end its ranks: it is killed, or one of them is stopped."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.product import DP2, Product, steps
from tests.e2e.test_launchers import end, family
from tests.e2e.test_restarts import quiet_port, rank_of
from tests.launcher import LAUNCHERS, POLL, ROOT, TIMEOUT

pytestmark = pytest.mark.long
ENDLESS = {"train_iters": 100_000, "lr_decay_iters": 100_000, "num_layers": 2, "save_interval": 3, "save_retain": 2, "load": "auto"}
SOON = 30.0
"""Seconds for what takes one or two on an idle machine; without what is tested here the ranks of one process would train for ever, and
those of several for a minute or more."""


@contextmanager
def torchrun(folder: Path, processes: int, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher of ranks; what is left of them is killed when the block is left."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHERS} | {"OMP_NUM_THREADS": "1"}
    options = ["--nproc-per-node", str(processes), "--master-addr", "127.0.0.1", "--master-port", quiet_port()]
    argv = [sys.executable, "-m", "torch.distributed.run", *options, *command]
    with (folder / "torchrun.out").open("ab") as out:
        process = subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=out, stderr=out)
    ranks: list[int] = []
    try:
        yield process
    finally:
        ranks = family(process.pid)
        end(process)
        for pid in ranks:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


def train(folder: Path, product: Product, **options: object) -> list[str]:
    return product.command(save=folder, **{**ENDLESS, **options})


def until_trained(process: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while len(steps(folder)) < count:
        assert process.poll() is None and time.monotonic() < deadline, (folder.parent / "torchrun.out").read_text()
        time.sleep(POLL)


@pytest.mark.few(1, all=2)
@pytest.mark.parametrize("kind", ["two ranks", "two ranks, saving in the background", "one rank behind a script"])
def test_ranks_whose_launcher_was_killed_end(kind: str, product: Product, tmp_path: Path) -> None:
    """Whatever they do: they wait for each other, save, or are alone. The next start goes on at once, in the same folder."""
    folder = tmp_path / "run"
    processes = 1 if kind.startswith("one") else 2
    layout = DP2.options if processes == 2 else {}
    command = ["-m", "megatron_llama", *train(folder, product, **layout, **({"async_save": True} if "background" in kind else {}))]
    if processes == 1:
        script = tmp_path / "rank.sh"
        script.write_text(f'#!/bin/sh\n{sys.executable} "$@"\necho the script has ended\n')
        script.chmod(0o755)
        command = ["--no-python", str(script), *command]
    with torchrun(tmp_path, processes, command) as process:
        until_trained(process, folder, 5)
        everything = {pid: os.pidfd_open(pid) for pid in family(process.pid)[1:]}
        process.kill()
        deadline = time.monotonic() + SOON
        for pid, descriptor in everything.items():
            ended = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
            os.close(descriptor)
            assert ended, f"process {pid} still runs: {(tmp_path / 'torchrun.out').read_text()[-2000:]}"
    said = (tmp_path / "torchrun.out").read_text()
    assert f" was ended: its launcher (process {process.pid} on " in said
    last = steps(folder)[-1]["iteration"] + 3
    out = product.launcher.run(train(folder, product, **layout, train_iters=last), processes).ok().out
    assert "held by" not in out and [entry["iteration"] for entry in steps(folder)] == list(range(1, last + 1))


def test_a_rank_that_was_stopped_does_not_keep_its_launcher(product: Product, tmp_path: Path) -> None:
    """The others kill it when they have said what is wrong: it hears no SIGTERM, for which torchrun would wait for half a minute."""
    folder = tmp_path / "run"
    options = {"distributed_timeout_minutes": 0.05, "global_batch_size": 12, "save_interval": None}
    with torchrun(tmp_path, 3, ["-m", "megatron_llama", *train(folder, product, **options)]) as process:
        until_trained(process, folder, 40)
        victim = rank_of(process.pid, 1)
        os.kill(victim, signal.SIGSTOP)
        process.wait(TIMEOUT)
    said = (tmp_path / "torchrun.out").read_text()
    assert f"rank 1 (process {victim} on " in said and "did not answer, and was killed\n" in said
    assert "rank 0 was stuck, and was ended: rank 1 does not answer; " in said
    assert "forcefully exiting via 9" not in said.lower() and "Unable to shutdown process" not in said, "torchrun had to wait for it"
