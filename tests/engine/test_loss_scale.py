"""The dynamic loss scale: its rule, its checkpoint, and steps in which one rank overflows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint import native
from megatron_llama.converter.native.writer import NativeWriter
from megatron_llama.engine.loss_scale import LossScale
from megatron_llama.engine.options import LossScaling
from megatron_llama.launch.launcher import Place

from tests.checkpoint.cases import SINGLE, state_at
from tests.engine.test_engine import same, state_of
from tests.harness import Cluster
from tests.parallel.cases import Layout, Trainer, trainer

CPU = torch.device("cpu")
FP16 = LossScaling(initial_loss_scale=64.0, loss_scale_window=3, hysteresis=2, min_loss_scale=8.0)


def after(scale: LossScale, story: str) -> list[float]:
    """The scale after each step: ``x`` overflows, ``.`` does not."""
    values = []
    for letter in story:
        scale.update(torch.tensor(float(letter == "x")))
        values.append(float(scale.value))
    return values


@pytest.mark.parametrize(
    ("story", "values"),
    [
        ("xx", [64, 32]),
        ("x.x", [64, 64, 64]),  # in a row means in a row
        ("xxxx", [64, 32, 32, 16]),  # the count starts anew after each halving
        ("xxxxxxxxxx", [64, 32, 32, 16, 16, 8, 8, 8, 8, 8]),
        ("...", [64, 64, 128]),
        ("......", [64, 64, 128, 128, 128, 256]),
        ("..x...", [64, 64, 64, 64, 64, 128]),  # an overflow that changes nothing still breaks the window
        ("xx...", [64, 32, 32, 32, 64]),
    ],
)
def test_it_halves_after_the_hysteresis_and_doubles_after_the_window(story: str, values: list[float]) -> None:
    assert after(LossScale(FP16, CPU), story) == values


def test_hysteresis_one_halves_at_once() -> None:
    assert after(LossScale(replace(FP16, hysteresis=1), CPU), "x.x") == [32, 32, 16]


def test_without_fp16_it_is_one_for_ever() -> None:
    scale = LossScale(None, CPU)
    assert float(scale.value) == 1.0 and after(scale, "xxxx......") == [1.0] * 10
    assert scale.state() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_restored_scale_goes_on_where_it_was(cut: int) -> None:
    story = "x.xx..x...x"
    straight, before, resumed = (LossScale(FP16, CPU) for _ in range(3))
    expected = after(straight, story)
    assert after(before, story[:cut]) == expected[:cut]
    resumed.load(before.state())
    assert resumed.state() == before.state() and float(resumed.value) == expected[cut - 1]
    assert after(resumed, story[cut:]) == expected[cut:]


@pytest.mark.long
def test_every_state_is_resumed_exactly(tmp_path: Path) -> None:
    """Through a checkpoint, after each step of a story in which the scale falls to 1, with all counts at 0, and rises again."""
    scaling, story = replace(FP16, initial_loss_scale=4.0, min_loss_scale=0.5), "xxxx...x.xxxx......"
    straight = LossScale(scaling, CPU)
    expected, states = [], []
    for letter in story:
        expected += after(straight, letter)
        states.append(straight.state())
    assert [1.0, 0.0, 0.0] in states
    layout = Layout(fp16=True)
    saving, loading = trainer(SINGLE, layout), trainer(SINGLE, layout)
    for done, state in enumerate(states, start=1):
        saving.optimizer.loss_scale.load(state)
        native.save(tmp_path, saving.optimizer, saving.mesh, state_at(done), layout.config())
        loading.optimizer.loss_scale = resumed = LossScale(scaling, CPU)
        native.load(tmp_path, loading.optimizer, loading.mesh, layout.config().model)
        assert resumed.state() == state
        assert after(resumed, story[done:]) == expected[done:]


def test_a_checkpoint_without_fp16_has_nothing_to_continue(tmp_path: Path) -> None:
    """Nor has a converted one, which has no optimizer either, whatever it says of its precision."""
    plain = Layout()
    run = trainer(SINGLE, plain)
    native.save(tmp_path, run.optimizer, run.mesh, state_at(1), plain.config())
    run = trainer(SINGLE, Layout(fp16=True, loss_scale=64.0))
    native.load(tmp_path, run.optimizer, run.mesh, plain.config().model)
    assert run.optimizer.loss_scale.state() == [64.0, 0.0, 0.0]
    source = native.open_weights(tmp_path)
    (tmp_path / "converted").mkdir()
    for task in NativeWriter(1).tasks(tmp_path / "converted", source.model, source, torch.float16, {}):
        task.run()
    native.load(tmp_path / "converted", run.optimizer, run.mesh, plain.config().model)
    assert run.optimizer.loss_scale.state() == [64.0, 0.0, 0.0]


@dataclass(frozen=True)
class Story:
    """What a rank saw."""

    skipped: list[float]
    scales: list[float]
    """That of each step."""
    untouched: list[bool]
    """Whether a step left all state as it was."""
    losses: list[float]


def only_one_token(run: Trainer, index: int) -> None:
    """A step whose loss is one token of the last sample: with a scale of 2^17 its gradient is beyond fp16, and ranks that do
    not see that sample have none at all."""
    batches, last = run.batches(index), run.mesh.data_rank == run.mesh.data_size - 1
    weights = [torch.zeros(batch.tokens.shape) for batch in batches]
    weights[-1][7, -1] = float(last)
    run.runtime.step([replace(batch, loss_mask=mask) for batch, mask in zip(batches, weights, strict=True)])


def overflow_then_train(place: Place, layout: Layout) -> Story:
    run = trainer(place, layout)
    skipped, scales, untouched, losses = [], [], [], []
    for index in range(14):
        before = state_of(run.optimizer)
        if index in (1, 2):
            only_one_token(run, index)
            loss, update = 0.0, run.optimizer.step(1e-3, clip=1.0)
        else:
            loss, update = (run.runtime.step(run.batches(index)).item(), run.optimizer.step(1e-3, clip=1.0))
            losses.append(loss)
        skipped.append(float(update.skipped))
        scales.append(float(update.loss_scale))
        untouched.append(same(before, state_of(run.optimizer)))
        assert bool(update.grad_norm.isfinite()) != bool(update.skipped)
    return Story(skipped, scales, untouched, losses)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2),
        Layout(dp=2, strategy="optim_grads", microbatches=2),
        Layout(dp=2, strategy="no_shard", reduce_bf16=True),
        Layout(pp=2, microbatches=2),
        Layout(tp=2, sp=True),
        Layout(cp=2),
    ],
    ids=lambda layout: layout.name,
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(cluster: Cluster, layout: Layout) -> None:
    stories = cluster.run(layout.world_size, overflow_then_train, replace(layout, fp16=True, loss_scale=2.0**17))
    assert all(story == stories[0] for story in stories)
    story = stories[0]
    # Two overflows in a row halve the scale, and the run goes on as if they had not been.
    assert story.skipped == [0.0, 1.0, 1.0] + [0.0] * 11
    assert story.scales == [2.0**17] * 3 + [2.0**16] * 11
    assert story.untouched == [bool(skipped) for skipped in story.skipped]
    assert story.losses[-1] < 0.8 * story.losses[0]


def save_scaled(place: Place, layout: Layout, folder: Path) -> list[float]:
    run = trainer(place, layout)
    run.step(0)
    only_one_token(run, 1)
    run.optimizer.step(1e-3, clip=1.0)
    native.save(folder, run.optimizer, run.mesh, state_at(2), layout.config())
    return run.optimizer.loss_scale.state()


def load_scaled(place: Place, layout: Layout, folder: Path) -> tuple[list[float], list[float], float]:
    """The state after the load, the state one overflow later, and the next loss."""
    run = trainer(place, layout)
    native.load(folder, run.optimizer, run.mesh, layout.config().model)
    loaded = run.optimizer.loss_scale.state()
    only_one_token(run, 1)
    run.optimizer.step(1e-3, clip=1.0)
    return loaded, run.optimizer.loss_scale.state(), run.step(2)[0].item()


@pytest.mark.long
def test_a_checkpoint_keeps_the_scale_and_the_overflows_so_far(cluster: Cluster, tmp_path: Path) -> None:
    layout = Layout(dp=2, fp16=True, loss_scale=2.0**17)
    saved = cluster.run(2, save_scaled, layout, tmp_path)
    assert saved == [[2.0**17, 0.0, 1.0]] * 2
    assert native.read_meta(tmp_path).loss_scale == saved[0]
    # Another start value has no effect on a resumed run; one more overflow makes two in a row.
    found = cluster.run(2, load_scaled, replace(layout, loss_scale=4.0), tmp_path)
    assert [(loaded, later) for loaded, later, _ in found] == [(saved[0], [2.0**16, 0.0, 0.0])] * 2
    assert 0.0 < found[0][2] < 6.0
    # In one process, and in fp32: the first goes on, the second has no scale.
    assert load_scaled(SINGLE, replace(layout, dp=1), tmp_path)[:2] == (saved[0], [2.0**16, 0.0, 0.0])
    assert load_scaled(SINGLE, Layout(), tmp_path)[0] == [1.0, 0.0, 0.0]


def test_the_scale_cancels_out() -> None:
    """Within fp16's rounding, loss and norm do not depend on it."""
    results = []
    for scale in (2.0**6, 2.0**12):
        run = trainer(SINGLE, Layout(fp16=True, loss_scale=scale))
        results.append([value.item() for index in range(3) for value in run.step(index)])
    assert results[0] == pytest.approx(results[1], rel=5e-3)
