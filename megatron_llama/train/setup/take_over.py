"""Goes on with a run of Megatron-LM: its optimizer's state fills the engine, and the user learns in
what this run differs from that one."""

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
"""Options of the precision in which moments are kept."""
UPDATE = ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad")
"""Options of an update, beside the learning rate."""


def take_over(
    state: OptimizerState, engine: OverlappedDistributedOptimizer, mesh: Mesh, config: Config
) -> None:
    """Fill a new engine with masters, moments and step count. Collective. Raises
    CheckpointError."""
    # Such a state counts updates for whole parameters, as a checkpoint without columns does.
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
    """Raise CheckpointError if the run's optimizer keeps other state than the one that is taken
    over, Megatron-LM's Adam."""
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
    """Warn of updates that differ from those of the run that saved the state."""
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
    """Yield for each run what its learning rate follows. Lengths are in samples for all if one of
    them counts samples, as in Megatron; a length that is not known is left out."""
    options = [with_decay(run.optimizer, run.training) for run in runs]
    samples = any(each.lr_decay_samples for each in options)
    for each, run in zip(options, runs, strict=True):
        if each.lr_decay_samples:
            decay, last = each.lr_decay_samples, each.lr_wsd_decay_samples
            warmup: float = each.lr_warmup_samples
        else:
            times = run.training.global_batch_size if samples else 1
            decay, last = times * each.lr_decay_iters, times * each.lr_wsd_decay_iters
            warmup = times * each.lr_warmup_iters
        unit = "samples" if samples else "iters"
        found: dict[str, Any] = {"--lr": each.lr, "--lr-decay-style": each.lr_decay_style}
        if warmup or decay or not each.lr_warmup_fraction:
            found[f"--lr-warmup-{unit}"] = warmup or each.lr_warmup_fraction * decay or 0
        if each.lr_decay_style != "constant":
            found["--min-lr"] = each.min_lr
        if each.lr_decay_style != "constant" and decay:
            found[f"--lr-decay-{unit}"] = decay
        if each.lr_decay_style == "WSD":
            found["--lr-wsd-decay-style"] = each.lr_wsd_decay_style
            found[f"--lr-wsd-decay-{unit}"] = last
        yield found
