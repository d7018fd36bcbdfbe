"""The messages of one step over the data-parallel axes, counted from the plans that the run
executes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from megatron_llama.config.schema import Config
from megatron_llama.engine.options import MUON
from megatron_llama.engine.plan.buckets import BucketPlan, strategy_named
from megatron_llama.engine.plan.muon import muon_plan
from megatron_llama.engine.plan.prefetch import PrefetchPlan, prefetch_plan_of
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.model.plan.itemsize import compute_itemsize, reduce_itemsize
from megatron_llama.pipeline.plan.run_engine import rank_bucket_plan
from megatron_llama.pipeline.plan.stage_accesses import rank_weight_accesses
from megatron_llama.schedule import Schedule


@dataclass(frozen=True)
class StepTraffic:
    """Messages and bytes of one rank in one of many equal steps. Bytes are those of whole buckets,
    as the recorder of a run counts them; ``sent`` are the bytes that leave the rank. Of experts
    that ranks divide among them ``experts`` has what travels along their axes, and the other fields
    have the rest."""

    gathers: int
    gather_bytes: int
    reductions: int
    """Reduce-scatters, or all-reduces if nothing is sharded."""
    reduction_bytes: int
    replica_bytes: int
    """Bytes of the shards that are all-reduced over replicas."""
    shards: int
    replicas: int
    matrix_bytes: float = 0.0
    """With Muon, the bytes that a rank sends to the owners of matrices and back, on average over
    the ranks that share buckets."""
    experts: StepTraffic | None = None

    @property
    def sent(self) -> float:
        """Bytes that leave the rank: the least with which these collectives are possible."""
        sharded = 1 - 1 / self.shards
        repeated = 2 * (1 - 1 / self.replicas)
        return (
            (self.gather_bytes + self.reduction_bytes) * sharded
            + self.replica_bytes * repeated
            + self.matrix_bytes
            + (0.0 if self.experts is None else self.experts.sent)
        )


def step_traffic(config: Config, schedule: Schedule, *, dp: int, rank: int = 0) -> StepTraffic:
    """Count the messages and bytes of a step of one pipeline rank. ``config`` is resolved, with
    every ``auto`` decided; ``dp``: data-parallel ranks, context-parallel ones included."""
    parallel = config.parallel
    bucket_plan = rank_bucket_plan(config, dp=dp, rank=rank)
    itemsize = compute_itemsize(config)
    wire = reduce_itemsize(config)
    every_microbatch = strategy_named(
        parallel.data_parallel_sharding_strategy
    ).reduce_every_microbatch
    rounds = schedule.microbatches if every_microbatch else 1
    frozen = {bucket.index for bucket in bucket_plan.buckets if not bucket.kind.trainable}
    accesses = rank_weight_accesses(config, schedule.ranks[rank], rank=rank)
    sizes = [bucket.numel * itemsize for bucket in bucket_plan.buckets]
    prefetch = prefetch_plan_of(bucket_plan, sizes, parallel.prefetch_bytes)
    counts = count_gathers(prefetch, accesses, frozen)

    def along(ep: int) -> StepTraffic:
        buckets = [bucket for bucket in bucket_plan.buckets if bucket.kind.ep == ep]
        trained = [bucket for bucket in buckets if bucket.kind.trainable]
        elements = sum(bucket.numel for bucket in trained)
        gathers = sum(counts[bucket.index] for bucket in buckets)
        gathered = sum(bucket.numel * counts[bucket.index] for bucket in buckets)
        shards = max(1, bucket_plan.shards // ep)
        replicas = dp // ep // shards
        return StepTraffic(
            gathers=gathers if shards > 1 else 0,
            gather_bytes=gathered * itemsize if shards > 1 else 0,
            reductions=len(trained) * rounds,
            reduction_bytes=elements * rounds * wire if shards > 1 else 0,
            replica_bytes=elements // shards * wire if replicas > 1 else 0,
            shards=shards,
            replicas=replicas,
        )

    ep = parallel.expert_model_parallel_size
    return replace(
        along(1),
        matrix_bytes=_matrix_bytes(config, bucket_plan),
        experts=along(ep) if ep > 1 else None,
    )


def _matrix_bytes(config: Config, bucket_plan: BucketPlan) -> float:
    if config.optimizer.optimizer != MUON:
        return 0.0
    plan = muon_plan(bucket_plan, tp=config.parallel.tensor_model_parallel_size)
    kinds = {
        bucket.kind.ep: bucket.kind.shards(bucket_plan.shards) for bucket in bucket_plan.buckets
    }
    return sum(
        plan.sent(rank, 0, ep)[0] / shards for ep, shards in kinds.items() for rank in range(shards)
    )


def count_gathers(
    prefetch: PrefetchPlan,
    accesses: Sequence[WeightAccess],
    frozen: Container[int] = (),
    steps: int = 2,
) -> Counter[int]:
    """Count the gathers of each bucket in the last of ``steps``. All steps from the second on are
    equal.

    A step is: begin, every access, an update of all buckets but the ``frozen`` ones, ``try_gather``
    in forward order. This walks ``prefetch``, so the caller must not use that elsewhere."""
    accesses = tuple(accesses)
    order = dict.fromkeys(
        bucket for access in accesses for bucket in prefetch.unit_buckets[access.unit]
    )
    trained = [bucket for bucket in order if bucket not in frozen]
    count: Counter[int] = Counter()
    for _ in range(steps):
        count = Counter(prefetch.begin(accesses))
        for access in accesses:
            count.update(prefetch.advance(access))
        for bucket in trained:
            prefetch.invalidate(bucket)
        count.update(bucket for bucket in trained if prefetch.try_gather(bucket))
    return count
