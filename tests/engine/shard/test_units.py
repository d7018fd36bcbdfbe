"""Units that compute in a dtype of their own, and units that stay gathered: ``ml.unit``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.nn.functional as F
from megatron_llama.engine.shard.placeholders import ShardedParameterError
from megatron_llama.errors import ConfigError, TrainingError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import Cluster
from tests.torch_twin import by_decay

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WIDTH, EXPERTS, STEPS, MICROBATCHES = 32, 4, 4, 2
LR, DECAY = 1e-2, 0.1


class Dense(nn.Module):
    """A linear layer whose gradient comes from autograd, rounded to the dtype of its weight: so one process has the same bits."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Norm(nn.Module):
    """A norm, which takes its inputs in fp32 whatever they are: it has to be given them so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.weight.dtype
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Router(nn.Module):
    """Weights of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = Dense(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.scores.weight.dtype
        return torch.softmax(self.scores(x), -1)


class Block(nn.Module):
    """A block with a norm, a router and experts."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.norm, self.router = Norm(), Router()
        self.experts = nn.ModuleList(Dense(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        shares = self.router(normed)
        assert normed.dtype == shares.dtype == x.dtype
        return x + sum(shares[:, number, None] * torch.tanh(expert(normed)) for number, expert in enumerate(self.experts))


def net(seed: int = 0, *, recomputes: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Dense(16, WIDTH), *(Block(recomputes=recomputes) for _ in range(4)), Dense(WIDTH, 16))


def inputs(step: int, microbatch: int, rank: int) -> Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(1000 * step + 100 * microbatch + rank))


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean() / MICROBATCHES


@dataclass(frozen=True)
class Mixed:
    """Which dtypes a model has."""

    dtype: torch.dtype
    units: Callable[[], Sequence[Any]]
    own: dict[type[nn.Module], torch.dtype]


BF16, FP32 = torch.bfloat16, torch.float32
MIXES = {
    "fp32 in bf16": Mixed(BF16, lambda: [Block, ml.unit(Router, dtype=FP32, keep=True), ml.unit(Norm, dtype=FP32)], {Router: FP32, Norm: FP32}),
    "bf16 in fp32": Mixed(FP32, lambda: [ml.unit(Block, dtype=BF16), Router, Norm], {Block: BF16, Router: FP32, Norm: FP32}),
    "kept": Mixed(BF16, lambda: [Block, ml.unit(Router, keep=True), ml.unit(lambda module: type(module) is Norm, keep=True)], {}),
}


def cast(module: nn.Module, own: dict[type[nn.Module], torch.dtype], dtype: torch.dtype) -> None:
    """Plain torch's module in these dtypes, its inputs and outputs cast by hooks."""
    chosen = own.get(type(module), dtype)
    for child in module.children():
        cast(child, own, chosen if type(module) not in (nn.Sequential, nn.ModuleList) else dtype)
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(chosen)
    if type(module) in own:
        module.register_forward_pre_hook(lambda module, args: tuple(value.to(chosen) for value in args))
        module.register_forward_hook(lambda module, args, output: output.to(dtype))


class Twin:
    """One process with masters in fp32 and a copy of the model that computes."""

    def __init__(self, mixed: Mixed, world: int, *, each_microbatch: bool) -> None:
        self.masters = net()
        self.model = copy.deepcopy(self.masters)
        cast(self.model, mixed.own, mixed.dtype)
        self.dtype, self.world, self.each_microbatch = mixed.dtype, world, each_microbatch
        self.optimizer = torch.optim.AdamW(by_decay(self.masters.parameters(), DECAY), lr=LR, fused=True)

    def step(self, step: int) -> list[list[float]]:
        """Losses by rank and microbatch."""
        grads: dict[tuple[int, int], list[Tensor]] = {}
        losses: list[list[float]] = []
        for rank in range(self.world):
            losses.append([])
            for microbatch in range(MICROBATCHES):
                loss = loss_of(self.model(inputs(step, microbatch, rank).to(self.dtype)))
                loss.backward()
                losses[-1].append(loss.item())
                grads[rank, microbatch] = [parameter.grad.float() for parameter in self.model.parameters()]
                self.model.zero_grad()
        for number, master in enumerate(self.masters.parameters()):
            by_rank = [[grads[rank, m][number] for m in range(MICROBATCHES)] for rank in range(self.world)]
            # The order in which the engine adds.
            outer = list(zip(*by_rank, strict=True)) if self.each_microbatch else by_rank
            master.grad = in_order([in_order(inner) for inner in outer]) / self.world
        self.optimizer.step()
        for master, computes in zip(self.masters.parameters(), self.model.parameters(), strict=True):
            computes.data.copy_(master.data)
        return losses


def in_order(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def engine_of(model: nn.Module, mixed: Mixed, **options: Any) -> ml.ModuleEngine:
    optimizer = ml.AdamW(lr=LR, weight_decay=DECAY)
    return ml.shard(model, units=mixed.units(), dtype=mixed.dtype, optimizer=optimizer, microbatches=MICROBATCHES, **options)


def mixed_steps(place: Place, kind: str, strategy: str, recomputes: bool) -> bool:
    mixed = MIXES[kind]
    model = net(recomputes=recomputes)
    engine = engine_of(model, mixed, strategy=strategy)
    twin = Twin(mixed, place.world_size, each_microbatch=strategy.startswith("optim_grads"))
    same = True
    for step in range(STEPS):
        expected = twin.step(step)[place.rank]
        for microbatch in range(MICROBATCHES):
            loss = loss_of(model(inputs(step, microbatch, place.rank)))
            loss.backward()
            same &= loss.item() == expected[microbatch]
        engine.step()
    state = engine.state_dict()
    wanted = dict(twin.masters.named_parameters())
    for name, value in state["model"].items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        same &= whole.dtype == FP32 and torch.equal(whole, wanted[name])
    x = inputs(99, 0, 0)
    with torch.no_grad():
        evaluated, expected_output = model(x), twin.model(x.to(mixed.dtype))
        same &= torch.equal(evaluated, expected_output)
        with engine.gathered():
            # The same dtypes, and the same casts.
            same &= torch.equal(model(x), expected_output)
            dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        same &= dtypes == {name: parameter.dtype for name, parameter in twin.model.named_parameters()}
        with engine.gathered(modify=True):
            same &= {parameter.dtype for parameter in model.parameters()} == {FP32}
            whole = model(x)
            same &= whole.dtype == FP32 and torch.allclose(whole, twin.masters(x))
    engine.load_state_dict(state)
    with torch.no_grad():
        same &= torch.equal(model(x), expected_output)
    engine.close()
    return same


@pytest.mark.few(2, all=6)
@pytest.mark.parametrize("strategy", STRATEGIES[::-1])
@pytest.mark.parametrize("kind", MIXES)
def test_units_of_other_dtypes_have_the_bits_of_one_process(kind: str, strategy: str, cluster: Cluster) -> None:
    assert cluster.run(2, mixed_steps, kind, strategy, False) == [True, True]


@pytest.mark.long
@pytest.mark.few(3)
@pytest.mark.parametrize("kind", MIXES)
def test_units_of_other_dtypes_over_four_ranks(kind: str, cluster: Cluster) -> None:
    assert cluster.run(4, mixed_steps, kind, "optim_grads_params", True) == [True] * 4


def gathers(place: Place, keep: bool) -> tuple[int, int]:
    """In a planned step: all, and those of routers."""
    model = net()
    engine = ml.shard(model, units=[Block, ml.unit(Router, keep=keep)], param_slots=1, microbatches=MICROBATCHES)
    for step in range(3):
        before = engine._engine.parameters.launched
        for microbatch in range(MICROBATCHES):
            loss_of(model(inputs(step, microbatch, place.rank))).backward()
        engine.step()
    launched = engine._engine.parameters.launched - before
    plan = engine._engine.bucket_plan
    routers = [bucket.index for bucket in plan.buckets if "router" in bucket.placements[0].spec.name]
    own = sum(plan.has_own_slot(bucket) for bucket in routers)
    assert len(routers) == 4
    engine.close()
    return launched, own


def test_a_kept_unit_is_gathered_once_in_a_step(cluster: Cluster) -> None:
    """Four routers with a slot: anew for each pass, and the first of a pass is there since the one before."""
    [(kept, own), *_] = cluster.run(2, gathers, True)
    [(anew, shared), *_] = cluster.run(2, gathers, False)
    assert (own, shared) == (4, 0)
    assert anew - kept == 2 * MICROBATCHES * 4 - 4 - (2 * MICROBATCHES - 1)


class Typed(nn.Module):
    """A unit that tells what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return x * self.scale


class Outer(nn.Module):
    """A unit with such a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Typed(), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.inner(x)
        return self.seen.to(self.scale.dtype) * self.scale


CASTS: dict[str, tuple[Callable[[], Sequence[Any]], torch.dtype | None, tuple[torch.dtype, torch.dtype, torch.dtype]]] = {
    "as around": (lambda: [Outer, Typed], BF16, (BF16, BF16, BF16)),
    "back": (lambda: [Outer, ml.unit(Typed, dtype=FP32)], BF16, (FP32, BF16, BF16)),
    "output": (lambda: [Outer, ml.unit(Typed, dtype=FP32, output_dtype=FP32)], BF16, (FP32, FP32, BF16)),
    "output alone": (lambda: [Outer, ml.unit(Typed, output_dtype=FP32)], BF16, (BF16, FP32, BF16)),
    "inputs as they are": (lambda: [Outer, ml.unit(Typed, dtype=FP32, cast_inputs=False)], BF16, (BF16, BF16, BF16)),
    "what is around": (lambda: [ml.unit(Outer, dtype=BF16), ml.unit(Typed, dtype=FP32)], None, (FP32, BF16, FP32)),
    "inside": (lambda: [ml.unit(Outer, dtype=BF16), Typed], None, (FP32, BF16, FP32)),
}
"""Units, the model's dtype; what the inner unit gets, what its caller gets, what the model returns."""


@pytest.mark.parametrize("kind", CASTS)
def test_inputs_and_outputs_of_a_unit_are_cast(kind: str) -> None:
    units, dtype, expected = CASTS[kind]
    model = nn.Sequential(Outer())
    with ml.shard(model, units=units(), dtype=dtype) as engine:
        for _ in range(2):
            output = model(torch.randn(3, 16))
            output.sum().backward()
            engine.step()
        assert (model[0].inner.seen[-1], model[0].seen.dtype, output.dtype) == expected
        with engine.gathered():
            output = model(torch.randn(3, 16))
        assert (model[0].inner.seen[-1], model[0].seen.dtype, output.dtype) == expected


@dataclass
class Answer:
    """A container that torch's pytree does not know."""

    value: Tensor


class Answering(Typed):
    def forward(self, x: Tensor) -> Answer:  # type: ignore[override]
        return Answer(x * self.scale)


def test_outputs_that_cannot_be_cast_are_refused() -> None:
    model = nn.Sequential(Answering())
    with ml.shard(model, units=[ml.unit(Answering, dtype=FP32)], dtype=BF16), pytest.raises(TrainingError, match=r"value of Answer, an output of a unit: got torch.float32"):
        model(torch.randn(3, 16))


def test_frozen_weights_keep_their_bits_in_a_unit_of_their_dtype() -> None:
    model = net()
    for block in model[1:5]:
        block.router.requires_grad_(False)
    before = model[1].router.scores.weight.detach().clone()
    with ml.shard(model, units=[Block, ml.unit(Router, dtype=FP32)], dtype=BF16) as engine:
        assert torch.equal(engine.state_dict()["model"]["1.router.scores.weight"], before)
        assert model[1].router.scores.weight.dtype == FP32 and model[0].weight.dtype == BF16
        model.to("cpu")
        with pytest.raises(ShardedParameterError, match=r"model: got a move to torch.bfloat16"):
            model.to(BF16)


def test_parameters_that_have_the_dtypes_of_their_units_need_no_other() -> None:
    model = net().bfloat16()
    for block in model[1:5]:
        block.router.float()
    with pytest.raises(ConfigError, match=r"dtype: got None for torch.bfloat16 of"):
        ml.shard(model, units=[Block])
    with ml.shard(model, units=[Block, ml.unit(Router, dtype=FP32)]) as engine:
        loss_of(model(inputs(0, 0, 0).bfloat16())).backward()
        engine.step()
        with engine.gathered():
            assert {parameter.dtype for parameter in model[1].router.parameters()} == {FP32}
            assert {parameter.dtype for parameter in model[1].experts.parameters()} == {BF16}


def tied() -> nn.Sequential:
    model = net()
    model[1].router.scores.weight = model[2].experts[0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any], list[str]]] = {
    "no match": (net, lambda: [Block, ml.unit(nn.LSTM, keep=True)], {}, [r"ml.unit\(LSTM\): got no module with parameters that matches"]),
    "two policies": (
        net,
        lambda: [Block, ml.unit(Router, keep=True), ml.unit(lambda module: type(module) is Router, dtype=FP32)],
        {},
        [r"1.router: got a match of ml.unit\(Router\) and of ml.unit\(.*<lambda>\), which say different things"],
    ),
    "class and policy": (net, lambda: [Block, Router, ml.unit(Router, keep=True)], {}, ["1.router: got a match of Router and of ml.unit"]),
    "all at once": (
        net,
        lambda: [ml.unit(Block, dtype=torch.int8), ml.unit(Router, output_dtype=torch.int16), ml.unit(nn.GRU)],
        {"clip": -1.0},
        ["clip: got -1.0", r"ml.unit\(Block\): dtype: got torch.int8", r"ml.unit\(Router\): output_dtype", r"ml.unit\(GRU\): got no module"],
    ),
    "fp64": (net, lambda: [ml.unit(Block, dtype=torch.float64)], {}, [r"dtype: got torch.float64 in a model of torch.float32"]),
    "offload": (
        net,
        lambda: [Block, ml.unit(Router, dtype=FP32)],
        {"dtype": BF16, "optimizer_offload": "exact"},
        ["got torch.float32 in a model of torch.bfloat16, with optimizer_offload='exact'"],
    ),
    "shared": (tied, lambda: [Block, ml.unit(Router, dtype=FP32)], {"dtype": BF16}, ["got torch.float32 by 1.router and no dtype by 2, which share it"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_policies_that_are_none_are_refused(kind: str) -> None:
    build, units, options, messages = REFUSED[kind]
    with pytest.raises(ConfigError) as error:
        ml.shard(build(), units=units(), **options)
    for message in messages:
        assert error.match(message)


def test_what_is_no_unit_is_refused() -> None:
    for wrong in (3, "Block", int):
        with pytest.raises(TypeError, match=r"ml.unit: got"):
            ml.unit(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"shard\(units\): got 3 in it"):
        ml.shard(net(), units=[3])  # type: ignore[list-item]


def other_policies(place: Place) -> str:
    with pytest.raises(ConfigError) as error:
        ml.shard(net(), units=[Block, ml.unit(Router, keep=place.rank == 0)])
    return str(error.value)


def test_ranks_have_the_same_policies(cluster: Cluster) -> None:
    for message in cluster.run(2, other_policies):
        assert "units: got" in message and "'keep': True" in message
