"""SIGKILL at every single file operation of a save: a complete checkpoint is always there, and the next save works."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from megatron_llama.checkpoint import native
from megatron_llama.launch.launcher import Place

from tests.checkpoint.cases import SINGLE, copies, merged, same, save_under, state_at, trained
from tests.harness import Cluster
from tests.parallel.cases import Layout, Trainer, trainer

ONE = Layout()
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree")
"""Python announces each of these just before it happens."""


def save_killed_at(run: Trainer, folder: Path, iteration: int, operation: int) -> bool:
    """Save in a child process that is killed before its Nth file operation. Returns whether the kill came."""
    child = os.fork()
    if child == 0:
        left = [operation]

        def count(event: str, _: object) -> None:
            if event in OPERATIONS:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        native.save(folder, run.optimizer, run.mesh, state_at(iteration), ONE.config())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return os.WIFSIGNALED(status)


def kill_everywhere(place: Place, good: Path, work: Path, iteration: int) -> list[str]:
    """What is found after a kill at each operation: the iteration and the optimizer steps of the newest checkpoint."""
    run, other = trained(place, ONE, steps=1), trainer(place, ONE)
    found: list[str] = []
    killed = True
    while killed:
        folder = work / f"{len(found)}"
        shutil.copytree(good, folder)
        killed = save_killed_at(run, folder, iteration, len(found))
        state = native.load(folder, other.optimizer, other.mesh, ONE.config().model)
        steps = native.read_meta(folder).optimizer_step
        assert same(merged(copies(other.optimizer)), merged(copies(run.optimizer))) == (steps == 1)
        found.append(f"iteration {state.iteration}, {steps} steps")
        native.save(folder, run.optimizer, run.mesh, state_at(5), ONE.config())
        expected = sorted({"iter_0000002", "iter_0000005", "latest_checkpointed_iteration.txt"} | {f"iter_{iteration:07d}"})
        left = sorted(path.name for path in folder.iterdir())
        # A new iteration may or may not have been complete when the kill came.
        assert left == expected or (iteration != 2 and left == [name for name in expected if name != f"iter_{iteration:07d}"])
        shutil.rmtree(folder)
    return found


@pytest.mark.long
@pytest.mark.parametrize("iteration", [3, pytest.param(2, marks=pytest.mark.long)], ids=["new", "again"])
def test_a_killed_save(cluster: Cluster, tmp_path: Path, iteration: int) -> None:
    good = tmp_path / "good"
    save_under(SINGLE, ONE, good)
    (tmp_path / "work").mkdir()
    (found,) = cluster.run(1, kill_everywhere, good, tmp_path / "work", iteration)
    old, new = "iteration 2, 2 steps", f"iteration {iteration}, 1 steps"
    switch = found.index(new)
    assert switch >= 8 and found[:switch] == [old] * switch and found[switch:] == [new] * (len(found) - switch)
