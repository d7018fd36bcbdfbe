"""Whole training steps with every kernel in its place, against the same steps in fp64, which torch's operators compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.host.ops import HOST
from megatron_llama.model.nn.ops import PLAIN

from tests.parallel.cases import LOSS_BOUND, NORM_BOUND, Layout, Trainer, deviation, trainer

pytestmark = pytest.mark.kernels


def test_steps_in_fp32(device: torch.device) -> None:
    """Within the bounds of every layout; the second step shows what the first update did."""
    from megatron_llama.model.nn.kernels.ops import KERNELS

    plain = HOST if device.type == "cpu" else PLAIN
    layout = Layout(layers=1, tied=True, recompute="selective", documents=True)
    run, exact = (trainer(Place(0, 1, 0), layout, device), trainer(Place(0, 1, 0), replace(layout, fp64=True), device))
    assert [trained.stages[0].options.ops for trained in (run, exact)] == [KERNELS, plain]
    (losses, norms), (exact_losses, exact_norms) = steps(run), steps(exact)
    slack = 1 if device.type == "cpu" else 20  # a device's products and exponentials are coarser
    assert deviation(losses, exact_losses) < slack * LOSS_BOUND and deviation(norms, exact_norms) < slack * NORM_BOUND


def test_a_step_in_bf16(device: torch.device) -> None:
    """The update also writes what the next step computes with."""
    run, exact = (trainer(Place(0, 1, 0), layout, device) for layout in (Layout(layers=1, bf16=True), Layout(layers=1, fp64=True)))
    before = [own.clone() for own in run.optimizer.parameters.shards]
    (losses, norms), (exact_losses, exact_norms) = steps(run, 1), steps(exact, 1)
    assert deviation(losses, exact_losses) < 5e-3 and deviation(norms, exact_norms) < 2e-2
    run.optimizer.settle()
    after = run.optimizer.parameters.shards
    assert all(torch.equal(own, master.to(torch.bfloat16)) for own, master in zip(after, run.optimizer.masters, strict=True))
    assert not all(torch.equal(own, old) for own, old in zip(after, before, strict=True))


def steps(run: Trainer, count: int = 2) -> tuple[list[float], list[float]]:
    """Losses and gradient norms."""
    found = [run.step(index) for index in range(count)]
    return [float(loss) for loss, _ in found], [float(norm) for _, norm in found]
