"""The engine under a model that is not ours: parameters of any rank in groups, the mean over ranks, accesses that nobody planned.

The model is a formula: the gradient of a parameter is its distance from a target of each rank and microbatch. So torch.optim.AdamW on
the mean of those gradients, in one process, says what every step has to give.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_llama.config.schema import TrainingConfig
from megatron_llama.engine.build import build_engine
from megatron_llama.engine.counting import Counting, PlannedCounting
from megatron_llama.engine.offload.exact import ExactOffload
from megatron_llama.engine.offload_options import OffloadConfig, ZenFlowConfig
from megatron_llama.engine.options import EngineOptions, UpdateOptions
from megatron_llama.engine.param_handle import ParamHandle
from megatron_llama.engine.plan.buckets import PlacedParam, strategy_named
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec, Rectangle, UnitSpec
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.engine.shard.data_mesh import close_data_mesh, data_mesh
from megatron_llama.engine.shard.module_buckets import module_bucket_plan
from megatron_llama.engine.shard.open_counting import OpenCounting, UnusedCounting
from megatron_llama.launch.launcher import Place
from megatron_llama.pipeline.plan.run_engine import compute_dtype_name
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.harness import Cluster

CPU = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {
    "root.weight": (9, 4),
    **{f"layers.{n}.{leaf}": shape for n in range(4) for leaf, shape in {"conv": (6, 5, 3, 3), "weight": (8, 11), "bias": (8,)}.items()},
    "layers.0.q_proj.weight": (4, 6),
    "layers.0.kv_proj.weight": (8, 10),
    "number": (),
}
LRS = (1e-2, 3e-3)
GROUPS = (UpdateOptions(adam_beta2=0.95, weight_decay=0.1), UpdateOptions(adam_beta1=0.8, adam_eps=1e-5, weight_decay=0.3))
STEPS = 3
MICROBATCHES = 2


def group_of(name: str) -> int:
    """Convolutions and the vectors of the last layer are the second group."""
    return int("conv" in name or name == "layers.3.bias")


def units() -> list[UnitSpec]:
    def spec(name: str) -> ParamSpec:
        shape = SHAPES[name]
        small = len(shape) < 2
        part = HFSlice(name, shape, 0, shape[0] if shape else 1)
        return ParamSpec(name, shape, (part,), decay=not small or name == "layers.3.bias", group=group_of(name), resident=small)

    layers = [UnitSpec(f"layers.{n}", tuple(spec(name) for name in SHAPES if name.startswith(f"layers.{n}."))) for n in range(4)]
    ends = [UnitSpec(name, (spec(name),), is_root_part=True) for name in ("root.weight", "number")]
    return [ends[0], *layers, ends[1]]


def values(name: str, seed: int) -> Tensor:
    number = list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(1000 * seed + number))


def target(name: str, rank: int, step: int, microbatch: int) -> Tensor:
    return values(name, 1 + rank + 10 * step + 100 * microbatch)


@dataclass(frozen=True)
class Case:
    """An engine, and how its steps are walked."""

    strategy: str
    shard_size: int = 0
    clip: float = 0.0
    planned: bool = True
    """The first step is recorded and the others follow it. Otherwise no step is planned."""
    find_unused: bool = False
    mean: bool = True
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    zenflow: ZenFlowConfig = field(default_factory=ZenFlowConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    announce: bool = False
    guesses_end: bool = False
    """No update that was begun during backward is overtaken by its step, which would make it again on any machine that is busy."""
    steps: int = STEPS


def wait_for_guesses(engine: Any) -> None:
    for rule in engine.rules.distinct:
        for shard in rule._shards.values() if isinstance(rule, ExactOffload) else ():
            if shard.attempt is not None:
                shard.attempt.wait()


class Formula:
    """The model of one rank and its engine."""

    def __init__(self, case: Case, group: DeviceMesh | dist.ProcessGroup | None = None) -> None:
        self.case = case
        found = strategy_named(case.strategy)
        self.mesh = data_mesh(group, case.shard_size if found.sharded else 1, CPU)
        options = EngineOptions(
            strategy=case.strategy,
            bucket_size=400,
            dtype=compute_dtype_name(case.training),
            grad_divisor=float(self.mesh.dp.size) if case.mean else 1.0,
            find_unused=case.find_unused,
            clip=case.clip,
            groups=GROUPS,
            offload=case.offload,
            zenflow=case.zenflow,
        )
        plan = module_bucket_plan(units(), options, shards=self.mesh.dp_shard.size)
        self.attached: dict[str, tuple[Tensor, ParamHandle]] = {}
        self.engine = build_engine(options, plan, self.mesh, attach=self._attach)
        self.engine.load_weights(self._fill)
        self.units = [[spec.name for spec in unit.params] for unit in units()]
        self.recorded: Any = None

    def _attach(self, placed: PlacedParam, view: Tensor, handle: ParamHandle) -> None:
        self.attached[placed.spec.name] = view, handle

    @staticmethod
    def _fill(rectangle: Rectangle, out: Tensor) -> None:
        block = tuple(slice(at, at + size) for at, size in zip(rectangle.offset, rectangle.size, strict=True))
        out.copy_(values(rectangle.name, 0)[block])

    def read(self, unit: int) -> dict[str, Tensor]:
        """The weights of a unit, once they are there."""
        found = {}
        for name in self.units[unit]:
            view, handle = self.attached[name]
            handle.wait_unsharded()
            found[name] = view.clone()
        return found

    def step(self, number: int) -> Any:
        count = len(self.units)
        ahead = [WeightAccess(unit, backward=False) for unit in range(count)]
        once = [*ahead, *(WeightAccess(unit, backward=True) for unit in reversed(range(count)))]
        planned = self.case.planned and self.recorded is not None
        lrs = [lr * (1 + number) for lr in LRS]
        if self.case.announce:
            self.engine.announce_step(lrs, clip=self.case.clip)
        if planned:
            counting: Counting = PlannedCounting(self.recorded, self.engine.bucket_plan.label)
        else:
            make = UnusedCounting if self.case.find_unused else OpenCounting
            counting = make(self.engine.gradients, lambda bucket: None)
        self.engine.begin_step(MICROBATCHES, once * MICROBATCHES if planned else (), counting)
        for microbatch in range(MICROBATCHES):
            for index, access in enumerate(once):
                if planned:
                    self.engine.access(access.unit, access.backward)
                else:
                    self.engine.access_unplanned(access.unit, once[index + 1].unit if index + 1 < len(once) else None)
                weights = self.read(access.unit)
                for name in reversed(weights) if access.backward else ():
                    self._deliver(name, weights[name] - target(name, self.mesh.rank, number, microbatch))
            self.engine.end_backward()
        if self.case.guesses_end:
            wait_for_guesses(self.engine)
        result = self.engine.step(lrs, clip=self.case.clip)
        if self.recorded is None and not self.case.find_unused:
            self.recorded = counting.rounds()
        return result

    def _deliver(self, name: str, grad: Tensor) -> None:
        _, handle = self.attached[name]
        view, beta = handle.grad_view()
        view.copy_(grad if beta == 0.0 else view + grad)
        handle.grad_written()

    def weights(self) -> dict[str, Tensor]:
        self.engine.settle()
        found: dict[str, Tensor] = {}
        for unit in range(len(self.units)):
            self.engine.access_unplanned(unit)
            found |= self.read(unit)
        return found


def expected(ranks: int, case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and weights of torch.optim.AdamW in fp32, in one process."""
    params = {name: torch.nn.Parameter(values(name, 0)) for name in SHAPES}
    options = []
    for name, param in params.items():
        group = GROUPS[group_of(name)]
        decays = param.dim() >= 2 or name == "layers.3.bias"
        options.append(
            {
                "params": [param],
                "betas": (group.adam_beta1, group.adam_beta2),
                "eps": group.adam_eps,
                "weight_decay": group.weight_decay if decays else 0.0,
                "name": name,
            }
        )
    optimizer = torch.optim.AdamW(options)
    norms = []
    for step in range(case.steps):
        for name, param in params.items():
            parts = [param.detach() - target(name, rank, step, m) for rank in range(ranks) for m in range(MICROBATCHES)]
            param.grad = sum(parts, torch.zeros(param.shape)) / (ranks if case.mean else 1)
        grads = [param.grad for param in params.values() if param.grad is not None]
        norms.append(float(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]).double())))
        if case.clip:
            torch.nn.utils.clip_grad_norm_(list(params.values()), case.clip)
        for group in optimizer.param_groups:
            group["lr"] = LRS[group_of(group["name"])] * (1 + step)
        optimizer.step()
    return norms, {name: param.detach() for name, param in params.items()}


