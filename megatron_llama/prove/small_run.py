"""Stages, buffers, batches and lengths of a small run with the structure of a large one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.config.blend import read_blend
from megatron_llama.config.schema import Config
from megatron_llama.engine.offload_options import ZenFlowConfig
from megatron_llama.engine.plan.buckets import strategy_named
from megatron_llama.engine.plan.zenflow import longest_window
from megatron_llama.model.plan.params import parameter_count, partition_of
from megatron_llama.pipeline.plan.run_engine import (
    engine_options,
    parameter_slots,
    rank_bucket_plan,
    shard_count,
)
from megatron_llama.prove.case import STEPS
from megatron_llama.prove.given import SMALL
from megatron_llama.prove.world import World
from megatron_llama.schedule import placement_of

BLOCKS = 4
"""Blocks of a model in one stage: more than two buffers that blocks take turns in."""
LENGTH = 64
"""Tokens of a sample."""
CONVERSATION = 128
"""Tokens of a sample of conversations."""
LEAST_LR = 1e-3
"""Least learning rate. With less, a few steps change weights around 0.1 by little more than their
rounding in bf16."""
MESSAGES = 4
"""Approximate number of buckets of a small model whose large model has several."""
PARTS = ("a", "b", "c", "d", "e", "f", "g", "h")
"""Names of the datasets of a blend, which has no more."""
PART_OF_A_PASS, MORE_THAN_A_PASS = 0.5, 1.6
"""Values of --epochs. With 1.6 even a run of two samples a step has a last step of one sample."""


def has_hybrid_shards(yours: Config, world: World) -> bool:
    """Whether buckets have several shards, and shards are replicated."""
    return 1 < yours.parallel.data_parallel_shard_size < world.replicas


def shard_size_here(yours: Config, world: World, here: World) -> int:
    """Return the number of ranks that share a bucket: all, one, or some, as yours."""
    size = yours.parallel.data_parallel_shard_size
    if not has_hybrid_shards(yours, world):
        return min(size, here.replicas)
    # A multiple of the ranks that divide experts.
    least = max(2, small_division(yours, world, here))
    return least if here.replicas > least and here.replicas % least == 0 else 0


def small_stages(yours: Config, here: World) -> dict[str, Any]:
    """Return the options of stages, chunks and blocks. As in yours, a stage has one block or
    several, all stages are alike or not, and a rank has more blocks than buffers."""
    parallel = yours.parallel
    counts = [len(layers) for layers in partition_of(yours).layers]
    schedule = parallel.pipeline_schedule if here.pp > 1 else "1f1b"
    virtual = parallel.virtual_pipeline_model_parallel_size
    if here.pp == 1:
        virtual = 1
    elif virtual > 2:
        virtual = 3 if here.pp == 2 else 2
    stages = len(placement_of(schedule, here.pp, virtual))
    values: dict[str, Any] = {
        "pipeline_model_parallel_size": here.pp,
        "pipeline_schedule": schedule,
        "virtual_pipeline_model_parallel_size": virtual,
        "pipeline_layer_split": (),
    }
    if stages == 1:
        return {**values, "num_hidden_layers": min(sum(counts), BLOCKS)}
    chunks = stages // here.pp
    picked = [counts[round(s * (len(counts) - 1) / (stages - 1))] for s in range(stages)]
    on_rank = sum(counts) // parallel.pipeline_model_parallel_size
    buffers = [slots for slots in _turns(yours) if slots < on_rank]
    base = max(min(2, min(picked)), *(-(-(min(slots, 2) + 1) // chunks) for slots in (0, *buffers)))
    sizes = [base + (count > min(picked)) for count in picked]
    if parallel.pipeline_layer_split:
        if len(set(sizes)) == 1 and len(set(counts)) > 1:
            # The stages with different numbers of blocks were not picked, so one is added.
            sizes[-1] += 1
        values["pipeline_layer_split"] = tuple(sizes)
    return {**values, "num_hidden_layers": sum(sizes)}


def _turns(yours: Config) -> list[int]:
    """Return the numbers of block-sized buffers of parameters and gradients that blocks share."""
    strategy = strategy_named(yours.parallel.data_parallel_sharding_strategy)
    slots = [yours.parallel.grad_slots] * strategy.reduce_every_microbatch
    parameters = parameter_slots(yours.parallel)
    return [*slots, parameters] if parameters is not None else slots


def small_buffers(yours: Config, world: World, here: Config, small: World) -> dict[str, Any]:
    """Return slots, messages and recomputation for the stages of ``here``, whose model is small. As
    in yours, blocks take turns in slots or have their own, there are several messages or one, and
    some blocks recompute or all."""
    parallel = yours.parallel
    chosen: dict[str, Any] = {}
    stages = [[len(layers) for layers in partition_of(config).layers] for config in (yours, here)]
    most_yours, most = (
        sum(counts) // config.parallel.pipeline_model_parallel_size
        for counts, config in zip(stages, (yours, here), strict=True)
    )

    def slots(count: int) -> int:
        return min(count, most - 1) if count < most_yours else max(most, 1)

    if parallel.param_slots.isdecimal():
        chosen["param_slots"] = str(max(1, slots(int(parallel.param_slots))))
    if strategy_named(parallel.data_parallel_sharding_strategy).reduce_every_microbatch:
        chosen["grad_slots"] = max(1, min(parallel.grad_slots, slots(parallel.grad_slots)))
    if parallel.recompute_num_layers.isdecimal():
        wanted = int(parallel.recompute_num_layers)
        largest = max(stages[1])
        chosen["recompute_num_layers"] = str(
            largest if wanted >= max(stages[0]) else min(wanted, 1, largest)
        )
    plan = rank_bucket_plan(here, dp=small.replicas)
    full = rank_bucket_plan(yours, dp=world.replicas)
    shards = shard_count(parallel, world.replicas)
    if full.numel > engine_options(yours).largest_message(shards):
        chosen["reduce_bucket_size"] = max(1, plan.numel // MESSAGES)
    block = _block(here) / _block(yours)
    if parallel.prefetch_bytes:
        chosen["prefetch_bytes"] = max(1, round(parallel.prefetch_bytes * block))
    # Speculation may have to take back fp32 weights and both moments of a rank's shard.
    if yours.offload.offload_speculative and 12 * full.numel > yours.offload.speculation_bytes:
        share = plan.numel / full.numel
        chosen["speculation_bytes"] = max(1, round(yours.offload.speculation_bytes * share))
    return chosen


def _block(config: Config) -> float:
    """Return the number of parameters of one block."""
    model = config.model
    return parameter_count(replace(model, vocab_size=1)) / model.num_hidden_layers


def small_length_of_samples(yours: Config, here: World, *, sft: bool) -> int:
    """Return the tokens of a sample: as many as yours if they are few, and a multiple of the pieces
    into which a sequence is cut."""
    unit = (2 * here.cp if here.cp > 1 else 1) * (
        here.tp if yours.parallel.sequence_parallel else 1
    )
    most = CONVERSATION if sft else LENGTH
    length = yours.training.seq_length
    return length if length <= most and length % unit == 0 else -(-most // unit) * unit


def small_context(yours: Config, here: World) -> dict[str, Any]:
    """Return the options of context parallelism: a ring of groups that exchange heads takes four
    ranks, and fewer are one group."""
    comm = yours.parallel.cp_comm_type if here.cp > 1 else "all_gather"
    in_ring = comm == "a2a+p2p" and here.cp == 4
    if comm == "a2a+p2p" and not in_ring:
        comm = "a2a"
    return {
        "context_parallel_size": here.cp,
        "cp_comm_type": comm,
        "hierarchical_context_parallel_sizes": (2, 2) if in_ring else (),
    }


def small_division(yours: Config, world: World, here: World) -> int:
    """Return the ranks that divide experts among them: as in yours all data-parallel ranks, or
    some, so that several hold the same experts."""
    ep = yours.parallel.expert_model_parallel_size
    if ep == 1 or here.dp == world.dp:
        return ep
    return 2 if has_equal_experts(yours, world) and here.dp % 2 == 0 else here.dp


def has_equal_experts(yours: Config, world: World) -> bool:
    """Whether ranks divide experts among them, and several hold the same."""
    return 1 < yours.parallel.expert_model_parallel_size < world.dp


def small_batch(yours: Config, world: World, here: World) -> dict[str, Any]:
    """Return the sizes of batches. As in yours, a microbatch has one sample or several, and has the
    same relation to the pipeline ranks. A growing batch grows within the first steps."""
    training = yours.training
    micro = min(2, training.micro_batch_size)
    unit = training.micro_batch_size * world.dp
    count = _microbatches(training.global_batch_size // unit, world.pp, here.pp)
    values: dict[str, Any] = {"micro_batch_size": micro}
    small_unit = micro * here.dp
    ramp = training.rampup_batch_size
    if ramp:
        start, increment, _ = ramp
        # As in yours, all sizes are multiples of the pipeline ranks or not.
        whole = world.pp > 1 and not any(size // unit % world.pp for size in (start, increment))
        step = here.pp if whole else 1
        grows = start < training.global_batch_size
        count = max(count, 2 * step) if grows else count
        first = step if grows else count
        full = count * small_unit
        values["rampup_batch_size"] = (first * small_unit, step * small_unit, full)
    return {**values, "global_batch_size": count * small_unit}


def _microbatches(yours: int, ranks_yours: int, ranks: int) -> int:
    """Return the microbatches: one or several, which are fewer than the pipeline ranks, as many, a
    multiple of them or none, as ``yours``. With two ranks several remain at least two."""
    if yours == 1 or ranks_yours == 1:
        # An odd number of microbatches stays odd.
        return min(yours, 2 + yours % 2)
    if ranks == 1:
        return 2
    if yours < ranks_yours:
        return max(2, min(yours, ranks - 1))
    if yours % ranks_yours:
        return ranks + 1 if yours < 2 * ranks_yours else 2 * ranks + 1
    return ranks if yours == ranks_yours else 2 * ranks


def small_schedule(yours: Config, here: Config) -> dict[str, Any]:
    """Return the length of a run and the schedule of its learning rate, so that the whole schedule
    fits into the steps that are run. ``here`` has the small batch. The learning rate is large
    enough to show in a few steps."""
    training = yours.training
    optimizer = yours.optimizer
    sizes = BatchSizes(here.training.global_batch_size, here.training.rampup_batch_size)
    in_samples = bool(
        (training.train_samples and not training.epochs)
        or optimizer.lr_decay_samples
        or optimizer.lr_warmup_samples
    )
    length = sizes.samples(STEPS) if in_samples else STEPS
    unit = "samples" if in_samples else "iters"
    values: dict[str, Any] = {
        "epochs": small_epochs(training.epochs),
        "train_samples": length if in_samples and not training.epochs else 0,
        "lr_warmup_fraction": 0.34 if optimizer.lr_warmup_fraction else 0.0,
    }
    whole = training.train_samples if in_samples else training.train_iters
    decay = getattr(optimizer, f"lr_decay_{unit}")
    for name in ("decay", "warmup", "wsd_decay"):
        for kind in ("iters", "samples"):
            values[f"lr_{name}_{kind}"] = 0
    values[f"lr_decay_{unit}"] = (
        0 if decay in (0, whole) else (length - length // STEPS if decay < whole else 2 * length)
    )
    for name in ("warmup", "wsd_decay"):
        if getattr(optimizer, f"lr_{name}_{unit}"):
            values[f"lr_{name}_{unit}"] = length // 3
    if 0 < optimizer.lr < LEAST_LR:
        values["lr"] = LEAST_LR
        values["min_lr"] = optimizer.min_lr * LEAST_LR / optimizer.lr
    return values


def lowered_values(yours: Config) -> dict[str, Any]:
    """Return the options that have an upper bound in small runs (``Small.most``), lowered to it."""
    sections = [getattr(yours, item.name) for item in fields(Config)]
    values = {name: value for section in sections for name, value in vars(section).items()}
    return {
        name: min(values[name], small.most)
        for name, small in SMALL.items()
        if small.most is not None and values.get(name) is not None
    }


def small_intervals(yours: Config) -> dict[str, Any]:
    """Return the intervals, lowered so that their events come within the steps that are run."""
    values: dict[str, Any] = {}
    if yours.training.eval_interval:
        values["eval_iters"] = min(yours.training.eval_iters, 2)
    zenflow = yours.zenflow
    if zenflow != ZenFlowConfig():
        values |= _zenflow(zenflow)
    return values


def _zenflow(zenflow: ZenFlowConfig) -> dict[str, Any]:
    """Return windows of two steps, or of up to three, and an interval that repeats selection."""
    values: dict[str, Any] = {
        "zenflow_update_interval_cap": min(zenflow.zenflow_update_interval_cap, 3),
        "zenflow_full_warm_up_rounds": min(zenflow.zenflow_full_warm_up_rounds, 1),
    }
    if zenflow.zenflow_update_interval.isdecimal():
        values["zenflow_update_interval"] = str(min(int(zenflow.zenflow_update_interval), 2))
    if zenflow.zenflow_select_strategy != "auto":
        values["zenflow_select_strategy"] = "step"
        # An epoch of yours is longer than a window, so its replacement is at least as long.
        window = longest_window(replace(zenflow, **values))
        interval = max(window, min(int(zenflow.zenflow_select_interval), 3))
        values["zenflow_select_interval"] = str(interval)
    return values


def small_epochs(yours: float) -> float:
    """Return part of a pass, one pass, or more than one, as yours."""
    if yours > 1:
        return MORE_THAN_A_PASS
    return PART_OF_A_PASS if 0 < yours < 1 else yours


def small_blend(paths: tuple[str, ...]) -> dict[str, Any]:
    """Return the datasets of a blend under other names, with their weights, up to the number of
    PARTS; none for a single dataset. A dataset with two entries has one name."""
    blend = read_blend(paths)
    if len(blend.prefixes) < 2:
        return {"data_path": ()}
    distinct = list(dict.fromkeys(blend.prefixes))
    names = dict(zip(distinct, PARTS, strict=False))
    weights = [str(weight) for weight in blend.weights or ()]
    places = [place for place, prefix in enumerate(blend.prefixes) if prefix in names]
    return {
        "data_path": tuple(
            word
            for place in places
            for word in (*weights[place : place + 1], names[blend.prefixes[place]])
        )
    }


def datasets(paths: tuple[str, ...]) -> str:
    """Return words with the number of datasets of --data-path; empty for fewer than two."""
    count = len(read_blend(paths).prefixes)
    return f"{count} datasets" if count > 1 else ""
