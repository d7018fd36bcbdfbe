"""The grid of processes, which is a pure function of the rank, and the process groups of its axes.

Rank order, outermost to innermost: pp, dp, cp, tp. Tensor-parallel ranks are neighbours, so they
share a machine. Groups are made by ``torch.distributed.new_group`` and not by ``DeviceMesh``,
because the two directions of the pipeline, and on a device gathers and reductions, need a
communicator each over the same ranks.

On a device a group of an axis is NCCL's alone. Values of the host (errors, paths, numbers for the
log) go along the axis of all ranks only, whose group has gloo besides, with connections that gloo
makes when two ranks first talk: to its two neighbours for most collectives, to log2 of the ranks
for a broadcast, to all from rank 0. A gloo group for each axis would hold a socket for each pair of
its ranks in every process.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import MappingProxyType

import torch
import torch.distributed as dist

from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.distributed import device as devices
from megatron_llama.distributed import flight_recorder
from megatron_llama.distributed.comm.store import host_named, open_store
from megatron_llama.distributed.comm.watch import Watch
from megatron_llama.distributed.launcher import Place, place_from_environment
from megatron_llama.distributed.network import (
    GLOO,
    GLOO_LAZY,
    NCCL,
    choose_interface,
    interface_of,
    require_master,
)
from megatron_llama.distributed.recorder import Recorder
from megatron_llama.distributed.rendezvous import meet
from megatron_llama.errors import ClusterError
from megatron_llama.plans.buckets import shard_count
from megatron_llama.plans.params import has_tied_head, kv_copies, partition_of
from megatron_llama.plans.schedule import Op, StagePlacement, connection_order

GRACE = timedelta(seconds=30)
"""What the backend waits longer than the watch."""
_ALLOCATOR_VARIABLES = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
_STREAM_GROUPS = MappingProxyType(
    {
        "tp": "tp",
        "kv": "tp",
        "cp": "cp",
        "dp": "dp",
        "dp_shard": "dp",
        "dp_replica": "dp",
        "dp_gather": "dp",
        "pp": "pp",
        "pp_backward": "pp",
        "pp_return": "pp",
        "pp_backward_return": "pp",
    }
)
"""The value of ``--high-priority-stream-groups`` that means an axis. Tied embeddings have none:
their gradients are added once in a step, when nothing is left to compute."""


@dataclass(frozen=True)
class Axis:
    """The processes along one dimension of the mesh. An axis of size 1 has no group, and its
    collectives do nothing."""

    name: str
    rank: int
    ranks: tuple[int, ...]
    """Global ranks, in axis order."""
    group: dist.ProcessGroup | None
    recorder: Recorder

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.ranks)

    @property
    def communicator(self) -> dist.ProcessGroup | None:
        """The group for the next message; None for an axis of size 1. Raises RuntimeError after
        ``close_data_mesh``: with the group that remains then, torch's collectives do nothing, warn,
        and return as if they had sent."""
        gone: object = dist.GroupMember.NON_GROUP_MEMBER
        if self.group is gone:
            raise RuntimeError(f"the communicator of {self.name} has ended")
        return self.group


@dataclass(frozen=True)
class Mesh:
    """This process's position on every axis."""

    world: Axis
    tp: Axis
    kv: Axis
    """The tensor-parallel ranks that hold copies of the same key/value head, where these are more
    than one and not all of ``tp``; else size 1."""
    cp: Axis
    dp: Axis
    """All ranks that hold the same weights: the data-parallel and the context-parallel ones.
    Shards and reductions span both."""
    dp_shard: Axis
    """The ranks of ``dp`` over which a bucket is sharded, for its reductions: all of them, some
    neighbours (hybrid sharding), or one."""
    dp_replica: Axis
    """The ranks of ``dp`` that hold the same shard."""
    dp_gather: Axis
    """The ranks of ``dp_shard``, for gathers. On a device they have a communicator of their own,
    so that gathers and reductions run concurrently."""
    pp: Axis
    pp_backward: Axis
    """The ranks of ``pp`` with a communicator of their own, so that gradients never queue behind
    activations."""
    embedding: Axis
    """The first and the last pipeline rank, for tied embeddings; size 1 on the ranks between."""
    device: torch.device
    recorder: Recorder = field(repr=False)
    pp_return: Axis | None = None
    pp_backward_return: Axis | None = None
    """With virtual stages: transfers against the usual direction of ``pp`` and ``pp_backward``."""
    made: tuple[dist.ProcessGroup, ...] = field(default=(), repr=False)
    """The groups that ``data_mesh`` has made and ``close_data_mesh`` ends, in this order."""

    def link(self, sender: int, receiver: int, *, backward: bool) -> Axis:
        """The communicator for transfers from one pipeline rank to another: there is one for each
        kind of tensor and each direction."""
        # NCCL runs the operations of one communicator in the order of their issue. Two ranks that
        # each first wait to receive from the other would wait forever.
        usual = (sender < receiver) is not backward
        if backward:
            axis = self.pp_backward if usual else self.pp_backward_return
        else:
            axis = self.pp if usual else self.pp_return
        assert axis is not None, "only virtual stages send against the usual direction"
        return axis

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.world.rank

    @property
    def data_rank(self) -> int:
        """Which share of a global batch this process reads. Context-parallel ranks read the same
        samples."""
        return self.dp.rank // self.cp.size

    @property
    def data_size(self) -> int:
        """The number of shares of a global batch."""
        return self.dp.size // self.cp.size

    @staticmethod
    def single(device: torch.device | None = None) -> Mesh:
        """The mesh of one process, without process groups."""
        return build_mesh(Config(), rank=0, world_size=1, device=device or torch.device("cpu"))


