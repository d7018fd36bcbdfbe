"""State dicts of a sharded module, in the form of torch.distributed.checkpoint.state_dict.

    {"model": {name: value},
     "optimizer": {"state": {name: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [...]}}

The state of another optimizer than AdamW has that one's names. Parameters and state of their
elements are DTensors that are cut along the first dim, as FSDP2's are. Numbers, buffers and
everything that each rank has whole (``no_shard``, a single process) are plain tensors. So
torch.distributed.checkpoint saves what comes from here and FSDP2 or one process loads it, and the
reverse. Weights are the fp32 masters. A shared parameter is in the model's part under all its
names, in the optimizer's under the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.modules.module import _IncompatibleKeys

from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.shard.data_mesh import new_group
from megatron_llama.engine.shard.names import clean_name
from megatron_llama.engine.shard.placeholders import Placeholder, ShardedParameterError
from megatron_llama.engine.shard.values import MASTER, ModuleValues, forget

MODEL = "model"
OPTIMIZER = "optimizer"
NO_FACTORS: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class StateLayout:
    """How state dicts cut what is sharded."""

    device_mesh: DeviceMesh | None
    """The user's processes; None where each has everything. Its groups are not the engine's, so
    that neither waits for the other's messages."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The first dim is cut over the last dim of the mesh, and repeated over the other."""
        assert self.device_mesh is not None
        return (*[Replicate()] * (self.device_mesh.ndim - 1), Shard(0))

    def cut(self, name: str, whole: Tensor, device: torch.device) -> Tensor:
        """Return this rank's part of a parameter in memory of its own on ``device``, as a DTensor
        where ranks have shards."""
        mesh = self.device_mesh
        # A number cannot be cut, and torch has it whole on every rank as well.
        if mesh is None or whole.dim() == 0:
            return whole.to(device, copy=True)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        chunks = whole.chunk(mesh.size(mesh.ndim - 1), dim=0)
        index = coordinate[-1]
        local = chunks[index] if index < len(chunks) else whole[:0]
        return DTensor.from_local(
            local.to(device, copy=True),
            mesh,
            self.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )


def state_layout(mesh: Mesh, given: DeviceMesh | dist.ProcessGroup | None) -> StateLayout:
    """Return the layout for the processes that the user chose: the user's DeviceMesh, or one over
    the user's group, with two dims (replicas and shards) under hybrid sharding. Collective."""
    if mesh.dp_shard.size == 1:
        return StateLayout(None)
    hybrid = mesh.dp_replica.size > 1
    if isinstance(given, DeviceMesh) and given.ndim == 1 + hybrid:
        return StateLayout(given)
    kind = mesh.device.type
    if hybrid:
        groups = [
            new_group(f"state dicts over {axis.name}", axis.ranks)
            for axis in (mesh.dp_replica, mesh.dp_shard)
        ]
        ranks = torch.tensor(mesh.dp.ranks).view(-1, mesh.dp_shard.size)
        names = ("replicate", "shard")
        return StateLayout(DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=names))
    group = dist.group.WORLD if given is None else given
    if isinstance(group, DeviceMesh):
        group = new_group("state dicts over dp", mesh.dp.ranks)
    assert group is not None
    return StateLayout(DeviceMesh.from_group(group, kind))


def sharded_parameters(
    values: ModuleValues,
    layout: StateLayout,
    what: str = MASTER,
    factors: Mapping[str, Tensor] = NO_FACTORS,
) -> dict[str, Tensor]:
    """Return one tensor of every parameter: ``master``, or a moment of the trained ones, times the
    factors [columns] of those parameters that have some.

    Bucket by bucket, so that beside the result one whole bucket is in the memory of the device.
    Collective. Weights without values are NaN. Parts that an update rule keeps on the host stay
    there."""
    cut: dict[str, Tensor] = {}
    for bucket in range(len(values.plan.buckets)):
        tensors = values.tensors(bucket)
        if what in tensors:
            whole = values.gather(bucket, what)
            for placed, value in values.parameters(bucket, whole):
                if what == MASTER and placed.spec.name in values.uninitialized:
                    forget(value)
                if placed.spec.name in factors:
                    factor = factors[placed.spec.name].to(value.device, value.dtype)
                    value.view(-1, len(factor)).mul_(factor)
                cut[placed.spec.name] = layout.cut(placed.spec.name, value, tensors[what].device)
            # Before the next gather: both are of this bucket's memory.
            del whole, value
    return {name: cut[name] for name in values.aliases if name in cut}


