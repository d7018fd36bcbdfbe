"""Checks of a step's samples, of the pipeline schedule for them, and of the precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_llama.config.batch_ramp import BatchSizes, size_problems
from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.config.world import dp_size, world_problem
from megatron_llama.errors import describe, nearest_multiples
from megatron_llama.schedule import ScheduleError, placement_of, schedule_problems


def batch_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield problems of the batch sizes, their microbatches, and the precision."""
    training = config.training
    if (
        world_problem(config, world_size) is None
        and training.micro_batch_size > 0
        and training.global_batch_size > 0
    ):
        dp = dp_size(config, world_size)
        unit = training.micro_batch_size * dp
        ramp_problems = list(size_problems(training, unit))
        yield from ramp_problems
        if training.global_batch_size % unit:
            yield describe(
                "--global-batch-size",
                got=training.global_batch_size,
                expected="a multiple of micro_batch_size "
                f"{training.micro_batch_size} x dp {dp} = {unit}",
                do=f"choose {nearest_multiples(training.global_batch_size, unit)}",
            )
        else:
            # The first two steps of a ramp stand for all: if both sizes are multiples of a number,
            # so is their difference, by which the batch grows.
            ramp = [] if ramp_problems else [*BatchSizes.from_training(training).all()][:2]
            sizes = {size // unit for size in (*ramp, training.global_batch_size)}
            yield from _schedule_problems(config.parallel, sorted(sizes))
    precisions = [f"--{name}" for name in ("bf16", "fp16", "fp64") if getattr(training, name)]
    if len(precisions) > 1:
        yield describe(
            " ".join(precisions),
            got=f"{len(precisions)} precisions",
            expected="at most one",
            do="leave the others out",
        )
    if training.min_loss_scale > training.initial_loss_scale > 0:
        yield describe(
            "--min-loss-scale",
            got=training.min_loss_scale,
            expected=f"at most initial_loss_scale {training.initial_loss_scale}",
            do="lower one or raise the other",
        )


def _schedule_problems(parallel: ParallelConfig, counts: Sequence[int]) -> Iterator[str]:
    """Yield the schedule's problems with the first of these numbers of microbatches that it
    refuses. The last number is that of a step of full size."""
    name = parallel.pipeline_schedule
    ranks = parallel.pipeline_model_parallel_size
    virtual = parallel.virtual_pipeline_model_parallel_size
    try:
        placement_of(name, ranks, virtual)
    except ScheduleError:
        return  # parallel.py names it
    for microbatches in counts:
        problems = schedule_problems(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
        if problems:
            ramp = "" if microbatches == counts[-1] else " (in a step of --rampup-batch-size)"
            yield from (f"{problem}{ramp}" for problem in problems)
            return