def init_mesh(config: Config, place: Place, watch: Watch | None = None) -> Mesh:
    """Join the process group, if there is more than one process, and build the mesh. Call
    ``close_mesh`` at the end. ``watch`` is that of this process, if the others are to be watched.
    Collective."""
    world, device = join(config.parallel, place, watch)
    return build_mesh(
        config,
        rank=place.rank,
        world_size=place.world_size,
        device=device,
        recorder=world.recorder,
        world=world,
    )


def join(
    parallel: ParallelConfig, place: Place, watch: Watch | None = None
) -> tuple[Axis, torch.device]:
    """Join the process group, unless this process has. Returns the axis of all processes, and the
    device of this one. Nothing here depends on the layout. ``watch`` starts as soon as this process
    has found the others. Collective. Raises ClusterError."""
    # Segments that grow, so that gaps between allocations of different sizes do not add up. A user
    # who sets one of these variables has decided otherwise.
    if not _ALLOCATOR_VARIABLES & os.environ.keys():
        devices.use_allocator("expandable_segments:True")
    device = devices.accelerator(place.local_rank)
    recorder = watch.recorder if watch is not None else Recorder()
    if place.world_size == 1:
        return _world(place.rank, 1, recorder, None), device
    if place.joined:
        # The program's group may have no backend for values of the host, or none for the device.
        group = dist.new_group(
            timeout=_backend_timeout(parallel), backend=devices.backend(device), group_desc="world"
        )
        return _world(place.rank, place.world_size, recorder, group), device
    if not dist.is_initialized():
        with recorder.waiting("the other ranks"):
            join_group(parallel, place, device, watch)
    return _world(place.rank, place.world_size, recorder, dist.group.WORLD), device


def meet_on_loopback() -> None:
    """Have gloo connect this process with others of this machine only. Called before it joins a
    group."""
    interface = interface_of("127.0.0.1")
    if interface is not None:
        os.environ[GLOO] = interface


def this_place() -> Place:
    """Which process this is: of the group that the program has made, else of those that a launcher
    has started. Raises ClusterError."""
    if not dist.is_initialized():
        return place_from_environment()
    rank = dist.get_rank()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return Place(rank, dist.get_world_size(), local_rank, joined=True)


