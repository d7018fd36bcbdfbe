"""The engine of a run: its options, and the buckets of each rank.

Only this module makes ``EngineOptions`` of a trainer's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from megatron_llama.config.schema import Config, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_llama.engine.options import (
    BF16,
    FP16,
    FP32,
    FP64,
    EngineOptions,
    LossScaling,
    UpdateOptions,
)
from megatron_llama.engine.plan.buckets import AUTO, BucketPlan, stage_bucket_plan, strategy_named
from megatron_llama.engine.plan.specs import UnitSpec
from megatron_llama.model.plan.run_params import param_groups, rank_units


def by_unit(parallel: ParallelConfig) -> bool:
    """Whether parameters are gathered before each access, or ``auto`` may still decide so."""
    name = parallel.data_parallel_sharding_strategy
    return name == AUTO or strategy_named(name).by_unit


def parameter_slots(parallel: ParallelConfig) -> int | None:
    """Return the number of block-sized parameter slots of a resolved configuration; None: one for
    each bucket.

    With pipeline stages the default is None: each of m microbatches would gather all weights twice,
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


def engine_options(config: Config) -> EngineOptions:
    """Return the engine's options for a configuration in which ``auto`` has been decided."""
    parallel = config.parallel
    training = config.training
    return EngineOptions(
        strategy=parallel.data_parallel_sharding_strategy,
        param_slots=parameter_slots(parallel),
        grad_slots=parallel.grad_slots,
        bucket_size=parallel.reduce_bucket_size,
        dtype=compute_dtype_name(training),
        reduces_in_bf16=parallel.grad_reduce_in_bf16,
        sums_wide=parallel.ddp_reduce_scatter_with_fp32_accumulation,
        registers_buffers=parallel.nccl_register_buffers,
        chunk_bytes=parallel.exchange_chunk_bytes,
        prefetch_bytes=parallel.prefetch_bytes,
        clip=config.optimizer.clip_grad,
        rule=config.optimizer.optimizer,
        groups=tuple(map(update_options, param_groups(config).configs)),
        loss_scaling=loss_scaling(training),
        offload=config.offload,
        zenflow=config.zenflow,
    )


def compute_dtype_name(training: TrainingConfig) -> str:
    """Return the dtype of parameters and activations."""
    if training.fp64:
        return FP64
    if training.fp16:
        return FP16
    return BF16 if training.bf16 else FP32


def update_options(optimizer: OptimizerConfig) -> UpdateOptions:
    """Return the numbers of one group of parameters, by the options of the same names."""
    names = (number.name for number in fields(UpdateOptions))
    return UpdateOptions(**{name: getattr(optimizer, name) for name in names})


def loss_scaling(training: TrainingConfig) -> LossScaling | None:
    """Return the rule of the loss scale; None without --fp16."""
    names = (number.name for number in fields(LossScaling))
    return (
        LossScaling(**{name: getattr(training, name) for name in names}) if training.fp16 else None
    )


def shard_count(parallel: ParallelConfig, dp: int) -> int:
    """Return the number of shards of a bucket. ``dp`` counts the data-parallel ranks,
    context-parallel ones included."""
    name = parallel.data_parallel_sharding_strategy
    # Process groups are made before ``auto`` is decided, by the memory of all processes; it always
    # shards.
    if name != AUTO and not strategy_named(name).sharded:
        return 1
    return parallel.data_parallel_shard_size or dp


def rank_bucket_plan(
    config: Config, *, dp: int, tp_rank: int = 0, rank: int = 0, ep_rank: int = 0
) -> BucketPlan:
    """Return the bucket plan of one pipeline rank (all its stages) on one tensor-parallel rank, for
    a resolved configuration. ``dp`` counts the data-parallel ranks, context-parallel ones included;
    ``ep_rank`` is the number of one of them among those that divide experts."""
    stages = rank_units(config, rank=rank, tp_rank=tp_rank, ep_rank=ep_rank)
    units = [unit for stage in stages for unit in stage]
    options = engine_options(config)
    shards = shard_count(config.parallel, dp)
    bucket_plan = stage_bucket_plan(units, options, shards=shards)
    if config.training.cuda_graph_scope == "none":
        return bucket_plan
    # A graph writes all gradients of a block, so all buckets of a block have their slots at once.
    slots = options.grad_slots
    while _share_slots(bucket_plan, units, options.grad_slots):
        slots += 1
        bucket_plan = stage_bucket_plan(units, replace(options, grad_slots=slots), shards=shards)
    return bucket_plan


def _share_slots(bucket_plan: BucketPlan, units: Sequence[UnitSpec], together: int) -> bool:
    """Whether any buckets of so many blocks in a row share a gradient slot."""
    pairs = zip(units, bucket_plan.unit_buckets, strict=True)
    blocks = [buckets for unit, buckets in pairs if unit.is_block]
    rows = (set[int]().union(*blocks[at : at + together]) for at in range(len(blocks)))
    slots = bucket_plan.gradient_slots
    return any(len({slots[bucket] for bucket in row}) < len(row) for row in rows)
