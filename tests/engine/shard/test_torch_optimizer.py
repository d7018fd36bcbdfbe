"""The engine as a torch.optim.Optimizer: schedulers and Accelerate, against torch's own AdamW."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.engine.shard.shard import shard
from megatron_llama.errors import ConfigError, TrainingError
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

Scheduler = Callable[[torch.optim.Optimizer], LRScheduler]
STEPS = 4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def adamw(module: nn.Module) -> torch.optim.AdamW:
    """Two groups with rates of their own."""
    return torch.optim.AdamW([{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 3e-2}], lr=1e-2)


def both(**options: Any) -> tuple[nn.Module, ModuleEngine, nn.Module, torch.optim.AdamW]:
    ours, theirs = net(), net()
    return ours, shard(ours, optimizer=adamw(ours), **options), theirs, adamw(theirs)


def loss_of(module: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    loss: torch.Tensor = module(x).square().mean()
    return loss


def train(module: nn.Module, optimizer: Any, scheduler: LRScheduler, *, first: int = 0) -> tuple[list[float], list[list[float]]]:
    """The usual loop: losses and rates."""
    losses, rates = [], []
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        loss = loss_of(module, step)
        loss.backward()
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, rates


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1.0 + step]),
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=1e-3),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1, cycle_momentum=False),
    ],
    ids=["lambda", "cosine", "one cycle"],
)
def test_a_scheduler_of_torch_sets_the_rates(scheduler: Scheduler) -> None:
    ours, engine, theirs, optimizer = both()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a scheduler that thinks that no step was made
        found = train(ours, engine.optimizer, scheduler(engine.optimizer))
    expected = train(theirs, optimizer, scheduler(optimizer))
    assert found[1] == expected[1] and len({tuple(one) for one in found[1]}) == STEPS
    assert found[0] == pytest.approx(expected[0], rel=1e-12)


def test_engine_step_uses_and_counts_for_the_scheduler_too() -> None:
    ours, engine, theirs, optimizer = both()
    schedulers = [CosineAnnealingLR(one, T_max=STEPS) for one in (engine.optimizer, optimizer)]
    for step in range(STEPS):
        loss_of(ours, step).backward()
        loss_of(theirs, step).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.step()
            schedulers[0].step()
        optimizer.step()
        optimizer.zero_grad()
        schedulers[1].step()
    assert loss_of(ours, 9).item() == pytest.approx(loss_of(theirs, 9).item(), rel=1e-12)


def test_a_run_is_resumed_with_its_scheduler() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return CosineAnnealingLR(optimizer, T_max=2 * STEPS)

    ours, engine, _, _ = both()
    scheduler = schedule(engine.optimizer)
    train(ours, engine.optimizer, scheduler)
    weights, state, where = engine.state_dict()["model"], engine.optimizer.state_dict(), copy.deepcopy(scheduler.state_dict())
    expected = train(ours, engine.optimizer, scheduler, first=STEPS)
    again, second, _, _ = both()
    resumed = schedule(second.optimizer)
    second.load_state_dict({"model": weights})
    second.optimizer.load_state_dict(state)
    resumed.load_state_dict(where)
    assert train(again, second.optimizer, resumed, first=STEPS) == expected


def test_a_closure_makes_the_pass() -> None:
    ours, engine, theirs, optimizer = both()

    def closure() -> torch.Tensor:
        loss = loss_of(ours, 0)
        loss.backward()
        return loss

    loss = engine.optimizer.step(closure)
    loss_of(theirs, 0).backward()
    optimizer.step()
    assert loss.item() == loss_of(net(), 0).item()
    assert loss_of(ours, 1).item() == pytest.approx(loss_of(theirs, 1).item(), rel=1e-12)


def test_gradients_are_not_thrown_away_in_silence() -> None:
    ours, engine, _, _ = both()
    engine.optimizer.zero_grad()
    loss_of(ours, 0).backward()
    with pytest.raises(TrainingError, match=r"zero_grad: got gradients that no step has used"):
        engine.optimizer.zero_grad()
    engine.optimizer.step()
    engine.optimizer.zero_grad(set_to_none=False)


def test_what_cannot_change_is_refused() -> None:
    ours, engine, _, _ = both()
    with pytest.raises(ConfigError, match=r"add_param_group: got another group"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    loss_of(ours, 0).backward()
    for name, value in (("betas", (1.0, 0.999)), ("eps", -1.0), ("weight_decay", float("nan"))):
        before = engine.param_groups[1][name]
        engine.param_groups[1][name] = value
        with pytest.raises(ConfigError, match=rf"param_groups\[1\]: got {name}="):
            engine.optimizer.step()
        engine.param_groups[1][name] = before
    engine.optimizer.step()


class Decaying(LRScheduler):
    """As DINO and timm schedule weight decay: one that begins at 0 in a group, and eps beside it."""

    def get_lr(self) -> list[float | torch.Tensor]:
        for number, group in enumerate(self.optimizer.param_groups):
            group["weight_decay"] = 0.2 * number + 0.1 * self.last_epoch
            group["eps"] = 1e-8 * 10**self.last_epoch
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize("offload", ["none", "exact"])
@pytest.mark.parametrize(
    "scheduler", [Decaying, lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)], ids=["weight decay", "betas"]
)
def test_all_options_may_follow_a_schedule(scheduler: Scheduler, offload: str) -> None:
    ours, engine, theirs, optimizer = both(optimizer_offload=offload, microbatches=1)
    found = train(ours, engine.optimizer, scheduler(engine.optimizer))
    options = [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in engine.param_groups]
    expected = train(theirs, optimizer, scheduler(optimizer))
    assert options == [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in optimizer.param_groups]
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    with engine.gathered():
        for own, exact in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(own, exact, rtol=1e-10, atol=1e-12)
    engine.close()


def test_zenflow_keeps_what_its_windows_have_begun_with() -> None:
    ours = net().float()
    engine = shard(ours, optimizer_offload="zenflow", zenflow_topk_ratio=0.5, zenflow_update_interval="2")
    ours(torch.ones(2, 6)).sum().backward()
    engine.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(ConfigError, match=r"param_groups: got other options \(betas, eps, weight decay\) than in shard\(\), where ZenFlow updates"):
        engine.step()
    engine.close()


def test_groups_have_the_names_and_sizes_of_their_parameters() -> None:
    ours, engine, _, _ = both()
    groups = engine.param_groups
    assert groups is engine.optimizer.param_groups
    assert [group["param_names"] for group in groups] == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert [tuple(p.shape) for group in groups for p in group["params"]] == [(8, 6), (8,), (3, 8), (3,)]
    assert all(p is q for p, q in zip((p for group in groups for p in group["params"]), ours.parameters(), strict=True))


def test_groups_of_torch_without_trained_parameters_stay() -> None:
    """A scheduler has one function for each group."""
    module = net()
    module[0].requires_grad_(False)
    engine = shard(module, optimizer=adamw(module))
    LambdaLR(engine.optimizer, [lambda step: 1.0, lambda step: 0.5])
    assert [(group["lr"], group["param_names"]) for group in engine.param_groups] == [(1e-2, []), (1.5e-2, ["2.weight", "2.bias"])]
    loss_of(module, 0).backward()
    engine.step()
    state = engine.optimizer.state_dict()
    assert [group["param_names"] for group in state["param_groups"]] == [[], ["2.weight", "2.bias"]]
    engine.optimizer.load_state_dict(state)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_accelerate_steps_it(microbatches: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    ours, engine, theirs, optimizer = both(microbatches=microbatches)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=microbatches)
    facade = accelerator.prepare(engine.optimizer)
    scheduler = accelerator.prepare(LambdaLR(engine.optimizer, lambda step: 1.0 / (1 + step)))
    plain = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for step in range(2 * STEPS):
        with accelerator.accumulate(ours):
            accelerator.backward(loss_of(ours, step))
            facade.step()
            scheduler.step()
            facade.zero_grad()
        (loss_of(theirs, step) / microbatches).backward()
        if (step + 1) % microbatches == 0:
            optimizer.step()
            optimizer.zero_grad()
            plain.step()
    assert [group["lr"] for group in facade.param_groups] == [group["lr"] for group in optimizer.param_groups]
    assert loss_of(ours, 99).item() == pytest.approx(loss_of(theirs, 99).item(), rel=1e-12)


def test_a_scheduler_of_the_optimizer_that_was_given_is_refused() -> None:
    """It would set rates that nobody reads."""
    model = net()
    optimizer = adamw(model)
    with shard(model, optimizer=optimizer) as engine:
        LambdaLR(optimizer, lambda step: 0.5)
        loss_of(model, 0).backward()
        with pytest.raises(
            ConfigError, match=r"shard\(\) was given: got learning rates \[0\.005, 0\.015\].*schedulers of engine\.optimizer"
        ):
            engine.step()


@pytest.mark.parametrize(
    ("use", "instead"),
    [
        (lambda given: given.step(), "engine.step"),
        (lambda given: given.zero_grad(), "nothing, since each step starts with gradients of zero"),
        (lambda given: given.state_dict(), "engine.state_dict"),
        (lambda given: given.load_state_dict({}), "engine.load_state_dict"),
        (lambda given: given.add_param_group({"params": []}), "it before shard"),
    ],
    ids=["step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"],
)
def test_the_optimizer_that_was_given_says_what_to_call(use: Callable[[torch.optim.Optimizer], object], instead: str) -> None:
    """It would train, clear or save nothing, in silence."""
    ours = net()
    given = adamw(ours)
    engine = shard(ours, optimizer=given)
    assert isinstance(given, torch.optim.AdamW) and [len(group["params"]) for group in given.param_groups] == [2, 2]
    loss_of(ours, 0).backward()
    with pytest.raises(ConfigError, match=rf"the optimizer that shard\(\) was given: .*{instead}"):
        use(given)
    engine.step()
    engine.close()