def join_group(
    parallel: ParallelConfig, place: Place, device: torch.device, watch: Watch | None = None
) -> None:
    """Join the process group of a ``place`` that is one of several. Collective. Raises
    ClusterError. ``join`` does it where nobody else may have done it."""
    patience = timedelta(minutes=parallel.distributed_timeout_minutes)
    timeout = _backend_timeout(parallel)
    rank = place.rank
    world_size = place.world_size
    require_master(place)
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun hosts it
    store = open_store(place, patience, hosts=rank == 0 and not by_launcher)
    found = None
    if watch is not None:
        watch.keep(store)
        found = watch.start
    with host_named():
        store = meet(store, rank, world_size, timeout.total_seconds(), found=found)
    store.set_timeout(timeout)
    interface = choose_interface(store, place, os.environ)
    if interface is not None:
        os.environ.setdefault(GLOO, interface)
        os.environ.setdefault(NCCL, f"={interface}")  # NCCL reads a bare name as a prefix
    if not devices.is_host(device):
        # Only now and then a value of the host crosses this group, so a socket for each pair of
        # ranks, 16,000 in every process of a job of 16,000, would mostly stay unused.
        os.environ.setdefault(GLOO_LAZY, "1")
    flight_recorder.turn_on(os.environ)
    dist.init_process_group(
        devices.backend(device), store=store, rank=rank, world_size=world_size, timeout=timeout
    )


def _world(rank: int, world_size: int, recorder: Recorder, group: dist.ProcessGroup | None) -> Axis:
    return Axis("world", rank, tuple(range(world_size)), group, recorder)


def _backend_timeout(parallel: ParallelConfig) -> timedelta:
    """Later than the timeout of the watch, which can say who is missing and where the others
    are."""
    return timedelta(minutes=parallel.distributed_timeout_minutes) + GRACE


def placement_warnings(parallel: ParallelConfig, local_world_size: int) -> list[str]:
    """Warn of what is slow in this layout on machines of ``local_world_size`` processes (0 means
    unknown)."""
    tp = parallel.tensor_model_parallel_size
    if local_world_size and tp > 1 and local_world_size % tp:
        return [
            f"tensor parallel size {tp} does not divide the {local_world_size} processes of a "
            "machine: its traffic leaves the machine"
        ]
    return []


def present_groups() -> tuple[dist.ProcessGroup, ...]:
    """The process groups to which this process belongs, in the order in which they were made."""
    return tuple(dist.distributed_c10d._world.pg_map)


def leave_group(*, abort: bool = False, kept: Collection[dist.ProcessGroup] = ()) -> None:
    """Leave the process group, if this process has joined it; where groups are to be ``kept``, all
    others. On a device that waits for everything that has been issued, so all ranks must have
    issued it: ``abort`` waits for nothing, for a rank that leaves alone."""
    if not dist.is_initialized():
        return
    if kept:
        for group in present_groups():
            if group in kept:
                continue
            if abort:
                dist.distributed_c10d._abort_process_group(group)
            else:
                dist.destroy_process_group(group)
    elif abort:
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def close_mesh() -> None:
    """Leave the process group. Call it when no variable holds a Mesh any more."""
    leave_group()
    # A group's threads end when the last reference to it goes. Reference cycles (a runtime holds
    # its own methods) would keep groups until the interpreter shuts down, and a gloo thread that
    # then frees a tensor aborts the process.
    gc.collect()


