"""The layout that ``--auto-parallel`` gives a run: the fastest that fits, with what the user has
given as it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config
from megatron_llama.errors import ConfigError
from megatron_llama.planner.candidate import Planned
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.fitted import HIGH, LOW
from megatron_llama.planner.job import Machine
from megatron_llama.planner.report import does_not_fit, duration, losses
from megatron_llama.planner.search import OFFLOAD, enough_gpus, search
from megatron_llama.plans.buckets import AUTO
from megatron_llama.plans.memory import gib
from megatron_llama.plans.resolve import resolve

SEARCHED = (
    *(
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "pipeline_schedule",
    ),
    *(
        "context_parallel_size",
        "sequence_parallel",
        "data_parallel_sharding_strategy",
        "recompute_granularity",
        "micro_batch_size",
    ),
)
"""Options that a search tries, unless they are given."""
DERIVED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Options that follow from these."""
RUNNERS_UP = 3
RISK = 0.05
"""Probability of running out of memory that a run takes, where another layout has less. Nobody
looks at what is chosen."""


@dataclass(frozen=True)
class Choice:
    """A configuration with its layout."""

    config: Config
    notes: tuple[str, ...]
    """What was chosen and why, one line each."""


def given_of(config: Config, explicit: Collection[str]) -> dict[str, Any]:
    """Of the options that are given, those which a search keeps."""
    kept = {
        name: value_of(config, name)
        for name in SEARCHED
        if name in explicit and value_of(config, name) != AUTO
    }
    return kept | ({OFFLOAD: config.offload.optimizer_offload} if OFFLOAD in explicit else {})


def value_of(config: Config, name: str) -> Any:
    """An option of a layout."""
    return getattr(config.training if name == "micro_batch_size" else config.parallel, name)


def searchable(config: Config) -> Config:
    """What a search begins with: derived fields filled in; what would be decided by memory is left
    to the search."""
    parallel = config.parallel
    slots, blocks = (
        "default" if text == AUTO else text
        for text in (parallel.param_slots, parallel.recompute_num_layers)
    )
    parallel = replace(
        parallel, param_slots=slots, recompute_num_layers="all" if blocks == "default" else blocks
    )
    return resolve(replace(config, parallel=parallel), 1)


def choose(config: Config, machine: Machine, fit: Coefficients, given: Mapping[str, Any]) -> Choice:
    """The fastest layout that is likelier than not to fit. ``config``: with a vocabulary and a
    batch; ``given``: what stays.

    The same for the same arguments, whoever asks. Raises ConfigError where no layout is valid, or
    none fits."""
    bare = searchable(config)
    found = search(bare, machine, fit, top=RUNNERS_UP, pinned=given, risk=RISK, offload=False)
    if not found.best:
        found = search(bare, machine, fit, top=RUNNERS_UP, pinned=given)
    if not found.best:
        assert found.smallest is not None
        raise ConfigError(does_not_fit(found.smallest, enough_gpus(bare, machine, fit, given)))
    best = found.best[0]
    changed = {name: value_of(best.config, name) for name in (*SEARCHED, *DERIVED)}
    training = replace(config.training, micro_batch_size=changed.pop("micro_batch_size"))
    whole = replace(
        config,
        parallel=replace(config.parallel, **changed),
        training=training,
        offload=best.config.offload,
    )
    moved = best.config.offload != config.offload
    return Choice(whole, tuple(_notes(found.best, found.tried, given, moved=moved)))


def _notes(
    best: tuple[Planned, ...], tried: int, given: Mapping[str, Any], *, moved: bool
) -> Iterator[str]:
    first = best[0]
    machine = best[0].machine
    words = [
        f"{flag(name)} {_word(value_of(first.config, name))}"
        for name in SEARCHED
        if name not in given
    ]
    words += [flag(name) for name in DERIVED if value_of(first.config, name)]
    words += [f"{flag(OFFLOAD)} {first.config.offload.optimizer_offload}"] * moved
    where = f"{machine.gpus} x {machine.gpu.name}, {machine.node} in a node"
    kept = (
        f", of those with {' '.join(f'{flag(name)} {_word(value)}' for name, value in given.items())}"
        if given
        else ""
    )
    yield f"--auto-parallel: {' '.join(words)}"
    yield f"  the fastest of {tried} layouts on {where}{kept}, as planned; give these options instead to keep it"
    between = f"{duration(first.seconds * LOW)} to {duration(first.seconds * HIGH)}"
    memory = f"{gib(sum(first.fullest.values()))} of {gib(machine.gpu.memory)} for each process"
    yield f"  planned: {duration(first.seconds)} s a step ({between}), {first.speed:,.0f} tokens/s/GPU, {memory}"
    if moved:
        yield f"  nothing fits without offload: {gib(first.host_bytes)} of host memory for each process"
    if first.oom_probability >= RISK:
        yield f"  warning: {first.oom_probability:.0%} probability of running out of memory, and no layout has less than {RISK:.0%}"
    yield from (f"  runner-up {loss}" for loss in losses(best))


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
