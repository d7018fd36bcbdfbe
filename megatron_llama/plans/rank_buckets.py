"""The buckets of a run: strategy, slots and shards by its options, and the plan of each rank."""

from __future__ import annotations

from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.plans.buckets import (
    AUTO,
    BucketPlan,
    Slots,
    bucket_plan_by_size,
    bucket_plan_by_unit,
    strategy_named,
)
from megatron_llama.plans.params import rank_units


def by_unit(parallel: ParallelConfig) -> bool:
    """Whether parameters are gathered before each access, or ``auto`` may still decide so."""
    name = parallel.data_parallel_sharding_strategy
    return name == AUTO or strategy_named(name).by_unit


def parameter_slots(parallel: ParallelConfig) -> int | None:
    """Returns the number of block-sized parameter slots of a resolved configuration; None: one for
    each bucket.

    With pipeline stages the default is None: each of m microbatches would gather everything twice,
    in a pipeline that waits."""
    chosen = parallel.param_slots
    stages = parallel.pipeline_model_parallel_size
    if (
        not strategy_named(parallel.data_parallel_sharding_strategy).by_unit
        or chosen == "all"
        or (chosen == "default" and stages > 1)
    ):
        return None
    return 2 if chosen == "default" else int(chosen)


def shard_count(parallel: ParallelConfig, dp: int) -> int:
    """Returns into how many shards a bucket is cut. ``dp`` counts the data-parallel ranks,
    context-parallel ones included."""
    name = parallel.data_parallel_sharding_strategy
    # Process groups are made before ``auto`` is decided, by the memory of all processes; it always
    # shards.
    if name != AUTO and not strategy_named(name).sharded:
        return 1
    return parallel.data_parallel_shard_size or dp


def rank_bucket_plan(config: Config, *, dp: int, tp_rank: int = 0, rank: int = 0) -> BucketPlan:
    """Returns the bucket plan of one pipeline rank (all its stages) on one tensor-parallel rank,
    for a resolved configuration. ``dp`` counts the data-parallel ranks, context-parallel ones
    included."""
    parallel = config.parallel
    strategy = strategy_named(parallel.data_parallel_sharding_strategy)
    shards = shard_count(parallel, dp)
    units = [unit for stage in rank_units(config, rank=rank, tp_rank=tp_rank) for unit in stage]
    slots = Slots(
        parameter_slots(parallel), parallel.grad_slots if strategy.reduce_every_microbatch else None
    )
    if strategy.by_unit:
        return bucket_plan_by_unit(units, shards=shards, slots=slots)
    return bucket_plan_by_size(units, shards=shards, cap=parallel.reduce_bucket_size, slots=slots)