def build_mesh(
    config: Config,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    recorder: Recorder | None = None,
    world: Axis | None = None,
) -> Mesh:
    """Build the mesh of a process group that has been joined, with communicators for what the
    configuration uses only. Each of them is used once, so that nothing waits for one to be made
    later. ``recorder`` is a new one unless this process has one, ``world`` is the default group
    unless the ranks have met in another. Collective. Raises ClusterError if the layout does not
    divide ``world_size``."""
    parallel = config.parallel
    model = config.model
    tp = parallel.tensor_model_parallel_size
    cp = parallel.context_parallel_size
    pp = parallel.pipeline_model_parallel_size
    if world_size % (tp * cp * pp):
        want = f"a multiple of tensor x context x pipeline parallel size ({tp} x {cp} x {pp})"
        raise ClusterError(
            "number of processes", got=world_size, expected=want, do="change one of the four"
        )
    grid = _Grid(pp, world_size // (tp * cp * pp), cp, tp)
    recorder = recorder or Recorder()
    builder = _AxisBuilder(rank, recorder, _backend_timeout(parallel), device, parallel)

    data_lines = grid.lines(1, 2)
    shards = shard_count(parallel, len(data_lines[0]))
    shard_lines = [line[i : i + shards] for line in data_lines for i in range(0, len(line), shards)]
    replica_lines = [line[i::shards] for line in data_lines for i in range(shards)]
    dp = builder.build("dp", data_lines)
    dp_shard = dp if shards == dp.size else builder.build("dp_shard", shard_lines)

    tp_lines = grid.lines(3)
    copies = kv_copies(model, tp) if model.num_key_value_heads else 1
    kv_lines = []
    if copies < tp:
        kv_lines = [line[i : i + copies] for line in tp_lines for i in range(0, tp, copies)]
    tp_axis = builder.build("tp", tp_lines)
    kv = builder.build("kv", kv_lines)
    cp_axis = builder.build("cp", grid.lines(2))

    dp_replica = dp if shards == 1 else builder.build("dp_replica", replica_lines)
    if devices.one_connection_per_peer(device):
        dp_gather = replace(dp_shard, name="dp_gather")
    else:
        dp_gather = builder.build("dp_gather", shard_lines)

    pp_lines = grid.lines(0)
    partition = partition_of(config)
    virtual = partition.stages > pp
    tied = has_tied_head(model) and not partition.first_and_last_share_rank
    mesh = Mesh(
        world=world
        or _world(rank, world_size, recorder, dist.group.WORLD if world_size > 1 else None),
        tp=tp_axis,
        kv=kv,
        cp=cp_axis,
        dp=dp,
        dp_shard=dp_shard,
        dp_replica=dp_replica,
        dp_gather=dp_gather,
        pp=builder.build("pp", pp_lines),
        pp_backward=builder.build("pp_backward", pp_lines),
        pp_return=builder.build("pp_return", pp_lines) if virtual else None,
        pp_backward_return=builder.build("pp_backward_return", pp_lines) if virtual else None,
        embedding=builder.build(
            "embedding", [(line[0], line[-1]) for line in pp_lines] if tied else []
        ),
        device=device,
        recorder=recorder,
    )
    ring = parallel.cp_comm_type == "ring"
    _make_communicators(mesh, partition.placement, ring=ring)
    return mesh


def _make_communicators(mesh: Mesh, placement: StagePlacement, *, ring: bool) -> None:
    """Use every communicator of this rank once: an all-reduce along each axis, a step of the ring,
    and a message from each pipeline rank to each neighbour that it sends to. Collective.

    NCCL makes a communicator at its first use, and the host waits there until all its ranks have
    come (``plans/schedule/connections.py``). Inside a schedule two ranks may come to their first
    uses in different orders, and would wait forever. Here all ranks come in one order."""
    if mesh.world.size == 1:
        return
    sent = torch.zeros(1, device=mesh.device)
    received = torch.zeros(1, device=mesh.device)
    axes = (
        mesh.world,
        mesh.tp,
        mesh.kv,
        mesh.cp,
        mesh.dp,
        mesh.dp_shard,
        mesh.dp_replica,
        mesh.dp_gather,
        mesh.embedding,
    )
    use_once(axes, mesh.device)
    if ring and mesh.cp.size > 1:
        # The messages of a batch go over the axis' own communicator, which connects the neighbours
        # at the first of them.
        after = (mesh.cp.rank + 1) % mesh.cp.size
        before = (mesh.cp.rank - 1) % mesh.cp.size
        step = [
            dist.P2POp(dist.isend, sent, group=mesh.cp.group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=mesh.cp.group, group_peer=before),
        ]
        with mesh.recorder.waiting("the ranks of the ring"):
            for work in dist.batch_isend_irecv(step):
                work.wait()
    for op, sender, receiver in connection_order(placement):
        if mesh.pp.rank not in (sender, receiver):
            continue
        link = mesh.link(sender, receiver, backward=op is Op.SEND_BACKWARD)
        peer = receiver if mesh.pp.rank == sender else sender
        with mesh.recorder.waiting(f"rank {link.ranks[peer]} on {link.name}"):
            if mesh.pp.rank == sender:
                message = dist.isend(sent, group=link.group, group_dst=peer)
            else:
                message = dist.irecv(received, group=link.group, group_src=peer)
            assert message is not None
            message.wait()
    # What cannot be connected fails here, and not in the first step.
    with mesh.recorder.waiting("the first messages of all communicators"):
        devices.synchronize(mesh.device)


def use_once(axes: Iterable[Axis], device: torch.device) -> None:
    """Make an all-reduce along each axis, so that its communicator exists. Collective, in one order
    on all ranks."""
    sent = torch.zeros(1, device=device)
    made: list[dist.ProcessGroup] = []
    for axis in axes:
        # On the host one group serves several axes.
        if axis.group is not None and axis.group not in made:
            with axis.recorder.waiting(f"the ranks of {axis.name}"):
                dist.all_reduce(sent, group=axis.group)
            made.append(axis.group)


@dataclass(frozen=True)
class _Grid:
    pp: int
    dp: int
    cp: int
    tp: int

    def lines(self, *dims: int) -> list[tuple[int, ...]]:
        """All lines of ranks along one or more dims (0 pp, 1 dp, 2 cp, 3 tp), the last one
        innermost."""
        shape = (self.pp, self.dp, self.cp, self.tp)
        ranks = torch.arange(math.prod(shape)).view(shape)
        size = math.prod(shape[dim] for dim in dims)
        lines = ranks.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1, size)
        return [tuple(line) for line in lines.tolist()]


