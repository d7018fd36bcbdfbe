"""``--dry-run``: the work of a run up to its first step, in one process and on no device, and facts
about its steps from the plans that it would execute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron_llama.config.blend import read_blend
from megatron_llama.config.parse import Parsed, flag
from megatron_llama.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    ParallelConfig,
)
from megatron_llama.config.world import dp_size
from megatron_llama.engine.plan.buckets import BY_TRAFFIC, NO_SHARD, strategy_named
from megatron_llama.engine.plan.memory import sized
from megatron_llama.errors import ConfigError, counted, listing
from megatron_llama.model.plan.chunks import GRANULARITIES
from megatron_llama.model.plan.fp8 import (
    SCALE_BYTES,
    ScaleMessages,
    fp8_layers,
    gathers_codes,
    scale_messages,
)
from megatron_llama.model.plan.pieces import chosen_pieces
from megatron_llama.model.plan.tensor_messages import block_messages, sparse_block_messages
from megatron_llama.model.presets import LLAMA_VOCABULARY
from megatron_llama.schedule import Schedule
from megatron_llama.train.commands.common.configs import DryRunConfig
from megatron_llama.train.setup.banner import describe_run
from megatron_llama.train.setup.communicators import (
    describe_communicators,
    most_communicators,
    total_bytes,
)
from megatron_llama.train.setup.deciders import CONFIGURATION, OUTPUTS, SAMPLES, ready_of
from megatron_llama.train.setup.description import describe_config
from megatron_llama.train.setup.draft import By, Decider, Draft, Need, refuses
from megatron_llama.train.setup.driver import decide
from megatron_llama.train.setup.memory import MemoryPlan
from megatron_llama.train.setup.processes import imagined_processes

SHOWN_ACTIONS = 40


class ExampleFiles(NamedTuple):
    """The files of a run that reads no --data-path."""

    option: str
    """The option that must name some."""
    paths: tuple[tuple[str, str], ...]
    """Options and the paths that they name."""


NamedFiles = Callable[[Parsed], ExampleFiles]
"""A function that finds the files named by a run's options."""


def dry_run(
    parsed: Parsed,
    reads: Sequence[Decider],
    checks: Sequence[Decider] = (),
    *,
    examples: NamedFiles | None = None,
) -> None:
    """Make the decisions of a run up to its first step, and print its plan. ``reads`` are the
    deciders of its inputs, ``checks`` those of its further uses of samples. ``examples`` finds the
    files that it reads instead of --data-path.

    Raises UserError if the run would. Files, memory and devices that this machine lacks are
    warnings; in strict mode they are errors, as they are for the run."""
    from megatron_llama.launch.launcher import place_from_environment
    from megatron_llama.train.setup.build import read_first_step

    options = parsed.get(DryRunConfig)
    launch = parsed.get(LaunchConfig)
    launched = (
        options.world_size
        or launch.nodes * launch.gpus_per_node
        or place_from_environment().world_size
    )
    world_size = _training(parsed, launched)
    strict = options.dry_run == "strict"
    absent = [] if strict else list(_absent(parsed, examples))
    missing = [text for _, text in absent]
    given = _without({name for name, _ in absent}, parsed, missing)
    processes = imagined_processes(world_size, launch.gpus_per_node, are_here=strict)
    samples = () if absent else (*reads, *SAMPLES, *checks)
    draft = decide(
        Draft(given, processes, needs_data=examples is None and strict, missing=tuple(missing)),
        (*CONFIGURATION, *samples, *OUTPUTS, _refuse_small_host),
    )
    plan = MemoryPlan(draft.config, world_size)
    described = describe_config(draft.config, world_size)
    if not absent:
        ready = ready_of(draft)
        data_size = dp_size(draft.config, world_size)
        read_first_step(ready, range(data_size), data_size)
        described = describe_run(ready, world_size)
    spares = launched - world_size
    if spares:
        print(
            f"{'processes':<15} {world_size} of {launched} train, {counted(spares, 'spare')} "
            "(--max-restarts-in-place)"
        )
    print("\n".join([*draft.notes, *_report(plan, described, world_size)]))
    lacking = list(_lacking(plan, world_size))
    for line in (*draft.warnings, *draft.missing, *lacking):
        print(f"warning: {line}")
    if strict and lacking:
        raise ConfigError(
            listing("--dry-run=strict: this machine cannot run it as it is:", lacking)
        )
    beside = f" and {counted(spares, 'spare')}" if spares else ""
    print(f"valid for {counted(world_size, 'process', 'processes')}{beside}")


