"""``--dry-run``: what can be known of a run before it starts, from the plans that the run itself
executes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_llama.commands.common.auto_parallel import planned, this_device, wanted
from megatron_llama.commands.common.configs import DryRunConfig
from megatron_llama.config.blend import read_blend
from megatron_llama.config.parse import Parsed
from megatron_llama.config.presets import LLAMA_VOCABULARY
from megatron_llama.config.schema import CheckpointConfig, Config, LaunchConfig
from megatron_llama.config.world import dp_size
from megatron_llama.distributed.host_memory import free_bytes
from megatron_llama.errors import ConfigError, UserError, listing
from megatron_llama.plans.activation_memory import GRANULARITIES
from megatron_llama.plans.auto import decide
from megatron_llama.plans.buckets import BY_TRAFFIC, NO_SHARD, strategy_named
from megatron_llama.plans.memory import MemoryPlan, gib, state_bytes
from megatron_llama.plans.params import (
    adapter_shapes,
    hf_shapes,
    padded_vocab_size,
    parameter_count,
)
from megatron_llama.plans.resolve import assemble, check
from megatron_llama.plans.schedule import Schedule

SHOWN_ACTIONS = 40


def dry_run(parsed: Parsed, *, dataset: bool = True) -> None:
    """Print the plan of a run. ``dataset``: the run reads --data-path. Raises ConfigError if the
    run cannot work, in strict mode also for what this machine lacks."""
    from megatron_llama.commands.common.loaded import loaded_model
    from megatron_llama.distributed.mesh import place_from_environment
    from megatron_llama.loop.start import compare, named_start

    options = parsed.get(DryRunConfig)
    loading = parsed.get(CheckpointConfig)
    launch = parsed.get(LaunchConfig)
    world = (
        options.world_size
        or launch.nodes * launch.gpus_per_node
        or place_from_environment().world_size
    )
    start = named_start(loading)
    trained = loaded_model(parsed, start)
    config = assemble(parsed, trained=trained)
    config, warnings = _with_vocabulary(config)
    layout: tuple[str, ...] = ()
    if wanted(parsed):
        choice = planned(parsed, config, world, [this_device(0, world, launch.gpus_per_node)])
        config = choice.config
        layout = choice.notes
    resolved = check(config, world, needs_data=False)
    config, decided = decide(resolved.config, world, _memory_here(world))
    changes = (
        compare(loading, start, trained, config.model)
        if start is not None and trained is not None
        else []
    )
    plan = MemoryPlan(config, world)
    warnings = [*resolved.warnings, *changes, *warnings, *_missing_here(plan, world, dataset)]
    print("\n".join([*parsed.notes, *layout, *resolved.notes, *decided, *_report(plan, world)]))
    for line in warnings:
        print(f"warning: {line}")
    if warnings and options.dry_run == "strict":
        raise ConfigError(
            listing("--dry-run=strict: this machine cannot run it as it is:", warnings)
        )
    print(f"valid for {world} process{'es' if world > 1 else ''}")


def _with_vocabulary(config: Config) -> tuple[Config, list[str]]:
    """Fill in the vocabulary of the tokenizer. Where that is not on this machine, assume one and
    return a warning."""
    from megatron_llama.data.vocabulary import find_vocabulary, with_vocabulary

    try:
        return with_vocabulary(config, find_vocabulary(config)), []
    except UserError as error:
        if config.model.vocab_size:
            return config, [str(error)]
        assumed = replace(config, model=replace(config.model, vocab_size=LLAMA_VOCABULARY))
        return assumed, [f"{error}; planned with a vocabulary of {LLAMA_VOCABULARY}"]


def _memory_here(world: int) -> int:
    """Bytes of memory for each of ``world`` processes on this machine."""
    from megatron_llama.distributed import device as devices

    device = devices.accelerator(0)
    return devices.memory_bytes(device) // (world if devices.is_host(device) else 1)


def _missing_here(plan: MemoryPlan, world: int, dataset: bool) -> Iterator[str]:
    """Yield what the run needs and this machine lacks: files, devices, memory."""
    from megatron_llama.distributed import device as devices
    from megatron_llama.loop.start import AUTO
    from megatron_llama.metrics.tensorboard import require_tensorboard

    config = plan.config
    load = config.checkpoint.load
    # A folder that is to be written as well may be missing: a fresh start.
    paths = (
        [("--load", load)]
        if load is not None and load not in (AUTO, config.checkpoint.save)
        else []
    )
    if dataset and not config.data.data_path:
        yield "--data-path is not given: the run itself needs one"
    prefixes = read_blend(config.data.data_path).prefixes
    paths += [
        ("--data-path", prefix + suffix) for prefix in prefixes for suffix in (".bin", ".idx")
    ]
    for flag, path in paths:
        if not Path(path).exists():
            yield f"{flag}: {path} is not on this machine"
    try:
        require_tensorboard(config.log)
    except UserError as error:
        yield str(error)
    device = devices.accelerator(0)
    count = devices.accelerator_count()
    if count < world and not (devices.is_host(device) and world <= (os.cpu_count() or 1)):
        yield (
            f"devices: {world} processes, this machine has {count} GPUs and {os.cpu_count()} cores"
        )
    if devices.is_host(device) and (problem := plan.chunk_problem()) is not None:
        yield problem
    needed = plan.needed(config.parallel.recompute_granularity, plan.recompute_layers())
    here = _memory_here(world)
    offloaded = plan.offloaded()
    if offloaded:
        # On a CPU the host holds what a device would hold, too.
        ranks = world if devices.is_host(device) else count
        each = offloaded + (needed if devices.is_host(device) else 0)
        free = free_bytes()
        if ranks * each > free:
            yield (
                f"offload: {gib(each)} of host memory per process, {gib(ranks * each)} for "
                f"{ranks} on one machine; this one has {gib(free)} free"
            )
    if needed > here:
        share = (
            f"{gib(here)} for each of {world}"
            if devices.is_host(device) and world > 1
            else gib(here)
        )
        yield (
            f"memory: {gib(needed)} per process for parameters, gradients, optimizer state and "
            f"activations, this machine has {share}"
        )


def _report(plan: MemoryPlan, world: int) -> Iterator[str]:
    config = plan.config
    model = config.model
    parallel = config.parallel
    training = config.training
    dp = dp_size(config, world)
    tp = parallel.tensor_model_parallel_size
    pp = parallel.pipeline_model_parallel_size
    microbatches = plan.schedule.microbatches
    padded = padded_vocab_size(model, tp)
    tensors = len(hf_shapes(model))
    yield (
        f"parameters      {parameter_count(model):,} in {tensors} tensors; vocabulary "
        f"{model.vocab_size:,}, padded to {padded:,}"
    )
    if config.lora.lora_rank:
        trained = [math.prod(shape) for shape in adapter_shapes(model, config.lora).values()]
        yield (
            f"  trained       {sum(trained):,} in {len(trained)} tensors: low-rank additions, "
            f"rank {config.lora.lora_rank}"
        )
    length = f"{training.epochs:g} epochs" if training.epochs else f"{training.train_iters:,} steps"
    sequence = ", sequence parallel" if parallel.sequence_parallel else ""
    yield (
        f"processes       {world} = tp {tp} x cp {parallel.context_parallel_size} x pp {pp} x "
        f"dp {dp}{sequence}"
    )
    yield (
        f"batch           {training.global_batch_size} samples = {microbatches} "
        f"microbatches x {training.micro_batch_size} x dp {dp}; "
        f"{training.global_batch_size * training.seq_length:,} tokens a step, {length}"
    )
    if training.rampup_batch_size:
        start, increment, samples = training.rampup_batch_size
        full = training.global_batch_size
        yield (
            f"  ramp-up       {start:,} samples, {increment:,} more at a time, to {full:,} "
            f"over {samples:,} samples"
        )
        # Memory never falls with the number of microbatches, so what is said below of the full size
        # holds for all steps.
        small = replace(training, global_batch_size=start, rampup_batch_size=())
        first = MemoryPlan(replace(config, training=small), world)
        granularity = parallel.recompute_granularity
        blocks = plan.recompute_layers()
        least, most = (gib(one.needed(granularity, blocks)) for one in (first, plan))
        yield (
            f"  first steps   {first.schedule.microbatches} microbatches; "
            f"the process that needs most has {least}, at full size {most}"
        )
    for rank in range(pp):
        yield from _rank_report(plan, rank)
    if dp * parallel.context_parallel_size > 1:
        yield from _choices(plan, world)
    yield from _schedule_report(plan.schedule)


def _rank_report(plan: MemoryPlan, rank: int) -> Iterator[str]:
    """Yield what one pipeline rank holds, sends and keeps."""
    config = plan.config
    partition = plan.partition
    bucket_plan = plan.bucket_plans[rank]
    strategy = strategy_named(config.parallel.data_parallel_sharding_strategy)
    stages = partition.stages_of(rank)
    held = [
        f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
        for layers in (partition.layers[stage] for stage in stages)
        if layers
    ]
    held += ["embedding"] * (0 in stages) + ["head"] * (partition.stages - 1 in stages)
    yield (
        f"pp rank {rank:<8}{', '.join(held)}: {bucket_plan.numel:,} elements per process, "
        "padding included"
    )
    traffic = plan.traffic(rank)
    verb = "reduce-scatters" if strategy.sharded else "all-reduces"
    gathers = f", {traffic.gathers} all-gathers" if strategy.sharded else ""
    replicas = (
        f" and {traffic.replicas} replicas" if strategy.sharded and traffic.replicas > 1 else ""
    )
    largest = max(bucket.numel for bucket in bucket_plan.buckets)
    yield (
        f"  layout        {len(bucket_plan.buckets)} buckets, the largest {largest:,} elements, "
        f"each in {bucket_plan.shards} shards{replicas}; "
        f"a step makes {traffic.reductions} {verb}{gathers} and sends {gib(round(traffic.sent))}"
    )
    sizes = state_bytes(config, bucket_plan)
    parts = ", ".join(f"{name} {gib(size)}" for name, size in sizes.items() if size)
    buffers = plan.host_buffers(rank)
    host = f"; on a CPU also {gib(buffers)} of receive buffers" if buffers else ""
    yield f"  state         {gib(sum(sizes.values()))} per process: {parts}{host}"
    offload = plan.offload(rank)
    if offload is not None:
        sizes = {
            "weights and moments": offload.state,
            "gradients": offload.gradients,
            "on their way": offload.staging,
            "to undo": offload.undo,
        }
        parts = ", ".join(f"{name} {gib(size)}" for name, size in sizes.items() if size)
        trained = sum(bucket.kind.trainable for bucket in bucket_plan.buckets)
        yield (
            f"  offload       {config.offload.optimizer_offload}, {len(offload.buckets)} of "
            f"{trained} buckets: {gib(offload.held)} of host memory per process: {parts}"
        )
        yield (
            f"                a step copies {gib(offload.to_host)} to the host and "
            f"{gib(offload.to_device)} to the device"
        )
    granularity = config.parallel.recompute_granularity
    layers = plan.recompute_layers()
    each = ", ".join(
        f"{name} {gib(plan.microbatch(rank, name, plan.largest_stage))}" for name in GRANULARITIES
    )
    yield f"  activations   of a microbatch, by --recompute-granularity: {each}"
    some = (
        ""
        if granularity == "none" or layers >= plan.largest_stage
        else f" on {layers} blocks of each stage"
    )
    peak = plan.activations(rank, granularity, layers)
    yield (
        f"  peak          {gib(peak)} of activations with {plan.in_flight(rank):g} "
        f"microbatches in flight, {granularity}{some}; "
        f"with the state {gib(plan.state(rank) + peak)}"
    )


def _choices(plan: MemoryPlan, world: int) -> Iterator[str]:
    """Yield what other ways to shard would cost the process that needs most."""
    yield "sharding        per process, by --data-parallel-sharding-strategy (--param-slots):"
    for name, slots in (
        *((name, "default") for name in ("no_shard", *BY_TRAFFIC[:-1])),
        (BY_TRAFFIC[-1], "2"),
        (BY_TRAFFIC[-1], "all"),
    ):
        parallel = replace(
            plan.config.parallel,
            data_parallel_sharding_strategy=name,  # type: ignore[arg-type]
            param_slots=slots,
        )
        if name == NO_SHARD:
            parallel = replace(parallel, data_parallel_shard_size=0)
        other = MemoryPlan(replace(plan.config, parallel=parallel), world)
        ranks = range(len(other.bucket_plans))
        state = max(other.state(rank) for rank in ranks)
        sent = max(other.traffic(rank).sent for rank in ranks)
        label = name + (f" ({slots})" if slots != "default" else "")
        yield f"  {label:<26}state {gib(state):>12}, sent in a step {gib(round(sent)):>12}"


def _schedule_report(schedule: Schedule) -> Iterator[str]:
    stages = f"{schedule.stages} stage{'s' if schedule.stages > 1 else ''}"
    yield (
        f"schedule        {schedule.name}, {stages}, {schedule.microbatches} microbatches "
        "(validated)"
    )
    for rank, actions in enumerate(schedule.ranks):
        passes = [
            f"{action.op.letter}{action.microbatch}" for action in actions if action.op.letter
        ]
        tail = f" ... ({len(passes)} passes)" if len(passes) > SHOWN_ACTIONS else ""
        yield f"  pp rank {rank:<6}{' '.join(passes[:SHOWN_ACTIONS])}{tail}"
