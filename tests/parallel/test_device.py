"""What holds of the engine on a GPU alone: a step takes no memory from the device, and the host never waits in it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from megatron_llama.data.upload import Upload
from megatron_llama.engine.comm import device as devices
from megatron_llama.launch.launcher import Place
from megatron_llama.metrics.readback import Readback
from megatron_llama.train.run.block_graphs import BlockGraphs

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


@pytest.mark.parametrize(
    "layout",
    [*(Layout(strategy=s, bf16=True) for s in STRATEGIES), Layout(bf16=True, documents=True, microbatches=2)],
    ids=lambda layout: f"{layout.strategy} {layout.name}",
)
def test_the_host_never_waits_for_the_device(layout: Layout) -> None:
    """From the batches, which come as they do in training, to the numbers of the step, which are read when the next one is under way."""
    run, later = on_device(layout), list[Readback]()
    upload = Upload(run.mesh.device)
    for _ in range(2):
        upload.send(run.batches(3))  # both pairs of slabs have their size
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = upload.send(run.batches(3))
        for index in range(3, 6):
            upload.wait()
            current, batches = batches, upload.send(run.batches(index + 1))
            loss = run.runtime.step(current)
            update = run.optimizer.step(OPTIMIZER.lr, clip=layout.clip, skip_update=loss.isfinite().logical_not().to(torch.float64))
            later.append(Readback((loss, update.grad_norm)))
            if len(later) > 1:
                assert all(map(math.isfinite, later[-2].read()))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_segments_grow() -> None:
    """Where the user does not say how memory is handed out. In a process of its own: the first tensor decides."""
    code = (
        "import torch; from megatron_llama.config.schema import Config; from megatron_llama.launch.launcher import Place\n"
        "from megatron_llama.launch.mesh import init_mesh\n"
        "torch.ones(1 << 22, device=init_mesh(Config(), Place(0, 1, 0)).device)\n"
        "print(any(segment['is_expandable'] for segment in torch.cuda.memory_snapshot()))"
    )
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    for given, expected in (({}, "True"), ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "False")):
        done = subprocess.run([sys.executable, "-c", code], env=environment | given, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_device_trains_what_the_host_trains(strategy: str) -> None:
    layout = Layout(strategy=strategy, microbatches=2)
    there, here = on_device(layout), trainer(Place(0, 1, 0), replace(layout))
    for index in range(3):
        here.step(index)
    (loss, norm), (host_loss, host_norm) = there.step(3), here.step(3)
    assert float(loss) == pytest.approx(float(host_loss), rel=1e-5)
    assert float(norm) == pytest.approx(float(host_norm), rel=1e-4)


@pytest.mark.parametrize(
    "layout",
    [Layout(bf16=True, microbatches=2, recompute=recompute, strategy=strategy) for recompute in ("none", "selective", "full") for strategy in STRATEGIES],
    ids=lambda layout: f"{layout.strategy} {layout.name}",
)
def test_blocks_as_graphs_train_the_same_bits(layout: Layout) -> None:
    """What a host shows by running a pass again (``tests/train/run/test_block_graphs.py``), of passes that a device has captured."""
    found = []
    for replayed in (False, True):
        with devices.deterministic(wanted=True):
            run = trainer(Place(0, 1, 0), replace(layout, graphs=replayed), device=devices.accelerator(0))
            graphs = BlockGraphs(run.stages, run.optimizer, run.mesh) if replayed else None
            steps = []
            for index in range(5):
                steps.append(run.step(index))
                if graphs is not None:
                    graphs.begin()
            assert graphs is None or graphs.buffers == 1
            run.optimizer.settle()
            found.append(([loss.item() for loss, _ in steps], [master.clone() for master in run.optimizer.masters]))
            run.optimizer.close()
    (losses, masters), (expected, weights) = found
    assert losses == expected and all(torch.equal(*pair) for pair in zip(masters, weights, strict=True))
