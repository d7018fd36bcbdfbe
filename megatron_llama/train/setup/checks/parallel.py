"""Checks of the layout over processes: sizes, sharding, pipeline stages, recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.config.world import world_problem
from megatron_llama.engine.plan.buckets import NO_SHARD
from megatron_llama.errors import describe, nearest_divisors, nearest_multiples
from megatron_llama.model.plan.params import partition_of
from megatron_llama.model.plan.pieces import SYMMETRIC
from megatron_llama.schedule import ScheduleError, placement_of


def parallel_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield sizes that do not divide what they split, and layouts that cannot be built."""
    model = config.model
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    pp = parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    world = world_problem(config, world_size)
    if world is not None and min(tp, pp, cp) > 0:
        yield world
    if min(tp, pp, cp, parallel.virtual_pipeline_model_parallel_size) <= 0:
        return
    for name in ("num_attention_heads", "intermediate_size"):
        size = getattr(model, name)
        if size > 0 and size % tp:
            yield describe(
                "--tensor-model-parallel-size",
                got=tp,
                expected=f"a divisor of {name} {size}",
                do=f"choose {nearest_divisors(size, tp)}",
            )
    if parallel.tp_comm_overlap == SYMMETRIC and tp > 1 and not parallel.sequence_parallel:
        yield describe(
            "--tp-comm-overlap",
            got=f"{SYMMETRIC} without --sequence-parallel",
            expected="layers that gather and scatter the sequence",
            do="give --sequence-parallel too, or a number of pieces",
        )
    heads = model.num_key_value_heads
    if heads > 0 and heads % tp and tp % heads:
        wanted = f"a divisor or a multiple of num_key_value_heads {heads}"
        do = f"choose {nearest_divisors(heads, tp) if tp < heads else nearest_multiples(tp, heads)}"
        yield describe("--tensor-model-parallel-size", got=tp, expected=wanted, do=do)
    yield from _sequence_problems(config)
    if parallel.cp_comm_type.startswith("a2a") or parallel.hierarchical_context_parallel_sizes:
        from megatron_llama.train.setup.checks import head_exchange  # of few runs

        yield from head_exchange.context_problems(config)
    ranks = 0 if world is not None else world_size // (tp * pp)
    yield from _sharding_problems(config, ranks)
    if parallel.expert_model_parallel_size > 1:
        from megatron_llama.train.setup.checks.experts import division_problems  # of few models

        yield from division_problems(config, ranks // cp)
    if model.num_hidden_layers > 0:
        # The number of blocks that may recompute is known only for stages that can be built.
        yield from list(_pipeline_problems(config)) or _recompute_problems(config)


def sequence_unit(parallel: ParallelConfig) -> int:
    """Return the number of which the length of a sequence must be a multiple."""
    cp = parallel.context_parallel_size
    # Context parallelism deals out 2 x cp chunks in a zigzag, so that all ranks have equal work.
    chunks = 2 * cp if cp > 1 else 1
    return chunks * (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)


def _sequence_problems(config: Config) -> Iterator[str]:
    parallel = config.parallel
    length = config.training.seq_length
    cp = parallel.context_parallel_size
    tp = parallel.tensor_model_parallel_size
    unit = sequence_unit(parallel)
    if length > 0 and length % unit:
        parts = [f"2 x cp {cp}"] * (cp > 1) + [f"tp {tp}"] * parallel.sequence_parallel
        do = f"choose {nearest_multiples(length, unit)}"
        yield describe(
            "--seq-length",
            got=length,
            expected=f"a multiple of {' x '.join(parts)} = {unit}",
            do=do,
        )


def _sharding_problems(config: Config, ranks: int) -> Iterator[str]:
    """Yield problems of sharding. ``ranks``: data-parallel ranks times cp; 0: unknown."""
    parallel = config.parallel
    if parallel.ddp_reduce_scatter_with_fp32_accumulation and not parallel.grad_reduce_in_bf16:
        yield describe(
            "--ddp-reduce-scatter-with-fp32-accumulation",
            got="no --grad-reduce-in-bf16",
            expected="gradients that travel in bf16: others are added up in fp32 anyway",
            do="give both or neither",
        )
    shards = parallel.data_parallel_shard_size
    strategy = parallel.data_parallel_sharding_strategy
    if shards > 0 and strategy == NO_SHARD:
        do = "leave it out, or choose another --data-parallel-sharding-strategy"
        yield describe(
            "--data-parallel-shard-size",
            got=shards,
            expected=f"nothing, since {NO_SHARD} shards nothing",
            do=do,
        )
    elif shards > 0 and ranks and ranks % shards:
        wanted = f"a divisor of the {ranks} data- and context-parallel ranks"
        yield describe(
            "--data-parallel-shard-size",
            got=shards,
            expected=wanted,
            do=f"choose {nearest_divisors(ranks, shards)}",
        )


def _pipeline_problems(config: Config) -> Iterator[str]:
    parallel = config.parallel
    layers = config.model.num_hidden_layers
    ranks = parallel.pipeline_model_parallel_size
    virtual = parallel.virtual_pipeline_model_parallel_size
    try:
        stages = len(placement_of(parallel.pipeline_schedule, ranks, virtual))
    except ScheduleError as error:
        yield str(error)
        return
    if parallel.pipeline_layer_split:
        split = parallel.pipeline_layer_split
        # The embedding and the head are work enough for a stage, and any other needs a block.
        inner = split[1:-1] if stages > 1 else split
        if len(split) != stages or sum(split) != layers or min(split) < 0 or 0 in inner:
            wanted = (
                f"{stages} numbers of 1 or more (one per stage; first and last may be 0) that add "
                f"up to num_hidden_layers {layers}"
            )
            got = f"{' '.join(map(str, split))} (sum {sum(split)})"
            yield describe("--pipeline-layer-split", got=got, expected=wanted, do="change the list")
        return
    ends = (
        parallel.account_for_embedding_in_pipeline_split
        + parallel.account_for_loss_in_pipeline_split
    )
    if (layers + ends) % stages or layers + ends < stages:
        counted = f" + {ends} for embedding and loss" if ends else ""
        name = (
            "virtual_pipeline_model_parallel_size"
            if virtual > 1
            else "pipeline_model_parallel_size"
        )
        do = (
            f"choose {nearest_divisors(layers + ends, stages)} stages, or give "
            "--pipeline-layer-split"
        )
        yield describe(
            flag(name),
            got=f"{stages} stages",
            expected=f"a divisor of num_hidden_layers {layers}{counted}",
            do=do,
        )


def _recompute_problems(config: Config) -> Iterator[str]:
    wanted = config.parallel.recompute_num_layers
    largest = max(map(len, partition_of(config).layers))
    if wanted not in ("all", "auto") and not (
        wanted.isascii() and wanted.isdecimal() and int(wanted) <= largest
    ):
        expected = f"all, auto, or a number from 0 to {largest}, the blocks of the largest stage"
        yield describe(
            "--recompute-num-layers",
            got=wanted,
            expected=expected,
            do="give one of these or leave it out",
        )
