"""The mesh of a user's model: data-parallel axes only, over processes that the user chose.

The engine never sends through a process group of the user: its gathers and reductions would queue
behind the user's messages, and an error in one would end the other. So every axis has a
communicator of its own, made by its members alone, and ``close_data_mesh`` ends these and nothing
else.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.groups import SCALARS, communicator_options, leave_group, use_once
from megatron_llama.engine.comm.host.gloo import end_connections
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.errors import ClusterError
from megatron_llama.registry import imported

Lines = Sequence[tuple[int, ...]]
"""Global ranks, line by line."""


def data_mesh(
    group: DeviceMesh | dist.ProcessGroup | None = None, device: torch.device | None = None
) -> Mesh:
    """Return the mesh of processes that all hold the same model, with the axis of all of them.
    ``add_shard_axes`` makes the others. Collective over these processes alone.

    ``group`` is a process group; a DeviceMesh with one dim, or with two, which are replicas and
    shards as FSDP2 has them; or None: all processes, which are joined as torchrun's variables say
    if that has not been done, and this one alone without torchrun. ``device`` is where the model
    is, by default this process's accelerator.

    The ranks of an axis are in the order of their global ranks. Call ``close_data_mesh`` at the
    end. Raises ClusterError for a group that this process is not in, and for a DeviceMesh with more
    dims."""
    joins = group is None and not dist.is_initialized()
    joined = False
    if device is None or joins:
        # Launcher, rendezvous and network serve only those who leave joining to them.
        if joins:
            device, joined = imported("launch.join:join_launched")(device)
        else:
            device = imported("launch.join:launched_device")()
    mesh = Mesh.single(device)
    ranks = _ranks(_rows(group))
    if len(ranks) == 1:
        return mesh
    world = _axis("world", [ranks], devices.backend(device), mesh, scalars=True)
    made = (world.group, dist.group.WORLD if joined else None)
    return replace(mesh, world=world, made=tuple(group for group in made if group is not None))


def add_shard_axes(
    mesh: Mesh, group: DeviceMesh | dist.ProcessGroup | None = None, shard_size: int = 0
) -> Mesh:
    """Return the mesh of ``data_mesh(group)`` with the axes along which the model is sharded,
    reduced and gathered. Collective over its processes alone, which give the same arguments.

    ``shard_size`` shards within so many neighbours and repeats the shards across (0: over all, or
    as the DeviceMesh says; 1: nothing is sharded). Raises ClusterError for one that does not divide
    the processes."""
    rows = _rows(group)
    shard_lines = _shard_lines(rows, shard_size)
    if mesh.world.size == 1:
        return mesh
    # An axis moves tensors of the device only.
    backend = devices.axis_backend(mesh.device) or devices.backend(mesh.device)
    gathers_apart = not devices.one_connection_per_peer(mesh.device)
    dp = _axis("dp", [_ranks(rows)], backend, mesh)
    shards = len(shard_lines[0])
    dp_shard = dp
    if shards < dp.size:
        dp_shard = _axis("dp_shard", shard_lines, backend, mesh)
    dp_replica = dp
    if shards > 1:
        # The shards of one place in their lines.
        replica_lines = list(zip(*shard_lines, strict=True))
        dp_replica = _axis("dp_replica", replica_lines, backend, mesh)
    dp_gather = replace(dp_shard, name="dp_gather")
    if gathers_apart:
        dp_gather = _axis("dp_gather", shard_lines, backend, mesh)
    axes = (dp, dp_shard, dp_replica, dp_gather)
    use_once((mesh.world, *axes), mesh.device)
    made = dict.fromkeys(axis.group for axis in axes if axis.group is not None)
    return replace(
        mesh,
        dp=dp,
        dp_shard=dp_shard,
        dp_replica=dp_replica,
        dp_gather=dp_gather,
        made=(*made, *mesh.made),
    )


def _axis(name: str, lines: Lines, backend: str, mesh: Mesh, scalars: bool = False) -> Axis:
    """Return the axis of the line to which this rank belongs, with a communicator of its own."""
    rank = dist.get_rank()
    line = next(tuple(sorted(line)) for line in lines if rank in line)
    if len(line) == 1:
        return Axis(name, 0, line, None, mesh.recorder)
    with mesh.recorder.waiting(f"the ranks of {name}"):
        group = new_group(name, line, backend, device=mesh.device, scalars=scalars)
    return Axis(name, line.index(rank), line, group, mesh.recorder)


def add_axis(
    mesh: Mesh, name: str, ranks: Sequence[int]
) -> tuple[Axis, tuple[dist.ProcessGroup, ...]]:
    """Return a further axis of ``ranks`` for what ranks say to each other, and the groups that
    ``close_data_mesh`` has to end for it. Collective over these ranks."""
    axis = _axis(name, [tuple(ranks)], devices.backend(mesh.device), mesh, scalars=True)
    return axis, () if axis.group is None else (axis.group,)


def close_data_mesh(mesh: Mesh, *, abort: bool = False) -> None:
    """End the communicators that ``data_mesh`` and ``add_shard_axes`` have made, and leave the
    process group if ``data_mesh`` has joined it. Does nothing to groups of the user. On a device
    that waits for everything that has been issued: ``abort`` waits for nothing, so that the waits
    of the other ranks fail."""
    made = list(mesh.made)
    # First of all: a thread that waits for a message would keep what is let go of next.
    _end_connections(mesh)
    _let_go(mesh)
    group = None
    while made:
        group = made.pop(0)
        if not dist.is_initialized():
            break
        if group is dist.group.WORLD:
            leave_group(abort=abort)
            continue
        # The user may have ended all groups at once, by ending the default group.
        with suppress(ValueError):
            if abort:
                dist.distributed_c10d._abort_process_group(group)
            else:
                dist.destroy_process_group(group)
    group = None
    gc.collect()  # as ``close_mesh``: groups in reference cycles would keep their threads


def _end_connections(mesh: Mesh) -> None:
    """End the waits for messages of a mesh, here and on its other ranks. Other groups of the
    process go on."""
    for group in mesh.made:
        if group is not dist.group.WORLD:
            end_connections(group)


def _let_go(mesh: Mesh) -> None:
    """Drop all references to the groups of a mesh: gloo's threads end when nothing refers to a
    group any more. Nothing else ends them: the model of a user may live on, with parameters whose
    hooks lead to the engine, and Python's collector does not follow the hooks of tensors."""
    for transfer in list(mesh.recorder.transfers):
        transfer.disconnect()
    for axis in (mesh.world, mesh.tp, mesh.dp, mesh.dp_shard, mesh.dp_replica, mesh.dp_gather):
        if axis.group is not None:
            # Frozen, because nothing else may ever change it. None would mean all processes.
            object.__setattr__(axis, "group", dist.GroupMember.NON_GROUP_MEMBER)
    object.__setattr__(mesh, "made", ())


