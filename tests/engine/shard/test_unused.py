"""Parameters that no rank uses in a step: ``unused="skip"`` leaves them out, as DistributedDataParallel and torch's optimizers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.nn.functional as F
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.errors import UserError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.harness import Cluster

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS, MICROBATCHES = 9, 2
LR, DECAY, CLIP = 1e-2, 0.1, 0.3
NOT_FINITE = 5
"""The step whose gradient is not finite."""


class Block(nn.Module):
    """A unit with branches of which a pass takes one or none. Sizes are no multiples of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(10, 23), nn.Tanh(), nn.Linear(23, 10)) for _ in range(3))
        self.extra = nn.Parameter(torch.randn(10, 10) / 10)
        self.branch, self.uses_extra = 0, False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        if self.uses_extra:
            hidden = hidden + hidden @ self.extra
        return x + (self.branches[self.branch](hidden) if self.branch < 3 else hidden)


class Net(nn.Module):
    """Blocks, of which some steps leave out the last, and a layer that nothing ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.never = nn.Linear(10, 3)
        self.outlet = nn.Linear(10, 5)
        self.depth = 3

    def choose(self, step: int, microbatch: int, rank: int) -> None:
        """The branch by the step, another one by the microbatch and the rank, the depth by the step."""
        self.depth = 2 if step % 4 == 2 else 3
        for number, block in enumerate(self.blocks):
            block.branch = (step // 2 + number + (rank + microbatch) * (number == 1)) % 4
            block.uses_extra = rank == 1 and microbatch == 0 and (step + number) % 3 == 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks[: self.depth]:
            x = block(x)
        return self.outlet(x)


def net() -> Net:
    torch.manual_seed(3)
    return Net().double()


def inputs(number: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def loss_of(model: nn.Module, step: int, microbatch: int, rank: int) -> Tensor:
    """The loss of a microbatch of a rank, of a ``Net`` or of what is around one."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, Net)
    inner.choose(step, microbatch, rank)
    number = 100 * step + 10 * microbatch + rank
    return F.mse_loss(model(inputs(number)), inputs(number + 5)) / MICROBATCHES * (float("nan") if step == NOT_FINITE else 1.0)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW": lambda module: torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY),
    "AdamW in groups": lambda module: torch.optim.AdamW(
        [{"params": [p for p in module.parameters() if p.dim() > 1]}, {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0}],
        lr=LR,
        weight_decay=DECAY,
    ),
    "SGD": lambda module: torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY),
    "SGD with dampening": lambda module: torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9, dampening=0.2, weight_decay=DECAY),
    "NAdam": lambda module: torch.optim.NAdam(module.parameters(), lr=LR, weight_decay=DECAY),
}
"""Of torch: the first is the engine's own AdamW."""


def trained_by_ddp(rank: int, optimizer: str, clip: float) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Losses, norms, parameters and the optimizer's state by parameter."""
    module = net()
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    steps = OPTIMIZERS[optimizer](module)
    losses, norms = [], []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            with nullcontext() if microbatch == MICROBATCHES - 1 else ddp.no_sync():
                loss = loss_of(ddp, step, microbatch, rank)
                loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(module.parameters(), clip or float("inf"))
        norms.append(norm.item())
        if norm.isfinite():
            steps.step()
        steps.zero_grad()
    names = {parameter: name for name, parameter in module.named_parameters()}
    state = {names[parameter]: dict(of_one) for parameter, of_one in steps.state.items()}
    return losses, norms, {name: p.detach() for name, p in module.named_parameters()}, state


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_state(engine: ModuleEngine) -> dict[str, Any]:
    """The engine's state in plain tensors."""
    state = engine.state_dict()
    return {
        "model": {name: whole(value) for name, value in state["model"].items()},
        "optimizer": {
            "state": {name: {what: whole(v) for what, v in own.items()} for name, own in state["optimizer"]["state"].items()},
            "param_groups": state["optimizer"]["param_groups"],
        },
    }


def run_steps(engine: ModuleEngine, rank: int, steps: range) -> tuple[list[float], list[float]]:
    """Losses and norms."""
    losses, norms = [], []
    for step in steps:
        for microbatch in range(MICROBATCHES):
            loss = loss_of(engine.model, step, microbatch, rank)
            loss.backward()
            losses.append(loss.item())
        norms.append(engine.step().grad_norm.item())
    return losses, norms


