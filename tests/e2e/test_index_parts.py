"""Runs whose checkpoints have an index in parts: as those of thousands of ranks."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from signal import Signals

import pytest
import torch
from megatron_llama.prove.run import states

from tests.e2e.product import DP2, TP2_PP2, Layout, Product, checkpoints, contents, exact_curve, steps
from tests.e2e.test_saving import ENDLESS, writers
from tests.launcher import Finished, Run

IN_PARTS = """
import sys
from megatron_llama.checkpoint import native
from megatron_llama.cli import main
native.LARGEST_WHOLE_INDEX = 0
sys.exit(main())
"""
TP2_DP2 = Layout(4, {"tensor_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim_grads"})


def start(product: Product, layout: Layout, **options: object) -> Run:
    return product.launcher.start(product.command(**layout.options, **options), layout.processes, code=IN_PARTS)


def train(product: Product, layout: Layout, **options: object) -> Finished:
    return start(product, layout, **options).wait().ok()


def same_tensors(first: Path, second: Path) -> bool:
    ours, theirs = states(first), states(second)
    kinds = ((ours.master, theirs.master), (ours.exp_avg, theirs.exp_avg), (ours.exp_avg_sq, theirs.exp_avg_sq), (ours.other, theirs.other))
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in kinds)


@pytest.mark.long
def test_parts_are_saved_in_both_ways_and_loaded_in_any_layout(product: Product, tmp_path: Path) -> None:
    whole, waited, beside = tmp_path / "whole", tmp_path / "waited", tmp_path / "beside"
    product.train(TP2_PP2, save=whole, save_interval=2)
    train(product, TP2_PP2, save=waited, save_interval=2)
    train(product, TP2_PP2, save=beside, save_interval=2, async_save=True)
    for iteration in (2, 4, 6):
        one, *parted = (folder / f"iter_{iteration:07d}" for folder in (whole, waited, beside))
        assert (one / ".metadata").exists() and all((path / "index.pp1.tp1.json").exists() for path in parted)
        assert all(same_tensors(path, one) for path in parted)
        assert product.run("inspect", "checkpoint", parted[1], "--verify").ok().out.startswith("verified: ")
    for folder, layout in ((waited, TP2_PP2), (beside, DP2)):
        product.train(layout, save=folder, load="auto", train_iters=8)
        assert steps(folder)[-1]["iteration"] == 8
    product.train(TP2_PP2, save=whole, load="auto", train_iters=8)
    assert exact_curve(waited) == exact_curve(whole)
    # What is saved again, below the bound, is one index.
    assert (waited / "iter_0000008" / ".metadata").exists()


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 2, 3], ids=["writer of a part", "its rank", "another rank"])
def test_a_process_that_dies_ends_the_run_and_is_named(rank: int, product: Product, tmp_path: Path) -> None:
    """Ranks 0 and 1 write the parts of tensor ranks 0 and 1; ranks 2 and 3 tell them where their chunks are."""
    train(product, TP2_DP2, save=tmp_path, train_iters=2)
    before = contents(tmp_path / "iter_0000002")
    run = start(product, TP2_DP2, save=tmp_path, load=tmp_path, async_save=True, **ENDLESS)
    run.until(lambda: len(steps(tmp_path)) >= 4)
    os.kill(writers(run)[rank], Signals.SIGKILL)
    run.signal(Signals.SIGUSR1)
    ended = run.wait()
    assert ended.codes == (1,) * 4
    assert re.search(rf"iter_\d+ on rank {rank}: got a writing process that ended with code -9, expected its part", ended.errs[0])
    assert contents(tmp_path / "iter_0000002") == before and checkpoints(tmp_path) == [2]


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True], ids=["waited for", "in the background"])
def test_a_disk_that_fills_up_is_named_through_the_writer(background: bool, product: Product, tmp_path: Path) -> None:
    train(product, TP2_DP2, save=tmp_path, train_iters=2)
    before = contents(tmp_path / "iter_0000002")
    options = {"async_save": True} if background else {}
    run = start(product, TP2_DP2, save=tmp_path, load=tmp_path, **options, **ENDLESS)
    run.until(lambda: len(steps(tmp_path)) >= 4)
    full = writers(run) if background else run.pids
    resource.prlimit(full[3], resource.RLIMIT_FSIZE, (50_000, 50_000))
    run.signal(Signals.SIGUSR1)
    ended = run.wait()
    assert ended.codes == (1,) * 4
    assert re.search(r"rank 3: \S+__3_0\.distcp: got File too large, expected to write it; free space", ended.errs[0])
    assert contents(tmp_path / "iter_0000002") == before and checkpoints(tmp_path) == [2]
