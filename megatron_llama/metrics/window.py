"""From the seconds and steps of a log interval to the averages that a log line shows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """The counts and times since the last log line."""

    steps: int
    """Optimizer steps, at least 1."""
    tokens: int
    """Tokens in all of these steps."""
    seconds: float
    """Wall-clock time of these steps; evaluation and saving excluded."""
    exposed_seconds: float | None
    """Time in which the rank waited for communication; None if not measured."""


@dataclass(frozen=True)
class Work:
    """The work of a token, and the devices that do it."""

    flops_per_token: int
    world_size: int
    peak_flops: float | None
    """FLOP/s of one device; None if unknown."""


@dataclass(frozen=True)
class Averages:
    """Averages over an interval, in the units of a ``StepRecord``."""

    elapsed_ms: float
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None
    exposed_comm_ms: float | None
    eta_seconds: float


@dataclass(frozen=True)
class Spread:
    """The times for which the ranks compute in a step, in milliseconds."""

    least: float
    median: float
    most: float
    slowest: int
    """The slowest rank."""


def spread(milliseconds: Sequence[float]) -> Spread:
    """Return the spread of the times of all ranks, given in rank order."""
    most = max(milliseconds)
    return Spread(
        min(milliseconds), statistics.median(milliseconds), most, list(milliseconds).index(most)
    )


def averages(interval: Interval, work: Work, *, steps_left: int) -> Averages:
    """Average an interval. ``steps_left`` is the number of optimizer steps until the end of the
    run."""
    per_step = interval.seconds / interval.steps
    tokens_per_second = interval.tokens / interval.seconds
    per_gpu = tokens_per_second / work.world_size
    flops = per_gpu * work.flops_per_token
    exposed = interval.exposed_seconds
    return Averages(
        elapsed_ms=per_step * 1e3,
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_gpu=per_gpu,
        tflops_per_gpu=flops / 1e12,
        mfu=None if work.peak_flops is None else flops / work.peak_flops,
        exposed_comm_ms=None if exposed is None else exposed * 1e3 / interval.steps,
        eta_seconds=per_step * steps_left,
    )
