"""What one step sends over the data-parallel axes, counted from the plans that the run executes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.config.schema import Config
from megatron_llama.plans.activation_memory import compute_bytes
from megatron_llama.plans.buckets import BucketPlan, rank_bucket_plan, strategy_named
from megatron_llama.plans.prefetch import PrefetchPlan, gathers
from megatron_llama.plans.schedule import Schedule
from megatron_llama.plans.weight_access import rank_weight_accesses


@dataclass(frozen=True)
class StepTraffic:
    """Messages and bytes (of whole buckets, as a recorder counts them) of one rank in a step of
    many equal ones."""

    gathers: int
    gather_bytes: int
    reductions: int
    """Reduce-scatters; all-reduces where nothing is sharded."""
    reduction_bytes: int
    replica_bytes: int
    """Shards that are all-reduced over replicas."""
    shards: int
    replicas: int

    @property
    def sent(self) -> float:
        """Bytes that leave the rank: the least that these collectives can do with."""
        sharded = 1 - 1 / self.shards
        repeated = 2 * (1 - 1 / self.replicas)
        return (self.gather_bytes + self.reduction_bytes) * sharded + self.replica_bytes * repeated


def prefetch_plan_of(layout: BucketPlan, itemsize: int, prefetch_bytes: int) -> PrefetchPlan:
    """The plan of a layout's gathers. ``itemsize``: bytes of a parameter; ``prefetch_bytes``: 0 for
    no limit."""
    return PrefetchPlan(
        slots=layout.parameter_slots,
        sizes=[bucket.numel * itemsize for bucket in layout.buckets],
        unit_buckets=layout.unit_buckets,
        prefetch_bytes=prefetch_bytes or None,
    )


def step_traffic(config: Config, schedule: Schedule, *, dp: int, rank: int = 0) -> StepTraffic:
    """Of one pipeline rank. ``config`` is resolved, with every ``auto`` decided; ``dp``:
    data-parallel ranks, context-parallel ones included."""
    parallel = config.parallel
    layout = rank_bucket_plan(config, dp=dp, rank=rank)
    narrow = compute_bytes(config)
    wire = 2 if parallel.grad_reduce_in_bf16 else max(narrow, 4)
    trained = [bucket for bucket in layout.buckets if bucket.kind.trainable]
    rounds = (
        schedule.microbatches
        if strategy_named(parallel.data_parallel_sharding_strategy).reduce_every_microbatch
        else 1
    )
    elements = sum(bucket.numel for bucket in trained)
    replicas = dp // layout.shards
    frozen = {bucket.index for bucket in layout.buckets if not bucket.kind.trainable}
    accesses = rank_weight_accesses(config, schedule.ranks[rank], rank=rank)
    counts = gathers(prefetch_plan_of(layout, narrow, parallel.prefetch_bytes), accesses, frozen)
    gathered = sum(layout.buckets[bucket].numel * count for bucket, count in counts.items())
    return StepTraffic(
        gathers=sum(counts.values()) if layout.shards > 1 else 0,
        gather_bytes=gathered * narrow if layout.shards > 1 else 0,
        reductions=len(trained) * rounds,
        reduction_bytes=elements * rounds * wire if layout.shards > 1 else 0,
        replica_bytes=elements // layout.shards * wire if replicas > 1 else 0,
        shards=layout.shards,
        replicas=replicas,
    )
