"""Schedule-free AdamW in every layout trains, evaluates and saves what the authors' own optimizer does with Hugging Face's model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import schedulefree
import torch
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.native import load, read_meta, require_complete, save
from megatron_llama.config.schema import Config
from megatron_llama.engine.pieces import shard_pieces, weight_sums
from megatron_llama.launch.launcher import Place
from megatron_llama.model.plan.run_params import param_groups
from torch import Tensor

from tests import torch_twin
from tests.engine.test_moments import Found, whole
from tests.engine.test_param_groups import GROUPS, options
from tests.harness import Cluster, WorkerError
from tests.parallel.cases import LOSS_BOUND, NORM_BOUND, OPTIMIZER, STEPS, Layout, deviation, global_samples, trainer
from tests.torch_twin import hf_model, next_token_loss

BETAS = (0.9, 0.95)
WARMUP = 5
EVALUATED = (0, 7, STEPS - 1)
"""Evaluated after these steps: the model goes on with the weights that it is trained with."""


@dataclass(frozen=True)
class AveragedLayout(Layout):
    """A layout whose optimizer is schedule-free AdamW."""

    groups: tuple[str, ...] = ()

    @property
    def reference(self) -> AveragedLayout:
        return AveragedLayout(**vars(super().reference), groups=self.groups)

    def config(self) -> Config:
        config = super().config()
        optimizer = replace(
            config.optimizer, optimizer="schedule_free_adamw", lr_decay_style="constant", adam_beta1=BETAS[0], adam_beta2=BETAS[1],
            param_group=self.groups,
        )
        return replace(config, optimizer=optimizer)


def warm(index: int) -> float:
    """What a step's rate is of the peak. The first step has 0, as with --lr-warmup-iters."""
    return min(1.0, index / WARMUP)


@dataclass(frozen=True)
class Curves:
    """What a run has computed."""

    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    pieces: Found


def train(place: Place, layout: AveragedLayout, steps: range = range(STEPS), loads: str | None = None, saves: str | None = None) -> Curves:
    run = trainer(place, layout)
    if loads is not None:
        load(loads, run.optimizer, run.mesh, layout.config().model)
    losses, norms, evaluations = [], [], []
    for index in steps:
        losses.append(run.runtime.step(run.batches(index)).item())
        rates = [group.lr * warm(index) for group in param_groups(layout.config()).configs]
        norms.append(run.optimizer.step(rates, clip=layout.clip).grad_norm.item())
        if index in EVALUATED:
            # Twice: the second finds the average there.
            found = [run.runtime.evaluate(run.batches(STEPS))[0].item() for _ in range(2)]
            assert found[0] == found[1]
            evaluations.append(found[0])
    if saves is not None:
        save(saves, run.optimizer, run.mesh, TrainState(steps.stop, 8), layout.sized())
    run.optimizer.settle()
    pieces = [(p.rectangle, {name: tensor.clone() for name, tensor in p.tensors.items()}) for p in shard_pieces(run.optimizer) if p.primary]
    run.optimizer.close()
    return Curves(losses, norms, evaluations, pieces)


def authors(layout: AveragedLayout) -> tuple[Curves, dict[str, Tensor]]:
    """The same with transformers' model and the optimizer of the package ``schedulefree``; and its weights for evaluation."""
    model = hf_model(layout.config().model, torch.float64 if layout.fp64 else torch.float32)
    groups = []
    for name, parameter in model.named_parameters():
        plain = (OPTIMIZER.lr, OPTIMIZER.weight_decay if parameter.dim() > 1 else 0.0)
        peak, decay = options(name, parameter.dim()) if layout.groups else plain
        groups.append({"params": [parameter], "lr": peak, "weight_decay": decay})
    peaks = [group["lr"] for group in groups]
    optimizer = schedulefree.AdamWScheduleFree(groups, betas=BETAS, eps=OPTIMIZER.adam_eps)
    optimizer.train()
    evaluations = []

    def losses_of(step: int) -> Iterator[Tensor]:
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * warm(step)
        yield next_token_loss(model, global_samples(step))

    def evaluate_after(step: int) -> None:
        if step in EVALUATED:
            optimizer.eval()
            with torch.no_grad():
                evaluations.append(next_token_loss(model, global_samples(STEPS)).item())
            optimizer.train()

    losses, norms = torch_twin.train(model, optimizer, losses_of, STEPS, layout.clip, evaluate_after)
    optimizer.eval()
    return Curves(losses, norms, evaluations, []), {name: tensor.detach() for name, tensor in model.state_dict().items()}