def _training(parsed: Parsed, launched: int) -> int:
    """Return how many of the processes that are launched train; the others are spares, which only
    --max-restarts-in-place allows."""
    if parsed.get(ParallelConfig).max_restarts_in_place <= 0:
        return launched
    from megatron_llama.train.commands.common.restarts import plan_of

    plan = plan_of(parsed)
    # Of too few processes the run says what it needs.
    return (plan.fitting(launched) if plan is not None else 0) or launched


def _memory_here(world: int) -> int:
    """Return the bytes of memory for each of ``world`` processes on this machine."""
    from megatron_llama.engine.comm import device as devices

    device = devices.accelerator(0)
    return devices.memory_bytes(device) // (world if devices.is_host(device) else 1)


def _absent(parsed: Parsed, examples: NamedFiles | None) -> Iterator[tuple[str, str]]:
    """Yield the options whose files are not on this machine, each with its warning."""
    from megatron_llama.data.words import is_stream
    from megatron_llama.train.setup.start import AUTO

    data = parsed.get(DataConfig)
    checkpoint = parsed.get(CheckpointConfig)
    paths = [("tokenizer_model", data.tokenizer_model)]
    # A folder that the run also writes may be missing: it is a fresh start.
    if checkpoint.load not in (AUTO, checkpoint.save) and "://" not in (checkpoint.load or ""):
        paths.append(("load", checkpoint.load))
    if parsed.get(ModelConfig).preset is not None:  # which has the shapes
        paths.append(("init_from_hf", checkpoint.init_from_hf))
    if examples is None:
        prefixes = read_blend(data.data_path).prefixes
        paths += [
            ("data_path", prefix + suffix)
            for prefix in prefixes
            if "://" not in prefix and not is_stream(prefix)
            for suffix in (".bin", ".idx")
        ]
        if not data.data_path:
            yield "data_path", "--data-path is not given: the run itself needs one"
    else:
        option, named = examples(parsed)
        paths += named
        if all(name != option for name, _ in named):
            yield option, f"{flag(option)} is not given: the run itself needs it"
    for name, path in paths:
        if path is not None and not Path(path).exists():
            yield name, f"{flag(name)}: {path} is not on this machine"


def _without(absent: set[str], parsed: Parsed, warnings: list[str]) -> Parsed:
    """Leave out the options whose files are absent, so that the rest can be planned. If the
    vocabulary is unknown then, one is assumed, with a warning."""
    from megatron_llama.train.setup.vocabulary import find_vocabulary

    if not absent:
        return parsed
    model = parsed.get(ModelConfig)
    data = parsed.get(DataConfig)
    checkpoint = parsed.get(CheckpointConfig)
    if "tokenizer_model" in absent:
        data = replace(data, tokenizer_model=None)
    if "init_from_hf" in absent:
        checkpoint = replace(checkpoint, init_from_hf=None)
    if "load" in absent:
        checkpoint = replace(checkpoint, load=None, finetune=False, load_optim=True)
    sources = dict(parsed.sources)
    elsewhere = (model.vocab_size, model.preset, checkpoint.load, checkpoint.init_from_hf)
    if (
        not any(elsewhere)
        and not find_vocabulary(Config(data=data, checkpoint=checkpoint), None).size
    ):
        model = replace(model, vocab_size=LLAMA_VOCABULARY)
        sources["vocab_size"] = "--dry-run"
        warnings.append(
            "--vocab-size: the tokenizer is not on this machine; planned with a vocabulary of "
            f"{LLAMA_VOCABULARY}"
        )
    changed = {ModelConfig: model, DataConfig: data, CheckpointConfig: checkpoint}
    return replace(parsed, instances={**parsed.instances, **changed}, sources=sources)


