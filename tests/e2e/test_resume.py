"""An interrupted run is the run: resumed, it goes on bit for bit; and nothing is resumed, or begun anew, by accident."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.product import (
    DP2,
    EVALUATED,
    GLOBAL_BATCH_SIZE,
    LAYOUTS,
    PP2,
    SPREAD,
    TP2,
    Product,
    assert_same_state,
    column,
    contents,
    exact_curve,
    state,
)

LAST = "iter_0000006"


@pytest.mark.long
@pytest.mark.tries("save", "load")
@pytest.mark.parametrize("name", SPREAD)
def test_resuming_changes_no_bit(name: str, product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    # It is stopped between two evaluations. Where it goes on it evaluates, which is not of the curve.
    product.train(layout, save=tmp_path, exit_interval=2, **EVALUATED)
    assert " validation loss at iteration 2 " in product.train(layout, save=tmp_path, load=tmp_path, **EVALUATED).out
    assert exact_curve(tmp_path) == exact_curve(straight(name))
    assert_same_state(tmp_path / LAST, straight(name) / LAST)
    rates = [3e-3 * (6 - done) / 6 for done in range(6)]
    assert column(tmp_path, "learning_rate") == pytest.approx(rates, rel=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.long)], ids=["first", "last"])
def test_a_stage_with_nothing_to_train(first: bool, product: Product, tmp_path: Path) -> None:
    """It only passes activations on, or gradients; the checkpoint knows the number of updates all the same."""
    freeze = ("model.embed_tokens.*", "model.layers.[01].*") if first else ("model.layers.[23].*", "model.norm.weight", "lm_head.*")
    product.train(PP2, save=tmp_path / "straight", freeze=freeze)
    product.train(PP2, save=tmp_path / "run", freeze=freeze, train_iters=3)
    product.train(PP2, save=tmp_path / "run", load=tmp_path / "run", freeze=freeze)
    assert exact_curve(tmp_path / "run") == exact_curve(tmp_path / "straight")
    assert_same_state(tmp_path / "run" / LAST, tmp_path / "straight" / LAST)
    meta = json.loads((tmp_path / "run" / LAST / "meta.json").read_text())
    assert meta["optimizer_step"] == 6


@pytest.mark.parametrize("name", SPREAD)
def test_a_checkpoint_is_the_model_whatever_saved_it(name: str, product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    """Equal to that of one process but for rounding, and exported as it is."""
    ours, theirs = state(straight(name) / LAST), state(straight("one") / LAST)
    assert {tensor: value.shape for tensor, value in ours.items()} == {tensor: value.shape for tensor, value in theirs.items()}
    weights = {tensor: value for tensor, value in ours.items() if not tensor.startswith("optimizer.")}
    for tensor, value in weights.items():
        # Adam moves an element whose gradient is all rounding by a whole step; together they are few.
        assert (value - theirs[tensor]).norm() < 1e-3 * theirs[tensor].norm(), tensor
    product.run("export", "--load", straight(name), "--output", tmp_path / "hf").ok()
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert [tensor for tensor, value in weights.items() if not torch.equal(exported[tensor], value)] == []


@pytest.mark.long
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


@pytest.mark.long
def test_resuming_a_finished_run_changes_nothing(product: Product, tmp_path: Path) -> None:
    """But the list of what happened to the run, which says that it was started again."""
    product.train(save=tmp_path, train_iters=2, **EVALUATED)
    before = {name: content for name, (_, content) in contents(tmp_path).items()}
    again = product.train(save=tmp_path, load=tmp_path, train_iters=2, **EVALUATED)
    after = {name: content for name, (_, content) in contents(tmp_path).items()}
    [events] = [name for name in after if after[name] != before[name]]
    assert after.keys() == before.keys() and Path(events).name == "events.jsonl"
    happened = [json.loads(line)["event"] for line in (tmp_path / events).read_text().splitlines()]
    assert happened == ["start", "saved", "end", "start", "end"]
    assert "saved" not in again.out


@pytest.mark.long
def test_the_checkpoint_says_how_far_the_run_is(product: Product, tmp_path: Path) -> None:
    """Also when the batch size changes on the way: samples are counted, not multiplied."""
    product.train(save=tmp_path, train_iters=3)
    resumed = product.train(save=tmp_path, load=tmp_path, train_iters=5, global_batch_size=4)
    assert f"warning: --global-batch-size was {GLOBAL_BATCH_SIZE} when the checkpoint was saved and is 4: the run goes on at" in resumed.out
    expected = [GLOBAL_BATCH_SIZE * n for n in (1, 2, 3)] + [3 * GLOBAL_BATCH_SIZE + 4 * n for n in (1, 2)]
    assert column(tmp_path, "consumed_samples") == expected
    meta = json.loads((tmp_path / "iter_0000005" / "meta.json").read_text())
    assert (meta["iteration"], meta["consumed_samples"]) == (5, expected[-1])
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "5"


@pytest.mark.long
def test_going_on_in_another_folder(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    product.train(save=first, train_iters=3)
    before = contents(first)
    product.train(save=second, load=first)
    assert contents(first) == before
    expected = [line for line in exact_curve(straight("one")) if line[2] is not None]
    assert exact_curve(second) == expected[3:]
    assert_same_state(second / LAST, straight("one") / LAST)


@pytest.mark.parametrize("there", [True, False])
def test_loading_what_is_not_there_is_refused(there: bool, product: Product, tmp_path: Path) -> None:
    load = tmp_path / "empty"
    if there:
        load.mkdir()
    refused = product.launcher.run(product.command(load=load, save=tmp_path / "new"))
    found = "no complete checkpoint" if there else "no such folder"
    assert refused.codes == (1,) and f"--load {load}: got {found}, expected iter_* folders" in refused.err
    assert not (tmp_path / "new").exists(), "a refused run leaves nothing"
