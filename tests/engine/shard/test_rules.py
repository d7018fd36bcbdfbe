"""The engine's other update rules in ``shard``: schedule-free AdamW, and AdamW with moments in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import megatron_llama as ml
import pytest
import schedulefree
import torch
import torch.distributed.checkpoint as dcp
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from tests.engine.shard import models
from tests.harness import Cluster

SINGLE = Place(0, 1, 0)
MAKES: dict[str, Callable[[], ml.AdamW]] = {
    "schedule-free": lambda: ml.ScheduleFreeAdamW(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1),
    "bf16": lambda: ml.AdamW(lr=1e-2, betas=(0.9, 0.95), exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"),
    "8bit": lambda: ml.AdamW(lr=1e-2, betas=(0.9, 0.95), exp_avg_dtype="8bit", exp_avg_sq_dtype="8bit"),
}
STEPS = 4


def run(place: Place, name: str, folder: str, first: int, strategy: str = "optim_grads_params") -> Any:
    """Some steps whose batches are the same for every number of ranks, from and to a folder. Returns losses, that of an evaluation before the
    steps, and the whole state before and after them."""
    module = models.net("tied").float()
    microbatches = 4 // place.world_size
    engine = ml.shard(module, units=[models.Block], optimizer=MAKES[name](), clip=0.5, microbatches=microbatches, strategy=strategy)
    if first:
        state = engine.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{first}")
        engine.load_state_dict(state)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = [get_state_dict(module, engine.optimizer, options=options)]
    with torch.no_grad():
        evaluated = models.loss_of(module, models.part(99, 0, 0)).item()
    losses = torch.zeros(STEPS, dtype=torch.float64)
    for step in range(STEPS):
        for microbatch in range(microbatches):
            loss = models.loss_of(module, models.part(first + step, microbatch * place.world_size + place.rank, 0)) / microbatches
            loss.backward()
            losses[step] += loss.item() / place.world_size
        assert engine.step().skipped == 0
    if place.world_size > 1:
        torch.distributed.all_reduce(losses)
    dcp.save(engine.state_dict(), checkpoint_id=f"{folder}/{first + STEPS}")
    states.append(get_state_dict(module, engine.optimizer, options=options))
    engine.close()
    return losses.tolist(), evaluated, states


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(equal, one, other)) if isinstance(one, list | tuple) else bool(one == other)


@pytest.mark.parametrize("name", MAKES)
def test_ranks_train_as_one_process_and_take_over_each_others_state(name: str, tmp_path: Any, cluster: Cluster) -> None:
    expected = [run(SINGLE, name, f"{tmp_path}/whole", first) for first in (0, STEPS, 2 * STEPS)]
    found = [
        cluster.run(2, run, name, f"{tmp_path}/parts", 0)[0],
        cluster.run(4, run, name, f"{tmp_path}/parts", STEPS, "optim")[0],
        run(SINGLE, name, f"{tmp_path}/parts", 2 * STEPS, "no_shard"),
    ]
    for (losses, evaluated, _), (same_losses, same_evaluated, _) in zip(found, expected, strict=True):
        # Moments in fewer bits round what differs in the last one.
        assert losses == pytest.approx(same_losses, abs=2e-3 if name != "schedule-free" else 1e-5)
        assert evaluated == pytest.approx(same_evaluated, abs=2e-3 if name != "schedule-free" else 1e-5)
    # What other ranks have taken over is the same to the bit.
    for before, after in pairwise(found):
        assert equal(before[2][1], after[2][0])


def test_schedule_free_is_that_of_its_package() -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def loss_of(module: nn.Module, step: int) -> Tensor:
        loss: Tensor = module(torch.randn(5, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)).square().mean()
        return loss

    ours, theirs = net(), net()
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
    engine = ml.shard(ours, units=[nn.Linear], optimizer=ml.ScheduleFreeAdamW(**options, groups=[ml.group("*", weight_decay=0.1)]))
    optimizer = schedulefree.AdamWScheduleFree(theirs.parameters(), **options)
    for step in range(10):
        optimizer.eval()
        with torch.no_grad():
            assert loss_of(ours, 99).item() == pytest.approx(loss_of(theirs, 99).item(), rel=1e-6)
        optimizer.train()
        losses = [loss_of(module, step) for module in (ours, theirs)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        for loss in losses:
            loss.backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    engine.param_groups[0]["weight_decay"] = 0.5
    loss_of(ours, 0).backward()
    with pytest.raises(ConfigError, match="where ScheduleFreeAdamW updates, expected the same: of this rule only lr may change"):
        engine.step()
    engine.close()


@pytest.mark.parametrize(
    ("make", "options", "got"),
    [
        (lambda: ml.AdamW(exp_avg_dtype="int4"), {}, "exp_avg_dtype='int4'"),
        (lambda: ml.AdamW(exp_avg_sq_dtype="bf16"), {}, "exp_avg_sq_dtype='bf16' with a beta of 0.999"),
        (lambda: ml.AdamW(betas=(0.9, 0.95), exp_avg_sq_dtype="bf16", groups=[ml.group("*.bias", betas=(0.9, 0.999))]), {}, "a beta of 0.999"),
        (lambda: ml.ScheduleFreeAdamW(exp_avg_dtype="bf16"), {}, "with moments in bf16 and fp32"),
        (MAKES["8bit"], {"optimizer_offload": "exact"}, "got exact with ml.AdamW with moments in 8bit"),
        (MAKES["schedule-free"], {"optimizer_offload": "zenflow"}, "got zenflow with ml.ScheduleFreeAdamW"),
        (MAKES["8bit"], {"dtype": torch.float64}, "got torch.float64 with ml.AdamW with moments in 8bit"),
    ],
)
def test_what_a_rule_cannot_do_is_refused(make: Callable[[], ml.AdamW], options: dict[str, Any], got: str) -> None:
    with pytest.raises(ConfigError, match=got):
        ml.shard(nn.Linear(2, 2), optimizer=make(), **options)