def _rows(group: DeviceMesh | dist.ProcessGroup | None) -> Lines:
    """Return the ranks of a mesh row by row; of a group there is one row."""
    if not dist.is_initialized():
        return [(0,)]
    here = dist.get_rank()
    if group is None:
        return [tuple(range(dist.get_world_size()))]
    if isinstance(group, DeviceMesh):
        if group.mesh.ndim > 2:
            raise ClusterError(
                "mesh",
                got=f"a DeviceMesh with {group.mesh.ndim} dims",
                expected="one dim, or two: replicas and shards",
                do="take a part of it, as mesh['dp']",
            )
        ranks = group.mesh.view(-1, group.mesh.shape[-1]).tolist()
    elif isinstance(group, dist.ProcessGroup):
        ranks = [dist.get_process_group_ranks(group)]
    else:
        ranks = []  # what ``new_group`` returns to those who are not in the group
    rows = [tuple(sorted(row)) for row in ranks]
    if not any(here in row for row in rows):
        among = ", ".join(str(rank) for row in rows for rank in row) or "other ranks"
        raise ClusterError(
            "mesh",
            got=f"a group of {among} on rank {here}",
            expected="a group that this process is in",
            do="shard a model on the ranks of its group alone",
        )
    return rows


def _ranks(rows: Lines) -> tuple[int, ...]:
    """Return the ranks of all rows, in their order."""
    return tuple(sorted(rank for row in rows for rank in row))


