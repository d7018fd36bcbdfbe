"""An engine around a small module without hooks: parameters are made whole for a pass, and their gradients handed to the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from megatron_llama.config.schema import Config, ParallelConfig, TrainingConfig
from megatron_llama.engine.build import build_engine
from megatron_llama.engine.offload_options import OffloadConfig
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer, StepResult
from megatron_llama.engine.param_handle import ParamHandle
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec, UnitSpec
from megatron_llama.engine.shard.holders import Holders
from megatron_llama.engine.shard.initial import first_values
from megatron_llama.engine.shard.module_buckets import module_bucket_plan
from megatron_llama.engine.shard.names import parameter_names
from megatron_llama.engine.shard.open_counting import OpenCounting
from megatron_llama.engine.shard.optimizer import AdamW, ParameterGroup, parameter_groups
from megatron_llama.engine.shard.values import ModuleValues
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.pipeline.plan.run_engine import engine_options, shard_count
from torch import Tensor, nn

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Block(nn.Module):
    """A unit with matrices, vectors, a number, a convolution of three dims, and buffers."""

    def __init__(self, width: int, *, shared: nn.Linear | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, 3, padding=1, bias=False)
        self.linear = shared or nn.Linear(width, 7)
        self.back = nn.Linear(7, width)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.scale * self.back(torch.tanh(self.linear(hidden)))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.calls.zero_()


class Model(nn.Module):
    """An embedding that is also the head, two blocks that share a layer, and a constant that is not saved."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width)
        first = Block(width)
        self.blocks = nn.ModuleList([first, Block(width, shared=first.linear)])
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("ramp", torch.arange(width, dtype=torch.float32) / width, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.ramp
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


def model(seed: int = 0, *, width: int = 10) -> Model:
    """On every process the same."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Model(width)


def batch(step: int, rank: int, *, rows: int = 2) -> Tensor:
    """The ids of one rank."""
    return torch.randint(0, 13, (rows, 6), generator=torch.Generator().manual_seed(100 * step + rank))


@dataclass
class Sharded:
    """A module and its engine."""

    model: nn.Module
    engine: OverlappedDistributedOptimizer
    groups: tuple[ParameterGroup, ...]
    values: ModuleValues
    handles: dict[str, ParamHandle]

    def step(self, loss_of: Callable[[], Tensor], *, lr: float | Sequence[float] = 1e-2, clip: float = 1.0) -> tuple[Tensor, StepResult]:
        """One step with the mean gradient of all ranks; returns the loss of this rank."""
        self.engine.settle()
        whole = self.values.whole(self.values.aliases)
        for name, parameter in whole.items():
            parameter.requires_grad_(name in self.trainable)
        with self.values.installed(whole):
            loss = loss_of()
            loss.backward()
        self.engine.begin_step(1, (), OpenCounting(self.engine.gradients, lambda bucket: None))
        for name in reversed(self.trainable):
            view, beta = self.handles[name].grad_view()
            assert beta == 0.0
            view.copy_(whole[name].grad)
            self.handles[name].grad_written()
        self.engine.end_backward()
        return loss.detach(), self.engine.step(lr, clip=clip)

    @property
    def trainable(self) -> list[str]:
        return [name for group in self.groups for name in group.names]


def sharded(
    place: Place,
    module: nn.Module,
    *,
    strategy: str = "optim_grads_params",
    optimizer: AdamW | torch.optim.Optimizer | None = None,
    units: Sequence[nn.Module] = (),
    shard_size: int = 0,
    bf16: bool = False,
    offload: str = "none",
    cap: int = 200,
) -> Sharded:
    """Build it, with small buckets. ``units``: each in a unit, everything else in one more."""
    parallel = ParallelConfig(data_parallel_sharding_strategy=strategy, data_parallel_shard_size=shard_size)
    config = Config(parallel=parallel, training=TrainingConfig(bf16=bf16), offload=OffloadConfig(optimizer_offload=offload))  # type: ignore[arg-type]
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    groups = parameter_groups(optimizer or AdamW(lr=1e-2), parameter_names(module))
    options = replace(
        engine_options(config),
        param_slots=2,
        bucket_size=cap,
        grad_divisor=float(mesh.dp.size),
        groups=tuple(group.update_options() for group in groups),
    )
    group_of = {name: number for number, group in enumerate(groups) for name in group.names}
    specs: dict[int, list[ParamSpec]] = {}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for parameter, name in names.items():
        shape = tuple(parameter.shape)
        decay = parameter.requires_grad and groups[group_of[name]].options["weight_decay"] != 0
        spec = ParamSpec(
            name,
            shape,
            (HFSlice(name, shape, 0, shape[0] if shape else 1),),
            decay,
            trainable=parameter.requires_grad,
            group=group_of.get(name, 0),
            resident=len(shape) < 2,
        )
        owners = [number for number, unit in enumerate(units) if any(parameter is one for one in unit.parameters())]
        for owner in owners or [len(units)]:
            specs.setdefault(owner, []).append(spec)
    plan = module_bucket_plan(
        [UnitSpec(f"unit {owner}", tuple(specs[owner]), is_root_part=owner == len(units)) for owner in sorted(specs)],
        options,
        shards=shard_count(parallel, mesh.dp.size),
    )
    handles: dict[str, ParamHandle] = {}

    def attach(placed: object, view: Tensor, handle: ParamHandle) -> None:
        handles[handle.placement.spec.name] = handle  # type: ignore[attr-defined]

    engine = build_engine(options, plan, mesh, attach=attach)
    all_names = parameter_names(module)
    values = first_values(engine, module, all_names, Holders(module, all_names, nullcontext))
    # What hooks would do: nobody reads old values.
    with torch.no_grad():
        forgotten = {name: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p, name in names.items()}
    for name, parameter in forgotten.items():
        for owner, leaf in values.places(name):
            owner._parameters[leaf] = parameter
    return Sharded(module, engine, groups, values, handles)
