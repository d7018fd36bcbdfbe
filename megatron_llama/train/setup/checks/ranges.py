"""The checks of single options, and of numbers that are too large for plans."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import Any

from megatron_llama.config.fields import shown
from megatron_llama.config.limits import LARGEST_INTEGER, LARGEST_RAMP, LARGEST_RANKS
from megatron_llama.config.parse import flag, options_of
from megatron_llama.config.schema import Config
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.option import Check
from megatron_llama.schedule.builders import schedule_bound_problem


def bound_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield every number so large that checks and plans, which list layers, ranks and passes, would
    take minutes or the machine's memory. No other check can run before they are mended."""
    wrong = list(_too_large(config))
    if world_size > LARGEST_RANKS:
        yield describe(
            "processes",
            got=f"{world_size:,}",
            expected=f"at most {LARGEST_RANKS:,}",
            do="start fewer",
        )
    yield from wrong
    if wrong or world_size > LARGEST_RANKS:
        return
    yield from _schedule_bounds(config, world_size)
    yield from _ramp_bounds(config)


def _too_large(config: Config) -> Iterator[str]:
    for section, name, most in _numbers():
        value = getattr(getattr(config, section), name)
        if isinstance(value, float) and not math.isfinite(value):
            do = f"give {flag(name)} a number"
            yield describe(flag(name), got=value, expected="a finite number", do=do)
        elif isinstance(value, int) and abs(value) > most:
            do = f"give {flag(name)} a smaller number"
            yield describe(flag(name), got=shown(value), expected=f"at most {most:,}", do=do)


def _schedule_bounds(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    training = config.training
    pp = parallel.pipeline_model_parallel_size
    virtual = parallel.virtual_pipeline_model_parallel_size
    others = parallel.tensor_model_parallel_size * parallel.context_parallel_size * pp
    problem = schedule_bound_problem(pp * virtual, 1)
    if problem is None and min(others, virtual, training.micro_batch_size) > 0:
        replicas = max(1, world_size // others)
        microbatches = training.global_batch_size // (training.micro_batch_size * replicas)
        problem = schedule_bound_problem(pp * virtual, microbatches)
    if problem is not None:
        yield problem


def _ramp_bounds(config: Config) -> Iterator[str]:
    ramp = config.training.rampup_batch_size
    if len(ramp) != 3 or min(ramp) <= 0:
        return  # batch_ramp says what is wrong
    start, increment, samples = ramp
    rises = (config.training.global_batch_size - start) // increment
    if max(rises, samples // start) > LARGEST_RAMP:
        yield describe(
            "--rampup-batch-size",
            got=f"{rises:,} sizes in up to {samples // start:,} steps",
            expected=f"at most {LARGEST_RAMP:,} of each",
            do="let the batch grow by more, or over fewer samples",
        )


def value_problems(section: Any) -> Iterator[str]:
    """Yield the problem of each value of a section, whatever the others are."""
    for name, check in _checks(type(section)):  # type: ignore[arg-type]
        value = getattr(section, name)
        if value is not None and not check.holds(value):
            got = (" ".join(value) or "an empty text") if isinstance(value, tuple) else value
            do = check.do or f"give {flag(name)} N"
            yield describe(flag(name), got=got, expected=check.expected, do=do)


def refuse_values(*sections: object) -> None:
    """Raise ConfigError with every invalid value of these sections, for commands that start no
    run."""
    problems = [problem for section in sections for problem in value_problems(section)]
    if problems:
        raise ConfigError(listing("These options cannot be used:", problems))


def range_problems(config: Config) -> Iterator[str]:
    """Yield the problem of each value of a run, whatever the others are."""
    for item in fields(Config):
        yield from value_problems(getattr(config, item.name))


@cache  # the planner checks thousands of configurations
def _checks(section: type[Any]) -> tuple[tuple[str, Check], ...]:
    """Return the options of a section that have a check."""
    options = options_of([section]).items()
    return tuple((name, option.check) for name, option in options if option.check is not None)


@cache
def _numbers() -> tuple[tuple[str, str, int], ...]:
    """Return (section, name, largest value) of every option that is a number."""
    return tuple(
        (section.name, name, option.rules.largest or LARGEST_INTEGER)
        for section in fields(Config)
        for name, option in options_of([type(getattr(Config(), section.name))]).items()
        if option.kind in (int, float, int | None, float | None)
    )
