"""What holds of the engine on a GPU alone: a step takes no memory from the device, and the host never waits in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_llama import device as devices
from megatron_llama.mesh import Place
from tests.parallel.cases import OPTIMIZER, STRATEGIES, Layout, Trainer, trainer

pytestmark = pytest.mark.gpu


def on_device(layout: Layout) -> Trainer:
    """One process with everything on the GPU, after three steps."""
    run = trainer(Place(0, 1, 0), layout, device=devices.accelerator(0))
    for index in range(3):
        run.step(index)
    torch.cuda.synchronize()
    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_allocates_nothing_on_the_device(strategy: str) -> None:
    run = on_device(Layout(strategy=strategy, bf16=True, microbatches=2))
    before = torch.cuda.memory_stats()
    for index in range(3, 6):
        run.step(index)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for counter in ("segment.all.allocated", "num_device_alloc", "num_device_free", "num_alloc_retries"):
        assert after[counter] == before[counter], counter


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_engine_never_waits_for_the_device(strategy: str) -> None:
    run = on_device(Layout(strategy=strategy, bf16=True))
    run.runtime.step(run.batches(3))
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.optimizer.step(OPTIMIZER.lr, clip=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_device_trains_what_the_host_trains(strategy: str) -> None:
    layout = Layout(strategy=strategy, microbatches=2)
    there, here = on_device(layout), trainer(Place(0, 1, 0), replace(layout))
    for index in range(3):
        here.step(index)
    (loss, norm), (host_loss, host_norm) = there.step(3), here.step(3)
    assert float(loss) == pytest.approx(float(host_loss), rel=1e-5)
    assert float(norm) == pytest.approx(float(host_norm), rel=1e-4)
