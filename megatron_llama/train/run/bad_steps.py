"""Steps that must not stay in the weights: their detection, and the reaction to them
(--on-bad-step).

A step is bad if its loss or its gradient norm is not finite, or if its loss exceeds
``loss_spike_factor`` times the mean loss of the last ``loss_spike_window`` good steps, once there
were that many. With --fp16 a gradient that overflows under a loss scale that can still fall is
neither good nor bad.

The loss is judged on the device. It is summed after the last forward pass, long before the update,
so a tensor tells the engine to leave the weights unchanged, and the host waits for nothing. The
host reads the outcome one step later, and then stops the run, goes on without the samples, or
returns to the newest checkpoint.

A save that finds values which are not finite (--on-bad-checkpoint rollback) is no bad step: the
faulty step is unknown, so no samples are left out, and the same steps are repeated. A passing
memory fault does not come again. Faults that do are counted here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.folders import staging
from megatron_llama.checkpoint.history import ROLLBACK, STOP, History, Skipped
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.saver import RefusedSave
from megatron_llama.checkpoint.storage_paths import local_folder
from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import TrainingError, describe
from megatron_llama.files import replacing
from megatron_llama.metrics.log import MetricLog
from megatron_llama.metrics.readback import Readback
from megatron_llama.train.run.callbacks import Step

FILE_NAME = "skipped.jsonl"
SPIKE = "loss spike"


@dataclass(frozen=True)
class Outcome:
    """The numbers of a step on the device, of which none has been read."""

    state: TrainState
    """The state after the step."""
    samples: int
    """Samples in the step."""
    numbers: Readback
    """The fields of ``Numbers``, those of the objective last."""
    counted: tuple[str, ...]
    """The names of the objective's numbers."""

    def read(self) -> Numbers:
        """Wait for the end of the step, and for no later one, and return its numbers."""
        loss, norm, skipped, scale, limit, *others = self.numbers.read()
        counted = dict(zip(self.counted, others, strict=True))
        return Numbers(loss, norm, skipped, scale, limit, counted)


@dataclass(frozen=True)
class Numbers:
    """The numbers of one step."""

    loss: float
    grad_norm: float
    skipped: float
    """Other than 0 if the step changed nothing; see StepResult."""
    loss_scale: float
    limit: float
    """The largest loss that is no spike; NaN where there is no limit."""
    counted: Mapping[str, float]
    """The numbers of the run's objective beside its loss, by name."""


