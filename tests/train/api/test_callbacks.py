"""Callbacks that do what the parts of a run do: they save, keep a state of their own, and see it go back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megatron_llama as ml
import pytest
import torch
from megatron_llama.launch.launcher import Place

from tests.harness import Cluster

Options = Mapping[str, Any]


class Saves(ml.Callback):
    """What a run does for --save: checkpoints every second step, when one is asked for, and at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: list[Path] = []

    def due(self, run: ml.Run) -> bool:
        return run.iteration % 2 == 0 or run.is_asked_to_save or run.ends

    def on_due(self, run: ml.Run) -> None:
        self.paths.append(run.write_checkpoint(self.folder))


def meta(checkpoint: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((checkpoint / "meta.json").read_text())
    return content


@pytest.fixture(scope="module")
def straight(options: Options) -> ml.TrainResult:
    """A run that nothing interrupts, with the loss of each step."""
    return ml.train(options, log_interval=1)


@pytest.mark.long
def test_a_callback_does_what_the_saver_does(options: Options, straight: ml.TrainResult, tmp_path: Path) -> None:
    """The same checkpoints to the bit, from which a run goes on as if nothing had ended it."""
    mine = Saves(tmp_path / "mine")
    ml.train(options, [mine], save=tmp_path / "own", save_interval=2, exit_interval=3)
    names = ["iter_0000002", "iter_0000003"]
    assert [path.name for path in mine.paths] == names
    assert sorted(path.name for path in (tmp_path / "own").glob("iter_*")) == names
    for path in mine.paths:
        own = tmp_path / "own" / path.name
        assert meta(path) == meta(own) and "callbacks" not in meta(own)
        expected = ml.load(own)
        assert all(torch.equal(weight, expected[name]) for name, weight in ml.load(path).items())
    again = ml.train(options, load=mine.folder, log_interval=1)
    assert again.losses == {iteration: loss for iteration, loss in straight.losses.items() if iteration > 3}
    assert again.grad_norm == straight.grad_norm


@pytest.mark.long
def test_a_callback_saves_where_a_run_ends_early(options: Options, tmp_path: Path) -> None:
    mine = Saves(tmp_path / "mine")
    early = {"eval_interval": 1, "eval_iters": 1, "early_stop_patience": 1, "lr": 0.5}
    result = ml.train(options, [mine], save=tmp_path / "own", **early)
    assert result.iteration < 6 and result.checkpoint is not None
    assert mine.paths[-1].name == result.checkpoint.name and meta(mine.paths[-1]) == meta(result.checkpoint)


def saves_in_a_group(place: Place, options: Options, folder: Path) -> list[str]:
    mine = Saves(folder)
    ml.train(options, [mine], data_parallel_sharding_strategy="optim_grads_params", exit_interval=4)
    return [path.name for path in mine.paths]


@pytest.mark.long
def test_all_ranks_write_the_checkpoint_of_a_callback(cluster: Cluster, options: Options, straight: ml.TrainResult, tmp_path: Path) -> None:
    found = cluster.run(2, saves_in_a_group, options, tmp_path)
    assert found == [["iter_0000002", "iter_0000004"]] * 2
    again = ml.train(options, load=tmp_path, log_interval=1)
    assert again.losses == pytest.approx({at: straight.losses[at] for at in (5, 6)}, rel=1e-5)


@pytest.mark.long
def test_a_run_that_is_over_writes_nothing(options: Options, tmp_path: Path) -> None:
    """Who keeps it does not keep the engine. And the folder of --save is the run's own."""

    class Keeps(ml.Callback):
        run: ml.Run

        def on_end(self, run: ml.Run) -> None:
            self.run = run

    kept = Keeps()
    ml.train(options, [kept])
    with pytest.raises(ml.UserError, match="a run that is over"):
        kept.run.write_checkpoint(tmp_path)
    with pytest.raises(ml.UserError, match="the folder of --save"):
        ml.train(options, [Saves(tmp_path)], save=tmp_path)


class Counts(ml.Callback):
    """Counts the steps that stayed, over the ends of runs."""

    def __init__(self, start: int = 0) -> None:
        self.steps = start
        self.started_with: list[int] = []
        self.returned_to: list[tuple[int, int]] = []

    def on_start(self, run: ml.Run) -> None:
        self.started_with.append(self.steps)

    def on_step(self, run: ml.Run, step: ml.Step) -> None:
        self.steps += 1

    def on_return(self, run: ml.Run) -> None:
        self.returned_to.append((run.iteration, self.steps))

    def save_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


@pytest.mark.long
def test_the_state_of_a_callback_is_in_the_checkpoint(options: Options, tmp_path: Path) -> None:
    """Two of one class have one each."""
    ml.train(options, [Counts(), Counts(100), Saves(tmp_path / "mine")], save=tmp_path / "own", exit_interval=3)
    for folder in ("own", "mine"):
        assert meta(tmp_path / folder / "iter_0000003")["callbacks"] == {"Counts 1": {"steps": 3}, "Counts 2": {"steps": 103}}
    resumed = [Counts(), Counts()]
    ml.train(options, resumed, load=tmp_path / "own")
    assert [each.started_with for each in resumed] == [[3], [103]]
    assert [each.steps for each in resumed] == [6, 106]
    begun = Counts()
    ml.train(options, [begun], load=tmp_path / "own", finetune=True)
    assert begun.started_with == [0], "a run that begins anew"


@pytest.mark.long
def test_what_json_does_not_have_is_no_state(options: Options, tmp_path: Path) -> None:
    class Odd(ml.Callback):
        def save_state(self) -> dict[str, float]:
            return {"loss": float("nan")}

    with pytest.raises(ValueError, match="not JSON compliant"):
        ml.train(options, [Odd()], save=tmp_path)
    assert not list(tmp_path.glob("iter_*"))


@pytest.mark.long
def test_a_callback_goes_back_with_the_run(options: Options, tmp_path: Path) -> None:
    """To the state that it had at the checkpoint, and every step is counted once."""
    counts = Counts()
    # Nothing is learned, so some losses are above the mean of the four before them.
    spikes = {"on_bad_step": "rollback", "loss_spike_factor": 1.001, "loss_spike_window": 4, "max_bad_steps": 50}
    result = ml.train(options, [counts], save=tmp_path, save_interval=2, train_iters=12, lr=0.0, **spikes)
    assert counts.returned_to and all(iteration == steps for iteration, steps in counts.returned_to)
    assert counts.steps == result.iteration


class Moments(ml.Callback):
    """Writes down every moment of a run."""

    def __init__(self) -> None:
        self.moments: list[str] = []
        self.steps: dict[int, tuple[float, ...]] = {}
        self.evaluated: dict[int, float] = {}

    def on_start(self, run: ml.Run) -> None:
        assert (run.iteration, run.rank, run.world_size, run.config.training.train_iters) == (0, 0, 1, 3)
        self.moments.append("start")

    def before_step(self, run: ml.Run) -> None:
        self.moments.append(f"before {run.iteration}")

    def on_step(self, run: ml.Run, step: ml.Step) -> None:
        assert (run.iteration, run.consumed_samples) == (step.iteration, step.consumed_samples)
        assert step.loss.shape == step.grad_norm.shape == step.skipped.shape == ()
        self.steps[step.iteration] = tuple(map(float, (step.loss, step.skipped, step.lr)))
        self.norm = float(step.grad_norm)
        self.moments.append(f"step {step.iteration} scale {float(step.loss_scale):g}")

    def due(self, run: ml.Run) -> bool:
        return run.iteration == 2

    def on_due(self, run: ml.Run) -> None:
        self.moments.append(f"due {run.is_last} {run.ends} {run.validation_loss is not None}")

    def after_step(self, run: ml.Run) -> None:
        self.moments.append(f"after {run.iteration} {run.validation_loss is not None}")

    def on_evaluation(self, run: ml.Run, loss: float) -> None:
        assert run.validation_loss == loss
        self.moments.append(f"evaluation {run.iteration}")
        self.evaluated[run.iteration] = loss

    def on_save(self, run: ml.Run, path: Path) -> None:
        self.moments.append(f"save {path.name}")

    def before_end(self, run: ml.Run) -> None:
        self.moments.append(f"before end {run.is_last} {run.ends}")

    def on_end(self, run: ml.Run) -> None:
        self.moments.append("end")


@pytest.mark.long
def test_the_moments_of_a_run_come_in_their_order(options: Options, tmp_path: Path) -> None:
    told = Moments()
    result = ml.train(options, [told], save=tmp_path, save_interval=2, train_iters=3, eval_interval=2, eval_iters=1, log_interval=1)
    assert told.steps == {at: (loss, 0.0, pytest.approx(1e-3 * (4 - at) / 3)) for at, loss in result.losses.items()} and len(told.steps) == 3
    assert told.norm == result.grad_norm and told.evaluated == result.validation_losses
    assert told.moments == [
        *("start", "evaluation 0", "before 0", "step 1 scale 1", "after 1 False"),
        *("before 1", "step 2 scale 1", "evaluation 2", "due False False True", "after 2 True", "save iter_0000002"),
        *("before 2", "step 3 scale 1", "evaluation 3", "after 3 True", "save iter_0000003"),
        *("before end True True", "end"),
    ]
