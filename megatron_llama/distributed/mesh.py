"""The grid of processes: a pure function of the rank, and the process groups of its axes.

Rank order, outermost to innermost: pp, dp, cp, tp. Tensor-parallel ranks are neighbours, so they
share a machine.
"""

from __future__ import annotations

import gc
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.distributed import device as devices
from megatron_llama.distributed.recorder import Recorder
from megatron_llama.distributed.rendezvous import meet
from megatron_llama.errors import ClusterError
from megatron_llama.plans.buckets import shard_count
from megatron_llama.plans.params import kv_copies, partition_of

GRACE = timedelta(seconds=30)
_ALLOCATOR_VARIABLES = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
"""With which a user says how a GPU's memory is handed out. Who says nothing gets segments that
grow, so that gaps between allocations of different sizes do not add up."""


@dataclass(frozen=True)
class Place:
    """Which process this is, as the launcher says."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str = "localhost"
    master_port: int = 29500
    local_world_size: int = 0
    """Processes on this machine; 0: unknown."""


@dataclass(frozen=True)
class Axis:
    """The processes along one dimension of the mesh. Size 1 has no group, and its collectives are
    no-ops."""

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


@dataclass(frozen=True)
class Mesh:
    """This process's place on every axis. ``pp_backward`` spans the ranks of ``pp`` with a
    communicator of its own, so that traffic of opposite directions never queues behind each
    other."""

    world: Axis
    tp: Axis
    kv: Axis
    """The tensor-parallel ranks that share a key/value head, where those are some of ``tp``; else
    size 1."""
    cp: Axis
    dp: Axis
    """All ranks that hold the same weights, data-parallel and context-parallel ones: shards and
    reductions span both."""
    dp_shard: Axis
    """The ranks of ``dp`` that share a bucket, for its reductions: all, some neighbours (hybrid
    sharding), or one."""
    dp_replica: Axis
    """The ranks of ``dp`` that hold the same shard."""
    dp_gather: Axis
    """The ranks of ``dp_shard``, for gathers: on a device with a communicator of their own, to run
    beside reductions."""
    pp: Axis
    pp_backward: Axis
    embedding: Axis
    """First and last pipeline rank, for tied embeddings; size 1 on the ranks between."""
    device: torch.device
    recorder: Recorder = field(repr=False)
    pp_return: Axis | None = None
    pp_backward_return: Axis | None = None
    """With virtual stages, also: transfers against the usual direction of ``pp`` and
    ``pp_backward``."""

    def link(self, sender: int, receiver: int, *, backward: bool) -> Axis:
        """The communicator for transfers between two pipeline ranks: one for each kind of tensor
        and direction. On NCCL two ranks that each wait to receive from the other on one
        communicator would wait for ever."""
        usual = (sender < receiver) is not backward
        axis = (
            (self.pp_backward if usual else self.pp_backward_return)
            if backward
            else (self.pp if usual else self.pp_return)
        )
        assert axis is not None, "only virtual stages send against the usual direction"
        return axis

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.world.rank

    @property
    def data_rank(self) -> int:
        """Which share of a global batch this process reads: context-parallel ranks read the same
        samples."""
        return self.dp.rank // self.cp.size

    @property
    def data_size(self) -> int:
        """Into how many shares a global batch is split."""
        return self.dp.size // self.cp.size

    @staticmethod
    def single(device: torch.device | None = None) -> Mesh:
        """One process, no process groups."""
        return build_mesh(Config(), rank=0, world_size=1, device=device or torch.device("cpu"))


def place_from_environment(environ: Mapping[str, str] | None = None) -> Place:
    """Read torchrun's variables, else Slurm's, else assume a single process.

    Slurm wins over a stray WORLD_SIZE: only RANK, WORLD_SIZE and MASTER_ADDR together mean
    torchrun.
    """
    env = os.environ if environ is None else environ
    if all(key in env for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    elif "RANK" in env and env.get("WORLD_SIZE", "1") != "1":
        found = f"RANK={env['RANK']} WORLD_SIZE={env['WORLD_SIZE']} without MASTER_ADDR"
        raise ClusterError(
            "environment",
            got=found,
            expected="all three",
            do="start with torchrun or srun, or set MASTER_ADDR",
        )
    else:
        return Place(0, 1, 0)
    rank = _integer(env, names[0])
    world_size = _integer(env, names[1])
    local_rank = _integer(env, names[2]) if names[2] in env else rank
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "localhost"))
    port = (
        _integer(env, "MASTER_PORT")
        if "MASTER_PORT" in env
        else 20000 + int(env.get("SLURM_JOB_ID", "9500")) % 20000
    )
    local = next(
        (
            _integer(env, name)
            for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
            if name in env
        ),
        0,
    )
    return Place(
        rank, world_size, local_rank, env.get("MASTER_ADDR") or first_host(nodes), port, local
    )


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ClusterError(
            f"environment variable {name}",
            got=repr(env[name]),
            expected="an integer",
            do="unset it",
        ) from None


def first_host(nodelist: str) -> str:
    """The first machine of a Slurm node list: ``gpu[03-07,9],login`` gives ``gpu03``."""
    first_entry = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    assert first_entry is not None  # the pattern matches the empty string
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first_entry[0])


def init_mesh(config: Config, place: Place) -> Mesh:
    """Join the process group (if there is more than one process) and build the mesh. Pair with
    ``close_mesh``."""
    _, device = join(config.parallel, place)
    return build_mesh(config, rank=place.rank, world_size=place.world_size, device=device)


def join(parallel: ParallelConfig, place: Place) -> tuple[Axis, torch.device]:
    """Join the process group, unless this process has: all processes, and the device of this one.
    Nothing here depends on the layout."""
    if not _ALLOCATOR_VARIABLES & os.environ.keys():
        devices.use_allocator("expandable_segments:True")
    device = devices.accelerator(place.local_rank)
    if place.world_size > 1 and not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", place.master_addr)
        os.environ.setdefault("MASTER_PORT", str(place.master_port))
        timeout = _backend_timeout(parallel)
        rank = place.rank
        world_size = place.world_size
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        store = meet(store, rank, world_size, timeout.total_seconds())
        dist.init_process_group(
            devices.backend(device), store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    return _world(place.rank, place.world_size, Recorder()), device


def _world(rank: int, world_size: int, recorder: Recorder) -> Axis:
    return Axis(
        "world",
        rank,
        tuple(range(world_size)),
        dist.group.WORLD if world_size > 1 else None,
        recorder,
    )


def _backend_timeout(parallel: ParallelConfig) -> timedelta:
    """Later than the watch, which can say who is missing, and where the others are."""
    return timedelta(minutes=parallel.distributed_timeout_minutes) + GRACE


def placement_warnings(parallel: ParallelConfig, local_world_size: int) -> list[str]:
    """What is slow about this layout on machines with so many processes each (0: unknown)."""
    tp = parallel.tensor_model_parallel_size
    if local_world_size and tp > 1 and local_world_size % tp:
        return [
            f"tensor parallel size {tp} does not divide the {local_world_size} processes of a machine: its traffic leaves the machine"
        ]
    return []


def close_mesh() -> None:
    """Leave the process group. Call it when no variable holds a Mesh any more.

    A group's threads end when the last reference to it goes. Reference cycles (a runtime holds its
    own methods) would keep groups until the interpreter shuts down, and a gloo thread that then
    frees a tensor aborts the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def build_mesh(config: Config, *, rank: int, world_size: int, device: torch.device) -> Mesh:
    """The mesh of an already joined process group. Collective: every rank calls it.

    Communicators are made only for what the configuration uses."""
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
    recorder = Recorder()
    builder = _AxisBuilder(rank, recorder, _backend_timeout(parallel))
    world = _world(rank, world_size, recorder)
    data = grid.lines(1, 2)
    stages = grid.lines(0)
    shards = shard_count(parallel, len(data[0]))
    together = [line[i : i + shards] for line in data for i in range(0, len(line), shards)]
    replicas = [line[i::shards] for line in data for i in range(shards)]
    copies = kv_copies(model, tp) if model.num_key_value_heads else 1
    sharing = (
        [line[i : i + copies] for line in grid.lines(3) for i in range(0, tp, copies)]
        if copies < tp
        else []
    )
    partition = partition_of(config)
    dp = builder.build("dp", data)
    tied = model.tie_word_embeddings and not partition.ends_meet
    virtual = partition.stages > pp
    dp_shard = dp if shards == dp.size else builder.build("dp_shard", together)
    apart = not devices.one_connection_per_peer(device)
    return Mesh(
        world=world,
        tp=builder.build("tp", grid.lines(3)),
        kv=builder.build("kv", sharing),
        cp=builder.build("cp", grid.lines(2)),
        dp=dp,
        dp_shard=dp_shard,
        dp_replica=dp if shards == 1 else builder.build("dp_replica", replicas),
        dp_gather=builder.build("dp_gather", together)
        if apart
        else replace(dp_shard, name="dp_gather"),
        pp=builder.build("pp", stages),
        pp_backward=builder.build("pp_backward", stages),
        pp_return=builder.build("pp_return", stages) if virtual else None,
        pp_backward_return=builder.build("pp_backward_return", stages) if virtual else None,
        embedding=builder.build(
            "embedding", [(line[0], line[-1]) for line in stages] if tied else []
        ),
        device=device,
        recorder=recorder,
    )


@dataclass(frozen=True)
class _Grid:
    pp: int
    dp: int
    cp: int
    tp: int

    def lines(self, *dims: int) -> list[tuple[int, ...]]:
        """All lines of ranks along one or more dims (0 pp, 1 dp, 2 cp, 3 tp), the last of them
        innermost."""
        ranks = torch.arange(self.pp * self.dp * self.cp * self.tp).view(
            self.pp, self.dp, self.cp, self.tp
        )
        size = math.prod(ranks.shape[dim] for dim in dims)
        return [
            tuple(line)
            for line in ranks.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1, size).tolist()
        ]


@dataclass(frozen=True)
class _AxisBuilder:
    rank: int
    recorder: Recorder
    timeout: timedelta

    def build(self, name: str, lines: list[tuple[int, ...]]) -> Axis:
        """Create every line's group, on every rank in the same order as torch.distributed demands,
        and keep our own."""
        mine = Axis(name, 0, (self.rank,), None, self.recorder)
        for line in lines:
            if len(line) == 1:
                continue
            group = dist.new_group(list(line), timeout=self.timeout)
            if self.rank in line:
                mine = Axis(name, line.index(self.rank), line, group, self.recorder)
        return mine
