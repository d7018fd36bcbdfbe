"""The mesh of a user's model: from groups and DeviceMeshes, with communicators of its own that end alone."""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron_llama.engine.comm.exchange import gather
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.shard.data_mesh import close_data_mesh
from megatron_llama.engine.shard.state import state_layout
from megatron_llama.errors import ClusterError
from megatron_llama.launch.launcher import Place
from torch.distributed.device_mesh import DeviceMesh

from tests.engine.shard.meshes import sharded_mesh
from tests.harness import Cluster

CPU = torch.device("cpu")


def places(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """The ranks of the axes, in the order world, dp, dp_shard, dp_replica, dp_gather; each has this rank at its place."""
    axes = (mesh.world, mesh.dp, mesh.dp_shard, mesh.dp_replica, mesh.dp_gather)
    here = dist.get_rank()
    for axis in axes:
        assert axis.ranks[axis.rank] == here
        assert (axis.group is None) == (axis.size == 1)
        if axis.group is not None:
            assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
    return tuple(axis.ranks for axis in axes)


def total(axis: Axis) -> float:
    """The sum of the global ranks along an axis, over its own communicator."""
    value = torch.tensor(float(dist.get_rank()))
    if axis.group is not None:
        dist.all_reduce(value, group=axis.group)
    return float(value)


def patience(group: dist.ProcessGroup | None) -> timedelta:
    assert group is not None
    found: timedelta = group._get_backend(CPU).options._timeout
    return found


def check_meshes(place: Place) -> None:
    rank = place.rank
    everybody = (0, 1, 2, 3)
    pair = (0, 1) if rank < 2 else (2, 3)
    across = (rank % 2, rank % 2 + 2)
    expected = {
        "all": (everybody, everybody, everybody, (rank,), everybody),
        "hybrid": (everybody, everybody, pair, across, pair),
        "no shard": (everybody, everybody, (rank,), everybody, (rank,)),
    }
    two_dims = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
    turned = DeviceMesh("cpu", torch.tensor([[3, 2], [0, 1]]))
    made = {
        "all": [sharded_mesh(device=CPU), sharded_mesh(dist.group.WORLD, device=CPU), sharded_mesh(DeviceMesh("cpu", torch.arange(4)), device=CPU)],
        "hybrid": [sharded_mesh(None, 2, CPU), sharded_mesh(two_dims, device=CPU), sharded_mesh(two_dims, 2, CPU), sharded_mesh(turned, 0, CPU)],
        "no shard": [sharded_mesh(None, 1, CPU), sharded_mesh(two_dims, 1, CPU)],
    }
    ours = {group for meshes in made.values() for mesh in meshes for group in mesh.made}
    users = dist.distributed_c10d._world.pg_map.keys() - ours
    assert dist.group.WORLD in users and len(users) > 4, "the DeviceMeshes have groups too"
    for name, meshes in made.items():
        for mesh in meshes:
            assert places(mesh) == expected[name], name
            for axis in (mesh.world, mesh.dp, mesh.dp_shard, mesh.dp_replica, mesh.dp_gather):
                assert axis.group not in users, f"{axis.name} goes through a group of the user"
                assert total(axis) == sum(axis.ranks)
            assert mesh.dp_gather.group is mesh.dp_shard.group, "on hosts gathers share the connection of reductions"
            assert (mesh.rank, mesh.dp.rank, mesh.dp.size, mesh.tp.size, mesh.pp.size) == (rank, rank, 4, 1, 1)
    meshes = [mesh for some in made.values() for mesh in some]
    for mesh, other in pairwise(meshes):
        assert not set(mesh.made) & set(other.made)
    closed, *left = meshes
    for round in range(3):
        close_data_mesh(closed)
        assert not set(closed.made) & dist.distributed_c10d._world.pg_map.keys()
        assert all(total(mesh.dp) == 6.0 for mesh in left), "the communicators of another mesh ended too"
        assert total(Axis("user", rank, everybody, dist.group.WORLD, closed.recorder)) == 6.0
        closed = sharded_mesh(device=CPU)
        assert total(closed.world) == 6.0, f"made again, time {round + 1}"


@pytest.mark.long
def test_meshes_of_four_processes(cluster: Cluster) -> None:
    cluster.run(4, check_meshes)


def told(place: Place) -> list[tuple[str, bool, int]]:
    """Of each communicator of a hybrid mesh in the order in which they are made: its device, whether it is urgent, its thread blocks."""
    asked: list[tuple[str, bool, int]] = []

    def note(device: torch.device, timeout: timedelta, *, urgent: bool, max_ctas: int) -> None:
        assert timeout == patience(dist.group.WORLD)
        asked.append((device.type, urgent, max_ctas))

    with patch("megatron_llama.engine.shard.data_mesh.communicator_options", note):
        mesh = sharded_mesh(None, 2, CPU)
    assert total(mesh.dp) == 6.0
    return asked


def test_what_nccl_is_told_is_what_the_trainer_tells_it(cluster: Cluster) -> None:
    """All ranks send scalars; dp, its shards and its replicas go before the computation (``launch/test_communicators.py`` has the trainer's)."""
    for asked in cluster.run(4, told):
        assert asked == [("cpu", False, 1), *[("cpu", True, 0)] * 3]


def check_part(place: Place) -> tuple[tuple[int, ...], str]:
    """Ranks 1 and 3 have a group of their own, in which nobody else takes part."""
    group = dist.new_group([1, 3])
    if place.rank not in (1, 3):
        with pytest.raises(ClusterError) as error:
            sharded_mesh(group, device=CPU)
        mesh = sharded_mesh(dist.new_group([place.rank], use_local_synchronization=True), device=CPU)
        assert (mesh.world.size, mesh.dp_shard.group) == (1, None)
        return (), str(error.value)
    found = []
    for _ in range(2):  # a second one while the first is there
        mesh = sharded_mesh(group, device=CPU)
        assert total(mesh.dp) == total(mesh.world) == 4.0
        for user, ours in ((dist.group.WORLD, mesh.world.group), (dist.group.WORLD, mesh.dp.group)):
            assert patience(user) == patience(ours) != timedelta(minutes=30), "as long as the user waits, not torch's default"
        found.append(mesh)
    for mesh in found:
        close_data_mesh(mesh)
    # Others have made other groups meanwhile; all of them still make groups together.
    return found[0].world.ranks, ""


@pytest.mark.long
def test_a_group_of_some_processes(cluster: Cluster) -> None:
    outside = "mesh: got a group of other ranks on rank {}, expected a group that this process is in; shard"
    for rank, (ranks, error) in enumerate(cluster.run(4, check_part)):
        assert ranks == ((1, 3) if rank in (1, 3) else ())
        assert error.startswith(outside.format(rank)) if rank in (0, 2) else error == ""


def check_bound_device(place: Place) -> int:
    """The default group is bound to a device, as after ``init_process_group(device_id=)``: torch looks for a communicator to split."""
    default = dist.group.WORLD
    assert default is not None
    device = torch.device("cuda", place.rank)
    default.bound_device_id = device
    try:
        with patch.object(dist.distributed_c10d, "_get_split_source", return_value=None) as split:
            group = dist.new_group([1, 3])
            asked = split.call_count
            if place.rank in (1, 3):
                mesh = sharded_mesh(group, device=CPU)
                assert total(mesh.dp) == 4.0
                close_data_mesh(mesh)
            # Ranks 1 and 3 have made more groups than the others by now, which count for the names that torch gives.
            hybrid = sharded_mesh(None, 2, CPU)
            state_layout(hybrid, None)
            close_data_mesh(hybrid)
            assert split.call_count == asked == 1, "ranks 0 and 2 would have to take part in a split"
        assert default.bound_device_id == device, "the user's group is as it was"
    finally:
        default.bound_device_id = None
    return asked


@pytest.mark.long
def test_nothing_is_split_off_the_group_of_the_user(cluster: Cluster) -> None:
    cluster.run(4, check_bound_device)


def check_refusals(place: Place) -> list[str]:
    cube = DeviceMesh("cpu", torch.arange(4).view(2, 2, 1))
    rows = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    others = DeviceMesh("cpu", torch.tensor([1, 2]))
    errors = []
    for arguments in ((cube, 0), (None, 3), (None, -1), (rows, 4), (others, 0)):
        if arguments[0] is others and place.rank in (1, 2):
            close_data_mesh(sharded_mesh(others, device=CPU))
            continue
        with pytest.raises(ClusterError) as error:
            sharded_mesh(*arguments, CPU)
        errors.append(str(error.value))
    return errors


@pytest.mark.long
def test_what_is_no_mesh_is_refused_by_name(cluster: Cluster) -> None:
    errors = cluster.run(4, check_refusals)
    assert errors[0][:4] == errors[1]
    assert errors[0] == [
        "mesh: got a DeviceMesh with 3 dims, expected one dim, or two: replicas and shards; take a part of it, as mesh['dp']",
        "shard_size: got 3, expected a divisor of the 4 processes; give another one, or 0 to shard over all",
        "shard_size: got -1, expected a divisor of the 4 processes; give another one, or 0 to shard over all",
        "shard_size: got 4, expected 2, the shards of the DeviceMesh; leave it out",
        "mesh: got a group of 1, 2 on rank 0, expected a group that this process is in; shard a model on the ranks of its group alone",
    ]


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for shard_size in (0, 1):
        mesh = sharded_mesh(None, shard_size, CPU)
        assert not dist.is_initialized()
        assert {axis.size for axis in (mesh.world, mesh.dp, mesh.dp_shard, mesh.dp_replica, mesh.dp_gather)} == {1}
        close_data_mesh(mesh)
    with pytest.raises(ClusterError, match="shard_size: got 2, expected a divisor of the 1 processes"):
        sharded_mesh(None, 2, CPU)


def check_joining(place: Place) -> None:
    """As under torchrun: nobody has joined, and the environment says who is there."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        ports = [free.getsockname()[1]]
        dist.broadcast_object_list(ports, src=0)
    dist.destroy_process_group()
    ranks = {"RANK": place.rank, "WORLD_SIZE": place.world_size, "LOCAL_RANK": place.rank}
    variables = ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": ports[0]}
    os.environ |= {name: str(value) for name, value in variables.items()}
    try:
        mesh = sharded_mesh(device=CPU)
        assert dist.is_initialized() and total(mesh.dp) == 1.0
        close_data_mesh(mesh)
        assert not dist.is_initialized(), "what it has joined it leaves"
    finally:
        for name in variables:
            del os.environ[name]


@pytest.mark.long
def test_processes_of_torchrun_are_joined(cluster: Cluster) -> None:
    cluster.run(2, check_joining)


def check_abort(place: Place) -> str:
    """Rank 0 waits for a message that will never come, because rank 1 has left."""
    mesh = sharded_mesh(device=CPU)
    if place.rank == 1:
        close_data_mesh(mesh, abort=True)
        return ""
    with pytest.raises(RuntimeError) as error:
        total(mesh.dp)
    close_data_mesh(mesh, abort=True)
    return str(error.value)


def test_aborting_ends_the_waits_of_the_others(cluster: Cluster) -> None:
    assert re.search("onnection (closed|reset) by peer", cluster.run(2, check_abort)[0])


def check_leaving_while_a_thread_waits(place: Place, abort: bool) -> str:
    """Rank 1 leaves with two gathers under way. A thread waits for the second one's message, so that its receive stays; the first one's is
    dropped. Rank 0 sends both only then, and waits for what rank 1 has not sent."""
    mesh = sharded_mesh(device=CPU)
    store = dist.distributed_c10d._get_default_store()
    gathers = [gather(torch.zeros(8), torch.ones(4), mesh.dp_gather, index=index) for index in range(2)]
    if place.rank == 1:
        for each in gathers:
            each.start()
        [kept] = gathers[1]._exchange._transfers._receives  # as the thread has it
        close_data_mesh(mesh, abort=abort)
        with pytest.raises(RuntimeError):
            kept.wait()
        store.set("rank 1 has left", "yes")
        # Until rank 0 knows: the end of this process would end the connection as well.
        store.wait(["rank 0 has heard of it"])
        return ""
    store.wait(["rank 1 has left"])
    for each in gathers:
        each.start()
    with pytest.raises(RuntimeError) as error:
        gathers[0].wait()
    store.set("rank 0 has heard of it", "yes")
    close_data_mesh(mesh, abort=True)
    return str(error.value)


@pytest.mark.long
@pytest.mark.parametrize("abort", [True, False])
def test_a_thread_that_waits_keeps_no_connection(cluster: Cluster, abort: bool) -> None:
    assert cluster.run(2, check_leaving_while_a_thread_waits, abort, timeout=30.0)[0]
