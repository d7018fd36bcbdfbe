"""The search for the fastest layouts of a run that fit on a machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product
from math import gcd
from typing import Any

from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.engine.offload_options import NONE
from megatron_llama.engine.plan.buckets import BY_TRAFFIC, NO_SHARD
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.footprint import fuller_end
from megatron_llama.planner.steps import estimate
from megatron_llama.planner.training_job import Machine, job_of
from megatron_llama.schedule import SCHEDULES
from megatron_llama.train.setup.checks.head_exchange import context_problems
from megatron_llama.train.setup.resolve import problems

EVEN_RISK = 0.5
"""Probability of running out of memory at which a layout no longer fits."""
MARGIN = 0.85
"""Factor that makes ``memory_estimate`` a low estimate, since the formula may exceed the plans."""
DOUBLINGS = 10
TRIES = 4
"""Doublings of a cluster that is too small, and layouts tried on each doubling."""
LONG = 4096
"""Fewest tokens of a sequence on a rank under context parallelism."""
MICRO_BATCHES = (1, 2, 4, 8)
OFFLOAD = "optimizer_offload"
"""The option that is changed if no layout fits."""
STRATEGIES = (NO_SHARD, *BY_TRAFFIC)
GRANULARITIES = ("none", "selective", "full")
DISPATCHERS = ("allgather", "alltoall")


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: tuple[Candidate, ...]
    """Layouts that fit, fastest first."""
    tried: int
    """Number of valid layouts."""
    smallest: Candidate | None
    """The layout that needs least memory, if none fits."""


def search(
    config: Config,
    machine: Machine,
    fit: Coefficients,
    *,
    top: int,
    pinned: Mapping[str, Any],
    risk: float = EVEN_RISK,
    offload: bool = True,
) -> SearchResult:
    """Return the fastest ``top`` layouts. ``config`` is resolved and has the model, the batch and
    all options that are not searched. ``pinned`` has the layout options that the user gave; all
    layouts keep them. ``risk`` is the probability of running out of memory at which a layout no
    longer fits. If no layout fits, ``offload`` repeats the search with the optimizer on the host,
    unless the user gave its place.

    Raises ConfigError if no layout is valid."""
    result = _search(config, machine, fit, top, pinned, risk)
    if (
        not offload
        or result.best
        or config.offload.optimizer_offload != NONE
        or OFFLOAD in pinned
        or not machine.gpu.host_memory
    ):
        return result
    return _search(
        replace(config, offload=replace(config.offload, optimizer_offload="exact")),
        machine,
        fit,
        top,
        pinned,
        risk,
    )


def _search(
    config: Config,
    machine: Machine,
    fit: Coefficients,
    top: int,
    pinned: Mapping[str, Any],
    risk: float,
) -> SearchResult:
    ranked = sorted(
        candidates(config, machine, pinned),
        key=lambda layout: estimate(job_of(layout, machine), fit).seconds,
    )
    if not ranked:
        raise ConfigError(_nothing_valid(config, machine, pinned))
    fitting: list[Candidate] = []
    for layout in ranked:
        candidate = Candidate(layout, machine, fit)
        if memory_estimate(candidate) < machine.gpu.memory and candidate.oom_probability < risk:
            fitting.append(candidate)
            if len(fitting) >= 2 * top:
                break
    valid = (
        candidate
        for candidate in sorted(fitting, key=lambda candidate: candidate.seconds)
        if not problems(candidate.config, machine.gpus)
    )
    best = tuple(islice(valid, top))
    if fitting and not best:
        wrong = problems(fitting[0].config, machine.gpus)
        raise ConfigError(listing("No layout makes these options a run:", wrong))
    every = (Candidate(layout, machine, fit) for layout in ranked)
    smallest = None if best else min(every, key=memory_estimate)
    return SearchResult(best, len(ranked), smallest)


def memory_estimate(candidate: Candidate) -> float:
    """Return a low estimate of the bytes of the fuller end of the pipeline. It rules out most
    layouts that do not fit without making their plans."""
    return MARGIN * fuller_end(candidate.job)


def enough_gpus(
    config: Config, machine: Machine, fit: Coefficients, pinned: Mapping[str, Any]
) -> Candidate | None:
    """Return a layout that fits on the first sufficient doubling of the GPUs; None if DOUBLINGS
    are not enough. Only the TRIES layouts that need least memory are tried on each."""
    for doublings in range(1, DOUBLINGS + 1):
        larger = replace(machine, gpus=machine.gpus << doublings)
        every = (Candidate(layout, larger, fit) for layout in candidates(config, larger, pinned))
        for candidate in sorted(every, key=memory_estimate)[:TRIES]:
            if candidate.oom_probability < EVEN_RISK:
                return candidate
    return None


def candidates(config: Config, machine: Machine, pinned: Mapping[str, Any]) -> Iterator[Config]:
    """Yield the valid layouts, whether they fit in memory or not."""
    strategies = _pinned_or(pinned, "data_parallel_sharding_strategy", STRATEGIES)
    granularities = _pinned_or(pinned, "recompute_granularity", GRANULARITIES)
    for tp, pp, cp, schedule, virtual, micro in shapes(config, machine, pinned):
        # With one data-parallel rank all strategies are the same.
        several = machine.gpus > tp * pp or "data_parallel_sharding_strategy" in pinned
        split = replace(
            config.parallel,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            sequence_parallel=tp > 1 and pinned.get("sequence_parallel", True),
        )
        whole = replace(config, parallel=split)
        for strategy, granularity, comm, (ep, dispatcher) in product(
            strategies if several else BY_TRAFFIC[:1],
            granularities,
            tuple(_comm_types(whole, pinned)),
            tuple(_divisions(whole, machine.gpus // (tp * pp * cp), pinned)),
        ):
            parallel = replace(
                split,
                cp_comm_type=comm,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=virtual,
                pipeline_schedule=schedule,
                expert_model_parallel_size=ep,
                moe_token_dispatcher_type=dispatcher,
                data_parallel_sharding_strategy=strategy,
                recompute_granularity=granularity,
            )
            parallel = with_ends(parallel, config.model.num_hidden_layers)
            yield replace(
                config, parallel=parallel, training=replace(config.training, micro_batch_size=micro)
            )


def with_ends(parallel: ParallelConfig, layers: int) -> ParallelConfig:
    """Return the options with embedding and head counted as one block each, if the blocks alone
    cannot be divided equally (LLaMA 3.1 405B)."""
    stages = parallel.pipeline_model_parallel_size
    stages *= SCHEDULES[parallel.pipeline_schedule].chunks(
        parallel.virtual_pipeline_model_parallel_size
    )
    if layers % stages == 0 or parallel.pipeline_layer_split:
        return parallel
    return replace(
        parallel,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )


def _comm_types(config: Config, pinned: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the possible types of context parallelism. A ring needs less memory than a gather, but
    is never faster."""
    several = config.parallel.context_parallel_size > 1
    every = ("all_gather", "a2a") if several else ("all_gather",)
    for comm in _pinned_or(pinned, "cp_comm_type", every):
        typed = replace(config, parallel=replace(config.parallel, cp_comm_type=comm))
        if not any(context_problems(typed)):
            yield comm


