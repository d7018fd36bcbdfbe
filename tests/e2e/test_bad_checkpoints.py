"""Saves that find values which are not finite: what a run does then, and that a good checkpoint is left."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_llama.planner.run.folder import read_run
from megatron_llama.planner.run.incidents import Incidents
from safetensors.torch import load_file, save_file

from tests.e2e.lost_value import COLUMN, EMBEDDING
from tests.e2e.product import DP2, PP2, SHAPELESS, VOCAB_SIZE, Layout, Product, assert_same_state, checkpoints, events, exact_curve
from tests.launcher import Finished

BACKGROUND = {"async_save": True}


@pytest.fixture(scope="module")
def row(product: Product) -> int:
    """A token that no document has."""
    known = set(np.memmap(f"{product.data}.bin", dtype=np.uint16, mode="r").tolist())
    return max(set(range(VOCAB_SIZE)) - known)


Lose = Callable[..., Finished]


@pytest.fixture
def lose(product: Product, row: int) -> Lose:
    """Runs a training that loses a value of that row."""

    def run(layout: Layout, *, state: str = "master", once: bool = True, **options: object) -> Finished:
        argv = [state, row, "once" if once else "always", *product.command(**{"vocab_size": VOCAB_SIZE, **layout.options, **options})]
        return product.launcher.run(argv, layout.processes, module="tests.e2e.lost_value")

    return run


@pytest.fixture(scope="module")
def sound(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that loses nothing."""
    folder = tmp_path_factory.mktemp("sound")
    product.train(DP2, save=folder, save_interval=2, vocab_size=VOCAB_SIZE)
    return folder


