"""From options to update rules: who updates which bucket, in which memory, on which
processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_llama.distributed import device as devices
from megatron_llama.distributed.axes import Mesh
from megatron_llama.distributed.comm.object_collectives import all_gather_object, raise_on_all_ranks
from megatron_llama.distributed.host_memory import free_bytes
from megatron_llama.distributed.machine import machine_name
from megatron_llama.engine.muon import Muon
from megatron_llama.engine.offload.copies import Copies, open_copies
from megatron_llama.engine.offload.exact import ExactOffload
from megatron_llama.engine.offload.worker import HostWorker, WorkerFactory, rank_cores
from megatron_llama.engine.offload.zenflow.rule import ZenFlow
from megatron_llama.engine.offload.zenflow.schedule import Intervals
from megatron_llama.engine.schedule_free import ScheduleFreeAdamW
from megatron_llama.engine.update_rule import AdamW, UpdateRule, UpdateRules
from megatron_llama.errors import OffloadError, describe
from megatron_llama.plans.buckets import BucketPlan
from megatron_llama.plans.engine_memory import sized, state_bytes
from megatron_llama.plans.engine_options import MUON, SCHEDULE_FREE, EngineOptions
from megatron_llama.plans.offload import ZENFLOW, OffloadPlan, offload_plan
from megatron_llama.plans.zenflow import AUTO, longest_window, selection_steps, sends_fp32


def build_update_rules(
    options: EngineOptions,
    bucket_plan: BucketPlan,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    copies: Copies | None = None,
    worker_factory: WorkerFactory = HostWorker,
    blocking: bool = False,
    steps_per_epoch: int = 0,
    tp_bucket_plans: Sequence[BucketPlan],
) -> UpdateRules:
    """Build the update rules of one rank: AdamW on the device, and where the optimizer is offloaded
    a rule on the host for the buckets that the plan names. Collective.

    ``dtype`` is that of the parameters; the rest are explained at ``build_engine``.

    Raises ConfigError or OffloadError, on every rank, where processors or memory for offload are
    missing."""
    groups = options.groups
    adamw = AdamW(groups)
    count = len(bucket_plan.buckets)
    if options.rule == SCHEDULE_FREE:
        schedule_free = ScheduleFreeAdamW(groups)
        return UpdateRules([schedule_free] * count, [schedule_free])
    if options.rule == MUON:
        muon = Muon(groups, tp_bucket_plans, mesh, chunk_bytes=options.chunk_bytes)
        kinds = [bucket.kind for bucket in bucket_plan.buckets]
        return UpdateRules([muon if kind.muon else adamw for kind in kinds], [muon, adamw])
    plan = offload_plan(options, bucket_plan, shard_rank=mesh.dp_shard.rank)
    if plan is None:
        return UpdateRules([adamw] * count, [adamw])
    on_cpu = devices.is_host(mesh.device)
    # Without a device the rest of the training state is in the host's memory as well.
    on_device = state_bytes(options, bucket_plan)
    needed = plan.held + (sum(on_device.values()) if on_cpu else 0)
    ranks = all_gather_object(
        Neighbour(machine_name(), devices.physical_cores(), needed), mesh.world
    )
    here = [rank for rank in ranks if rank.machine == ranks[mesh.rank].machine]
    cores_option = options.offload.offload_cores
    with raise_on_all_ranks(mesh.world):
        require_memory(sum(rank.needed for rank in here), len(here), plan)
        cores = rank_cores(cores_option, *place_among(ranks, mesh.rank, apart=cores_option == AUTO))
    # A section of its own: nobody allocates before all ranks have found enough free memory.
    with raise_on_all_ranks(mesh.world):
        # On a machine without a device OMP_NUM_THREADS says how ranks share the processors.
        threads = min(len(cores), torch.get_num_threads()) if on_cpu else len(cores)
        worker = worker_factory(cores, threads)
        copies = copies or open_copies(mesh.device)
        master_dtype = torch.promote_types(dtype, torch.float32)
        rule: UpdateRule
        if options.offload.optimizer_offload == ZENFLOW:
            zenflow = options.zenflow
            wire = dtype
            if sends_fp32(zenflow):
                wire = master_dtype
            elif dtype == torch.float16:
                # Gradients in float16 overflow where the norm, in fp32, does not.
                wire = torch.bfloat16
            rule = ZenFlow(
                groups,
                zenflow.zenflow_topk_ratio,
                Intervals(
                    update=longest_window(zenflow),
                    auto=zenflow.zenflow_update_interval == AUTO,
                    overlap=zenflow.zenflow_overlap_step,
                    warm_up_rounds=zenflow.zenflow_full_warm_up_rounds,
                    selection=selection_steps(zenflow, steps_per_epoch),
                ),
                bucket_plan,
                mesh,
                plan.buckets,
                master_dtype=master_dtype,
                compute_dtype=dtype,
                wire=wire,
                worker=worker,
                copies=copies,
            )
        else:
            rule = ExactOffload(
                groups,
                plan,
                master_dtype=master_dtype,
                compute_dtype=dtype,
                device=mesh.device,
                largest=max(map(bucket_plan.shard_numel, plan.buckets), default=0),
                label=bucket_plan.label,
                worker=worker,
                copies=copies,
                recorder=mesh.recorder,
                blocking=blocking,
                unclipped=options.grad_divisor,
            )
    offloaded = frozenset(plan.buckets)
    by_bucket = [rule if bucket in offloaded else adamw for bucket in range(count)]
    # Also a rule that has no bucket on this rank: on other ranks it may have, and its collectives
    # need all of them.
    return UpdateRules(by_bucket, [rule, adamw])


@dataclass(frozen=True)
class Neighbour:
    """A rank as the others see it."""

    machine: str
    cores: tuple[int, ...]
    """The physical cores that it may use."""
    needed: int
    """Bytes of host memory that it needs."""


def place_among(ranks: Sequence[Neighbour], rank: int, *, apart: bool) -> tuple[int, int]:
    """Returns (i, n): a rank is the i-th of n ranks that divide processors among them. These are
    all ranks of its machine, or with ``apart`` those that may use the same processors: a launcher
    that binds each rank to processors of its own has divided them already."""
    me = ranks[rank]
    sharing = [
        number
        for number, one in enumerate(ranks)
        if one.machine == me.machine and (one.cores == me.cores or not apart)
    ]
    return sharing.index(rank), len(sharing)


def require_memory(needed: int, ranks: int, plan: OffloadPlan) -> None:
    """Raise OffloadError if this machine has less than ``needed`` bytes free for its ``ranks``;
    ``plan`` is that of one of them."""
    free = free_bytes()
    if needed > free:
        got = f"{sized(free)} free on this machine"
        expected = (
            f"{sized(needed)} for its {ranks} rank{'s' if ranks > 1 else ''}, "
            f"{sized(plan.held)} of it for the optimizer of this one"
        )
        do = (
            "shard over more machines, lower --optimizer-offload-fraction or --speculation-bytes, "
            "or stop what else runs here"
        )
        raise OffloadError(describe("--optimizer-offload", got=got, expected=expected, do=do))