def _divisions(config: Config, dp: int, pinned: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yield how many of ``dp`` data-parallel ranks may divide the experts of a model, and how
    tokens come to these; nothing if it cannot have experts in this layout."""
    parallel = config.parallel
    experts = config.model.num_experts
    if not experts:
        yield 1, parallel.moe_token_dispatcher_type
        return
    sizes = _pinned_or(pinned, "expert_model_parallel_size", _divisors(gcd(dp, experts)))
    from megatron_llama.train.setup.checks.experts import division_problems, expert_problems

    # What forbids experts on one tensor-parallel rank too is for the user to change.
    anyway = len([*expert_problems(config)])
    if parallel.tensor_model_parallel_size > 1 and anyway:
        return
    for ep in sizes:
        every = DISPATCHERS if ep > 1 else DISPATCHERS[:1]
        for way in _pinned_or(pinned, "moe_token_dispatcher_type", every):
            divided = replace(
                config,
                parallel=replace(
                    parallel, expert_model_parallel_size=ep, moe_token_dispatcher_type=way
                ),
            )
            if ep == 1 or not (
                any(division_problems(divided, dp)) or len([*expert_problems(divided)]) > anyway
            ):
                yield ep, way


Shape = tuple[int, int, int, Any, int, int]


def shapes(config: Config, machine: Machine, pinned: Mapping[str, Any]) -> Iterator[Shape]:
    """Yield each (tp, pp, cp, schedule, virtual stages, micro-batch) that divides evenly."""
    model = config.model
    training = config.training
    world = machine.gpus
    tensors = [
        size
        for size in _powers(machine.node)
        if model.num_attention_heads % size == 0 and _whole_kv(config, size)
    ]
    pipes = [
        size
        for size in _divisors(world)
        if size <= model.num_hidden_layers and _divides_blocks(config, size)
    ]
    contexts = [size for size in _powers(64) if size == 1 or training.seq_length // size >= LONG]
    for tp, pp, cp in product(
        _pinned_or(pinned, "tensor_model_parallel_size", tensors),
        _pinned_or(pinned, "pipeline_model_parallel_size", pipes),
        _pinned_or(pinned, "context_parallel_size", contexts),
    ):
        if world % (tp * pp * cp):
            continue
        samples, rest = divmod(training.global_batch_size, world // (tp * pp * cp))
        for micro in _pinned_or(pinned, "micro_batch_size", MICRO_BATCHES):
            if rest == 0 and samples and samples % micro == 0:
                for schedule, virtual in _pipelines(config, pp, samples // micro, pinned):
                    yield tp, pp, cp, schedule, virtual, micro


def _pipelines(
    config: Config, pp: int, microbatches: int, pinned: Mapping[str, Any]
) -> Iterator[tuple[str, int]]:
    """Yield the schedules with their numbers of virtual stages."""
    layers = -(-config.model.num_hidden_layers // pp)
    every = [("1f1b", 1)]
    if pp > 1:
        counts = range(2, min(layers, 10) + 1) if microbatches % pp == 0 else ()
        split = [name for name, entry in SCHEDULES.items() if entry.bubble < 1]
        several = [name for name, entry in SCHEDULES.items() if entry.several_chunks]
        for name in split:
            chunks = SCHEDULES[name].chunks(1)
            if chunks == 1 or _divides_blocks(config, chunks * pp):
                every.append((name, chunks))
        every += product(several, (v for v in counts if _divides_blocks(config, v * pp)))
    for schedule, virtual in every:
        wanted = (
            pinned.get("pipeline_schedule", schedule),
            pinned.get("virtual_pipeline_model_parallel_size", virtual),
        )
        folded = SCHEDULES[schedule].folded  # its number of chunks is no option
        if wanted == (schedule, virtual) or (folded and wanted[0] == schedule):
            yield schedule, 1 if folded else virtual


def _divides_blocks(config: Config, stages: int) -> bool:
    """Whether stages have equal numbers of blocks, alone or with the ends (``with_ends``)."""
    layers = config.model.num_hidden_layers
    return layers % stages == 0 or (layers + 2) % stages == 0


def _pinned_or(pinned: Mapping[str, Any], name: str, every: Any) -> Any:
    return (pinned[name],) if name in pinned else every


def _whole_kv(config: Config, tp: int) -> bool:
    heads = config.model.num_key_value_heads
    return heads % tp == 0 or tp % heads == 0


def _powers(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]


def _divisors(whole: int) -> list[int]:
    return [size for size in range(1, whole + 1) if whole % size == 0]


def _nothing_valid(config: Config, machine: Machine, pinned: Mapping[str, Any]) -> str:
    """Return the message that no layout is valid, with the nearest batch that has one."""
    given = ", ".join(f"{name} {value}" for name, value in pinned.items()) or "none"
    batch = config.training.global_batch_size
    world = machine.gpus
    near = [size * max(1, round(batch / size)) for size in _divisors(world)]
    works = []
    for size in near:
        training = replace(config.training, global_batch_size=size)
        if any(True for _ in shapes(replace(config, training=training), machine, pinned)):
            works.append(size)
    best = min(works, key=lambda size: abs(size - batch), default=None)
    do = (
        f"--global-batch-size {best} would work"
        if best
        else "give --gpus that model and layout divide, such as 8 or 64"
    )
    got = f"{world} GPUs, --global-batch-size {batch}, given options of the layout: {given}"
    return describe("plan", got=got, expected="numbers that divide each other", do=do)
