"""The grid of processes: a pure function of the rank, and the process groups of its axes.

Rank order, outermost to innermost: pp, dp, tp. Tensor-parallel ranks are neighbours, so they share a machine.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_llama import device as devices
from megatron_llama.config import ParallelConfig
from megatron_llama.errors import ClusterError, describe
from megatron_llama.recorder import Recorder


@dataclass(frozen=True)
class Place:
    """Which process this is, as the launcher says."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str = "localhost"
    master_port: int = 29500


@dataclass(frozen=True)
class Axis:
    """The processes along one dimension of the mesh. Size 1 has no group, and its collectives are no-ops."""

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
    """This process's place on every axis. ``dp_gather`` and ``pp_backward`` span the ranks of ``dp`` and ``pp`` with a
    communicator of their own, so that traffic of opposite directions never queues behind each other."""

    world: Axis
    tp: Axis
    dp: Axis
    dp_gather: Axis
    pp: Axis
    pp_backward: Axis
    embedding: Axis
    """First and last pipeline stage, for tied embeddings; size 1 on the stages between."""
    device: torch.device
    recorder: Recorder = field(repr=False)

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.world.rank

    @property
    def is_first_stage(self) -> bool:
        """Whether this process holds the embedding."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process holds the head and computes the loss."""
        return self.pp.rank == self.pp.size - 1

    @staticmethod
    def single(device: torch.device | None = None) -> Mesh:
        """One process, no process groups."""
        return build_mesh(ParallelConfig(), rank=0, world_size=1, device=device or torch.device("cpu"))


def place_from_environment(environ: Mapping[str, str] | None = None) -> Place:
    """Read torchrun's variables, else Slurm's, else assume a single process.

    Slurm wins over a stray WORLD_SIZE: only RANK, WORLD_SIZE and MASTER_ADDR together mean torchrun.
    """
    env = os.environ if environ is None else environ
    if all(key in env for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    elif "RANK" in env and env.get("WORLD_SIZE", "1") != "1":
        found = f"RANK={env['RANK']} WORLD_SIZE={env['WORLD_SIZE']} without MASTER_ADDR"
        raise ClusterError(describe("environment", got=found, expected="all three", do="start with torchrun or srun, or set MASTER_ADDR"))
    else:
        return Place(0, 1, 0)
    rank, world_size = _integer(env, names[0]), _integer(env, names[1])
    local_rank = _integer(env, names[2]) if names[2] in env else rank
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "localhost"))
    port = _integer(env, "MASTER_PORT") if "MASTER_PORT" in env else 20000 + int(env.get("SLURM_JOB_ID", "9500")) % 20000
    return Place(rank, world_size, local_rank, env.get("MASTER_ADDR") or first_host(nodes), port)


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ClusterError(describe(f"environment variable {name}", got=repr(env[name]), expected="an integer", do="unset it")) from None


def first_host(nodelist: str) -> str:
    """The first machine of a Slurm node list: ``gpu[03-07,9],login`` gives ``gpu03``."""
    first_entry = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    assert first_entry is not None  # the pattern matches the empty string
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first_entry[0])


def init_mesh(config: ParallelConfig, place: Place) -> Mesh:
    """Join the process group (if there is more than one process) and build the mesh. Pair with ``close_mesh``."""
    device = devices.accelerator(place.local_rank)
    if place.world_size > 1 and not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", place.master_addr)
        os.environ.setdefault("MASTER_PORT", str(place.master_port))
        timeout = timedelta(minutes=config.distributed_timeout_minutes)
        dist.init_process_group(devices.backend(device), rank=place.rank, world_size=place.world_size, timeout=timeout)
    return build_mesh(config, rank=place.rank, world_size=place.world_size, device=device)


def close_mesh() -> None:
    """Leave the process group. Call it when no variable holds a Mesh any more.

    A group's threads end when the last reference to it goes. Reference cycles (a runtime holds its own methods) would keep
    groups until the interpreter shuts down, and a gloo thread that then frees a tensor aborts the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def build_mesh(config: ParallelConfig, *, rank: int, world_size: int, device: torch.device) -> Mesh:
    """The mesh of an already joined process group. Collective: every rank calls it."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    if world_size % (tp * pp):
        want = f"a multiple of tensor x pipeline parallel size ({tp} x {pp})"
        raise ClusterError(describe("number of processes", got=world_size, expected=want, do="change one of the three"))
    grid, recorder = _Grid(pp, world_size // (tp * pp), tp), Recorder()
    builder = _AxisBuilder(rank, recorder, config.distributed_timeout_minutes)
    everyone = tuple(range(world_size))
    world = Axis("world", rank, everyone, dist.group.WORLD if world_size > 1 else None, recorder)
    return Mesh(
        world=world,
        tp=builder.build("tp", grid.lines(2)),
        dp=builder.build("dp", grid.lines(1)),
        dp_gather=builder.build("dp_gather", grid.lines(1)),
        pp=builder.build("pp", grid.lines(0)),
        pp_backward=builder.build("pp_backward", grid.lines(0)),
        embedding=builder.build("embedding", [_ends(line) for line in grid.lines(0)]),
        device=device,
        recorder=recorder,
    )


def _ends(line: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((line[0], line[-1])))


@dataclass(frozen=True)
class _Grid:
    pp: int
    dp: int
    tp: int

    def lines(self, dim: int) -> list[tuple[int, ...]]:
        """All lines of ranks along one dim (0 pp, 1 dp, 2 tp)."""
        ranks = torch.arange(self.pp * self.dp * self.tp).view(self.pp, self.dp, self.tp)
        return [tuple(line) for line in ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()]


@dataclass(frozen=True)
class _AxisBuilder:
    rank: int
    recorder: Recorder
    timeout_minutes: float

    def build(self, name: str, lines: list[tuple[int, ...]]) -> Axis:
        """Create every line's group, on every rank in the same order as torch.distributed demands, and keep our own."""
        mine = Axis(name, 0, (self.rank,), None, self.recorder)
        for line in lines:
            if len(line) == 1:
                continue
            group = dist.new_group(list(line), timeout=timedelta(minutes=self.timeout_minutes))
            if self.rank in line:
                mine = Axis(name, line.index(self.rank), line, group, self.recorder)
        return mine
