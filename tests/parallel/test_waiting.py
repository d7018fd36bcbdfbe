"""No operator of a training step asks for a number that a device would still have to compute, so that its host would wait.

RankDevice on the host, where asking costs nothing: the operators are the same. What a GPU says itself: engine/comm/test_device.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_llama.launch.launcher import Place
from megatron_llama.metrics.readback import Readback
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.cases import OPTIMIZER, Layout, trainer

ASKING = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero", "bincount"})
"""Operators whose result, or the size of whose result, the host must know."""


class Asked(TorchDispatchMode):
    """Which of them are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name in ASKING:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(microbatches=2),
        Layout(documents=True, recompute="full"),
        Layout(fp16=True, recompute="selective"),
        Layout(clip=0.0, early=True, tied=True),
        Layout(bf16=True, lora=4),
    ],
    ids=lambda layout: layout.name,
)
def test_a_step_asks_for_nothing(layout: Layout) -> None:
    """Forward, backward, update with a veto, and what is read of it later."""
    run = trainer(Place(0, 1, 0), layout)
    batches = [run.batches(index) for index in range(2)]
    with Asked() as asked:
        for step in batches:
            if layout.early:
                run.optimizer.announce_step(OPTIMIZER.lr, clip=layout.clip)
            loss = run.runtime.step(step)
            update = run.optimizer.step(OPTIMIZER.lr, clip=layout.clip, skip_update=loss.isfinite().logical_not().to(torch.float64))
            later = Readback((loss, update.grad_norm, update.skipped, update.loss_scale))
    assert asked.found == []
    assert later.read()[2] == 0.0
