"""The grid of processes, which is a pure function of the rank, and the process groups of its axes.

Rank order, outermost to innermost: pp, dp, cp, tp. Tensor-parallel ranks are neighbours, so they
share a machine. Groups are made by ``torch.distributed.new_group`` and not by ``DeviceMesh``,
because some need their own communicator over the same ranks: the two directions of the pipeline,
and on a device gathers and reductions.

On a device the group of an axis is NCCL's alone. Values of the host (errors, paths, numbers for the
log) go only along the axis of all ranks, whose group has gloo too. gloo connects two ranks when
they first talk: a rank with its two neighbours for most collectives, with log2 of the ranks for a
broadcast, and rank 0 with all. A gloo group for each axis would hold a socket for each pair of its
ranks in every process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.groups import communicator_options, use_once
from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.engine.mesh import Axis, DataAxes, Mesh
from megatron_llama.errors import ClusterError
from megatron_llama.launch.join import backend_timeout, join, world_axis
from megatron_llama.launch.launcher import Place
from megatron_llama.model.plan.params import has_tied_head, kv_copies, partition_of
from megatron_llama.pipeline.plan.run_engine import shard_count
from megatron_llama.schedule import Op, StagePlacement, connection_order

if TYPE_CHECKING:
    from megatron_llama.launch.watch import Watch


_STREAM_GROUPS = MappingProxyType(
    {
        "tp": "tp",
        "kv": "tp",
        "cp": "cp",
        "cp_heads": "cp",
        "cp_keys": "cp",
        "dp": "dp",
        "dp_shard": "dp",
        "dp_replica": "dp",
        "dp_gather": "dp",
        "ep": "dp",
        "expert_dp": "dp",
        "expert_dp_gather": "dp",
        "pp": "pp",
        "pp_backward": "pp",
        "pp_return": "pp",
        "pp_backward_return": "pp",
    }
)
"""The value of ``--high-priority-stream-groups`` for an axis. Tied embeddings have none: their
gradients are added once in a step, when nothing is left to compute."""


def init_mesh(config: Config, place: Place, watch: Watch | None = None) -> Mesh:
    """Join the process group, if there is more than one process, and build the mesh. Call
    ``close_mesh`` at the end. ``watch``: the watch of this process, if the others are to be
    watched. Collective."""
    world, device = join(config.parallel, place, watch)
    return build_mesh(
        config,
        rank=place.rank,
        world_size=place.world_size,
        device=device,
        recorder=world.recorder,
        world=world,
    )


def placement_warnings(parallel: ParallelConfig, local_world_size: int) -> list[str]:
    """Return warnings of slow axes of this layout on machines of ``local_world_size`` processes (0
    means unknown)."""
    tp = parallel.tensor_model_parallel_size
    if local_world_size and tp > 1 and local_world_size % tp:
        return [
            f"tensor parallel size {tp} does not divide the {local_world_size} processes of a "
            "machine: its traffic leaves the machine"
        ]
    return []


def build_mesh(
    config: Config,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    recorder: Recorder | None = None,
    world: Axis | None = None,
) -> Mesh:
    """Build the mesh of a process group that has been joined, with only those communicators that
    the configuration uses. Each is used once here, so that no later step waits for its creation.
    ``recorder`` is a new one by default, and ``world`` the default group. Collective. Raises
    ClusterError if the layout does not divide ``world_size``, or if the ranks that divide experts
    do not divide the data-parallel ones."""
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
    ep = parallel.expert_model_parallel_size
    if grid.dp % ep:
        raise ClusterError(
            "expert parallel size",
            got=ep,
            expected=f"a divisor of the {grid.dp} data-parallel ranks",
            do="change one of the two",
        )
    recorder = recorder or Recorder()
    builder = _AxisBuilder(rank, recorder, backend_timeout(parallel), device, parallel)

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
    cp_lines = grid.lines(2)
    cp_axis = builder.build("cp", cp_lines)
    cp_heads = cp_keys = None
    ring = cp_axis
    if heads := parallel.head_ranks:
        cp_heads = cp_axis
        if heads < cp:
            neighbours = [line[i : i + heads] for line in cp_lines for i in range(0, cp, heads)]
            cp_heads = builder.build("cp_heads", neighbours)
        strided = [line[i::heads] for line in cp_lines for i in range(heads)]
        ring = cp_keys = builder.build("cp_keys", strided)

    dp_replica = dp if shards == 1 else builder.build("dp_replica", replica_lines)
    if devices.one_connection_per_peer(device):
        dp_gather = replace(dp_shard, name="dp_gather")
    else:
        dp_gather = builder.build("dp_gather", shard_lines)

    ep_axis = experts = None
    if ep > 1:
        ep_axis, experts = _expert_axes(builder, grid, ep, is_sharded=shards > 1)

    pp_lines = grid.lines(0)
    partition = partition_of(config)
    virtual = partition.stages > pp
    tied = has_tied_head(model) and not partition.first_and_last_share_rank
    mesh = Mesh(
        world=world
        or world_axis(rank, world_size, recorder, dist.group.WORLD if world_size > 1 else None),
        tp=tp_axis,
        kv=kv,
        cp=cp_axis,
        dp=dp,
        dp_shard=dp_shard,
        dp_replica=dp_replica,
        dp_gather=dp_gather,
        pp=builder.build("pp", pp_lines),
        pp_backward=builder.build("pp_backward", pp_lines),
        cp_heads=cp_heads,
        cp_keys=cp_keys,
        ep=ep_axis,
        experts=experts,
        exchanges_tokens=parallel.exchanges_tokens,
        pp_return=builder.build("pp_return", pp_lines) if virtual else None,
        pp_backward_return=builder.build("pp_backward_return", pp_lines) if virtual else None,
        embedding=builder.build(
            "embedding", [(line[0], line[-1]) for line in pp_lines] if tied else []
        ),
        device=device,
        recorder=recorder,
    )
    _make_communicators(
        mesh, partition.placement, None if parallel.cp_comm_type == "all_gather" else ring
    )
    return mesh


def _expert_axes(
    builder: _AxisBuilder, grid: _Grid, ep: int, *, is_sharded: bool
) -> tuple[Axis, DataAxes]:
    """Return the axis of ``ep`` neighbouring data-parallel ranks that divide experts among them,
    and those of the ranks that hold the same experts. Collective."""
    lines = [line[i : i + ep] for line in grid.lines(1) for i in range(0, grid.dp, ep)]
    # A line has the ranks of dp, and of each those of cp.
    same = [
        tuple(rank for place, rank in enumerate(line) if place // grid.cp % ep == number)
        for line in grid.lines(1, 2)
        for number in range(ep)
    ]
    ep_axis = builder.build("ep", lines)
    dp = builder.build("expert_dp", same)
    alone = Axis(dp.name, 0, (builder.rank,), None, builder.recorder)
    shard, replica = (dp, alone) if is_sharded else (alone, dp)
    gather = replace(shard, name="expert_dp_gather")
    if is_sharded and not devices.one_connection_per_peer(builder.device):
        gather = builder.build(gather.name, same)
    return ep_axis, DataAxes(dp, shard, replica, gather)


def _make_communicators(mesh: Mesh, placement: StagePlacement, ring: Axis | None) -> None:
    """Use every communicator of this rank once: an all-reduce along each axis, an exchange of
    sequence for heads, a step of the ring, and a message from each pipeline rank to each neighbour
    that it sends to. Collective.

    NCCL makes a communicator at its first use, and the host waits there for all its ranks
    (``schedule/connections.py``). Inside a schedule two ranks may come to their first uses in
    different orders, and would wait forever. Here all ranks come in one order."""
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
        *(axis for axis in (mesh.cp_heads, mesh.cp_keys, mesh.ep) if axis is not None),
        *(() if mesh.experts is None else mesh.experts.all),
    )
    use_once(axes, mesh.device)
    for axis in (mesh.cp_heads, mesh.ep if mesh.exchanges_tokens else None):
        if axis is not None:
            # Connects each rank to each: the all-reduce has connected neighbours only.
            with mesh.recorder.waiting(f"the ranks of {axis.name} that exchange parts"):
                parts, others = (torch.zeros(axis.size, device=mesh.device) for _ in range(2))
                dist.all_to_all_single(others, parts, group=axis.group)
    if ring is not None and ring.size > 1:
        # The messages of a batch go over the axis' own communicator, which connects the neighbours
        # at the first of them.
        after = (ring.rank + 1) % ring.size
        before = (ring.rank - 1) % ring.size
        step = [
            dist.P2POp(dist.isend, sent, group=ring.group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=ring.group, group_peer=before),
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
    # A broken connection fails here, and not in the first step.
    with mesh.recorder.waiting("the first messages of all communicators"):
        devices.synchronize(mesh.device)


@dataclass(frozen=True)
class _Grid:
    pp: int
    dp: int
    cp: int
    tp: int

    def lines(self, *dims: int) -> list[tuple[int, ...]]:
        """Return all lines of ranks along one or more dims (0 pp, 1 dp, 2 cp, 3 tp), the last one
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
        """Create the group of every line, and return the axis of this rank's line."""
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
        """Return NCCL's options for the communicators of an axis; on a host None."""
        group = _STREAM_GROUPS.get(name)
        return communicator_options(
            self.device,
            self.timeout,
            urgent=group in self.parallel.high_priority_stream_groups,
            # A message of the pipeline has a whole pass to arrive in, and its kernel takes
            # multiprocessors away from that pass for as long as it waits for its peer.
            max_ctas=self.parallel.nccl_pp_max_ctas if group == "pp" else 0,
        )
