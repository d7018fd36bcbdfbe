"""From options to the rules of an optimizer on the host: which buckets, in which memory, on which
processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.host_memory import free_bytes
from megatron_llama.engine.comm.machine import machine_name
from megatron_llama.engine.comm.object_collectives import all_gather_object, raise_on_all_ranks
from megatron_llama.engine.offload.copies import Copies, open_copies
from megatron_llama.engine.offload.worker import HostWorker, physical_cores, rank_cores
from megatron_llama.engine.offload_options import EXACT, ZENFLOW
from megatron_llama.engine.plan.memory import sized, state_bytes
from megatron_llama.engine.plan.offload import OffloadPlan, offload_plan
from megatron_llama.engine.plan.zenflow import AUTO
from megatron_llama.engine.rules.registry import RuleInputs
from megatron_llama.engine.rules.update_rule import AdamW, UpdateRule, UpdateRules
from megatron_llama.errors import OffloadError, describe
from megatron_llama.registry import Registry


@dataclass(frozen=True)
class Host:
    """The parts of which a rule on the host is built, beside the ``RuleInputs``."""

    plan: OffloadPlan
    worker: HostWorker
    copies: Copies


OFFLOADED: Registry[Callable[[RuleInputs, Host], UpdateRule]] = Registry(
    {EXACT: "engine.offload.exact:exact_offload", ZENFLOW: "engine.offload.zenflow.rule:zenflow"}
)
"""Build the rule of the buckets that are updated on the host, by --optimizer-offload."""


def offloaded_rules(inputs: RuleInputs) -> UpdateRules:
    """Build a rule on the host for the buckets that the plan names, and AdamW on the device for the
    others. Collective.

    Raises ConfigError or OffloadError, on every rank, where processors or memory for offload are
    missing."""
    options = inputs.options
    bucket_plan = inputs.bucket_plan
    mesh = inputs.mesh
    plan = offload_plan(options, bucket_plan, shard_rank=mesh.dp_shard.rank)
    assert plan is not None
    on_cpu = devices.is_host(mesh.device)
    # Without a device the rest of the training state is in the host's memory as well.
    on_device = state_bytes(options, bucket_plan)
    needed = plan.held + (sum(on_device.values()) if on_cpu else 0)
    ranks = all_gather_object(Neighbour(machine_name(), physical_cores(), needed), mesh.world)
    here = [rank for rank in ranks if rank.machine == ranks[mesh.rank].machine]
    cores_option = options.offload.offload_cores
    with raise_on_all_ranks(mesh.world):
        require_memory(sum(rank.needed for rank in here), len(here), plan)
        cores = rank_cores(cores_option, *place_among(ranks, mesh.rank, apart=cores_option == AUTO))
    # A section of its own: no rank allocates before all have found enough free memory.
    with raise_on_all_ranks(mesh.world):
        # On a machine without a device OMP_NUM_THREADS says how ranks share the processors.
        threads = min(len(cores), torch.get_num_threads()) if on_cpu else len(cores)
        worker = (inputs.worker_factory or HostWorker)(cores, threads)
        copies = inputs.copies or open_copies(mesh.device)
        build_rule = OFFLOADED[options.offload.optimizer_offload]
        rule = build_rule(inputs, Host(plan, worker, copies))
    adamw = AdamW(options.groups)
    offloaded = frozenset(plan.buckets)
    by_bucket = [
        rule if bucket in offloaded else adamw for bucket in range(len(bucket_plan.buckets))
    ]
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
    """Return (i, n): a rank is the i-th of n ranks that divide processors among them. These are
    all ranks of its machine, or with ``apart`` those that may use the same processors: a launcher
    that binds each rank to processors of its own has divided them already."""
    me = ranks[rank]
    sharing = [
        number
        for number, peer in enumerate(ranks)
        if peer.machine == me.machine and (peer.cores == me.cores or not apart)
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