@dataclass(frozen=True)
class _AxisBuilder:
    rank: int
    recorder: Recorder
    timeout: timedelta
    device: torch.device
    parallel: ParallelConfig

    def build(self, name: str, lines: list[tuple[int, ...]]) -> Axis:
        """Create the group of every line, and return the axis of the line to which this rank
        belongs."""
        # torch.distributed demands that every rank creates every group, in the same order.
        mine = Axis(name, 0, (self.rank,), None, self.recorder)
        for line in lines:
            if len(line) == 1:
                continue
            with self.recorder.waiting(f"the ranks of {name}"):
                group = dist.new_group(
                    list(line),
                    timeout=self.timeout,
                    backend=devices.axis_backend(self.device),
                    pg_options=self._options(name),
                    group_desc=name,
                )
            if self.rank in line:
                mine = Axis(name, line.index(self.rank), line, group, self.recorder)
        return mine

    def _options(self, name: str) -> object:
        """What NCCL is told of the communicators of an axis; on a host None."""
        if devices.is_host(self.device):
            return None
        group = _STREAM_GROUPS.get(name)
        # A kernel of a stream with high priority starts before waiting ones of others, so the
        # computation in the compute stream does not hold up a message that others wait for.
        options = dist.ProcessGroupNCCL.Options(
            is_high_priority_stream=group in self.parallel.high_priority_stream_groups
        )
        # torch warns of options whose timeout is another than the group's.
        options._timeout = self.timeout
        if group == "pp" and self.parallel.nccl_pp_max_ctas:
            # A message of the pipeline has a whole pass to arrive in, and its kernel takes
            # multiprocessors away from that pass for as long as it waits for its peer.
            options.config.max_ctas = self.parallel.nccl_pp_max_ctas
        return options