def _shard_lines(rows: Lines, shard_size: int) -> Lines:
    """Return the ranks that share each copy of the model."""
    if len(rows) > 1 and shard_size in (0, len(rows[0])):
        return rows
    ranks = _ranks(rows)
    size = len(ranks)
    shards = shard_size or size
    if len(rows) > 1 and shard_size != 1:
        raise ClusterError(
            "shard_size",
            got=shard_size,
            expected=f"{len(rows[0])}, the shards of the DeviceMesh",
            do="leave it out",
        )
    if shards < 0 or size % shards:
        raise ClusterError(
            "shard_size",
            got=shard_size,
            expected=f"a divisor of the {size} processes",
            do="give another one, or 0 to shard over all",
        )
    return [ranks[first : first + shards] for first in range(0, size, shards)]


def new_group(
    name: str,
    ranks: tuple[int, ...],
    backend: str | None = None,
    *,
    device: torch.device | None = None,
    scalars: bool = False,
) -> dist.ProcessGroup:
    """Make a process group of ``ranks``, which are global and in order, by these ranks alone.
    Collective over them. ``backend`` is by default what the default group has. ``name`` says in
    torch's logs what the group is for. ``device`` is that of its tensors: on a GPU its messages
    then go before waiting kernels of the computation, unless they are ``scalars``.

    ``torch.distributed.new_group(use_local_synchronization=True)`` counts the groups of a process
    for the name of the next one. Where only the members of a group make it, ranks count
    differently: they wait for each other under two names, or the name of a group that has ended
    comes again, with the addresses of its sockets still in the store. Here each member counts in
    the store how often it has made this group, and all count alike."""
    distributed = dist.distributed_c10d
    default = dist.group.WORLD
    assert default is not None
    store = distributed._get_default_store()
    position = ranks.index(dist.get_rank())
    digest = hashlib.sha256("_".join(map(str, ranks)).encode()).hexdigest()[:16]
    count = store.add(f"megatron_llama/{name}/{digest}/{position}", 1)
    bound = next(iter(default._device_types), torch.device("cpu"))
    # The user's patience is ours, too.
    patience = default._get_backend(bound).options._timeout
    options = None
    if device is not None:  # as the trainer's communicators have them
        options = communicator_options(
            device, patience, urgent=not scalars, max_ctas=SCALARS if scalars else 0
        )
    group: dist.ProcessGroup
    with _members_alone(default):
        group, _ = distributed._new_process_group_helper(
            len(ranks),
            position,
            list(ranks),
            dist.Backend(backend or distributed._world.pg_map[default][0]),
            store,
            f"megatron_llama {name} {digest} {count}",  # type: ignore[arg-type]
            timeout=patience,
            backend_options=options,
            group_desc=name,
        )
    distributed._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


@contextmanager
def _members_alone(default: dist.ProcessGroup) -> Iterator[None]:
    """A section in which the members of a new process group make it alone.

    After ``init_process_group(device_id=)`` torch (2.11 to 2.13) splits a new group's communicator
    off the default one, and knows by ``bound_device_id`` that there is one to split. But
    ncclCommSplit is a call of all ranks of the default group: torch lets those that are not in the
    new group call ``perform_nocolor_split``. Here they do not come, and the members would wait for
    ever. torch's own ``use_local_synchronization`` has the same hang."""
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