class BadSteps:
    """The policy of one run. Every rank sees the same losses and norms, and the engine sums the
    ranks' flags to skip an update, so all ranks decide the same."""

    def __init__(self, config: Config, mesh: Mesh, log: MetricLog, history: History) -> None:
        """Raises CheckpointError, on rank 0, if ``skipped.jsonl`` cannot be written."""
        self._training = config.training
        self._clips = config.optimizer.clip_grad > 0
        self._log = log
        self._device = mesh.device
        self._history = history
        self._sizes = BatchSizes.from_training(config.training)
        self._size = 0
        """Samples of the current step."""
        self._file = (
            local_folder(config.checkpoint.save) / FILE_NAME
            if config.checkpoint.save is not None and mesh.rank == 0
            else None
        )
        self.rollback_needed = False
        """Whether the run has to return to an earlier state, until ``rewind``."""
        self._refused_in_a_row = 0
        self._last_refused = 0
        """The iteration of the last save that was not kept."""
        self._losses = self._window(history)
        self._limit = torch.tensor(math.nan, dtype=torch.float64, device=self._device)
        self._write_file()

    def _window(self, history: History) -> Tensor:
        """Return the losses of the last good steps, newest last. If there are too few, the rest is
        NaN, which makes the mean and so the limit NaN: no loss exceeds that."""
        size = self._training.loss_spike_window if self._training.loss_spike_factor else 0
        losses = [math.nan] * size + list(history.good_losses)
        return torch.tensor(losses[len(losses) - size :], dtype=torch.float64, device=self._device)

    def next_state(self, state: TrainState) -> TrainState:
        """Return the state after the step that follows ``state``. Samples that are left out count
        as consumed."""
        first = self.first_sample(state)
        self._size = self._sizes.at(first)
        return replace(state, iteration=state.iteration + 1, consumed_samples=first + self._size)

    def first_sample(self, state: TrainState) -> int:
        """Return the first sample of the step that follows ``state``."""
        return self._history.first_sample(state.consumed_samples, self._sizes.at)

    def is_last(self, state: TrainState) -> bool:
        """Whether no step follows: all iterations are done, or with --epochs only samples that are
        left out remain."""
        end = self._sizes.end
        return state.iteration >= self._training.train_iters or (
            end > 0 and self.first_sample(state) >= end
        )

    def skip_update(self, loss: Tensor) -> Tensor:
        """Return whether the step with this loss must leave the weights unchanged: 0 or 1, 0-dim
        fp64 on the device."""
        bad = loss.isfinite().logical_not()
        if self._training.loss_spike_factor:
            self._limit = self._losses.mean() * self._training.loss_spike_factor
            bad = bad | (loss > self._limit)
        return bad.to(torch.float64)

    def outcome(self, state: TrainState, step: Step) -> Outcome:
        """Return the outcome of the step of the last ``skip_update``, which leads to ``state``. Its
        kernels need not have run."""
        if self._training.loss_spike_factor:
            longer = torch.cat([self._losses[1:], step.loss.reshape(1)])
            self._losses = torch.where(step.skipped > 0, self._losses, longer)
        return Outcome(
            state,
            self._size,
            Readback(
                (
                    step.loss,
                    step.grad_norm,
                    step.skipped,
                    step.loss_scale,
                    self._limit,
                    *step.numbers.values(),
                )
            ),
            tuple(step.numbers),
        )

    def check(self, step: Outcome) -> bool:
        """Read a step's outcome, act on it, and return whether it was a good step.

        Sets ``rollback_needed`` when the run has to return to an earlier state. Raises
        TrainingError, the same on every rank, when it must not go on."""
        training = self._training
        numbers = step.read()
        loss = numbers.loss
        norm = numbers.grad_norm
        if not numbers.skipped and math.isfinite(loss):
            if training.on_bad_step != ROLLBACK and self._history.bad_in_a_row:
                self._history = replace(self._history, bad_in_a_row=0)
            return True
        overflow = training.fp16 and numbers.loss_scale > training.min_loss_scale
        if not math.isfinite(loss):
            self._act(step, "loss", loss)
        elif math.isfinite(norm):
            self._act(step, SPIKE, loss)
        elif not overflow:  # a scale that falls after an overflow is how loss scaling works
            self._act(step, "gradient norm", norm)
        return False

    def _act(self, step: Outcome, reason: str, value: float) -> None:
        last = step.state.consumed_samples - 1
        iteration = step.state.iteration
        bad_step = Skipped(iteration, last + 1 - step.samples, last, reason, value)
        if self._training.on_bad_step == STOP:
            raise TrainingError(self._message(step, bad_step))
        row = self._history.bad_in_a_row + 1
        self._history = replace(
            self._history, skipped=(*self._history.skipped, bad_step), bad_in_a_row=row
        )
        self._write_line(bad_step)
        samples = f"samples {bad_step.first_sample} to {bad_step.last_sample} are left out"
        self._log.say(f" warning: {reason} {value:.6g} at iteration {iteration}: {samples}")
        if row > self._training.max_bad_steps:
            allowed = f"at most {self._training.max_bad_steps} (--max-bad-steps)"
            do = "lower --lr, look at the data, or go back further"
            raise TrainingError(
                "bad steps",
                got=f"{row} in a row, the last: {reason} {value:.6g}",
                expected=allowed,
                do=do,
            )
        self.rollback_needed = self._training.on_bad_step == ROLLBACK

    def _message(self, step: Outcome, bad_step: Skipped) -> str:
        kept = (
            "the weights were not changed by it"
            if self._clips
            else "without --clip-grad it changed some weights"
        )
        do = (
            f"lower --lr, look at the data of this step, or resume from the last checkpoint; {kept}"
        )
        where = f"{bad_step.reason} at iteration {bad_step.iteration}"
        expected = "a finite number"
        if bad_step.reason == SPIKE:
            factor = self._training.loss_spike_factor
            window = self._training.loss_spike_window
            expected = (
                f"at most {step.read().limit:.6g}, {factor:g} times the mean of the last {window} "
                "good steps (--loss-spike-factor)"
            )
        return describe(where, got=bad_step.value, expected=expected, do=do)

    def with_history(self, state: TrainState) -> TrainState:
        """Return ``state`` with the history for a checkpoint. Every step before it has been
        checked."""
        losses = tuple(loss for loss in self._losses.tolist() if not math.isnan(loss))
        # With a rollback the bad steps in a row are those after the checkpoint, not before it.
        row = 0 if self._training.on_bad_step == ROLLBACK else self._history.bad_in_a_row
        self._history = replace(self._history, good_losses=losses, bad_in_a_row=row)
        return replace(state, history=self._history)

    def rewind(self, state: TrainState) -> None:
        """Return to ``state``. Samples that the run has since decided to leave out stay left
        out."""
        self._losses = self._window(state.history)
        self.rollback_needed = False

    def count_refusal(self, refused: RefusedSave, newest_good: int | None) -> None:
        """Count a return to an earlier state because of a save that was not kept. ``newest_good``
        is the newest iteration that this run has saved. Raises TrainingError, the same on every
        rank, if more than are allowed came in a row, without a later checkpoint between them."""
        if newest_good is not None and newest_good >= self._last_refused:
            self._refused_in_a_row = 0
        self._last_refused = max(self._last_refused, refused.iteration)
        self._refused_in_a_row += 1
        allowed = self._training.max_bad_steps
        if self._refused_in_a_row > allowed:
            raise TrainingError(
                f"{refused.target}",
                got=f"values that are not finite, {self._refused_in_a_row} times in a row: "
                f"{refused.words}",
                expected=f"at most {allowed} such saves in a row (--max-bad-steps)",
                do="the same steps lead there again, so it is no passing fault of a machine: lower "
                f"--lr, look at the data, or go back behind {refused.good or 'the start'}",
            )

    def _write_file(self) -> None:
        """Write the file anew from the history: an interrupted run may have written lines that its
        checkpoint does not have."""
        if self._file is not None and (self._history.skipped or self._file.exists()):
            lines = "".join(json.dumps(skipped.entry()) + "\n" for skipped in self._history.skipped)
            with (
                writing(self._file),
                replacing(self._file, temporary=staging(self._file), synced=True) as temporary,
            ):
                temporary.write_bytes(lines.encode())

    def _write_line(self, bad_step: Skipped) -> None:
        if self._file is not None:
            with writing(self._file), self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(bad_step.entry()) + "\n")
