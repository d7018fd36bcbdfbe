"""Ranks that call the same units and go different ways inside of them, while nobody knows the order: all say so by name, none hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import megatron_llama as ml
import pytest
import torch
from megatron_llama.engine.shard.accesses import PassError
from megatron_llama.engine.shard.peers import OrderError
from megatron_llama.engine.shard.shard import shard
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn

from tests.harness import Cluster

SECONDS = 20.0
"""Far below the timeout of the job."""
WIDTH = 8


class Branch(nn.Module):
    """Uses ``extra`` where it is told to. It is in a group of its own, so in a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.taken = True

    def forward(self, x: Tensor) -> Tensor:
        out = x + torch.tanh(self.first(x))
        return out + x @ self.extra if self.taken else out


def branches() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Branch() for _ in range(4))).double()


def run_pass(model: nn.Module, rank: int, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + rank)
    model(torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)).square().mean().backward()


def said_by(place: Place, taken: Callable[[int, int], bool], options: dict[str, Any]) -> str:
    """What a rank says of a step of two passes. ``taken``: whether a rank takes the branch in a pass."""
    model = branches()
    optimizer = ml.AdamW(lr=1e-2, groups=(ml.group("*.extra", lr=1e-3),))
    begin = time.monotonic()
    with shard(model, units=[Branch], optimizer=optimizer, microbatches=2, **options) as engine:
        try:
            for step in range(2):
                for number in range(2):
                    for branch in (model[1], model[2]):
                        branch.taken = taken(place.rank, number)
                    run_pass(model, place.rank, 2 * step + number)
                engine.step()
        except (OrderError, PassError) as error:
            assert time.monotonic() - begin < SECONDS
            return str(error)
    return "nothing"


def only_rank_0(rank: int, number: int) -> bool:
    return rank == 0


def in_turn(rank: int, number: int) -> bool:
    return rank == number


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("taken", [only_rank_0, in_turn])
def test_a_branch_that_one_rank_takes_is_an_error_by_name_on_all(
    cluster: Cluster, taken: Callable[[int, int], bool], strategy: str, static: bool
) -> None:
    said = cluster.run(2, said_by, taken, {"strategy": strategy, "static_order": static})
    if (taken, strategy, static) == (in_turn, "optim", False):
        # Each has all of its gradients at the end of the step, where everything is reduced, in the order of the plan.
        assert said == ["nothing", "nothing"]
    else:
        assert said[0] == said[1] and ".extra" in said[0] and "rank 1" in said[0] and "find_unused=True" in said[0], said


@pytest.mark.parametrize("taken", [only_rank_0, in_turn])
def test_a_branch_that_one_rank_takes_is_trained_with_find_unused(cluster: Cluster, taken: Callable[[int, int], bool]) -> None:
    assert cluster.run(2, said_by, taken, {"find_unused": True}) == ["nothing", "nothing"]


def said_of_order(place: Place, strategy: str) -> str:
    model = branches()
    if place.rank == 1:
        model[1].forward = lambda x: x + x @ model[1].extra + torch.tanh(model[1].first(x))  # type: ignore[method-assign]
    optimizer = ml.AdamW(groups=(ml.group("*.extra", lr=1e-3),))
    with shard(model, units=[Branch], optimizer=optimizer, strategy=strategy), pytest.raises((OrderError, PassError)) as error:
        run_pass(model, place.rank, 0)
    return str(error.value)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_another_order_inside_a_unit_is_an_error_on_all(cluster: Cluster, strategy: str) -> None:
    """By the recorded plan each rank would reduce buckets at their last gradients, so in another order."""
    for said in cluster.run(2, said_of_order, strategy):
        expected = "in another order on rank 1 than on rank 0"
        if strategy == "optim_grads_params":
            # Already where a slot is needed: the same bucket would not be reduced on both.
            expected = (
                "rank 0: the next gradients after those of bucket 1 of 3 (3.extra); rank 1: the next gradients after those of bucket 0"
            )
        assert expected in said