def check(_: Place, case: Case, group: DeviceMesh | dist.ProcessGroup | None = None) -> list[int]:
    model = Formula(case, group)
    with closing(model.engine):
        results = [model.step(number) for number in range(case.steps)]
        norms, weights = expected(model.mesh.dp.size, case)
        for result, norm in zip(results, norms, strict=True):
            assert float(result.skipped) == 0.0 and float(result.loss_scale) == 1.0
            torch.testing.assert_close(float(result.grad_norm), norm, rtol=2e-6, atol=0.0)
        found = model.weights()
        assert found.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=0.0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
        kept = [rule.speculation.kept for rule in model.engine.rules.distinct if isinstance(rule, ExactOffload)]
    close_data_mesh(model.mesh)
    return kept


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
EXACT = OffloadConfig(optimizer_offload="exact")
HALF = OffloadConfig(optimizer_offload="exact", optimizer_offload_fraction=0.5)
SPECULATIVE = OffloadConfig(optimizer_offload="exact", offload_speculative=True)
ALL_HOT = ZenFlowConfig(zenflow_topk_ratio=1.0)
EVERY_STEP = ZenFlowConfig(zenflow_update_interval="1", zenflow_select_interval="1000000", zenflow_select_strategy="step")
ZENFLOW = OffloadConfig(optimizer_offload="zenflow")
CASES = {
    **{strategy: Case(strategy) for strategy in STRATEGIES},
    **{f"{strategy} clipped, never planned": Case(strategy, clip=0.7, planned=False) for strategy in STRATEGIES},
    **{f"{strategy} unused": Case(strategy, clip=0.7, find_unused=True) for strategy in STRATEGIES},
    "sum": Case("optim_grads_params", mean=False, clip=0.7),
    "announced": Case("optim", announce=True),
    "exact": Case("optim_grads_params", clip=0.7, offload=EXACT),
    "half": Case("optim", clip=0.7, offload=HALF),
    "all hot": Case("optim_grads_params", clip=0.7, offload=ZENFLOW, zenflow=ALL_HOT),
    "cold every step": Case("optim_grads", clip=0.7, offload=ZENFLOW, zenflow=EVERY_STEP),
    # The first step updates everything, the second one is half of a window, which ends with the run.
    "cold at the end": Case("optim", clip=0.7, offload=ZENFLOW, zenflow=replace(EVERY_STEP, zenflow_update_interval="2"), steps=2),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@cases
def test_alone(case: Case) -> None:
    check(Place(0, 1, 0), case)


def check_many(place: Place, several: Sequence[Case]) -> None:
    for case in several:
        check(place, case)


@pytest.mark.parametrize("number", range(4))
def test_two_ranks(cluster: Cluster, number: int) -> None:
    cluster.run(2, check_many, list(CASES.values())[number::4])


def test_hybrid(cluster: Cluster) -> None:
    """Four ranks, shards over two of them."""
    planned = [Case(strategy, shard_size=2, clip=0.7) for strategy in STRATEGIES[1:]]
    unused = Case("optim_grads_params", shard_size=2, clip=0.7, find_unused=True, planned=False)
    cluster.run(4, check_many, [*planned, unused])


def check_groups(place: Place) -> None:
    """Shards and replicas as a DeviceMesh has them, whose rows are no neighbours; and a group of two ranks, while the others train alone."""
    case = Case("optim_grads_params", clip=0.7)
    check(place, case, DeviceMesh("cpu", torch.tensor([[3, 0], [1, 2]])))
    pair = dist.new_group([1, 3])
    alone = dist.new_group([place.rank], use_local_synchronization=True)
    check(place, case, pair if place.rank in (1, 3) else alone)
    check(place, Case("no_shard"))


@pytest.mark.long
def test_groups_of_the_user(cluster: Cluster) -> None:
    cluster.run(4, check_groups)


@pytest.mark.long
def test_updates_are_guessed_as_unclipped_whatever_the_mean_divides_by(cluster: Cluster) -> None:
    """With a clip that never binds, every speculative update is kept."""
    case = Case("optim_grads_params", clip=1e9, offload=SPECULATIVE, announce=True, guesses_end=True)
    for kept in cluster.run(2, check, case):
        assert kept[0] > 0
    assert check(Place(0, 1, 0), case)[0] > 0


def check_fp16() -> tuple[float, float]:
    """fp16 without a loss scale: nothing scales the loss of a user's model, and nothing changes a scale."""
    model = Formula(Case("optim", training=TrainingConfig(fp16=True)))
    with closing(model.engine):
        assert model.engine.dtype is torch.float16 and not model.engine.loss_scale.dynamic
        results = [model.step(number) for number in range(2)]
    return float(results[0].loss_scale), float(results[1].skipped)


def test_without_a_loss_scale() -> None:
    assert check_fp16() == (1.0, 0.0)
