"""From configuration to update rule: who updates which bucket, in which memory, on which
processors."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_llama.config.schema import Config
from megatron_llama.distributed import device as devices
from megatron_llama.distributed.comm.object_collectives import all_gather_object, raise_on_all_ranks
from megatron_llama.distributed.host_memory import free_bytes
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.engine.offload.copies import Copies, open_copies
from megatron_llama.engine.offload.divided import Divided
from megatron_llama.engine.offload.exact import ExactOffload
from megatron_llama.engine.offload.windows import Pace
from megatron_llama.engine.offload.worker import HostWorker, WorkerFactory, rank_cores
from megatron_llama.engine.offload.zenflow import ZenFlow
from megatron_llama.engine.update_rule import AdamW, ShardUpdate
from megatron_llama.errors import OffloadError, describe
from megatron_llama.plans.buckets import BucketPlan
from megatron_llama.plans.checks.zenflow import (
    AUTO,
    longest_window,
    sends_wide,
    steps_between_choices,
)
from megatron_llama.plans.memory import gib, state_bytes
from megatron_llama.plans.offload import ZENFLOW, OffloadPlan, offload_plan


def build_update(
    config: Config,
    layout: BucketPlan,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    copies: Copies | None = None,
    worker_factory: WorkerFactory = HostWorker,
    blocking: bool = False,
    steps_per_epoch: int = 0,
) -> ShardUpdate:
    """The update rule of one rank. ``dtype``: of parameters; ``copies``: between device and host,
    by default as fast as they go; ``worker_factory``: makes who updates there; ``blocking``:
    offload that waits at once, for comparison; ``steps_per_epoch``: 0 where there is no such thing.
    Collective.

    Raises ConfigError or OffloadError, on every rank, where processors or memory for offload are
    not there."""
    plan = offload_plan(config, layout)
    if plan is None:
        return AdamW(config.optimizer)
    needed = plan.held + (
        sum(state_bytes(config, layout).values()) if devices.is_host(mesh.device) else 0
    )
    ranks = all_gather_object(Neighbour(_machine(), devices.physical_cores(), needed), mesh.world)
    here = [rank for rank in ranks if rank.machine == ranks[mesh.rank].machine]
    option = config.offload.offload_cores
    with raise_on_all_ranks(mesh.world):
        _require_memory(sum(rank.needed for rank in here), len(here), plan)
        cores = rank_cores(option, *place_among(ranks, mesh.rank, apart=option == AUTO))
    with raise_on_all_ranks(mesh.world):  # not before all have found enough of it free
        # On a host without a device the ranks' own number of threads counts: they have been told
        # how to share the processors.
        worker = worker_factory(
            cores,
            min(len(cores), torch.get_num_threads())
            if devices.is_host(mesh.device)
            else len(cores),
        )
        copies = copies or open_copies(mesh.device)
        if config.offload.optimizer_offload == ZENFLOW:
            rule: ShardUpdate = _zenflow(
                config,
                layout,
                mesh,
                plan,
                dtype=dtype,
                worker=worker,
                copies=copies,
                epoch=steps_per_epoch,
            )
        else:
            rule = ExactOffload(
                config.optimizer,
                plan,
                dtype=torch.promote_types(dtype, torch.float32),
                narrow=dtype,
                device=mesh.device,
                largest=max((layout.shard_numel(bucket) for bucket in plan.buckets), default=0),
                label=layout.label,
                worker=worker,
                copies=copies,
                recorder=mesh.recorder,
                blocking=blocking,
            )
    return Divided(frozenset(plan.buckets), rule, AdamW(config.optimizer))


def _zenflow(
    config: Config,
    layout: BucketPlan,
    mesh: Mesh,
    plan: OffloadPlan,
    *,
    dtype: torch.dtype,
    worker: HostWorker,
    copies: Copies,
    epoch: int,
) -> ZenFlow:
    options = config.zenflow
    wide = torch.promote_types(dtype, torch.float32)
    pace = Pace(
        interval=longest_window(options),
        asks=options.zenflow_update_interval == AUTO,
        overlap=options.zenflow_overlap_step,
        rounds=options.zenflow_full_warm_up_rounds,
        choice=steps_between_choices(options, epoch),
    )
    # Gradients in float16 overflow where the norm, in fp32, does not.
    wire = wide if sends_wide(options) else torch.bfloat16 if dtype == torch.float16 else dtype
    return ZenFlow(
        config.optimizer,
        options.zenflow_topk_ratio,
        pace,
        layout,
        mesh,
        plan.buckets,
        dtype=wide,
        narrow=dtype,
        wire=wire,
        worker=worker,
        copies=copies,
    )


@dataclass(frozen=True)
class Neighbour:
    """A rank as the others see it."""

    machine: str
    cores: tuple[int, ...]
    """The physical ones that it may use."""
    needed: int
    """Bytes of host memory."""


def place_among(ranks: Sequence[Neighbour], rank: int, *, apart: bool) -> tuple[int, int]:
    """Which one of how many ranks that divide processors a rank is: of all on its machine, or,
    ``apart``, of those that may use the same ones. A launcher that binds each rank to processors of
    its own has divided them already."""
    own = ranks[rank]
    others = [
        number
        for number, one in enumerate(ranks)
        if one.machine == own.machine and (one.cores == own.cores or not apart)
    ]
    return others.index(rank), len(others)


def _machine() -> str:
    """Tells machines, and containers on them, apart."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text() if boot.exists() else "")


def _require_memory(needed: int, ranks: int, plan: OffloadPlan) -> None:
    free = free_bytes()
    if needed > free:
        got = f"{gib(free)} free on this machine"
        expected = f"{gib(needed)} for its {ranks} rank{'s' if ranks > 1 else ''}, {gib(plan.held)} of it for the optimizer of this one"
        do = "shard over more machines, lower --optimizer-offload-fraction or --speculation-bytes, or stop what else runs here"
        raise OffloadError(describe("--optimizer-offload", got=got, expected=expected, do=do))
