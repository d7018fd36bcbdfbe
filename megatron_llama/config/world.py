"""Processes and parallel sizes: whether they fit, and the number of data-parallel ranks."""

from __future__ import annotations

from megatron_llama.config.schema import Config
from megatron_llama.errors import ConfigError, describe, nearest_multiples


def dp_size(config: Config, world_size: int) -> int:
    """Return the number of data-parallel ranks: processes / (tp x cp x pp). Raises ConfigError if
    that is no whole number."""
    problem = world_problem(config, world_size)
    if problem is not None:
        raise ConfigError(problem)
    parallel = config.parallel
    return world_size // (
        parallel.tensor_model_parallel_size
        * parallel.context_parallel_size
        * parallel.pipeline_model_parallel_size
    )


def world_problem(config: Config, world_size: int) -> str | None:
    """Return the problem of the number of processes; None if it gives whole data-parallel ranks."""
    tp = config.parallel.tensor_model_parallel_size
    pp = config.parallel.pipeline_model_parallel_size
    cp = config.parallel.context_parallel_size
    if min(tp, pp, cp) <= 0:
        return describe(
            "tp x cp x pp",
            got=f"{tp} x {cp} x {pp}",
            expected="positive sizes",
            do="give positive sizes",
        )
    unit = tp * cp * pp
    if world_size > 0 and world_size % unit == 0:
        return None
    return describe(
        "processes",
        got=world_size,
        expected=f"a multiple of tp {tp} x cp {cp} x pp {pp} = {unit}",
        do=f"start {nearest_multiples(world_size, unit)} processes, or change "
        "--tensor-model-parallel-size, --context-parallel-size or --pipeline-model-parallel-size",
    )
