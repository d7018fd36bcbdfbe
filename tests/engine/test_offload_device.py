"""What of offload holds on a GPU alone: copies in streams of their own, a host that waits for events, memory that is pinned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.offload.pinned_buffer import PinnedBuffer
from megatron_llama.engine.offload_options import OffloadConfig, ZenFlowConfig
from megatron_llama.launch.launcher import Place

from tests.engine.test_engine import same, state_of
from tests.engine.test_offload import EXACT, MIXED_CLIP, SPECULATIVE, rule_of
from tests.parallel.cases import STRATEGIES, Layout, Trainer, trainer
from tests.parallel.test_zenflow import AT_ONCE, EVERY, FOUR, OVERLAP, everything, zen

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def sums_in_a_fixed_order() -> Iterator[None]:
    """Bits are compared: without it, only what offload does would have to be alike, and attention's gradient is not."""
    with devices.deterministic(wanted=True):
        yield


def trained(layout: Layout, steps: int = 20) -> Trainer:
    """One process with everything but the optimizer on the GPU."""
    run = trainer(Place(0, 1, 0), layout, device=devices.accelerator(0))
    for index in range(steps):
        run.step(index)
    run.optimizer.settle()
    devices.synchronize(run.mesh.device)
    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bf16", [True, False])
def test_exact_is_blocking_bit_for_bit(bf16: bool, strategy: str) -> None:
    layout = Layout(strategy=strategy, bf16=bf16, clip=MIXED_CLIP, microbatches=2, offload=EXACT)  # type: ignore[arg-type]
    blocking = state_of(trained(replace(layout, blocking=True)).optimizer)
    for other in (layout, replace(layout, offload=SPECULATIVE, early=True)):
        assert same(blocking, state_of(trained(other).optimizer))
    without, early = (replace(layout, clip=0.0, blocking=late, early=not late) for late in (True, False))
    assert same(state_of(trained(without).optimizer), state_of(trained(early).optimizer))


def test_the_host_updates_as_the_device_does() -> None:
    """Within what their kernels round differently."""
    there, here = (state_of(trained(Layout(offload=offload), 3).optimizer) for offload in (OffloadConfig(), EXACT))
    for one, other in zip(there, here, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-6)


def test_state_is_pinned_and_off_the_device() -> None:
    run = trained(Layout(offload=EXACT, bf16=True), 1)
    assert all(master.device.type == "cpu" and master.is_pinned() for master in run.optimizer.masters)
    assert rule_of(run).nbytes > 16 * sum(master.numel() for master in run.optimizer.masters)
    buffer = PinnedBuffer(1 << 20, torch.float32, run.mesh.device, "a sample")
    part = buffer.take(64)
    assert part.is_pinned()


def test_the_engine_never_waits_for_the_device() -> None:
    run = trained(Layout(offload=EXACT, bf16=True), 3)
    run.runtime.step(run.batches(3))
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.optimizer.step(1e-3, clip=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.optimizer.settle()


@pytest.mark.parametrize("zenflow", [EVERY, AT_ONCE], ids=["every column hot", "windows of one step"])
def test_zenflow_is_adamw_where_it_should_be(zenflow: ZenFlowConfig) -> None:
    """Within what kernels round differently."""
    layout = Layout(layers=2, clip=MIXED_CLIP)
    there, here = (state_of(trained(one, 4).optimizer) for one in (layout, zen(layout, zenflow)))
    for one, other in zip(there, here, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip", [MIXED_CLIP, 0.0])
@pytest.mark.parametrize("zenflow", [FOUR, OVERLAP, replace(OVERLAP, zenflow_update_interval="auto")], ids=["inline", "overlap", "auto"])
def test_zenflow_can_be_repeated_bit_for_bit(zenflow: ZenFlowConfig, clip: float) -> None:
    """No moment decides anything: what crosses the bus beside the computation is complete when it is used, and memory that shards take turns
    in is free when it is taken."""
    layout = zen(Layout(bf16=True, clip=clip, early=clip == 0.0, microbatches=2), zenflow)
    first, *others = (everything(trained(layout)) for _ in range(3))
    assert all(torch.equal(one.tensor, two.tensor) for other in others for one, two in zip(first, other, strict=True))


def test_zenflow_takes_no_memory_between_choices() -> None:
    run = trained(zen(Layout(bf16=True), replace(OVERLAP, zenflow_select_interval="100")), 10)
    before = torch.cuda.memory_stats()
    for index in range(10, 19):
        run.step(index)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    assert all(after[key] == before[key] for key in ("segment.all.allocated", "num_device_alloc", "num_device_free"))
