"""Steps that end after fewer backward passes than they were begun with: engine.step(fewer=True)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_llama.engine.shard.accesses import PassError
from megatron_llama.engine.shard.peers import OrderError
from megatron_llama.launch.launcher import Place

from tests import torch_twin
from tests.engine.shard.models import CLIP, Trained, adamw, difference, loss_of, net, part, sharded
from tests.harness import Cluster

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
MICROBATCHES = 3
COUNTS = (3, 2, 3, 1, 1, 3, 2, 3)
"""Backward passes of each step. The first of three is recorded, and so are none of the short ones."""
FIRST_SHORT = (1, 3, 2, 3, 1, 3)
"""The first step is a short one: it may not become the plan of whole ones."""


def plain(world: int, counts: tuple[int, ...]) -> Trained:
    """torch alone, in one process, on the batches of all ranks."""
    model = net()

    def losses_of(step: int) -> Any:
        for rank in range(world):
            for microbatch in range(counts[step]):
                yield loss_of(model, part(step, microbatch, rank)) / counts[step] / world

    losses, norms = torch_twin.train(model, adamw(model), losses_of, len(counts), CLIP)
    split = torch.tensor(losses, dtype=torch.float64).split([world * count for count in counts])
    return Trained([part.sum().item() for part in split], norms, {name: p.detach().clone() for name, p in model.named_parameters()})


def engine_run(place: Place, counts: tuple[int, ...], options: dict[str, Any]) -> Trained:
    """Every step is begun with all microbatches, and told of fewer at its end alone. An evaluation follows each."""
    found = Trained()
    with sharded(net(), microbatches=MICROBATCHES, **options) as engine:
        for step, count in enumerate(counts):
            total = torch.zeros((), dtype=torch.float64)
            for microbatch in range(count):
                loss = loss_of(engine.model, part(step, microbatch, place.rank)) / count
                loss.backward()
                total += loss.detach() / place.world_size
            result = engine.step(fewer=True)
            assert engine.microbatches == MICROBATCHES and result.skipped == 0
            found.norms.append(result.grad_norm.item())
            if place.world_size > 1:
                dist.all_reduce(total)
            found.losses.append(total.item())
            with torch.no_grad():
                loss_of(engine.model, part(step, 0, place.rank))
        with engine.gathered():
            found.parameters = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [*((strategy, {}) for strategy in STRATEGIES), ("optim_grads_params", {"param_slots": "all"}), ("optim", {"static_order": False})],
)
def test_short_steps_are_those_of_torch(cluster: Cluster, strategy: str, options: dict[str, Any]) -> None:
    for counts in (COUNTS, FIRST_SHORT):
        for trained in cluster.run(2, engine_run, counts, {"strategy": strategy, **options}):
            assert difference(trained, plain(2, counts)) < 1e-9


def test_short_steps_under_hybrid_sharding(cluster: Cluster) -> None:
    """Replicas sum their shards once, also where a step ends early."""
    for trained in cluster.run(4, engine_run, COUNTS, {"strategy": "optim_grads_params", "shard_size": 2}):
        assert difference(trained, plain(4, COUNTS)) < 1e-9


@pytest.mark.long
def test_short_steps_with_unused_parameters(cluster: Cluster) -> None:
    for trained in cluster.run(2, engine_run, COUNTS, {"strategy": "optim", "find_unused": True}):
        assert difference(trained, plain(2, COUNTS)) < 1e-9


def test_a_short_step_needs_whole_passes() -> None:
    with sharded(net(), microbatches=2) as engine:
        with pytest.raises(PassError, match="got 0 backward passes, expected 2"):
            engine.step(fewer=True)
        for microbatch in range(2):
            loss_of(engine.model, part(0, microbatch, 0)).backward()
        engine.step(fewer=True)
        loss_of(engine.model, part(1, 0, 0)).backward()
        loss_of(engine.model, part(1, 1, 0))  # without its backward pass
        with pytest.raises(OrderError, match="got the end of the step, expected backward of"):
            engine.step(fewer=True)


def on_rank_0_alone(place: Place, recorded: int) -> str:
    """Rank 0 ends the step early, where rank 1 goes on."""
    with sharded(net(), microbatches=2) as engine:
        for step in range(recorded):
            for microbatch in range(2):
                loss_of(engine.model, part(step, microbatch, place.rank)).backward()
            engine.step()
        loss_of(engine.model, part(recorded, 0, place.rank)).backward()
        with pytest.raises((OrderError, PassError)) as raised:
            if place.rank:
                loss_of(engine.model, part(recorded, 1, place.rank)).backward()
            engine.step(fewer=True)
            loss_of(engine.model, part(recorded + 1, 0, place.rank)).backward()
            engine.step(fewer=True)
        return str(raised.value)


@pytest.mark.parametrize("recorded", [0, 1])
def test_ranks_end_a_step_together(cluster: Cluster, recorded: int) -> None:
    """Nobody waits for ever, and nobody goes on with half of a gradient."""
    for message in cluster.run(2, on_rank_0_alone, recorded):
        assert "rank 0" in message and "rank 1" in message, message
