"""``--dry-run``: everything that can be known of a run before it starts, from the plans that the run itself uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_llama.commands.options import DryRunConfig
from megatron_llama.config import CheckpointConfig, Config, LaunchConfig
from megatron_llama.errors import ConfigError, UserError, listing
from megatron_llama.layout import ShardLayout, stage_layout, strategy_named
from megatron_llama.options import Parsed
from megatron_llama.params import hf_shapes, padded_vocab_size, parameter_count, stage_layers
from megatron_llama.schedule import Op, schedule_named
from megatron_llama.validate import assemble, check, dp_size

LLAMA_VOCABULARY = 32000
SHOWN_ACTIONS = 40


def dry_run(parsed: Parsed) -> None:
    """Print the plan. Raises ConfigError if the run cannot work, in strict mode also for what this machine lacks."""
    from megatron_llama.setup import trained_model

    options = parsed.get(DryRunConfig)
    world = options.world_size or _launched(parsed.get(LaunchConfig)) or _environment()
    config = assemble(parsed, trained=trained_model(parsed.get(CheckpointConfig).load))
    config, warnings = _with_vocabulary(config)
    resolved = check(config, world, needs_data=False)
    config = resolved.config
    warnings = [*resolved.warnings, *warnings, *_missing_here(config, world)]
    print("\n".join([*resolved.notes, *_report(config, world)]))
    for line in warnings:
        print(f"warning: {line}")
    if warnings and options.dry_run == "strict":
        raise ConfigError(listing("--dry-run=strict: this machine cannot run it as it is:", warnings))
    print(f"valid for {world} process{'es' if world > 1 else ''}")


def _launched(launch: LaunchConfig) -> int:
    return launch.nodes * launch.gpus_per_node


def _environment() -> int:
    from megatron_llama.mesh import place_from_environment

    return place_from_environment().world_size


def _with_vocabulary(config: Config) -> tuple[Config, list[str]]:
    """The vocabulary from the tokenizer, or an assumed one with a warning where the tokenizer is not on this machine."""
    from megatron_llama.vocabulary import find_vocabulary, with_vocabulary

    try:
        return with_vocabulary(config, find_vocabulary(config)), []
    except UserError as error:
        if config.model.vocab_size:
            return config, [str(error)]
        assumed = replace(config, model=replace(config.model, vocab_size=LLAMA_VOCABULARY))
        return assumed, [f"{error}; planned with a vocabulary of {LLAMA_VOCABULARY}"]


def _missing_here(config: Config, world: int) -> Iterator[str]:
    from megatron_llama import device as devices

    paths = {"--load": config.checkpoint.load}
    if config.data.data_path is None:
        yield "--data-path is not given: the run itself needs one"
    else:
        paths |= {f"--data-path {suffix}": config.data.data_path + suffix for suffix in (".bin", ".idx")}
    for flag, path in paths.items():
        if path is not None and not Path(path).exists():
            yield f"{flag}: {path} is not on this machine"
    device = devices.accelerator(0)
    count = devices.accelerator_count()
    if count < world and not (devices.is_host(device) and world <= (os.cpu_count() or 1)):
        yield f"devices: {world} processes, this machine has {count} GPUs and {os.cpu_count()} cores"
    needed = max(sum(state_bytes(config, layout).values()) for layout in _layouts(config, world))
    here = devices.memory_bytes(device) // (world if devices.is_host(device) else 1)
    if needed > here:
        share = f"{_gib(here)} for each of {world}" if devices.is_host(device) and world > 1 else _gib(here)
        yield f"memory: {_gib(needed)} per process for parameters, gradients and optimizer state, this machine has {share}"


def _layouts(config: Config, world: int) -> list[ShardLayout]:
    dp = dp_size(config, world)
    return [stage_layout(config, dp=dp, stage=stage) for stage in range(config.parallel.pipeline_model_parallel_size)]


def state_bytes(config: Config, layout: ShardLayout) -> dict[str, int]:
    """Persistent bytes of one process, by component, as the engine allocates them."""
    training = config.training
    strategy = strategy_named(config.parallel.data_parallel_sharding_strategy)
    wide = 8 if training.fp64 else 4
    narrow = 2 if training.bf16 else wide
    shard = layout.numel // layout.shards
    slots = sum(layout.slot_numel().values())
    return {
        "parameters": layout.numel * narrow,
        "gradients": slots * wide + (shard * wide if strategy.reduce_every_microbatch else 0),
        "master weights": shard * wide if narrow != wide else 0,
        "moments": 2 * shard * wide,
    }


def _report(config: Config, world: int) -> Iterator[str]:
    model, parallel, training = config.model, config.parallel, config.training
    dp = dp_size(config, world)
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    microbatches = training.global_batch_size // (training.micro_batch_size * dp)
    padded = padded_vocab_size(model, tp)
    tensors = len(hf_shapes(model))
    yield f"parameters      {parameter_count(model):,} in {tensors} tensors; vocabulary {model.vocab_size:,}, padded to {padded:,}"
    yield f"processes       {world} = tp {tp} x pp {pp} x dp {dp}{', sequence parallel' if parallel.sequence_parallel else ''}"
    yield (
        f"batch           {training.global_batch_size} samples = {microbatches} microbatches x {training.micro_batch_size} x dp {dp}; "
        f"{training.global_batch_size * training.seq_length:,} tokens a step, {training.train_iters:,} steps"
    )
    for stage, layout in enumerate(_layouts(config, world)):
        yield from _stage_report(config, stage, layout, microbatches)
    yield from _schedule_report(parallel.pipeline_schedule, pp, microbatches)


def _stage_report(config: Config, stage: int, layout: ShardLayout, microbatches: int) -> Iterator[str]:
    strategy = strategy_named(config.parallel.data_parallel_sharding_strategy)
    pp = config.parallel.pipeline_model_parallel_size
    layers = stage_layers(config.model.num_hidden_layers, pp, stage)
    ends = [name for name, here in (("embedding", stage == 0), ("head", stage == pp - 1)) if here]
    sizes = state_bytes(config, layout)
    reductions = len(layout.buckets) * (microbatches if strategy.reduce_every_microbatch else 1)
    verb = "reduce-scatters" if strategy.sharded else "all-reduces"
    gathers = f", {len(layout.buckets)} all-gathers" if strategy.sharded else ""
    held = ", ".join([f"layers {layers.start}-{layers.stop - 1}", *ends])
    yield f"stage {stage:<10}{held}: {layout.numel:,} elements per process, padding included"
    count, largest = len(layout.buckets), max(bucket.numel for bucket in layout.buckets)
    yield (
        f"  layout        {count} buckets, the largest {largest:,} elements, each in {layout.shards} shards; "
        f"a step makes {reductions} {verb}{gathers}"
    )
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size)
    yield f"  state         {_gib(sum(sizes.values()))} per process: {parts}; activations come on top"


def _schedule_report(name: str, stages: int, microbatches: int) -> Iterator[str]:
    schedule = schedule_named(name, stages, microbatches)
    yield f"schedule        {name}, {stages} stage{'s' if stages > 1 else ''}, {microbatches} microbatches (validated)"
    letters = {Op.FORWARD: "F", Op.BACKWARD: "B"}
    for rank, actions in enumerate(schedule.ranks):
        passes = [f"{letters[action.op]}{action.microbatch}" for action in actions if action.op in letters]
        tail = f" ... ({len(passes)} passes)" if len(passes) > SHOWN_ACTIONS else ""
        yield f"  stage {rank:<8}{' '.join(passes[:SHOWN_ACTIONS])}{tail}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
