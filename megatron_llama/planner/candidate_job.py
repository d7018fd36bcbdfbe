"""A configuration of this trainer as the work of a step: what its options mean for products,
messages, updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_llama.config.schema import Config, LoraConfig, ModelConfig
from megatron_llama.planner.job import Job, Machine, Offload, Sharding, Trained, TrainerTraits
from megatron_llama.plans.activation_memory import compute_bytes
from megatron_llama.plans.buckets import shard_count, strategy_named
from megatron_llama.plans.checks.zenflow import longest_window, sends_wide
from megatron_llama.plans.offload import EXACT, NONE
from megatron_llama.plans.params import ParamSpec, stage_units, whole_model


def job_of(config: Config, machine: Machine) -> Job:
    """The work of a step of a resolved configuration."""
    parallel = config.parallel
    training = config.training
    tp = parallel.tensor_model_parallel_size
    pp = parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    dp = machine.gpus // (tp * pp * cp)
    strategy = strategy_named(parallel.data_parallel_sharding_strategy)
    sharding: Sharding = "none"
    if strategy.sharded:
        sharding = (
            "parameters"
            if strategy.by_unit
            else "gradients"
            if strategy.reduce_every_microbatch
            else "optimizer"
        )
    itemsize = compute_bytes(config)
    wire = 2 if parallel.grad_reduce_in_bf16 else max(4, itemsize)
    return Job(
        model=config.model,
        machine=machine,
        traits=TrainerTraits(
            family="torchtitan", gradient_bytes=wire, reduces_every_microbatch=True
        ),
        seq=training.seq_length,
        micro_batch=training.micro_batch_size,
        microbatches=training.global_batch_size // (training.micro_batch_size * dp),
        tp=tp,
        pp=pp,
        vpp=2
        if parallel.pipeline_schedule == "zb-v"
        else parallel.virtual_pipeline_model_parallel_size,
        cp=cp,
        dp=dp,
        sequence_parallel=parallel.sequence_parallel,
        recomputed=_share(config) if parallel.recompute_granularity == "full" else 0.0,
        recomputed_memory=0.5 * _share(config)
        if parallel.recompute_granularity == "selective"
        else 0.0,
        ends_counted=parallel.account_for_loss_in_pipeline_split,
        bubble={"zb-h1": 1 / 3, "zb-v": 1 / 3}.get(parallel.pipeline_schedule, 1.0),
        sharding=sharding,
        shards=shard_count(parallel, dp * cp),
        precision="bf16",
        itemsize=itemsize,
        trained=_trained(
            replace(config.model, rope_scaling=None), tp, config.optimizer.freeze, config.lora
        ),
        offload=_offload(config, itemsize),
    )


@lru_cache(maxsize=64)
def _trained(model: ModelConfig, tp: int, freeze: tuple[str, ...], lora: LoraConfig) -> Trained:
    """What is trained of a model, blocks taken together. ``model``: without a mapping in it, for
    the cache."""
    if not freeze and not lora.lora_rank:
        return Trained()
    units = stage_units(model, whole_model(model), 0, tp=tp, freeze=freeze, lora=lora)
    every = [spec for unit in units for spec in unit.params]
    products = [
        spec
        for unit in units
        if unit.is_block
        for spec in unit.params
        if len(spec.shape) > 1 and not spec.adapter
    ]
    first = next(unit for unit in units if unit.is_block)
    head = next((spec for spec in units[-1].params if len(spec.shape) > 1), None)
    return Trained(
        frozen=_share_of(products, trainable=False),
        head_frozen=head is not None and not head.trainable,
        share=_share_of(every, trainable=True),
        additions=tuple((spec.shape[0], spec.shape[1]) for spec in first.params if spec.adapter),
    )


def _share_of(specs: Sequence[ParamSpec], *, trainable: bool) -> float:
    """Of their elements."""
    return sum(spec.numel for spec in specs if spec.trainable is trainable) / max(
        1, sum(spec.numel for spec in specs)
    )


def _offload(config: Config, itemsize: int) -> Offload | None:
    options = config.offload
    zenflow = config.zenflow
    wide = max(4, itemsize)
    if options.optimizer_offload == NONE:
        return None
    if options.optimizer_offload == EXACT:
        speculative = options.offload_speculative and not config.training.fp16
        return Offload(
            options.optimizer_offload_fraction,
            wide,
            itemsize,
            config.optimizer.clip_grad == 0 or speculative,
        )
    return Offload(
        options.optimizer_offload_fraction * (1 - zenflow.zenflow_topk_ratio),
        wide if sends_wide(zenflow) else itemsize,
        itemsize,
        early=False,
        steps=longest_window(zenflow),
        beside=zenflow.zenflow_overlap_step,
    )


def _share(config: Config) -> float:
    """Of the blocks that recompute."""
    wanted = config.parallel.recompute_num_layers
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size
    return (
        min(1.0, int(wanted) * stages / config.model.num_hidden_layers)
        if wanted.isdecimal()
        else 1.0
    )