LAYOUTS = [
    AveragedLayout(tp=2, dp=2, strategy="optim_grads_params", slots="2", microbatches=2),
    AveragedLayout(pp=2, dp=2, strategy="no_shard", tied=True, microbatches=2),
    AveragedLayout(clip=0.0, early=True, dp=2),
    AveragedLayout(dp=2, groups=GROUPS, strategy="optim_grads"),
    AveragedLayout(fp64=True, dp=4, shard_size=2),
]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{'groups ' * bool(layout.groups)}{layout.name}")
def test_every_layout_is_the_authors_optimizer(cluster: Cluster, layout: AveragedLayout) -> None:
    """In training, in evaluations between steps, and in the weights that are left."""
    expected, weights = authors(layout)
    records = cluster.run(layout.world_size, train, layout)
    for found in records:
        assert deviation(found.losses, expected.losses) < LOSS_BOUND
        assert deviation(found.norms, expected.norms) < NORM_BOUND
        assert deviation(found.evaluations, expected.evaluations) < LOSS_BOUND
    # The two sets of weights differ by much more than the bound.
    assert abs(expected.evaluations[1] - expected.losses[8]) > 1e-3
    for (name, state), tensor in whole([record.pieces for record in records]).items():
        if state == "master":
            # Where a gradient is all rounding AdamW makes a full step of it.
            far = (tensor - weights[name]).abs() > (1e-7 if layout.fp64 else 2e-6)
            assert far.float().mean() < 1e-3, name


@pytest.mark.long
def test_a_run_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """To the bit in the same layout, also from within a warm-up and after an evaluation; in another layout up to rounding."""
    layout, folder = AveragedLayout(dp=2), str(tmp_path / "one")
    straight = cluster.run(2, train, layout, range(10))
    cluster.run(2, train, layout, range(3), None, folder)
    resumed = cluster.run(2, train, layout, range(3, 10), folder)
    for before, after in zip(straight, resumed, strict=True):
        assert before.losses[3:] == after.losses and before.norms[3:] == after.norms and before.evaluations[1:] == after.evaluations
    expected = whole([record.pieces for record in straight])
    for key, tensor in whole([record.pieces for record in resumed]).items():
        assert torch.equal(tensor, expected[key])
    assert {state for _, state in expected} == {"master", "z", "exp_avg_sq"}
    meta = read_meta(folder)
    assert (meta.optimizer_step, meta.weight_sum) == (3, pytest.approx(0.2**2 + 0.4**2, rel=1e-6))
    other = AveragedLayout(tp=2, strategy="optim_grads_params")
    require_complete(meta.folder, other.sized(), optimizer=True)
    moved = cluster.run(2, train, other, range(3, 10), folder)
    assert deviation(moved[0].losses, straight[0].losses[3:]) < LOSS_BOUND
    assert deviation(moved[0].evaluations, straight[0].evaluations[1:]) < LOSS_BOUND
    with pytest.raises(WorkerError, match="has the state of another optimizer"):
        cluster.run(1, train, Layout(), range(3, 4), folder)


def skipping(place: Place, layout: AveragedLayout, skipped: tuple[int, ...]) -> Curves:
    """Train; some steps have a gradient that is not finite."""
    run = trainer(place, layout)
    losses = []
    number = 0
    for index in range(4 + len(skipped)):
        bad = index in skipped
        losses.append(run.runtime.step(run.batches(number)).item())
        if bad and place.rank == 0:
            run.optimizer.gradients.finish_all()
            next(iter(run.optimizer.gradients.shards.values()))[3] = torch.nan
        result = run.optimizer.step(OPTIMIZER.lr, clip=layout.clip, skip_update=torch.tensor(float(bad), dtype=torch.float64))
        assert result.skipped.item() == bad
        number += not bad
    run.optimizer.settle()
    pieces = [(p.rectangle, {name: tensor.clone() for name, tensor in p.tensors.items()}) for p in shard_pieces(run.optimizer) if p.primary]
    sums = {float(weight_sum) for weight_sum in weight_sums(run.optimizer)}
    assert sums == {4.0}
    run.optimizer.close()
    return Curves([loss for index, loss in enumerate(losses) if index not in skipped], [], [], pieces)


def test_a_skipped_step_is_in_no_average(cluster: Cluster) -> None:
    """Also the first one, before which there is nothing."""
    layout = AveragedLayout(dp=2)
    expected = cluster.run(2, skipping, layout, ())
    found = cluster.run(2, skipping, layout, (0, 3))
    assert found[0].losses == expected[0].losses
    wanted = whole([record.pieces for record in expected])
    for key, tensor in whole([record.pieces for record in found]).items():
        assert torch.equal(tensor, wanted[key])
