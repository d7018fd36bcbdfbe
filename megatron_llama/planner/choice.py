"""The layout that ``--auto-parallel`` gives a run: the fastest that fits, with the user's options
unchanged."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.options import MUON
from megatron_llama.engine.plan.buckets import AUTO
from megatron_llama.engine.plan.memory import sized
from megatron_llama.errors import ConfigError
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.report import (
    AS_ADAM,
    does_not_fit,
    duration,
    experts_line,
    interval,
    losses,
)
from megatron_llama.planner.search import OFFLOAD, enough_gpus, search
from megatron_llama.planner.training_job import Machine
from megatron_llama.train.setup.layout import Choice
from megatron_llama.train.setup.resolve import resolve

SEARCHED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_schedule",
    "context_parallel_size",
    "cp_comm_type",
    "sequence_parallel",
    "data_parallel_sharding_strategy",
    "recompute_granularity",
    "micro_batch_size",
)
"""Options that a search varies, unless they are given."""
OF_EXPERTS = ("expert_model_parallel_size", "moe_token_dispatcher_type")
"""Those of a model with experts besides."""
DERIVED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Options that follow from these."""
TOP = 3
"""Layouts that a search returns: the choice and two to compare it with."""
RISK = 0.05
"""Probability of running out of memory below which a layout is preferred. It is low because the run
starts without a check of the choice."""


def searched_options(model: ModelConfig) -> tuple[str, ...]:
    """Return the options that a search varies for a model."""
    return (*SEARCHED, *OF_EXPERTS) if model.num_experts else SEARCHED


def given_of(config: Config, explicit: Collection[str]) -> dict[str, Any]:
    """Return those of the ``explicit`` options that a search keeps, with their values."""
    kept = {
        name: value_of(config, name)
        for name in searched_options(config.model)
        if name in explicit and value_of(config, name) != AUTO
    }
    return kept | ({OFFLOAD: config.offload.optimizer_offload} if OFFLOAD in explicit else {})


def value_of(config: Config, name: str) -> Any:
    """Return the value of a layout's option."""
    return getattr(config.training if name == "micro_batch_size" else config.parallel, name)


def searchable(config: Config) -> Config:
    """Return the configuration that a search begins with. Derived fields are filled in, and options
    that depend on memory are left to the search."""
    parallel = config.parallel
    slots = "default" if parallel.param_slots == AUTO else parallel.param_slots
    blocks = parallel.recompute_num_layers
    blocks = "all" if blocks in (AUTO, "default") else blocks
    parallel = replace(parallel, param_slots=slots, recompute_num_layers=blocks)
    return resolve(replace(config, parallel=parallel), 1)


def choose(config: Config, machine: Machine, fit: Coefficients, given: Mapping[str, Any]) -> Choice:
    """Return the fastest layout that fits. ``config`` has a vocabulary and a batch; ``given`` are
    options that stay. The result depends only on the arguments, so every rank makes the same
    choice. Raises ConfigError if no layout is valid or none fits."""
    bare = searchable(config)
    result = search(bare, machine, fit, top=TOP, pinned=given, risk=RISK, offload=False)
    if not result.best:
        result = search(bare, machine, fit, top=TOP, pinned=given)
    if not result.best:
        assert result.smallest is not None
        raise ConfigError(does_not_fit(result.smallest, enough_gpus(bare, machine, fit, given)))
    best = result.best[0].config
    changed = {name: value_of(best, name) for name in (*searched_options(config.model), *DERIVED)}
    training = replace(config.training, micro_batch_size=changed.pop("micro_batch_size"))
    parallel = replace(config.parallel, **changed)
    whole = replace(config, parallel=parallel, training=training, offload=best.offload)
    moved = best.offload != config.offload
    return Choice(whole, tuple(_notes(result.best, result.tried, given, moved=moved)))


def _notes(
    best: tuple[Candidate, ...], tried: int, given: Mapping[str, Any], *, moved: bool
) -> Iterator[str]:
    first = best[0]
    config = first.config
    machine = first.machine
    chosen = [
        f"{flag(name)} {_text(value_of(config, name))}"
        for name in searched_options(config.model)
        if name not in given
    ]
    chosen += [flag(name) for name in DERIVED if value_of(config, name)]
    chosen += [f"{flag(OFFLOAD)} {config.offload.optimizer_offload}"] * moved
    kept = " ".join(f"{flag(name)} {_text(value)}" for name, value in given.items())
    yield f"--auto-parallel: {' '.join(chosen)}"
    yield (
        f"  the fastest of {tried} layouts on {machine.gpus} x {machine.gpu.name}, "
        f"{machine.node} in a node{f', of those with {kept}' if given else ''}, as planned; "
        f"give these options instead to keep it"
    )
    yield (
        f"  planned: {duration(first.seconds)} s a step ({interval(first)}), "
        f"{first.speed:,.0f} tokens/s/GPU, {sized(first.needed)} of {sized(machine.gpu.memory)} "
        f"for each process"
    )
    if first.job.experts is not None:
        yield f"  experts: {experts_line(first)}"
    if first.config.optimizer.optimizer == MUON:
        yield f"  update: {AS_ADAM}"
    if moved:
        host = f"{sized(first.host_bytes)} of host memory for each process"
        yield f"  nothing fits without offload: {host}"
    if first.oom_probability >= RISK:
        yield (
            f"  warning: {first.oom_probability:.0%} probability of running out of memory, "
            f"and no layout has less than {RISK:.0%}"
        )
    yield from (f"  runner-up {loss}" for loss in losses(best))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
