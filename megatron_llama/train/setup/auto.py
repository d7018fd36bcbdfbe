"""The values of ``auto`` options: those that fit into memory, each with a reason."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace

from megatron_llama.config.schema import Config
from megatron_llama.engine.plan.buckets import AUTO, BY_TRAFFIC
from megatron_llama.engine.plan.memory import sized
from megatron_llama.model.plan.params import partition_of
from megatron_llama.pipeline.plan.run_engine import by_unit
from megatron_llama.train.setup.communicators import most_communicators, total_bytes
from megatron_llama.train.setup.memory import USABLE, MemoryPlan
from megatron_llama.train.setup.processes import Processes

FEWEST_SLOTS = 2


def decide_on_devices(config: Config, processes: Processes) -> tuple[Config, tuple[str, ...]]:
    """Do as ``decide`` for the memory of all processes. On GPUs ``auto`` leaves a share of it free,
    and more if NCCL takes more for its communicators."""
    memory = processes.memory
    if not processes.devices[0].host:
        taken = total_bytes(most_communicators(config, processes.count))
        memory = min(memory, int((memory - taken) / USABLE))
    return decide(config, processes.count, memory)


def decide(config: Config, world_size: int, memory: int) -> tuple[Config, tuple[str, ...]]:
    """Replace every ``auto`` by a value that fits into ``memory`` bytes per process. Return the
    configuration and a note on each decision.

    ``config`` is resolved and knows its vocabulary. All ranks must give the same memory, because
    all must decide alike."""
    # Sharding comes before recomputation: it costs communication, which overlaps with computation,
    # while recomputation costs computation.
    config, strategy = _decide_strategy(config, world_size, memory)
    config, slots = _decide_slots(config, world_size, memory)
    config, recompute = decide_recompute(config, world_size, memory)
    return config, (*strategy, *slots, *recompute)


def _with(config: Config, **parallel: str) -> Config:
    return replace(config, parallel=replace(config.parallel, **parallel))  # type: ignore[arg-type]


def _least_needed(plan: MemoryPlan) -> int:
    """Return the bytes of the process that needs most, with as little recomputation as the
    configuration allows."""
    parallel = plan.config.parallel
    return plan.needed(
        parallel.recompute_granularity,
        0 if parallel.recompute_num_layers == AUTO else plan.recompute_layers(),
    )


def _of_budget(needed: int, memory: int) -> str:
    budget = int(memory * USABLE)
    return (
        f"{sized(needed)} of {sized(budget)} usable per "
        f"process{'' if needed <= budget else ', which is not enough'}"
    )


def _decide_strategy(
    config: Config, world_size: int, memory: int
) -> tuple[Config, tuple[str, ...]]:
    """Choose the strategy that sends least among those that fit."""
    if config.parallel.data_parallel_sharding_strategy != AUTO:
        return config, ()
    # If the number of slots is still open, a strategy fits if it does with the fewest.
    slots = config.parallel.param_slots
    fewest = str(FEWEST_SLOTS) if slots == AUTO else slots
    plans = {
        name: MemoryPlan(
            _with(config, data_parallel_sharding_strategy=name, param_slots=fewest), world_size
        )
        for name in BY_TRAFFIC
    }
    needed = {name: _least_needed(plan) for name, plan in plans.items()}
    fitting = [name for name in BY_TRAFFIC if needed[name] <= memory * USABLE]
    chosen = fitting[0] if fitting else BY_TRAFFIC[-1]
    reasons = [
        f"{name} would need {sized(needed[name])}"
        for name in BY_TRAFFIC[: BY_TRAFFIC.index(chosen)]
    ]
    if fitting:
        reasons.append(
            f"with {plans[chosen].schedule.microbatches} microbatches it sends least of what fits"
        )
    note = f"--data-parallel-sharding-strategy auto: {chosen}; {_of_budget(needed[chosen], memory)}"
    return _with(config, data_parallel_sharding_strategy=chosen), ("; ".join([note, *reasons]),)


def _decide_slots(config: Config, world_size: int, memory: int) -> tuple[Config, tuple[str, ...]]:
    """Choose the most parameter slots that fit: each one saves gathers."""
    if config.parallel.param_slots != AUTO or not by_unit(config.parallel):
        return config, ()
    partition = partition_of(config)
    ranks = range(config.parallel.pipeline_model_parallel_size)
    most = max(
        sum(len(partition.layers[stage]) for stage in partition.stages_of(rank)) for rank in ranks
    )

    def needed(slots: int) -> int:
        return _least_needed(
            MemoryPlan(
                _with(config, param_slots="all" if slots >= most else str(slots)), world_size
            )
        )

    counts = range(FEWEST_SLOTS, max(FEWEST_SLOTS, most) + 1)
    slots = counts[max(0, bisect_right(counts, memory * USABLE, key=needed) - 1)]
    note = f"--param-slots auto: {slots} for {most} blocks; {_of_budget(needed(slots), memory)}"
    return _with(config, param_slots="all" if slots >= most else str(slots)), (note,)


def decide_recompute(
    config: Config, world_size: int, memory: int
) -> tuple[Config, tuple[str, ...]]:
    """Replace ``--recompute-num-layers auto`` by the fewest blocks with which every process fits
    into ``memory`` bytes. Otherwise as ``decide``."""
    parallel = config.parallel
    if parallel.recompute_num_layers != AUTO:
        return config, ()
    plan = MemoryPlan(config, world_size)
    granularity = parallel.recompute_granularity
    most = plan.largest_stage if granularity != "none" else 0
    counts = range(most + 1)
    layers = min(
        most,
        bisect_left(
            counts, True, key=lambda count: plan.needed(granularity, count) <= memory * USABLE
        ),
    )
    note = (
        f"--recompute-num-layers auto: {layers} of up to {plan.largest_stage} blocks of a "
        f"stage recompute ({granularity}); "
        f"{_of_budget(plan.needed(granularity, layers), memory)}"
    )
    return _with(config, recompute_num_layers=str(layers)), (note,)
