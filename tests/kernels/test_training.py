"""Whole training steps with every kernel in its place, against the same steps in fp64, which torch's operators compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_llama.mesh import Place
from megatron_llama.model.llama import Stage
from megatron_llama.nn.bodies import PLAIN
from tests.parallel.cases import LOSS_BOUND, NORM_BOUND, Layout, Trainer, deviation, trainer

pytestmark = pytest.mark.kernels


def test_steps_in_fp32(device: torch.device) -> None:
    """Within the bounds of every layout; the second step shows what the first update did."""
    from megatron_llama.nn.kernels.bodies import KERNELS

    layout = Layout(layers=1, tied=True, recompute="selective", documents=True)
    run, exact = trainer(Place(0, 1, 0), layout, device), trainer(Place(0, 1, 0), replace(layout, fp64=True), device)
    assert bodies_of(run.stages) == {id(KERNELS)} and bodies_of(exact.stages) == {id(PLAIN)}
    (losses, norms), (exact_losses, exact_norms) = steps(run), steps(exact)
    assert deviation(losses, exact_losses) < LOSS_BOUND and deviation(norms, exact_norms) < NORM_BOUND


def test_steps_in_bf16(device: torch.device) -> None:
    """The copy that the update writes is what the next step computes with."""
    run, exact = (trainer(Place(0, 1, 0), layout, device) for layout in (Layout(layers=1, bf16=True), Layout(layers=1, fp64=True)))
    (losses, norms), (exact_losses, exact_norms) = steps(run), steps(exact)
    assert exact_losses[-1] < exact_losses[0] - 0.1
    assert deviation(losses, exact_losses) < 5e-3 and deviation(norms, exact_norms) < 2e-2
    run.optimizer.settle()
    for own, master in zip(run.optimizer.weights.own, run.optimizer.masters, strict=True):
        assert torch.equal(own, master.to(torch.bfloat16))


def steps(run: Trainer) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of two."""
    found = [run.step(index) for index in range(2)]
    return [float(loss) for loss, _ in found], [float(norm) for _, norm in found]


def bodies_of(stages: dict[int, Stage]) -> set[int]:
    """By identity."""
    return {id(stage.options.bodies) for stage in stages.values()}
