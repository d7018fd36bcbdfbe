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
import torch.nn.functional as F
from megatron_llama.engine.plan.buckets import ALIGN
from megatron_llama.engine.rules.moments import EightBitMoment, Tables
from megatron_llama.engine.shard.moment_forms import dequantised, quantised
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor

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


@pytest.mark.few(1)
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


State = dict[str, dict[str, Tensor]]


def adamw_engine(place: Place, name: str, strategy: str) -> tuple[ml.ModuleEngine, nn.Module]:
    """An engine whose moments are kept in fp32, bf16 or 8 bits, after three steps."""
    module = models.net("tied").float()
    optimizer = ml.AdamW(lr=1e-2, betas=(0.9, 0.95), exp_avg_dtype=name, exp_avg_sq_dtype=name)
    engine = ml.shard(module, units=[models.Block], optimizer=optimizer, strategy=strategy)
    for step in range(3):
        models.loss_of(module, models.part(step, place.rank, 0)).backward()
        engine.step()
    return engine, module


def whole_state(engine: ml.ModuleEngine) -> State:
    state = engine.state_dict()["optimizer"]["state"]
    return {name: {what: v.full_tensor() if isinstance(v, DTensor) else v for what, v in own.items()} for name, own in state.items()}


def moments_taken_over(place: Place, saved: str, kept: str, sharded: bool) -> tuple[State, State]:
    """A state of moments in one dtype, and that of an engine with another one which has loaded it. ``sharded``: as DTensors."""
    engine, module = adamw_engine(place, saved, "optim_grads_params")
    given = engine.state_dict()
    before = whole_state(engine)
    engine.close()
    engine, module = adamw_engine(place, kept, "optim")
    engine.load_state_dict(given if sharded else {"optimizer": {**given["optimizer"], "state": before}})
    after = whole_state(engine)
    models.loss_of(module, models.part(9, place.rank, 0)).backward()
    assert engine.step().skipped == 0
    engine.close()
    return before, after


@pytest.mark.few(2, all=5)
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(("saved", "kept"), [("fp32", "8bit"), ("bf16", "8bit"), ("8bit", "fp32"), ("8bit", "bf16"), ("bf16", "fp32")])
def test_moments_of_another_dtype_are_converted(saved: str, kept: str, sharded: bool, cluster: Cluster) -> None:
    for before, after in cluster.run(2, moments_taken_over, saved, kept, sharded):
        assert before.keys() == after.keys()
        for name, own in before.items():
            for moment in ("exp_avg", "exp_avg_sq"):
                numel = own.get(moment, own.get(f"{moment}_codes")).numel()
                values = [
                    state[name][moment].flatten().float() if moment in state[name]
                    else dequantised(moment, state[name][f"{moment}_codes"], state[name][f"{moment}_scales"])
                    for state in (before, after)
                ]
                assert all(len(value) == numel for value in values)
                # An update in 8 bits rounds to one of the two nearest of 256 numbers, which are at most 1/64 of the block's scale apart.
                blocks = [F.pad(value, (0, -numel % ALIGN)).view(-1, ALIGN) for value in values]
                bound = blocks[0].abs().amax(1, keepdim=True) / 64 if "8bit" in (saved, kept) else blocks[0].abs().amax() * 2.0**-8
                assert ((blocks[0] - blocks[1]).abs() <= bound).all(), (name, moment)
            assert own["step"] == after[name]["step"]


def test_a_loaded_moment_is_quantised_as_by_a_step() -> None:
    """What a step of no learning rate and a gradient of the moments makes of them is known: the bits that an engine in 8 bits has itself."""
    shape = (5, 70)
    for moment in ("exp_avg", "exp_avg_sq"):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        values = values if moment == "exp_avg" else values.square()
        padded = F.pad(values.flatten(), (0, -values.numel() % ALIGN))
        expected = EightBitMoment(padded, Tables.on(padded.device), signed=moment == "exp_avg")
        expected.keep(slice(0, len(padded)), padded, step=torch.tensor(7.0), skip=torch.tensor(0.0))
        codes, scales = quantised(moment, values, 7.0)
        assert torch.equal(codes, expected.kept.codes[: values.numel()]) and torch.equal(scales, expected.kept.scales)
        again, same = quantised(moment, dequantised(moment, codes, scales), 8.0)
        assert torch.equal(again, codes) and torch.equal(same, scales)
