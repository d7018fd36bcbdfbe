"""When a run saves, what stays, whether training waits for it, and what happens when that goes wrong."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import shutil
import subprocess
from pathlib import Path
from signal import Signals

import pytest

from tests.e2e.product import DP2, EVALUATED, TP2_PP2, Layout, Product, assert_same_state, checkpoints, contents, exact_curve, log, steps
from tests.flipped import flip
from tests.launcher import TIMEOUT, Run

BACKGROUND = {"async_save": True, "save_interval": 1}
ENDLESS = {"train_iters": 100_000, "save_interval": 0}


def writers(run: Run) -> list[int]:
    """The writing process of every rank."""
    found = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in run.pids]
    assert all(len(children) == 1 for children in found), found
    return [int(child) for (child,) in found]


@pytest.mark.long
@pytest.mark.tries("async_save")
@pytest.mark.parametrize("layout", [DP2, TP2_PP2], ids=["dp 2", "tp 2 pp 2"])
def test_what_is_written_in_the_background_is_what_training_would_have_waited_for(layout: Layout, product: Product, tmp_path: Path) -> None:
    waited, beside = tmp_path / "waited", tmp_path / "beside"
    product.train(layout, save=waited, save_interval=2, **EVALUATED)
    run = product.train(layout, save=beside, save_interval=2, async_save=True, **EVALUATED)
    assert exact_curve(beside) == exact_curve(waited)
    assert sorted(path.name for path in beside.iterdir()) == sorted(path.name for path in waited.iterdir())
    for iteration in (2, 4, 6):
        name = f"iter_{iteration:07d}"
        assert_same_state(beside / name, waited / name)
        assert sorted(path.name for path in (beside / name).iterdir()) == sorted(path.name for path in (waited / name).iterdir())
        started, saved = (run.out.index(f" {word} {beside}/{name}") for word in ("saving", "saved"))
        assert started < saved
    product.train(layout, save=beside, load=beside, train_iters=8)
    assert steps(beside)[-1]["iteration"] == 8


@pytest.mark.long
@pytest.mark.tries("save_first_step", "save_retain", "save_retain_interval")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"save_retain": 2, "async_save": True}, [5, 6]),
        ({"save_retain": 1, "save_retain_interval": 2}, [2, 4, 6]),
        ({"save_retain_interval": 2, "async_save": True}, [1, 2, 3, 4, 5, 6]),
        ({"save_interval": 4, "save_first_step": True}, [1, 4, 6]),
        ({"save_interval": 4, "save_first_step": True, "save_retain": 2, "async_save": True}, [4, 6]),
    ],
    ids=["newest", "newest and multiples", "no limit", "first step", "first step that goes"],
)
def test_which_checkpoints_stay(options: dict, expected: list[int], product: Product, tmp_path: Path) -> None:
    product.train(save=tmp_path, **{"save_interval": 1, **options})
    assert checkpoints(tmp_path) == expected
    assert (tmp_path / "last").resolve() == tmp_path / f"iter_{expected[-1]:07d}" and not (tmp_path / "best").exists()
    assert [path for path in tmp_path.iterdir() if path.suffix in (".incomplete", ".replaced")] == []


@pytest.mark.long
def test_the_best_checkpoint_stays(product: Product, tmp_path: Path) -> None:
    """A learning rate that destroys the model after the second step: the best one is neither the newest nor the first."""
    product.train(save=tmp_path, save_interval=1, save_retain=1, eval_interval=1, eval_iters=1, train_iters=2, lr_decay_iters=100)
    product.train(save=tmp_path, load=tmp_path, save_interval=1, save_retain=1, eval_interval=1, eval_iters=1, train_iters=4, lr=3.0)
    losses = {entry["iteration"]: entry["validation_loss"] for entry in log(tmp_path) if "validation_loss" in entry}
    assert min(losses, key=lambda iteration: losses[iteration]) == 2
    assert checkpoints(tmp_path) == [2, 4]
    assert (os.readlink(tmp_path / "best"), os.readlink(tmp_path / "last")) == ("iter_0000002", "iter_0000004")
    assert json.loads((tmp_path / "best" / "meta.json").read_text())["validation_loss"] == losses[2]
    product.train(load=tmp_path / "best", save=tmp_path / "branch", train_iters=3)
    assert steps(tmp_path / "branch")[0]["iteration"] == 3


@pytest.mark.long
@pytest.mark.parametrize("background", [{}, {"async_save": True}], ids=["waited for", "in the background"])
def test_saving_on_request(background: dict, product: Product, tmp_path: Path) -> None:
    """By a signal to one rank, and by a file; the run goes on."""
    run = product.start(DP2, save=tmp_path, **ENDLESS, **background)
    run.until(lambda: len(steps(tmp_path)) >= 2)
    run.signal(Signals.SIGUSR1, [1])
    run.until(lambda: len(checkpoints(tmp_path)) == 1)
    (tmp_path / "save-now").touch()
    run.until(lambda: len(checkpoints(tmp_path)) == 2)
    assert not (tmp_path / "save-now").exists()
    run.signal(Signals.SIGTERM)
    run.wait().ok(143)
    assert len(checkpoints(tmp_path)) == 3


@pytest.mark.long
def test_auto_resumes_the_newest_usable_checkpoint(product: Product, tmp_path: Path) -> None:
    folder, straight = tmp_path / "run", tmp_path / "straight"
    product.train(save=straight)
    fresh = product.train(save=folder, load="auto", save_interval=2, train_iters=4)
    assert "warning" not in fresh.out
    (data,) = (folder / "iter_0000004").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    run = product.train(save=folder, load="auto")
    assert f" warning: {folder}/iter_0000004 is damaged, going on from {folder}/iter_0000002; inspect checkpoint" in run.out
    assert exact_curve(folder) == exact_curve(straight)
    assert_same_state(folder / "iter_0000006", straight / "iter_0000006")


def test_auto_needs_to_know_where(product: Product) -> None:
    refused = product.start(load="auto").wait()
    assert refused.codes == (2,) and "--load auto: got no --save, expected the folder in which the run saves" in refused.err


@pytest.mark.long
def test_every_file_has_a_checksum(product: Product, tmp_path: Path) -> None:
    product.train(DP2, save=tmp_path, train_iters=2, **BACKGROUND)
    newest = tmp_path / "iter_0000002"
    listed = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=newest, capture_output=True, text=True, check=True).stdout
    assert sorted(listed.splitlines()) == [f"{name}: OK" for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "meta.json")]
    good = product.run("inspect", "checkpoint", tmp_path, "--verify").ok()
    assert "verified: 4 files are as they were saved" in good.out
    damaged = tmp_path / "damaged"
    shutil.copytree(newest, damaged)
    size = (damaged / "__1_0.distcp").stat().st_size
    flip(damaged / "__1_0.distcp", size // 2)
    (damaged / "__0_0.distcp").unlink()
    (damaged / "note").touch()
    bad = product.run("inspect", "checkpoint", damaged, "--verify")
    assert bad.codes == (1,)
    assert re.search(r"__0_0\.distcp: got No such file or directory, expected a file with SHA-256 [0-9a-f]{64}; restore", bad.err)
    assert re.search(rf"__1_0\.distcp: got SHA-256 [0-9a-f]{{64}} in {size} bytes, expected [0-9a-f]{{64}}; restore", bad.err)
    assert "note: got a file, expected none of this name" in bad.err and ".metadata:" not in bad.err


@pytest.mark.long
def test_signals_for_the_ranks_do_not_reach_their_writers(product: Product, tmp_path: Path) -> None:
    """Slurm and a terminal send them to the whole process group."""
    run = product.start(DP2, save=tmp_path, async_save=True, **ENDLESS)
    run.until(lambda: len(steps(tmp_path)) >= 2)
    for process in (*writers(run), *run.pids):
        for number in (Signals.SIGINT, Signals.SIGTERM) if process not in run.pids else (Signals.SIGTERM,):
            os.kill(process, number)
    run.wait().ok(143)
    assert len(checkpoints(tmp_path)) == 1


@pytest.mark.long
def test_a_writer_that_dies_ends_the_run_and_is_named(product: Product, tmp_path: Path) -> None:
    """That of the rank which names it."""
    product.train(DP2, save=tmp_path, train_iters=2)
    before = contents(tmp_path / "iter_0000002")
    run = product.start(DP2, save=tmp_path, load=tmp_path, async_save=True, **ENDLESS)
    run.until(lambda: len(steps(tmp_path)) >= 4)
    os.kill(writers(run)[0], Signals.SIGKILL)
    run.signal(Signals.SIGUSR1)
    ended = run.wait()
    assert ended.codes == (1, 1)
    assert re.search(r"iter_\d+ on rank 0: got a writing process that ended with code -9, expected its part", ended.errs[0])
    assert contents(tmp_path / "iter_0000002") == before and checkpoints(tmp_path) == [2]


@pytest.mark.long
def test_a_disk_that_fills_up_in_the_background(product: Product, tmp_path: Path) -> None:
    """That of another rank."""
    product.train(DP2, save=tmp_path, train_iters=2)
    before = contents(tmp_path / "iter_0000002")
    run = product.start(DP2, save=tmp_path, load=tmp_path, async_save=True, **ENDLESS)
    run.until(lambda: len(steps(tmp_path)) >= 4)
    resource.prlimit(writers(run)[1], resource.RLIMIT_FSIZE, (50_000, 50_000))
    run.signal(Signals.SIGUSR1)
    ended = run.wait()
    assert ended.codes == (1, 1)
    assert re.search(r"rank 1: \S+__1_0\.distcp: got File too large, expected to write it; free space", ended.errs[0])
    assert contents(tmp_path / "iter_0000002") == before and checkpoints(tmp_path) == [2]


def test_a_killed_rank_takes_its_writer_along(product: Product, tmp_path: Path) -> None:
    run = product.start(save=tmp_path, async_save=True, **ENDLESS)
    run.until(lambda: len(steps(tmp_path)) >= 2)
    writer = os.pidfd_open(writers(run)[0])
    assert not select.select([writer], [], [], 0)[0]
    run.signal(Signals.SIGKILL)
    run.wait()
    assert select.select([writer], [], [], TIMEOUT)[0], "it still runs"
    os.close(writer)


@pytest.mark.long
@pytest.mark.parametrize("load", ["folder", "auto"])
def test_a_first_save_that_was_killed_before_its_renaming_is_no_model(load: str, product: Product, tmp_path: Path) -> None:
    """Everything in it is there but its name: it does not count, and is no folder of weights to start from either."""
    folder = tmp_path / "run"
    product.train(save=folder, train_iters=1)
    (folder / "iter_0000001").rename(folder / "iter_0000001.incomplete")
    (folder / "latest_checkpointed_iteration.txt").unlink()
    said = product.train(save=folder, load=folder if load == "folder" else load, train_iters=1).out
    assert "no checkpoint there yet, a fresh start" in said
    assert not (folder / "iter_0000001.incomplete").exists() and (folder / "iter_0000001").is_dir()