def hook_state_dict(
    values: ModuleValues, layout: StateLayout, meet: Callable[[], None]
) -> Callable[[], None]:
    """Let ``model.state_dict()`` have the parameters of ``sharded_parameters``, which are in the
    module while torch collects them. It is collective from now on, unless each rank has everything.
    Inside of ``gathered`` it has the whole parameters, and is not collective; outside of it
    ``load_state_dict`` of a module around the model raises ShardedParameterError. ``meet`` makes
    sure that all ranks ask for it. Returns a function that takes the hooks back."""
    installed = ExitStack()

    def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        installed.close()  # an exception may have come between the hooks
        if values.are_whole:
            return
        meet()
        values.engine.settle()
        parameters = {
            name: nn.Parameter(value, requires_grad=False)
            for name, value in sharded_parameters(values, layout).items()
        }
        installed.enter_context(values.installed(parameters))

    def after(module: nn.Module, state: object, prefix: str, metadata: object) -> None:
        installed.close()

    def before_load(module: nn.Module, *arguments: object) -> None:
        # torch would collect an error for each parameter.
        if not values.are_whole:
            raise ShardedParameterError(
                "load_state_dict",
                got="a module around a model whose parameters are sharded",
                expected="a call of the model or the engine",
                do="call load_state_dict of the model that shard() was given, or this one inside "
                "of engine.gathered(modify=True)",
            )

    model: Any = values.model  # torch's registrations of hooks have no types
    handles = (
        model.register_state_dict_pre_hook(before),
        model.register_state_dict_post_hook(after),
        model.register_load_state_dict_pre_hook(before_load),
    )

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def require_savable(values: ModuleValues, layout: StateLayout, keywords: Mapping[str, Any]) -> None:
    """Raise ShardedParameterError where ``model.save_pretrained(**keywords)`` would save parts of
    parameters as if they were whole."""
    if keywords.get("distributed_checkpoint"):
        return  # it saves with torch.distributed.checkpoint
    given = keywords.get("state_dict")
    if given is None and values.layouts:
        raise ShardedParameterError(
            "model.save_pretrained",
            got="a model with DTensors, of which this rank has parts",
            expected="whole parameters",
            do="inside of engine.gathered() give it state_dict= with full_tensor() of each, or "
            "save engine.state_dict() with torch.distributed.checkpoint",
        )
    if given is not None:
        absent = any(isinstance(value, DTensor) for value in given.values())
    else:
        placeholders = any(isinstance(p, Placeholder) for p in values.model.parameters())
        absent = placeholders and (values.are_whole or layout.device_mesh is not None)
    if absent:
        raise ShardedParameterError(
            "model.save_pretrained",
            got="parameters of which this rank has a part",
            expected="whole parameters",
            do='write "with engine.gathered(): model.save_pretrained(...)" on all ranks, or '
            'save on rank 0 inside of engine.gathered(to="cpu", rank0=True)',
        )


def incompatible_keys(values: ModuleValues, given: Iterable[str]) -> Any:
    """Return the names that a state dict of the model lacks, and those that it has too much, as
    torch's ``load_state_dict`` does. One name of a shared parameter is enough."""
    left = {clean_name(name) for name in given}
    missing = [own[0] for own in values.aliases.values() if left.isdisjoint(own)]
    expected = {name for own in values.aliases.values() for name in own}
    whole = (*persistent_buffers(values.model), *values.ignored.items())
    for name, _ in (*whole, *with_extra_state(values.model)):
        expected.add(name)
        if name not in left:
            missing.append(name)
    return _IncompatibleKeys(missing, sorted(left - expected))


def model_state(values: ModuleValues) -> dict[str, Any]:
    """Return the model's part of a state between two steps, as the module describes it; all are
    copies. Needs ``hook_state_dict``. Collective."""
    # torch hands out the buffers themselves, which the next forward pass changes.
    return {
        clean_name(name): value
        if not isinstance(value, Tensor)
        or (isinstance(value, DTensor) and clean_name(name) not in values.ignored)
        else value.clone()
        for name, value in values.model.state_dict().items()
    }


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a state dict has, under all names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield clean_name(f"{prefix}.{leaf}" if prefix else leaf), buffer


def with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that keep something of their own in a state dict, and its key."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield clean_name(f"{prefix}._extra_state" if prefix else "_extra_state"), module
