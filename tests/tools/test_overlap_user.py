"""The user's module in the overlap bench: it is the same model, its bytes and its memory are judged by figures worked out by hand."""

from __future__ import annotations

import mmap
import re

import pytest
import torch
from tools.overlap import report
from tools.overlap.catalogue import BLOCKS, HF, MODES, configuration, mode_named, parameters, strategy_minimum
from tools.overlap.contender import Model
from tools.overlap.job import Sample
from tools.overlap.measure import batch_of, stray
from tools.overlap.memory import bytes_in_use, peak_resident
from tools.overlap.user import UserModel
from tools.overlap.waits import Clock

MIB = 2**20


@pytest.mark.parametrize("experts", [0, 4])
def test_it_trains_the_model_that_ours_trains(experts: int) -> None:
    """Loss and gradients of every weight: fused weights of ours are the parts of Hugging Face's, one below the other."""
    config = configuration(MODES[0], 4, experts)
    ours, user = Model(config, Clock()), UserModel(config, Clock())
    batch = batch_of(0, 0)
    losses = []
    for model in (ours, user):
        loss = model(batch.tokens, batch.labels)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    norms = [torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item() for model in (ours, user)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    routers = BLOCKS * experts * 256
    assert sum(p.numel() for p in user.parameters()) == sum(p.numel() for p in ours.parameters()) == parameters() + routers
    assert len(user.groups) == len(ours.groups) == BLOCKS + 2


def test_experts_share_out_the_width() -> None:
    """As many parameters as with MLPs, and routers: so the waits, and the least bytes, are those of the dense model within 0.2 %."""
    clock = Clock()
    waited = []
    clock.wait_backward = lambda: waited.append("backward")  # type: ignore[method-assign]
    user = UserModel(configuration(MODES[0], 4, experts=4), clock)
    batch = batch_of(0, 0)
    user(batch.tokens, batch.labels).backward()
    assert sum(p.numel() for p in user.parameters()) == parameters() + BLOCKS * 4 * 256
    assert all(p.grad is not None and p.grad.any() for p in user.parameters())
    assert len(waited) == 2 * BLOCKS


def test_the_clock_times_both_halves_of_a_block() -> None:
    clock = Clock()
    waited = []
    clock.wait_forward = lambda: waited.append("forward")  # type: ignore[method-assign]
    clock.wait_backward = lambda: waited.append("backward")  # type: ignore[method-assign]
    batch = batch_of(0, 0)
    UserModel(configuration(MODES[0], 4), clock)(batch.tokens, batch.labels).backward()
    assert waited == ["forward"] * 2 * BLOCKS + ["backward"] * 2 * BLOCKS


@pytest.mark.parametrize(
    ("name", "again"),
    [("optim", 0), ("no_shard", 0), ("optim_grads", 0), ("optim_grads_params", BLOCKS - 2), ("optim_grads_params-3", BLOCKS - 3)],
)
def test_the_minimum_of_a_strategy(name: str, again: int) -> None:
    """Each of 4 ranks sends 3/4 of 4 bytes of every parameter to gather it, and as much to reduce its gradient."""
    mode = mode_named(HF + name)
    assert mode is not None
    block = 4 * 256 * 256 + 3 * 256 * 688 + 2 * 256
    assert strategy_minimum(mode, 4) == 3 * (2 * parameters() + again * block)


def test_what_is_allocated_is_seen() -> None:
    before = bytes_in_use()
    peak_resident()
    base = peak_resident()
    kept = torch.ones(8 * MIB, dtype=torch.uint8)
    # Not a tensor's memory: malloc may have kept what was freed, for the next tensor.
    with mmap.mmap(-1, 256 * MIB) as gone:
        gone[::4096] = bytes(256 * MIB // 4096)
    assert 8 * MIB <= bytes_in_use() - before < 9 * MIB
    # A little less: pages that were free before are used first.
    assert 200 * MIB < peak_resident() - base <= 270 * MIB
    assert peak_resident() - base < 12 * MIB
    del kept


def sample(seconds: float, loss: float = 1.0) -> Sample:
    return Sample(seconds, 0.0, None, 0.0, loss)


def test_the_user_model_is_compared_with_peers_and_with_ours() -> None:
    seconds = {"compute": 1.0, "optim": 1.2, "fsdp2": 1.3, HF + "compute": 2.0, HF + "optim": 2.52, HF + "ddp": 2.8, HF + "fsdp2": 2.8}
    lines = report.pairs({name: [sample(value)] * 3 for name, value in seconds.items()})
    found = [re.split(r"  +", line) for line in lines if line.startswith((HF, "optim"))]
    assert found == [
        ["optim", "0.923 (0.923..0.923)"],
        ["hf:optim", "0.900 (0.900..0.900)", "0.900 (0.900..0.900)"],
        ["hf:optim", "1.050 (1.050..1.050)"],
    ]


def test_another_model_is_noticed() -> None:
    same = {name: [sample(1.0)] for name in ("compute", HF + "compute", "optim", HF + "optim", HF + "ddp")}
    assert stray(same) == []
    assert stray(same | {HF + "optim": [sample(1.0, loss=1.1)]}) == ["hf:optim has loss 1.10000"]
