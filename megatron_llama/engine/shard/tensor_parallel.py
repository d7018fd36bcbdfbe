"""Models with torch's tensor parallelism inside: what ``shard`` does with DTensor parameters.

The engine shards a model over its data-parallel ranks. Each of these may share parameters with
other ranks, as torch's ``parallelize_module`` arranges it: then the world of the engine is a grid,
and all of its ranks agree on passes, steps and errors. A parameter that is cut there counts on each
of these ranks in the norm of the gradient, others count once.

Imported for models that have DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import eq
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from megatron_llama.engine.comm.object_collectives import all_gather_object, raise_on_all_ranks
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.options import ADAM, EIGHT_BIT, SCHEDULE_FREE, TORCH
from megatron_llama.engine.plan.specs import UnitSpec
from megatron_llama.engine.shard.data_mesh import add_axis
from megatron_llama.engine.shard.gathered import sum_of_words
from megatron_llama.engine.shard.names import ParameterNames, clean_name
from megatron_llama.engine.shard.optimizer import ParameterGroup
from megatron_llama.engine.shard.state import StateLayout
from megatron_llama.engine.shard.tensor_layouts import ALL_PLAIN, TensorLayouts
from megatron_llama.engine.shard.values import MASTER, ModuleValues, named
from megatron_llama.errors import ClusterError, ConfigError, TrainingError, describe

T = TypeVar("T")
ELEMENTWISE = (ADAM, SCHEDULE_FREE, TORCH)
"""The update rules that give a part of a parameter what they would give it in the whole."""
LARGEST_DIFFERENCE = 1e-2
"""The most by which norm and sum of one gradient may differ between ranks that compute it alike, as
a share of its norm: in bf16, with sums in another order. A rank's part of a sum, or the gradient of
other samples, differs by more."""


@dataclass(frozen=True)
class TensorLayout:
    """The ranks that share one parameter, and how."""

    mesh: DeviceMesh
    """Of one dim."""
    placement: Placement
    """Shard or Replicate."""
    shape: tuple[int, ...]
    """The shape of the whole parameter."""

    @property
    def is_cut(self) -> bool:
        """Whether each rank has a part of its own."""
        return isinstance(self.placement, Shard)

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides of the whole parameter."""
        return torch.empty(self.shape, device="meta").stride()

    def around(self, local: Tensor) -> DTensor:
        """Return the DTensor around this rank's part, in the same memory."""
        return DTensor.from_local(
            local,
            self.mesh,
            (self.placement,),
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )

    def has(self, tensor: DTensor) -> bool:
        """Whether a DTensor lies as this layout says."""
        return tensor.device_mesh == self.mesh and tensor.placements == (self.placement,)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor: of the whole, or of a DTensor of this layout."""
        if isinstance(whole, DTensor):
            return whole.to_local()
        if isinstance(self.placement, Shard):
            return whole.chunk(self.mesh.size(), self.placement.dim)[self.mesh.get_local_rank()]
        return whole


def tensor_parallel_problems(model: nn.Module, names: ParameterNames) -> Iterator[str]:
    """Yield what the engine cannot do with the DTensors of a model."""
    meshes: dict[DeviceMesh, str] = {}
    for parameter, (name, *_) in names.items():
        if not isinstance(parameter, DTensor):
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        meshes.setdefault(mesh, name)
        where = f"a DTensor {placements} of {mesh}"
        if mesh.ndim != 1:
            yield describe(
                name,
                got=where,
                expected="a mesh of one dim, that of tensor parallelism",
                do="parallelize the model over mesh['tp'], and leave data parallelism to "
                "shard(mesh=mesh['dp'])",
            )
        elif mesh.get_coordinate() is None:
            yield describe(
                name,
                got=f"{where}, without this rank",
                expected="ranks with this one",
                do="parallelize the model on the ranks that train it",
            )
        elif type(placements[0]) not in (Shard, Replicate):
            yield describe(
                name, got=where, expected="Shard or Replicate", do="redistribute it before shard()"
            )
        elif isinstance(placements[0], Shard) and parameter.shape[placements[0].dim] % mesh.size():
            yield describe(
                name,
                got=f"{tuple(parameter.shape)} over {mesh.size()} ranks: {where}",
                expected="a dim that they divide",
                do="pad it, or leave it out of the plan of parallelize_module",
            )
    if len(meshes) > 1:
        listed = ", ".join(f"{mesh} of {name}" for mesh, name in meshes.items())
        yield describe(
            "model",
            got=f"DTensors of several meshes: {listed}",
            expected="one mesh of tensor-parallel ranks",
            do="parallelize all modules over one mesh, or give shard(ignored=) the others",
        )
    for name, buffer in model.named_buffers():
        if isinstance(buffer, DTensor):
            yield describe(
                clean_name(name),
                got="a buffer that is a DTensor",
                expected="a plain tensor",
                do="give it as a parameter, or keep it out of the model",
            )


def require_by_parts(groups: Sequence[ParameterGroup], optimizer_offload: str) -> None:
    """Raise ConfigError for an optimizer that cannot update parts of parameters alone."""
    for made in groups:
        kept = made.base.exp_avg_dtype, made.base.exp_avg_sq_dtype
        if made.rule not in ELEMENTWISE or (made.rule == ADAM and EIGHT_BIT in kept):
            raise ConfigError(
                "shard(optimizer=)",
                got=f"{made.kind} for a model with DTensors",
                expected="an elementwise optimizer without moments in 8 bits: each rank has a part "
                "of a parameter alone",
                do="take ml.AdamW, ml.ScheduleFreeAdamW or one of torch.optim",
            )
    if optimizer_offload == "zenflow":
        raise ConfigError(
            "shard(optimizer_offload=)",
            got='"zenflow" for a model with DTensors',
            expected='"none" or "exact": ZenFlow chooses columns of whole parameters',
            do='take optimizer_offload="exact"',
        )


def add_tensor_axis(mesh: Mesh, names: ParameterNames) -> tuple[Mesh, TensorLayouts]:
    """Return the mesh of data-parallel ranks with the axis of the ranks that share the parameters
    of each, and a world of all of them; and the layouts of the parameters. Collective over this
    world.

    Raises ClusterError where the data-parallel ranks share parameters with each other, or have
    other parts of them."""
    tensors = {own[0]: p for p, own in names.items() if isinstance(p, DTensor)}
    tensor_mesh = next(iter(tensors.values())).device_mesh
    line = tuple(tensor_mesh.mesh.tolist())
    position = tensor_mesh.get_local_rank()
    # The mesh of a single process knows no global ranks.
    data_ranks = mesh.world.ranks if mesh.world.size > 1 else (dist.get_rank(),)
    # First of all: a rank that refuses would leave while others connect to it.
    places = all_gather_object((line, position), mesh.world)
    shared = sorted(set(line).intersection(data_ranks))
    if len(shared) > 1:
        raise ClusterError(
            "mesh",
            got=f"ranks {', '.join(map(str, shared))}, which share parameters: "
            f"{next(iter(tensors))} is a DTensor of {tensor_mesh}",
            expected="the data-parallel ranks, which have copies of each other's parameters",
            do="give shard(mesh=mesh['dp']) of the DeviceMesh whose mesh['tp'] has the DTensors, "
            "and a model that no other library has sharded over them",
        )
    if len({place for _, place in places}) > 1:
        listed = ", ".join(
            f"rank {rank} the {place + 1}. of {ranks}"
            for rank, (ranks, place) in zip(data_ranks, places, strict=True)
        )
        raise ClusterError(
            "mesh",
            got=f"ranks that have other parts of parameters ({listed})",
            expected="data-parallel ranks at the same place of their tensor-parallel ranks",
            do="give shard(mesh=mesh['dp']) of the DeviceMesh whose mesh['tp'] has the DTensors",
        )
    lines = {rank: ranks for rank, (ranks, _) in zip(data_ranks, places, strict=True)}
    everyone = tuple(rank for ranks in lines.values() for rank in ranks)
    world, made = add_axis(mesh, "world", everyone)
    tp, also_made = add_axis(mesh, "tp", line)
    by_name = {
        name: TensorLayout(tensor_mesh, parameter.placements[0], tuple(parameter.shape))
        for name, parameter in tensors.items()
    }
    grown = replace(mesh, world=world, tp=tp, made=(*also_made, *made, *mesh.made))
    return grown, TensorLayouts(by_name, lines)


@dataclass(frozen=True)
class JointStateLayout(StateLayout):
    """How state dicts cut a model with DTensors: over the data-parallel ranks as others, and before
    that as each DTensor is."""

    layouts: TensorLayouts = ALL_PLAIN
    joint_mesh: DeviceMesh | None = None
    """The data-parallel ranks, each with those with which it shares DTensors along the last dim;
    None where the former have everything."""

    def cut(self, name: str, whole: Tensor, device: torch.device) -> Tensor:
        layout = self.layouts.by_name.get(name)
        cut = super().cut(name, whole, device)
        if layout is None:
            return cut
        if not isinstance(cut, DTensor):
            return layout.around(cut)
        assert self.joint_mesh is not None
        *repeated, first = cut.placements
        if layout.placement == Shard(0):
            # As FSDP2 has it: the parts of tensor parallelism are cut, and not the whole.
            first = _StridedShard(0, split_factor=layout.mesh.size())
        return DTensor.from_local(
            cut.to_local(),
            self.joint_mesh,
            (*repeated, first, layout.placement),
            run_check=False,
            shape=torch.Size(layout.shape),
            stride=layout.stride,
        )


def joint_state_layout(plain: StateLayout, layouts: TensorLayouts, mesh: Mesh) -> JointStateLayout:
    """Return the layout of a model with DTensors, given that of a plain one."""
    if plain.device_mesh is None:
        return JointStateLayout(None, layouts)
    tensor_mesh = next(iter(layouts.by_name.values())).mesh
    ranks = [layouts.lines[rank] for rank in plain.device_mesh.mesh.flatten().tolist()]
    joint_mesh = DeviceMesh.from_group(
        [*plain.device_mesh.get_all_groups(), tensor_mesh.get_group()],
        mesh.device.type,
        torch.tensor(ranks).view(*plain.device_mesh.shape, tensor_mesh.size()),
        mesh_dim_names=(*("replicate", "shard")[-plain.device_mesh.ndim :], "tensor"),
    )
    return JointStateLayout(plain.device_mesh, layouts, joint_mesh)


def with_local_parts(model: nn.Module, names: ParameterNames) -> ParameterNames:
    """Let the module have plain parameters in place of its DTensors, in the memory of their local
    parts, and return the names of all parameters then."""
    local: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in names:
        if isinstance(parameter, DTensor):
            with torch.no_grad():
                value = parameter.to_local()
            part = nn.Parameter(value, parameter.requires_grad)
            others = {name: held for name, held in vars(parameter).items() if name != "_is_param"}
            vars(part).update(others)
            local[parameter] = part
    for module in model.modules():
        for leaf, held in module._parameters.items():
            if held is not None and held in local:
                module._parameters[leaf] = local[held]
    return {local.get(parameter, parameter): own for parameter, own in names.items()}


def counted_once(
    units: Sequence[UnitSpec], layouts: TensorLayouts, size: int
) -> tuple[UnitSpec, ...]:
    """Return what the plans know of each unit, where ``size`` ranks have copies of what is not
    cut."""
    return tuple(
        replace(
            unit,
            params=tuple(
                spec if layouts.is_cut(spec.name) else replace(spec, copies=size)
                for spec in unit.params
            ),
        )
        for unit in units
    )


def require_same_values(values: ModuleValues) -> None:
    """Raise ConfigError on all ranks for parameters of which tensor-parallel ranks should have
    copies, and have other values. Collective."""
    masters = {bucket: values.tensors(bucket)[MASTER] for bucket in range(len(values.plan.buckets))}
    sums = {name: int(sum_of_words(piece)) for name, piece in _copies(values, masters)}
    apart = _apart(sums, values.engine.mesh.tp, eq)
    with raise_on_all_ranks(values.engine.mesh.world):
        if apart:
            raise ConfigError(
                named(apart),
                got="other values on ranks that share the model's DTensors",
                expected="the same: what is no DTensor is whole on each of them, and is trained "
                "alike",
                do="build the model from the same seed or file on all ranks, and parallelize what "
                "ranks share by torch's parallelize_module, or give it as ignored=",
            )


def require_same_gradients(values: ModuleValues) -> None:
    """Raise TrainingError on all ranks for parameters of which tensor-parallel ranks have copies,
    and got other gradients in the last step. Collective."""
    # An update scales the gradient in place.
    values.engine.settle()
    found: dict[str, tuple[float, float]] = {}
    for name, piece in _copies(values, values.engine.gradients.shards):
        norm = torch.linalg.vector_norm(piece, dtype=torch.float64)
        # At most as large as the norm.
        along = piece.sum(dtype=torch.float64) / len(piece) ** 0.5
        found[name] = float(norm), float(along)
    apart = _apart(found, values.engine.mesh.tp, _alike)
    with raise_on_all_ranks(values.engine.mesh.world):
        if apart:
            raise TrainingError(
                f"the gradient of {named(apart)}",
                got="other values on ranks that share the model's DTensors",
                expected="the same: what is no DTensor is whole on each of them, and no message "
                "adds up its gradient",
                do="give these ranks the same samples (those of mesh['dp']); a layer that sees a "
                "part of the tokens needs SequenceParallel in the plan of parallelize_module",
            )


def _alike(own: tuple[float, float], other: tuple[float, float]) -> bool:
    # A gradient that is not finite has skipped the step, and is larger than nothing.
    bound = LARGEST_DIFFERENCE * max(own[0], other[0])
    return not any(abs(mine - theirs) > bound for mine, theirs in zip(own, other, strict=True))


def _apart(own: Mapping[str, T], axis: Axis, alike: Callable[[T, T], bool]) -> list[str]:
    """Return the names whose values on some rank are not like those of the first one."""
    first, *others = all_gather_object(own, axis)
    return [name for name in first if not all(alike(first[name], other[name]) for other in others)]


def _copies(values: ModuleValues, shards: Mapping[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and piece, on this rank, of parameters of which tensor-parallel ranks have
    copies."""
    for bucket, shard in shards.items():
        if values.plan.buckets[bucket].kind.copies > 1:
            for segment in values.plan.segments(bucket, values.engine.mesh.dp_shard.rank):
                yield segment.spec.name, shard[segment.in_shard : segment.in_shard + segment.length]