CASES: Mapping[str, tuple[Layout, str, dict[str, object]]] = {
    "a weight": (DP2, "master", {}),
    "a weight, in the background": (DP2, "master", {"async_save": True}),
    "a moment": (DP2, "exp_avg_sq", {}),
    "a frozen weight, in the background": (PP2, "master", {"freeze": EMBEDDING, "async_save": True}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_run_stops_and_keeps_no_such_checkpoint(name: str, lose: Lose, row: int, tmp_path: Path) -> None:
    layout, state, options = CASES[name]
    folder = tmp_path / "run"
    ended = lose(layout, state=state, save=folder, save_interval=2, **options)
    assert ended.codes == (1, 1)
    key = EMBEDDING if state == "master" else f"optimizer.{state}.{EMBEDDING}"
    # What a moment has lost, the next update takes into the weight.
    lost = re.escape(f"{key} (1 value, the first is nan at [{row}, {COLUMN}])")
    assert re.match(rf"error: {folder}/iter_0000004: got values that are not finite: .*{lost}", ended.errs[0]), ended.err
    assert f"; resume from {folder}/iter_0000002, " in ended.errs[0]
    assert ended.out.count(f" warning: {folder}/iter_0000004 has values that are not finite: ") == 1
    assert checkpoints(folder) == [2] and not list(folder.glob("*.incomplete"))
    first, *later = events(folder, "not finite")
    assert (Path(first["path"]).name, first["kept"]) == ("iter_0000004", False)
    assert not later or "async_save" in options, "one more may have been under way"
    assert re.search(r"fault.*iter_0000004 is not kept: not finite: ", str(list(Incidents(read_run(str(folder))).listed)))


@pytest.mark.long
@pytest.mark.tries("on_bad_checkpoint")
@pytest.mark.parametrize(
    ("interval", "more"),
    [(2, {}), (2, BACKGROUND), (3, {}), (3, BACKGROUND), (5, {})],
    ids=["inside", "inside, in the background", "at the last step", "at the last step, in the background", "to the start"],
)
def test_a_run_that_goes_back_is_the_run_that_lost_nothing(
    interval: int, more: dict[str, object], lose: Lose, sound: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    iters = 3 if interval == 3 else 6
    options = {"save": folder, "save_interval": interval if interval != 3 else 1, "train_iters": iters}
    printed = lose(DP2, on_bad_checkpoint="rollback", **options, **more).ok().out
    back = {2: 2, 3: 2, 5: 0}[interval]
    assert printed.count(f" back to iteration {back}\n") == 1
    assert exact_curve(folder) == exact_curve(sound)[:iters]
    if iters == 6:
        assert_same_state(folder / "iter_0000006", sound / "iter_0000006")
    assert len(events(folder, "rewind")) == 1
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == f"{iters}\n"


@pytest.mark.long
def test_what_comes_again_and_again_ends_the_run(lose: Lose, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = {"save": folder, "save_interval": 2, "max_bad_steps": 2, "on_bad_checkpoint": "rollback"}
    ended = lose(DP2, once=False, **options, **BACKGROUND)
    assert ended.codes == (1, 1)
    start = f"error: {folder}/iter_0000004: got values that are not finite, 3 times in a row: {EMBEDDING} "
    assert ended.errs[0].startswith(start), ended.err
    assert "expected at most 2 such saves in a row (--max-bad-steps); the same steps lead there again" in ended.errs[0]
    assert ended.out.count(" back to iteration 2\n") == 2
    assert checkpoints(folder) == [2]


@pytest.mark.long
def test_a_marked_checkpoint_is_passed_over(lose: Lose, row: int, product: Product, tmp_path: Path) -> None:
    """It is the newest, it is never the best, and the newest good one stays beside it, however few are to stay."""
    folder = tmp_path / "run"
    saves = {"save": folder, "save_interval": 1, "save_retain": 1, "vocab_size": VOCAB_SIZE}
    options = {"on_bad_checkpoint": "warn", "eval_interval": 1, "eval_iters": 1, "train_iters": 4}
    assert lose(DP2, **options, **saves, **BACKGROUND).ok().out.count("; it is kept with a mark\n") == 2
    assert checkpoints(folder) == [2, 4] and os.readlink(folder / "best") == "iter_0000002"
    marked = json.loads((folder / "iter_0000004" / "meta.json").read_text())["not_finite"]
    assert {"name": EMBEDDING, "count": 1, "first": [row, COLUMN], "value": "nan"} in marked
    assert "not finite" in product.run("inspect", "checkpoint", folder / "iter_0000004").ok().out
    named = product.start(DP2, load=folder / "iter_0000004", save=tmp_path / "other", vocab_size=VOCAB_SIZE, train_iters=6).wait()
    assert named.codes == (1, 1)
    assert (
        f" warning: the run begins with values that are not finite: {EMBEDDING} (1 value, the first is nan at [{row}, {COLUMN}])"
        in named.out
    )
    assert "; its first save will end it" in named.out and f"error: {tmp_path}/other/iter_0000006: got values that are not finite" in named.err
    resumed = product.train(DP2, load="auto", **{**saves, "train_iters": 3})
    assert f" warning: {folder}/iter_0000004 has weights or moments that are not finite, going on from {folder}/iter_0000002; " in resumed.out
    assert checkpoints(folder) == [2, 3] and os.readlink(folder / "last") == "iter_0000003"


@pytest.mark.long
def test_weights_of_another_format_are_looked_at(product: Product, sound: Path, row: int, tmp_path: Path) -> None:
    """A rollback has nothing to go back to that would be better: such a run ends at its first save, and says so at the start."""
    product.run("export", "--load", sound, "--output", tmp_path / "hf").ok()
    (tmp_path / "hf" / "SHA256SUMS").unlink()  # the file below is changed on purpose
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights[EMBEDDING][row, 3:5] = torch.inf
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    options = {**SHAPELESS, "init_from_hf": tmp_path / "hf", "save": tmp_path / "run", "save_interval": 2, "on_bad_checkpoint": "rollback"}
    run = product.start(DP2, **options).wait()
    assert run.codes == (1, 1)
    assert f" warning: the run begins with values that are not finite: {EMBEDDING} (2 values, the first is inf at [{row}, 3])" in run.out
    assert f"error: {tmp_path}/run/iter_0000002: got values that are not finite: " in run.err and "; begin anew, " in run.err
    assert checkpoints(tmp_path / "run") == []


@pytest.mark.long
def test_a_signal_leaves_the_way_back_to_the_next_start(lose: Lose, product: Product, sound: Path, tmp_path: Path) -> None:
    """--exit-interval stands for all that stops a run."""
    folder = tmp_path / "run"
    options = {"save": folder, "save_interval": 2, "vocab_size": VOCAB_SIZE, "on_bad_checkpoint": "rollback"}
    printed = lose(DP2, exit_interval=4, **options).ok().out
    assert " back to iteration" not in printed and " stopped by --exit-interval after iteration 4\n" in printed
    assert checkpoints(folder) == [2]
    product.train(DP2, load="auto", **options)
    assert exact_curve(folder) == exact_curve(sound)
    assert_same_state(folder / "iter_0000006", sound / "iter_0000006")
