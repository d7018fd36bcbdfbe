"""The continuation of a run of Megatron-LM: its optimizer's state fills the engine, and the user
learns how this run differs from that one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint.columns import SavedColumns
from megatron_llama.checkpoint.model_folders.optimizer_state import OptimizerState
from megatron_llama.config.batch_ramp import with_decay
from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config
from megatron_llama.engine.comm.object_collectives import raise_on_all_ranks
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.options import EIGHT_BIT, FP32
from megatron_llama.engine.pieces import shard_pieces, step_counts
from megatron_llama.errors import CheckpointError
from megatron_llama.train.run.lr import learning_rate

ADAM = "adam"
MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
"""Options of the precision of moments."""
UPDATE = ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad")
"""Options of an update, beside the learning rate."""


def take_over(
    state: OptimizerState, engine: OverlappedDistributedOptimizer, mesh: Mesh, config: Config
) -> None:
    """Fill a new engine with masters, moments and step count. Collective. Raises
    CheckpointError."""
    # Such a state counts updates for whole parameters, like a checkpoint without columns.
    columns = SavedColumns(engine, mesh, {})
    with raise_on_all_ranks(mesh.world), torch.no_grad():
        for piece in shard_pieces(engine):
            for what, values in piece.tensors.items():
                state.sources[what](piece.rectangle, values)
    for count in step_counts(engine):
        count.fill_(state.step)
    optimizer = config.optimizer
    columns.take_up(
        state.step, {"adam_beta1": optimizer.adam_beta1, "adam_beta2": optimizer.adam_beta2}
    )
    engine.loss_scale.reset()
    engine.publish()


def require_adam(folder: Path, config: Config) -> None:
    """Raise CheckpointError if the run's optimizer keeps other state than Megatron-LM's Adam."""
    if config.optimizer.optimizer != ADAM:
        raise CheckpointError(
            f"--optimizer {config.optimizer.optimizer}",
            got=f"the masters and moments of Adam in {folder}",
            expected="the state of this optimizer",
            do=f"go on with --optimizer {ADAM}, or give --no-load-optim",
        )
    for name in MOMENTS:
        if getattr(config.optimizer, name) == EIGHT_BIT:
            raise CheckpointError(
                f"{flag(name)} {EIGHT_BIT}",
                got=f"moments in fp32 in {folder}",
                expected="bytes and scales: moments are not converted to them",
                do="go on with fp32 or bf16, or give --no-load-optim",
            )


def update_lines(state: OptimizerState, config: Config) -> Iterator[str]:
    """Yield warnings of updates that differ from those of the run that saved the state."""
    for name in UPDATE:
        before = getattr(state.config.optimizer, name)
        now = getattr(config.optimizer, name)
        if before != now:
            yield f"warning: {flag(name)} was {before:g} in the run that goes on, and is {now:g}"
    for name in MOMENTS:
        if getattr(config.optimizer, name) != FP32:
            kept = getattr(config.optimizer, name)
            yield f"warning: {flag(name)} is {kept}: the moments, read as fp32, are converted"
    theirs, ours = _schedules(state.config, config)
    differing = [
        f"{what} was {theirs[what]} and is {now}"
        for what, now in ours.items()
        if what in theirs and theirs[what] != now
    ]
    if differing:
        yield f"warning: the schedule of the learning rate: {', '.join(differing)}"
    iterations = config.training.train_iters
    if state.lr is None or not iterations:
        return
    lr = learning_rate(config.optimizer, iterations, state.iteration, state.consumed_samples)
    if not math.isclose(lr, state.lr, rel_tol=1e-6, abs_tol=1e-12):
        yield (
            f"warning: the learning rate goes on with {lr:.6g}, and would have gone on with "
            f"{state.lr:.6g}: --lr, --min-lr and the options of its decay and warm-up decide"
        )


def _schedules(*runs: Config) -> Iterator[dict[str, Any]]:
    """Yield the learning-rate options of each run. Lengths are in samples for all runs if one
    counts samples, as in Megatron; an unknown length is left out."""
    configs = [with_decay(run.optimizer, run.training) for run in runs]
    samples = any(config.lr_decay_samples for config in configs)
    for config, run in zip(configs, runs, strict=True):
        if config.lr_decay_samples:
            decay, last = config.lr_decay_samples, config.lr_wsd_decay_samples
            warmup: float = config.lr_warmup_samples
        else:
            times = run.training.global_batch_size if samples else 1
            decay, last = times * config.lr_decay_iters, times * config.lr_wsd_decay_iters
            warmup = times * config.lr_warmup_iters
        unit = "samples" if samples else "iters"
        schedule: dict[str, Any] = {"--lr": config.lr, "--lr-decay-style": config.lr_decay_style}
        if warmup or decay or not config.lr_warmup_fraction:
            schedule[f"--lr-warmup-{unit}"] = warmup or config.lr_warmup_fraction * decay or 0
        if config.lr_decay_style != "constant":
            schedule["--min-lr"] = config.min_lr
        if config.lr_decay_style != "constant" and decay:
            schedule[f"--lr-decay-{unit}"] = decay
        if config.lr_decay_style == "WSD":
            schedule["--lr-wsd-decay-style"] = config.lr_wsd_decay_style
            schedule[f"--lr-wsd-decay-{unit}"] = last
        yield schedule
