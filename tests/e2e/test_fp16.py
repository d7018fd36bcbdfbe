"""Training in float16: the dynamic loss scale as it is logged, saved, resumed, and as it recovers."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.e2e.product import DP2, ZB_V, Product, assert_same_state, column, exact_curve, log, state, steps

BEYOND = 2.0**40
"""A scale with which the first gradients cannot be written as float16."""


def scales(folder: Path) -> list[tuple[float, int]]:
    return [(entry["loss_scale"], entry["skipped_iterations"]) for entry in steps(folder)]


@pytest.mark.long
@pytest.mark.tries("fp16")
def test_the_loss_falls(product: Product, tmp_path: Path) -> None:
    printed = product.train(ZB_V, fp16=True, save=tmp_path / "run", train_iters=20, lr_decay_iters=20, lr=1e-2, log_format="megatron")
    losses = column(tmp_path / "run", "lm_loss")
    assert losses[-1] < losses[0] - 1.0
    assert scales(tmp_path / "run") == [(65536.0, 0)] * 20
    assert len(re.findall(r" \| loss scale: 65536\.0 \| grad norm: \d+\.\d+ \| number of skipped iterations:   0 \|", printed.out)) == 20


def test_export_keeps_the_masters(product: Product, tmp_path: Path) -> None:
    product.train(fp16=True, save=tmp_path / "run", train_iters=2)
    product.run("export", "--load", tmp_path / "run", "--output", tmp_path / "hf", "--dtype", "float16").ok()
    masters = state(tmp_path / "run" / "iter_0000002")
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  no mapping
            assert torch.equal(file.get_tensor(name), masters[name].half()) and not torch.equal(masters[name], masters[name].half().float())


GROWING: dict[str, Any] = {"fp16": True, "initial_loss_scale": 1024, "loss_scale_window": 3, "train_iters": 8, "lr_decay_iters": 8}


@pytest.mark.long
@pytest.mark.tries("initial_loss_scale", "loss_scale_window")
def test_resuming_goes_on_with_the_scale(product: Product, tmp_path: Path) -> None:
    """Also with the count of good steps: five are a window and two thirds."""
    product.train(DP2, save=tmp_path / "straight", **GROWING)
    assert scales(tmp_path / "straight") == [(scale, 0) for scale in (1024.0,) * 3 + (2048.0,) * 3 + (4096.0,) * 2]
    folder = tmp_path / "resumed"
    product.train(DP2, save=folder, **GROWING | {"train_iters": 5})
    assert json.loads((folder / "iter_0000005" / "meta.json").read_text())["loss_scale"] == [2048.0, 2.0, 0.0]
    product.train(DP2, save=folder, load=folder, **GROWING | {"initial_loss_scale": 4})
    assert scales(folder) == scales(tmp_path / "straight")
    assert exact_curve(folder) == exact_curve(tmp_path / "straight")
    assert_same_state(folder / "iter_0000008", tmp_path / "straight" / "iter_0000008")


@pytest.fixture(scope="module")
def recovered(product: Product, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Forty steps that begin with an impossible scale: the folder, and what was printed."""
    folder = tmp_path_factory.mktemp("recovered")
    options = {"fp16": True, "initial_loss_scale": BEYOND, "hysteresis": 1, "train_iters": 40, "lr_decay_style": "constant"}
    return folder, product.train(DP2, save=folder, log_format="megatron", **options).out


@pytest.mark.long
@pytest.mark.tries("hysteresis")
def test_an_impossible_scale_recovers_by_skipping(recovered: tuple[Path, str]) -> None:
    folder, printed = recovered
    found, losses, norms = scales(folder), column(folder, "lm_loss"), column(folder, "grad_norm")
    first = next(index for index, (_, count) in enumerate(found) if count == 0)
    assert 5 < first < 25 and found[0] == (BEYOND, 1) and found[-1][1] == 0
    for (scale, count), (following, _) in pairwise(found):
        assert following == (scale / 2 if count else scale)
    assert max(losses[:first]) - min(losses[:first]) < 0.1, "nothing is learnt meanwhile"
    assert losses[-1] < losses[0] - 0.5
    assert [norm is None for norm in norms] == [count == 1 for _, count in found]
    assert printed.count(" | grad norm: n/a | number of skipped iterations:   1 | ") == sum(count for _, count in found)
    assert column(folder, "consumed_samples")[-1] == 40 * 8, "a skipped batch is consumed"


@pytest.mark.tries("min_loss_scale")
@pytest.mark.long
def test_overflow_at_the_smallest_scale_ends_the_run(product: Product, tmp_path: Path) -> None:
    command = product.command(fp16=True, initial_loss_scale=BEYOND, min_loss_scale=BEYOND / 4, hysteresis=1, save=tmp_path, **DP2.options)
    ended = product.launcher.run(command, 2)
    assert ended.codes == (1, 1)
    assert re.fullmatch(r"error: gradient norm at iteration 3: got (inf|nan), expected a finite number; .*\n", ended.err), ended.err
    assert scales(tmp_path) == [(BEYOND, 1), (BEYOND / 2, 1)] and not list(tmp_path.glob("iter_*"))


@pytest.mark.long
def test_every_skipped_step_is_counted_once(product: Product, tmp_path: Path) -> None:
    """Also when saves and evaluations lie between two lines of the log."""
    product.train(
        fp16=True, initial_loss_scale=BEYOND, save=tmp_path, train_iters=9, log_interval=4, save_interval=3, eval_interval=2, eval_iters=1
    )
    assert [entry["skipped_iterations"] for entry in log(tmp_path) if "lm_loss" in entry] == [4, 4, 1]


@pytest.mark.long
def test_megatrons_line_has_the_mean_of_the_interval(product: Product, tmp_path: Path) -> None:
    """Of the steps that were not skipped, whatever is saved and evaluated between two lines; in the first interval there is none."""
    overflowing: dict[str, Any] = {"fp16": True, "initial_loss_scale": 2.0**24, "hysteresis": 1, "train_iters": 10, "lr_decay_style": "constant"}
    product.train(save=tmp_path / "each", **overflowing)
    often = {"save_interval": 6, "eval_interval": 7, "eval_iters": 1}
    printed = product.train(save=tmp_path / "run", log_interval=4, log_format="megatron", **often, **overflowing)
    good = {entry["iteration"]: entry["lm_loss"] for entry in steps(tmp_path / "each") if not entry["skipped_iterations"]}
    intervals = [[good[i] for i in range(first, last + 1) if i in good] for first, last in ((1, 4), (5, 8), (9, 10))]
    assert [len(interval) for interval in intervals] == [0, 2, 1], good
    assert re.findall(r"\| lm loss: (\S+) \|", printed.out) == ["n/a", *(f"{sum(row) / len(row):.6E}" for row in intervals[1:])]
    assert column(tmp_path / "run", "lm_loss")[1] == good[8], "the file has the loss of the step"
