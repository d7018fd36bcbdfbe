"""Mixtures of experts that ``shard`` trains: each pass uses the experts that its tokens choose, on each rank others, without ``find_unused``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.nn.functional as F
from megatron_llama.engine.shard.alternatives import alternatives_in_units
from megatron_llama.engine.shard.names import parameter_names
from megatron_llama.engine.shard.optimizer import parameter_groups
from megatron_llama.engine.shard.specs import module_units
from megatron_llama.engine.shard.unit_policies import unit_policies
from megatron_llama.errors import UserError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.engine.shard.test_unused import largest, whole_state
from tests.engine.shard.training import Run, Trained, deviation, train, train_alone
from tests.harness import Cluster
from tests.parallel.cases import LOSS_BOUND, NORM_BOUND, STRATEGIES

WIDTH, EXPERTS, STEPS, MICROBATCHES = 6, 5, 7, 2
LR, DECAY = 1e-2, 0.1
IDLE = EXPERTS - 1
"""The expert that no token chooses in any step."""


class Expert(nn.Module):
    """A gated MLP, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 8, bias=False)
        self.up = nn.Linear(WIDTH, 8, bias=False)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Scaled(nn.Module):
    """An expert whose weight no nn.Linear reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Mixture(nn.Module):
    """A residual block that sends each row through two of the experts that are allowed, one call for each expert that has rows."""

    def __init__(self, expert: type[nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))
        self.allowed: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        logits = self.router(normed)
        if not self.allowed:
            return x + logits.mean(-1, keepdim=True)
        barred = torch.ones(EXPERTS, dtype=torch.bool)
        barred[list(self.allowed)] = False
        weights, chosen = logits.masked_fill(barred, float("-inf")).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, places = torch.where(chosen == number)
            out = out.index_add(0, rows, self.experts[number](normed[rows]) * weights[rows, places, None])
        return x + out


class Net(nn.Module):
    """Blocks of two kinds of experts between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mixture(kind) for kind in (Expert, Scaled, Expert, Expert))
        self.outlet = nn.Linear(WIDTH, WIDTH)
        self.reentrant: bool | None = None

    def allow(self, step: int, microbatch: int, rank: int) -> None:
        """Choose the experts of each block: a microbatch of a rank has two or three of them, and some experts are nobody's for some steps."""
        for number, block in enumerate(self.blocks):
            first = (step // 2 + number) % IDLE
            block.allowed = sorted({first, (first + 1 + (rank + microbatch) % 2) % IDLE, (first + rank) % IDLE})
        if (rank, microbatch) == (1, 0):
            self.blocks[0].allowed = ()  # no expert at all, where the other rank has some

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.outlet(x)


def net(reentrant: bool | None = None) -> Net:
    torch.manual_seed(5)
    made = Net().double()
    made.reentrant = reentrant
    return made


def inputs(number: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def loss_of(model: nn.Module, inner: Net, step: int, microbatch: int, rank: int) -> Tensor:
    inner.allow(step, microbatch, rank)
    number = 100 * step + 10 * microbatch + rank
    return F.mse_loss(model(inputs(number)), inputs(number + 5)) / MICROBATCHES


def grouped(module: nn.Module) -> torch.optim.AdamW:
    """Experts in a group of their own, so that a unit has several buckets."""
    parts: list[list[nn.Parameter]] = [[], []]
    for name, parameter in module.named_parameters():
        parts["experts" in name].append(parameter)
    return torch.optim.AdamW([{"params": parts[0]}, {"params": parts[1], "lr": 2 * LR}], lr=LR, weight_decay=DECAY)


def alone(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY)


def ddp_run(rank: int, make: Any, clip: float, steps: int) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Losses, norms, parameters and the optimizer's state by parameter, of torch."""
    module = net()
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = make(module)
    losses, norms = [], []
    for step in range(steps):
        for microbatch in range(MICROBATCHES):
            with nullcontext() if microbatch == MICROBATCHES - 1 else ddp.no_sync():
                loss = loss_of(ddp, module, step, microbatch, rank)
                loss.backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    names = {parameter: name for name, parameter in module.named_parameters()}
    return losses, norms, {name: p.detach() for name, p in module.named_parameters()}, {names[p]: dict(own) for p, own in optimizer.state.items()}


def engine_steps(engine: Any, rank: int, steps: range) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in steps:
        for microbatch in range(MICROBATCHES):
            loss = loss_of(engine.model, engine.model, step, microbatch, rank)
            loss.backward()
            losses.append(loss.item())
        norms.append(engine.step().grad_norm.item())
    return losses, norms


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in groups": {"make": grouped},
    "clipped": {"clip": 0.05},
    "checkpointed": {"reentrant": False},
    "checkpointed, reentrant": {"reentrant": True},
    "small buckets": {"bucket_size": 100, "grad_slots": 1},
    "no static order": {"static_order": False},
}


def beside_ddp(place: Place, strategy: str, ways: Sequence[str]) -> dict[str, float]:
    """By way, the largest difference from DDP: of losses, norms, parameters, moments and counts of steps."""
    differences = {}
    for way in ways:
        options = {"make": alone, "clip": 0.0, "reentrant": None, "strategy": strategy} | WAYS[way]
        make, clip, reentrant = (options.pop(name) for name in ("make", "clip", "reentrant"))
        losses, norms, parameters, expected = ddp_run(place.rank, make, clip, STEPS)
        module = net(reentrant)
        with ml.shard(module, units=[Mixture], optimizer=make(module), clip=clip, microbatches=MICROBATCHES, **options) as engine:
            found_losses, found_norms = engine_steps(engine, place.rank, range(STEPS))
            state = whole_state(engine)
        worst = [largest(found_losses, losses), largest(found_norms, norms)]
        worst += [float((state["model"][name] - value).abs().max()) for name, value in parameters.items()]
        idle = [name for name in parameters if f".experts.{IDLE}." in name]
        assert idle and not expected.keys() & set(idle), "torch has trained what was never used"
        counts = {int(own["step"]) for own in expected.values()}
        assert max(counts) == STEPS and len(counts) > 2, f"{counts}: no expert was left out of some steps and trained in others"
        for name, own in state["optimizer"]["state"].items():
            for what, value in own.items():
                theirs = torch.as_tensor(expected[name][what] if name in expected else 0.0)
                worst.append(float((torch.as_tensor(value).double() - theirs.double()).abs().max()))
        differences[way] = max(worst) / (1e-7 if clip else 1e-13)
    return differences


@pytest.mark.few(1, all=4)
@pytest.mark.parametrize("strategy", STRATEGIES[::-1])
def test_experts_train_as_with_ddp(strategy: str, cluster: Cluster) -> None:
    for differences in cluster.run(2, beside_ddp, strategy, [*WAYS]):
        assert max(differences.values()) < 1, differences


def refusals(place: Place, cases: Sequence[tuple[Mapping[str, Any], str]]) -> list[str]:
    """What training ends with: of each case the options of ``shard``, and the name of an optimizer of the engine."""
    messages = []
    for options, optimizer in cases:
        engine = ml.shard(net(), optimizer=getattr(ml, optimizer)(lr=LR), microbatches=MICROBATCHES, **options)
        try:
            with engine:
                engine_steps(engine, place.rank, range(2))
        except UserError as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages


def test_where_experts_cannot_be_left_out(cluster: Cluster) -> None:
    """Muon updates them together, and without units nothing shows the end of their gradients."""
    cases = [({"units": [Mixture]}, "Muon"), ({"units": [Mixture], "unused": "zero"}, "Muon"), ({}, "AdamW")]
    for by_muon, with_zero, without_units in cluster.run(2, refusals, cases):
        assert "experts" in by_muon and "find_unused=True" in by_muon
        assert with_zero == ""
        assert "experts" in without_units and "find_unused=True" in without_units


def test_what_is_alike() -> None:
    """Of a unit the experts, and nothing else: no list of unlike modules, no part of another unit, no frozen parameter."""
    module = net()
    module.blocks[1].experts.requires_grad_(False)
    module.blocks[2].experts[1] = nn.Linear(WIDTH, WIDTH)  # type: ignore[index]
    names = parameter_names(module)
    for kinds, found in (([Mixture], [0, 3]), ([Mixture, Net], [0, 3]), ([Expert], [])):
        policies = unit_policies(kinds)
        units = module_units(module, names, policies)
        by_unit = alternatives_in_units(units, names, parameter_groups(ml.AdamW(), names, units), "none")
        assert {name for own in by_unit.values() for name in own} == {
            name for name, _ in module.named_parameters() if any(f"blocks.{number}.experts" in name for number in found)
        }, kinds


@dataclass(frozen=True)
class Mixed(Run):
    """A model of transformers whose experts are computed in one of its ways."""

    experts: str = "eager"
    reentrant: bool | None = None
    """How it is checkpointed; None: not at all."""

    def built(self, rank: int = 0) -> nn.Module:
        model: Any = super().built(rank)
        model.set_experts_implementation(self.experts)
        if self.reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": self.reentrant})
        return model  # type: ignore[no-any-return]


def all_trained(place: Place, cases: Sequence[tuple[Run, str]]) -> list[Trained]:
    return [train(run, place.rank, strategy=strategy) for run, strategy in cases]


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_experts_of_transformers(model: str, cluster: Cluster) -> None:
    """Stacked in one parameter they have a gradient always, of zeros where no token chose them. A reentrant checkpoint leaves the loss that
    balances them without a gradient, in transformers too."""
    run = Mixed(model, microbatches=2, steps=4)
    runs = [run, replace(run, experts="grouped_mm"), replace(run, experts="batched_mm"), replace(run, reentrant=False), replace(run, reentrant=True)]
    cases = [*zip(runs, (*STRATEGIES, STRATEGIES[-1]), strict=True)]
    expected = [train_alone(run) for run in runs]
    for rank, found in enumerate(cluster.run(2, all_trained, cases)):
        for (case, strategy), one, twin in zip(cases, found, expected, strict=True):
            half = len(twin.losses) // 2
            loss = deviation(one.losses, twin.losses[half * rank :][:half])
            assert loss < LOSS_BOUND and deviation(one.norms, twin.norms) < NORM_BOUND, (case, strategy, loss)
