"""An interrupted run is the run: resumed, it goes on bit for bit; and nothing is resumed, or begun anew, by accident."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.e2e.product import (
    DP2,
    EVALUATED,
    GLOBAL_BATCH_SIZE,
    LAYOUTS,
    PP2,
    TP2,
    Product,
    assert_same_state,
    column,
    contents,
    exact_curve,
    state,
)

LAST = "iter_0000006"


@pytest.mark.parametrize("name", ["one", "tp2 sp", "pp2", "dp2 optim_grads"])
def test_resuming_changes_no_bit(name: str, product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    product.train(layout, save=tmp_path, train_iters=3, **EVALUATED)
    product.train(layout, save=tmp_path, load=tmp_path, **EVALUATED)
    assert exact_curve(tmp_path) == exact_curve(straight(name))
    assert_same_state(tmp_path / LAST, straight(name) / LAST)
    rates = [3e-3 * (6 - done) / 6 for done in range(6)]
    assert column(tmp_path, "learning_rate") == pytest.approx(rates, rel=1e-12)


def test_resuming_under_other_layouts(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    for layout, until in ((TP2, 2), (PP2, 4), (DP2, 6)):
        product.train(layout, save=tmp_path, load=tmp_path, train_iters=until, **EVALUATED)
    expected = [line for line in exact_curve(straight("one")) if line[2] is not None]
    for ours, theirs in zip((line for line in exact_curve(tmp_path) if line[2] is not None), expected, strict=True):
        assert ours[:2] == theirs[:2] and ours[2] == pytest.approx(theirs[2], rel=1e-6) and ours[3] == pytest.approx(theirs[3], rel=2e-5)
    ours, theirs = state(tmp_path / LAST), state(straight("one") / LAST)
    for name, tensor in theirs.items():
        if not name.startswith("optimizer."):
            torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_resuming_a_finished_run_changes_nothing(product: Product, tmp_path: Path) -> None:
    product.train(save=tmp_path, train_iters=2, **EVALUATED)
    before = {name: content for name, (_, content) in contents(tmp_path).items()}
    again = product.train(save=tmp_path, load=tmp_path, train_iters=2, **EVALUATED)
    assert {name: content for name, (_, content) in contents(tmp_path).items()} == before
    assert "saved" not in again.out


@pytest.mark.parametrize("exists", [True, False])
def test_loading_from_an_empty_save_folder_is_a_fresh_start(
    exists: bool, product: Product, straight: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path if exists else tmp_path / "new"
    product.train(save=folder, load=folder, **EVALUATED)
    assert exact_curve(folder) == exact_curve(straight("one"))


def test_the_checkpoint_says_how_far_the_run_is(product: Product, tmp_path: Path) -> None:
    """Also when the batch size changes on the way: samples are counted, not multiplied."""
    product.train(save=tmp_path, train_iters=3)
    product.train(save=tmp_path, load=tmp_path, train_iters=5, global_batch_size=4)
    expected = [GLOBAL_BATCH_SIZE * n for n in (1, 2, 3)] + [3 * GLOBAL_BATCH_SIZE + 4 * n for n in (1, 2)]
    assert column(tmp_path, "consumed_samples") == expected
    meta = json.loads((tmp_path / "iter_0000005" / "meta.json").read_text())
    assert (meta["iteration"], meta["consumed_samples"]) == (5, expected[-1])
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "5"


def test_going_on_in_another_folder(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    product.train(save=first, train_iters=3)
    before = contents(first)
    product.train(save=second, load=first)
    assert contents(first) == before
    expected = [line for line in exact_curve(straight("one")) if line[2] is not None]
    assert exact_curve(second) == expected[3:]
    assert_same_state(second / LAST, straight("one") / LAST)


def test_going_back_to_an_earlier_checkpoint(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    product.train(save=tmp_path, save_interval=3, **EVALUATED)
    product.train(save=tmp_path, load=tmp_path / "iter_0000003", **EVALUATED)
    assert exact_curve(tmp_path) == exact_curve(straight("one"))
    assert_same_state(tmp_path / LAST, straight("one") / LAST)


def test_interrupted_log_is_cut_back_to_the_checkpoint(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    """A run that died after its last save had logged more, half a line at the end."""
    product.train(save=tmp_path, train_iters=3, **EVALUATED)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"iteration": 4, "lm_loss": 1.0}\n{"iteration": 5, "lm_')
    product.train(save=tmp_path, load=tmp_path, **EVALUATED)
    assert exact_curve(tmp_path) == exact_curve(straight("one"))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_fresh_run_never_enters_a_folder_with_checkpoints(
    processes: int, product: Product, straight: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(straight("one"), tmp_path / "theirs")
    before = contents(tmp_path)
    refused = product.launcher.run(product.command(save=tmp_path / "theirs"), processes)
    assert set(refused.codes) == {1}
    assert refused.err == (
        f"error: --save {tmp_path}/theirs: got iter_0000006, expected no checkpoint, since --load is not given; "
        f"give --load {tmp_path}/theirs to resume, or another --save\n"
    )
    assert contents(tmp_path) == before


@pytest.mark.parametrize("there", [True, False])
def test_loading_what_is_not_there_is_refused(there: bool, product: Product, tmp_path: Path) -> None:
    load = tmp_path / "empty"
    if there:
        load.mkdir()
    refused = product.launcher.run(product.command(load=load, save=tmp_path / "new"))
    found = "no complete checkpoint" if there else "no such folder"
    assert refused.codes == (1,) and f"--load {load}: got {found}, expected iter_* folders" in refused.err
    assert not (tmp_path / "new").exists(), "a refused run leaves nothing"