def largest(found: list[float], expected: list[float]) -> float:
    """The largest difference. What is not finite has to be so in both."""
    one, other = (torch.tensor(numbers, dtype=torch.float64) for numbers in (found, expected))
    assert torch.equal(one.isfinite(), other.isfinite())
    return float((one - other)[one.isfinite()].abs().max())


def sharded(module: nn.Module, optimizer: Any, **options: Any) -> ModuleEngine:
    given = {"units": [Block], "microbatches": MICROBATCHES, "static_order": False, "unused": "skip", "bucket_size": 500}
    return ml.shard(module, optimizer=optimizer, **given | options)


def beside_ddp(place: Place, optimizers: Sequence[str], kinds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By optimizer and clipping, the largest difference from DDP: of losses, norms, parameters and state. A clip factor is in fp32."""
    differences = {}
    for optimizer, clip in [*((name, 0.0) for name in optimizers), (optimizers[0], CLIP)]:
        losses, norms, parameters, expected = trained_by_ddp(place.rank, optimizer, clip)
        for options in kinds:
            module = net()
            with sharded(module, OPTIMIZERS[optimizer](module), clip=clip, **options) as engine:
                found_losses, found_norms = run_steps(engine, place.rank, range(STEPS))
                state = whole_state(engine)
            worst = [largest(found_losses, losses), largest(found_norms, norms)]
            worst += [float((state["model"][name] - value).abs().max()) for name, value in parameters.items()]
            assert not any(name in expected for name in ("never.weight", "never.bias")), "torch has trained what was never used"
            for name, own in state["optimizer"]["state"].items():
                for what, value in own.items():
                    if name in expected and expected[name].get(what) is not None:
                        worst.append(float((torch.as_tensor(value).double() - torch.as_tensor(expected[name][what]).double()).abs().max()))
                    else:
                        # Never begun: as it was made.
                        assert not torch.as_tensor(value).nan_to_num(0.0).any(), (optimizer, name, what)
            differences[f"{optimizer} clip {clip} {options}"] = max(worst) / (1e-7 if clip else 1e-13)
    return differences


@pytest.mark.few(1, all=4)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES[::-1])
def test_what_no_rank_uses_is_left_out_as_by_ddp(strategy: str, world: int, cluster: Cluster) -> None:
    hybrid = [{"shard_size": 2}] if world == 4 and strategy != "no_shard" else []
    optimizers = [*OPTIMIZERS] if world == 2 else ["AdamW", "NAdam"]
    for differences in cluster.run(world, beside_ddp, optimizers, [{"strategy": strategy, **options} for options in ({}, *hybrid)]):
        assert max(differences.values()) < 1, differences


def trained(place: Place, optimizer: str, strategy: str, steps: int, state: dict[str, Any] | None) -> tuple[dict[str, Any], list[float]]:
    """The whole state of an engine that goes on from one after some steps, and the losses of these."""
    module = net()
    with sharded(module, OPTIMIZERS[optimizer](module), strategy=strategy) as engine:
        first = 0
        if state is not None:
            engine.load_state_dict(state)
            first = 8
        losses, _ = run_steps(engine, place.rank, range(first, first + steps))
        return whole_state(engine), losses


def same(one: Any, other: Any) -> bool:
    """All values of two states are the same to the bit."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(77.0), other.nan_to_num(77.0))
    return bool(one == other)


@pytest.mark.few(1, all=4)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD with dampening", "NAdam"])
def test_counts_are_saved_and_loaded_by_any_number_of_ranks(optimizer: str, strategy: str, cluster: Cluster) -> None:
    saved = cluster.run(2, trained, optimizer, strategy, 8, None)
    state = saved[0][0]
    assert same(saved[1][0], state)
    if optimizer == "AdamW":
        counts = {int(own["step"]) for own in state["optimizer"]["state"].values()}
        assert {0, 7} < counts and len(counts) > 3, counts
    for world in (4, 1):
        for loaded, _ in cluster.run(world, trained, optimizer, strategy, 0, state):
            assert same(loaded, state), world
    whole_run = cluster.run(2, trained, optimizer, strategy, 12, None)
    resumed = cluster.run(2, trained, optimizer, strategy, 4, state)
    for (last, losses), (expected, all_losses) in zip(resumed, whole_run, strict=True):
        assert losses == all_losses[-len(losses) :] and same(last, expected)


def saved_by_rank_0(place: Place) -> int:
    """Where each rank has everything, one may save alone. Returns how many counts of steps there are."""
    module = net()
    with sharded(module, OPTIMIZERS["AdamW"](module), strategy="no_shard") as engine:
        run_steps(engine, place.rank, range(4))
        state = engine.optimizer.state_dict()["state"] if place.rank == 0 else {}
        run_steps(engine, place.rank, range(4, 6))
    return len({int(own["step"]) for own in state.values()})


def test_rank_0_saves_alone_where_it_has_everything(cluster: Cluster) -> None:
    assert cluster.run(2, saved_by_rank_0)[0] > 2


def test_torch_loads_the_counts(cluster: Cluster) -> None:
    """And goes on in one process."""
    state = cluster.run(2, trained, "AdamW", "optim_grads_params", 8, None)[0][0]
    module = net()
    module.load_state_dict(state["model"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY)
    numbers = {name: number for number, (name, _) in enumerate(module.named_parameters())}
    optimizer.load_state_dict(
        {
            "state": {numbers[name]: own for name, own in state["optimizer"]["state"].items()},
            "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["optimizer"]["param_groups"]],
        }
    )
    [(expected, losses)] = cluster.run(1, trained, "AdamW", "optim_grads_params", 3, state)
    found = []
    for step in range(8, 11):
        for microbatch in range(MICROBATCHES):
            loss = loss_of(module, step, microbatch, 0)
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert largest(found, losses) < 1e-13
    assert max(float((expected["model"][name] - p.detach()).abs().max()) for name, p in module.named_parameters()) < 1e-13


KINDS: dict[str, Any] = {
    "fp32": ml.AdamW(lr=LR, weight_decay=DECAY),
    "weights in bf16": ml.AdamW(lr=LR, weight_decay=DECAY),
    "bf16": ml.AdamW(lr=LR, betas=(0.9, 0.95), exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"),
    "8 bits": ml.AdamW(lr=LR, exp_avg_dtype="8bit", exp_avg_sq_dtype="8bit"),
    "schedule-free": ml.ScheduleFreeAdamW(lr=LR, weight_decay=DECAY),
}
"""Optimizers of the engine whose state torch does not have."""


def in_buckets(place: Place, kind: str, strategy: str, apart: bool) -> dict[str, Any]:
    """The state after training with masters in fp32; ``apart``: with a group for each parameter, so that each is a bucket."""
    module = net().float()
    given = KINDS[kind]
    if apart:
        options = {"weight_decay": given.weight_decay}
        groups = [ml.group(name, **(options if p.dim() > 1 else {"weight_decay": 0.0})) for name, p in module.named_parameters()]
        given = replace(given, groups=groups)
    with sharded(module, given, strategy=strategy, dtype=torch.bfloat16 if kind == "weights in bf16" else None) as engine:
        for step in range(9):
            for microbatch in range(MICROBATCHES):
                module.choose(step, microbatch, place.rank)
                module(inputs(100 * step + 10 * microbatch + place.rank).float()).square().mean().backward()
            engine.step()
        state = whole_state(engine)
    return {"model": state["model"], "state": state["optimizer"]["state"]}


@pytest.mark.few(3, all=7)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_bucket_has_the_bits_of_a_bucket_of_its_own(kind: str, strategy: str, cluster: Cluster) -> None:
    together, apart = (cluster.run(2, in_buckets, kind, strategy, each)[0] for each in (False, True))
    assert same(together, apart)


def losses_with_zero(place: Place, options: Mapping[str, Any]) -> list[float]:
    module = net()
    with sharded(module, OPTIMIZERS["AdamW"](module), **options) as engine:
        return run_steps(engine, place.rank, range(4))[0]


def test_zero_is_what_find_unused_does(cluster: Cluster) -> None:
    by_word, by_switch = (cluster.run(2, losses_with_zero, options) for options in ({"unused": "zero"}, {"unused": None, "find_unused": True}))
    assert by_word == by_switch
    # What a step leaves out decays, and comes back with other values.
    assert cluster.run(2, losses_with_zero, {}) != by_word


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer_offload": "exact"}, 'shard(unused=): got "skip" with optimizer_offload="exact"'),
        ({"unused": "none"}, "unused: got 'none', expected one of None, zero, skip"),
    ],
)
def test_what_cannot_skip_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    module = net()
    with pytest.raises(UserError) as error:
        sharded(module, ml.AdamW(), **options)
    assert said in str(error.value)