@refuses(needs=Need.MACHINE, by=By.RANK_0)
def _refuse_small_host(draft: Draft) -> None:
    """Raise the error that the engine of a run would raise on this machine."""
    from megatron_llama.engine.comm import device as devices
    from megatron_llama.engine.offload.build import require_memory
    from megatron_llama.engine.offload.worker import rank_cores

    world = draft.processes.count
    plan = MemoryPlan(draft.config, world)
    device = devices.accelerator(0)
    on_cpu = devices.is_host(device)
    if on_cpu and world > 1 and (problem := plan.chunk_problem()) is not None:
        raise ConfigError(problem)
    offloads = [
        (offload, rank)
        for rank in range(len(plan.bucket_plans))
        if (offload := plan.offload(rank)) is not None
    ]
    if offloads:
        rank_cores(plan.config.offload.offload_cores, 0, 1)
        # Without a device all ranks are on this machine, otherwise one for each device.
        ranks = world if on_cpu else min(world, max(1, devices.accelerator_count()))
        needed = [
            offload.held + (sum(plan.state_by_component(rank).values()) if on_cpu else 0)
            for offload, rank in offloads
        ]
        require_memory(sum(needed) * ranks // len(needed), ranks, offloads[0][0])


def _lacking(plan: MemoryPlan, world: int) -> Iterator[str]:
    """Yield sentences about devices and memory that this machine lacks for the run."""
    from megatron_llama.engine.comm import device as devices

    config = plan.config
    device = devices.accelerator(0)
    count = devices.accelerator_count()
    if count < world and not (devices.is_host(device) and world <= (os.cpu_count() or 1)):
        yield (
            f"devices: {world} processes, this machine has {count} GPUs and {os.cpu_count()} cores"
        )
    needed = plan.needed(config.parallel.recompute_granularity, plan.recompute_layers())
    here = _memory_here(world)
    if not devices.is_host(device):
        here -= total_bytes(most_communicators(config, world))
    if needed > here:
        share = (
            f"{sized(here)} for each of {world}"
            if devices.is_host(device) and world > 1
            else sized(here)
        )
        yield (
            f"memory: {sized(needed)} per process for parameters, gradients, optimizer state and "
            f"activations, this machine has {share}"
        )


def _report(plan: MemoryPlan, described: Mapping[str, str], world: int) -> Iterator[str]:
    config = plan.config
    for subject, words in described.items():
        yield f"{subject:<15} {words}"
        if subject == "ramp-up":
            yield _first_steps(plan, world)
    if world > 1:
        yield f"communicators   {describe_communicators(most_communicators(config, world))}"
    for rank in range(len(plan.bucket_plans)):
        yield from _rank_report(plan, rank)
    if dp_size(config, world) * config.parallel.context_parallel_size > 1:
        yield from _choices(plan, world)
    yield from _schedule_report(plan.schedule)


def _first_steps(plan: MemoryPlan, world: int) -> str:
    """Return a line about the memory of the first steps of a ramp-up. Memory never falls with the
    number of microbatches, so that of the full size is enough for all steps."""
    config = plan.config
    start, _, _ = config.training.rampup_batch_size
    small = replace(config.training, global_batch_size=start, rampup_batch_size=())
    first = MemoryPlan(replace(config, training=small), world)
    granularity = config.parallel.recompute_granularity
    blocks = plan.recompute_layers()
    least, most = (sized(step_plan.needed(granularity, blocks)) for step_plan in (first, plan))
    return (
        f"  first steps   {first.schedule.microbatches} microbatches; "
        f"the process that needs most has {least}, at full size {most}"
    )


def _rank_report(plan: MemoryPlan, rank: int) -> Iterator[str]:
    """Yield lines about the layers, traffic and memory of one pipeline rank."""
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
    own_shards = own_messages = ""
    if (experts := traffic.experts) is not None:
        of_experts = sum(bucket.kind.ep > 1 for bucket in bucket_plan.buckets)
        if strategy.sharded:
            own_shards = f" ({of_experts} of experts in {experts.shards})"
        if experts.shards * experts.replicas > 1:
            own_gathers = f" and {experts.gathers}" if strategy.sharded else ""
            own_messages = f" (of experts {experts.reductions}{own_gathers} more)"
    yield (
        f"  layout        {len(bucket_plan.buckets)} buckets, the largest {largest:,} elements, "
        f"each in {bucket_plan.shards} shards{own_shards}{replicas}; a step makes "
        f"{traffic.reductions} {verb}{gathers}{own_messages} and sends {sized(round(traffic.sent))}"
    )
    if config.parallel.expert_model_parallel_size > 1:
        yield from _dispatch_report(plan)
    if config.parallel.tensor_model_parallel_size > 1:
        pieces = chosen_pieces(config)
        where = "in a block in FP8" if gathers_codes(config) else "in a block"
        cut = f", {pieces} pieces for each that forward passes wait for" if pieces > 1 else ""
        counts = {where: block_messages(config)}
        if config.model.num_experts:
            from megatron_llama.model.plan.experts import sparse_layers  # of few models

            dense = sparse_layers(config.model) < config.model.num_hidden_layers
            counts = {"in a dense block": counts[where]} if dense else {}
            counts["in a block with experts"] = sparse_block_messages(config)
        for where, tensor in counts.items():
            yield (
                f"  over tp       {where}, of each microbatch: forward {tensor.forward} messages, "
                f"{sized(tensor.forward_bytes)}; backward {tensor.backward}, "
                f"{sized(tensor.backward_bytes)}{cut}"
            )
    if config.model.num_experts:
        yield from _counts_report(config)
    own_layers = [layer for stage in stages for layer in partition.layers[stage]]
    yield from _scales(config, [layer for layer in own_layers if layer in fp8_layers(config)])
    staging = plan.staging(rank)
    sizes = plan.state_by_component(rank) | {"gradients on their way": staging}
    # Scalars are left out: all together are less than the last digit of the sum.
    parts = ", ".join(
        f"{name} {sized(size)}" for name, size in sizes.items() if size and name != "scalars"
    )
    buffers = plan.host_buffers(rank)
    instead = "instead of those on their way" if staging else "of receive buffers"
    host = f"; on a CPU also {sized(buffers)} {instead}" if buffers else ""
    yield f"  state         {sized(plan.state(rank))} per process: {parts}{host}"
    offload = plan.offload(rank)
    if offload is not None:
        sizes = {
            "weights and moments": offload.state,
            "gradients": offload.gradients,
            "on their way": offload.staging,
            "to undo": offload.undo,
        }
        parts = ", ".join(f"{name} {sized(size)}" for name, size in sizes.items() if size)
        trained = sum(bucket.kind.trainable for bucket in bucket_plan.buckets)
        yield (
            f"  offload       {config.offload.optimizer_offload}, {len(offload.buckets)} of "
            f"{trained} buckets: {sized(offload.held)} of host memory per process: {parts}"
        )
        yield (
            f"                a step copies {sized(offload.to_host)} to the host and "
            f"{sized(offload.to_device)} to the device"
        )
    granularity = config.parallel.recompute_granularity
    layers = plan.recompute_layers()
    by_granularity = ", ".join(
        f"{name} {sized(plan.microbatch(rank, name, plan.largest_stage))}" for name in GRANULARITIES
    )
    yield f"  activations   of a microbatch, by --recompute-granularity: {by_granularity}"
    some = (
        ""
        if granularity == "none" or layers >= plan.largest_stage
        else f" on {layers} blocks of each stage"
    )
    peak = plan.activations(rank, granularity, layers)
    yield (
        f"  peak          {sized(peak)} of activations with {plan.in_flight(rank):g} "
        f"microbatches in flight, {granularity}{some}; "
        f"with the state {sized(plan.state(rank) + peak)}"
    )


def _scales(config: Config, layers: Sequence[int]) -> Iterator[str]:
    """Yield the messages by which ranks agree on the scales of these layers, all in FP8."""
    sparse = 0
    if config.model.num_experts:
        from megatron_llama.model.plan.expert_fp8 import sparse_scale_messages  # of few models
        from megatron_llama.model.plan.experts import is_sparse

        sparse = sum(is_sparse(config.model, layer) for layer in layers)
    if len(layers) > sparse:
        for axis, scales in scale_messages(config).items():
            yield _scale_line(axis, "in a dense block" if sparse else "in a block", scales)
    if sparse:
        size = SCALE_BYTES * config.model.num_experts
        for axis, (single, experts) in sparse_scale_messages(config).items():
            yield (
                _scale_line(axis, "in a block with experts", single)
                + f"; of experts forward {experts.forward}, backward {experts.backward}, "
                f"{sized(size)} each"
            )


def _scale_line(axis: str, where: str, scales: ScaleMessages) -> str:
    weights = f"; {scales.weights} for weights, whenever they change" if scales.weights else ""
    return (
        f"  scales        over {axis}, {where} in FP8, of each microbatch: forward "
        f"{scales.forward} messages, backward {scales.backward}, {SCALE_BYTES} B each{weights}"
    )


def _counts_report(config: Config) -> Iterator[str]:
    """Yield a line about the counts of experts' tokens that context-parallel ranks send each
    other."""
    from megatron_llama.model.plan.router_losses import count_messages  # of few models

    if size := count_messages(config).get("cp"):
        yield (
            "  over cp       in a block with experts, of each microbatch, beside keys and values: "
            f"forward 1 message, {sized(size)}, the tokens of each expert in a sequence"
        )


def _dispatch_report(plan: MemoryPlan) -> Iterator[str]:
    """Yield lines about the tokens that ranks which divide experts send each other."""
    from megatron_llama.model.plan.dispatch import dispatch_messages, largest_load, load_of

    config = plan.config
    granularity = config.parallel.recompute_granularity
    recomputed = granularity == "selective" and plan.recompute_layers() > 0
    sent = dispatch_messages(config, recomputed=recomputed)
    line = (
        f"  over ep       in a block with experts, of each microbatch: forward {sent.forward} "
        f"messages, {sized(sent.forward_bytes)}; backward {sent.backward}, "
        f"{sized(sent.backward_bytes)}"
    )
    if not config.parallel.exchanges_tokens:
        yield line
        return
    most = dispatch_messages(config, load_of(config, largest_load), recomputed=recomputed)
    yield (
        f"{line}, if experts are equally loaded; at most {sized(most.forward_bytes)} and "
        f"{sized(most.backward_bytes)}"
    )
    from megatron_llama.model.plan.expert_memory import ExpertActivations

    assert isinstance(plan.shape, ExpertActivations)
    equal = replace(plan.shape, load=load_of(config)).sparse_block("none")
    yield (
        "                memory is counted for the most uneven choice, all tokens to the experts "
        f"of one rank: {sized(plan.shape.sparse_block('none'))} of activations in such a block, "
        f"{sized(equal)} if experts are equally loaded"
    )


def _choices(plan: MemoryPlan, world: int) -> Iterator[str]:
    """Yield the costs of other sharding strategies for the process that needs most."""
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
        variant = MemoryPlan(replace(plan.config, parallel=parallel), world)
        ranks = range(len(variant.bucket_plans))
        state = max(variant.state(rank) for rank in ranks)
        sent = max(variant.traffic(rank).sent for rank in ranks)
        label = name + (f" ({slots})" if slots != "default" else "")
        yield f"  {label:<26}state {sized(state):>12}, sent in a step {sized(round(sent)):>12}"


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
