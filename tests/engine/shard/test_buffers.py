"""Buffers that passes change: those of each rank, or of rank 0 as in DDP."""

from __future__ import annotations

import megatron_llama as ml
import pytest
import torch
from megatron_llama.engine.shard.peers import OrderError
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.harness import Cluster

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS, MICROBATCHES, LR = 3, 2, 1e-2


class Block(nn.Module):
    """Batch norm, which has buffers of two dtypes, and a flag of one byte."""

    def __init__(self) -> None:
        super().__init__()
        # The gradient of a bias in front of it would be all rounding.
        self.linear, self.norm = nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16)
        self.register_buffer("flag", torch.tensor(True), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Block(), Block())


def loss_of(model: nn.Module, step: int, microbatch: int, rank: int) -> Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + 10 * microbatch + rank))
    return model(x).square().mean() / MICROBATCHES


def trained(place: Place, strategy: str, buffers: str, twice: bool) -> bool:
    """``twice``: two forward passes come before each backward pass."""
    model, plain = net(), net()
    engine = ml.shard(model, units=[Block], strategy=strategy, optimizer=ml.AdamW(lr=LR, weight_decay=0.0), microbatches=MICROBATCHES, buffers=buffers)
    ddp = DistributedDataParallel(plain, broadcast_buffers=buffers == "rank0")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.0)
    same = True
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            loss = loss_of(model, step, microbatch, place.rank)
            if twice:
                loss = loss + loss_of(model, step, microbatch + 5, place.rank)
            loss.backward()
            other = loss_of(ddp, step, microbatch, place.rank)
            other.backward()
            if not twice:
                named = dict(plain.named_buffers())
                same &= all(torch.allclose(buffer, named[name], atol=1e-5) for name, buffer in model.named_buffers())
                same &= abs(loss.item() / other.item() - 1) < 1e-4
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    mine = {name: buffer.clone() for name, buffer in model.named_buffers() if "flag" not in name}
    state = engine.state_dict()["model"]
    first = [mine if place.rank == 0 else None]
    torch.distributed.broadcast_object_list(first)
    of_state = first[0] if buffers == "rank0" and strategy != "no_shard" else mine
    assert of_state is not None
    same &= all(torch.equal(state[name], value) for name, value in of_state.items())
    if place.rank:
        same &= not torch.equal(mine["1.norm.running_mean"], first[0]["1.norm.running_mean"])
    engine.close()
    return bool(same)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES[::-1])
@pytest.mark.parametrize("buffers", ["rank0", "own"])
def test_buffers_are_those_of_ddp(buffers: str, strategy: str, cluster: Cluster) -> None:
    assert cluster.run(2, trained, strategy, buffers, False) == [True, True]


@pytest.mark.parametrize("buffers", ["rank0", pytest.param("own", marks=pytest.mark.long)])
def test_buffers_of_four_ranks_are_those_of_ddp(buffers: str, cluster: Cluster) -> None:
    assert cluster.run(4, trained, "optim_grads_params", buffers, False) == [True] * 4


def test_two_forward_passes_may_come_before_one_backward_pass(cluster: Cluster) -> None:
    assert cluster.run(2, trained, "optim_grads_params", "rank0", True) == [True, True]


def apart(place: Place) -> str:
    model = net()
    with ml.shard(model, units=[Block], strategy="optim", microbatches=2, buffers="rank0") as engine, pytest.raises(OrderError) as error:
        for step in range(3):
            for microbatch in range(2):
                loss_of(model, step, microbatch, place.rank).backward()
            engine.step()
        if place.rank == 0:
            engine.state_dict()
        loss_of(model, 9, 0, place.rank)
    return str(error.value)


def test_ranks_that_go_apart_are_told(cluster: Cluster) -> None:
    for message in cluster.run(2, apart):
        assert "state_dict() before step 4" in message


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="buffers: got 'mean', expected one of own, rank0"):
        ml.shard(net(), buffers="mean")
