"""Steps that must not stay in the weights: how they are found, and what happens then
(--on-bad-step).

A step is bad when its loss or its gradient norm is not finite, or when its loss exceeds
``loss_spike_factor`` times the mean loss of the last ``loss_spike_window`` good steps, once there
have been as many. With --fp16 a gradient that overflows under a loss scale that can still fall is
neither good nor bad.

The loss is judged where it is, on the device: it is summed behind the last forward pass, long
before the update, so the engine learns from a tensor that it has to leave the weights alone, and
the host waits for nothing. The host reads what happened a step later, and acts: stops, notes the
samples and goes on, or takes the run back to its newest checkpoint.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.folders import staging, write_synced
from megatron_llama.checkpoint.history import History, Skipped
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.storage_paths import local_folder
from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.config.schema import Config
from megatron_llama.distributed.comm.object_collectives import raise_on_all_ranks
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.engine.optimizer import StepResult
from megatron_llama.errors import TrainingError, describe
from megatron_llama.metrics.log import MetricLog
from megatron_llama.metrics.readback import Readback

FILE_NAME = "skipped.jsonl"
STOP = "stop"
ROLLBACK = "rollback"
SPIKE = "loss spike"


@dataclass(frozen=True)
class Outcome:
    """What a step left on the device; nothing of it has been read."""

    state: TrainState
    """The step leads to it."""
    samples: int
    """In the step."""
    numbers: Readback
    """Of ``read``."""

    def read(self) -> Numbers:
        """Waits for the end of the step, and for no later one."""
        return Numbers(*self.numbers.read())


@dataclass(frozen=True)
class Numbers:
    """Of one step."""

    loss: float
    grad_norm: float
    skipped: float
    """Not 0: the step changed nothing; see StepResult."""
    loss_scale: float
    limit: float
    """What the loss was allowed to be; not a number: anything."""


class BadSteps:
    """The policy of one run. Every rank sees the same losses and norms, and the votes on spikes are
    counted: all decide the same."""

    def __init__(self, config: Config, mesh: Mesh, log: MetricLog, history: History) -> None:
        """Raises CheckpointError, on every rank, if ``skipped.jsonl`` cannot be written."""
        self._training = config.training
        self._clips = config.optimizer.clip_grad > 0
        self._log = log
        self._device = mesh.device
        self._history = history
        self._sizes = BatchSizes.of(config.training)
        self._size = 0
        """Samples of the step under way."""
        self._file = (
            local_folder(config.checkpoint.save) / FILE_NAME
            if config.checkpoint.save is not None and mesh.rank == 0
            else None
        )
        self.goes_back = False
        """The run has to return to an earlier state: ``rewind`` says that it has."""
        self._losses, self._limit = self._window(history), self._number(math.nan)
        with raise_on_all_ranks(mesh.world):
            self._write_file()

    def _number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device=self._device)

    def _window(self, history: History) -> Tensor:
        """Losses of the last good steps, newest last, not a number where there are too few: then no
        mean is one either."""
        size = self._training.loss_spike_window if self._training.loss_spike_factor else 0
        losses = [math.nan] * size + list(history.good_losses)
        return torch.tensor(losses[len(losses) - size :], dtype=torch.float64, device=self._device)

    def following(self, state: TrainState) -> TrainState:
        """The state behind the step that comes after ``state``; samples that are left out are
        consumed with it."""
        first = self.first_sample(state)
        self._size = self._sizes.at(first)
        return replace(state, iteration=state.iteration + 1, consumed_samples=first + self._size)

    def first_sample(self, state: TrainState) -> int:
        """Where that step begins."""
        return self._history.first_sample(state.consumed_samples, self._sizes.at)

    def skip_update(self, loss: Tensor) -> Tensor:
        """Whether the step with this loss must change nothing: 0 or 1, 0-dim fp64 on the device."""
        bad = loss.isfinite().logical_not()
        if self._training.loss_spike_factor:
            self._limit = self._losses.mean() * self._training.loss_spike_factor
            bad = bad | (loss > self._limit)
        return bad.to(torch.float64)

    def issued(self, state: TrainState, loss: Tensor, update: StepResult) -> Outcome:
        """The step that had the last ``skip_update`` is under way."""
        if self._training.loss_spike_factor:
            longer = torch.cat([self._losses[1:], loss.reshape(1)])
            self._losses = torch.where(update.skipped > 0, self._losses, longer)
        return Outcome(
            state,
            self._size,
            Readback((loss, update.grad_norm, update.skipped, update.loss_scale, self._limit)),
        )

    def settle(self, step: Outcome) -> bool:
        """Read a step's outcome and act on it. Whether it was a good one.

        Raises TrainingError, the same on every rank, when the run must not go on; ``goes_back``
        when it must elsewhere."""
        training = self._training
        found = step.read()
        loss = found.loss
        norm = found.grad_norm
        if not found.skipped and math.isfinite(loss):
            if training.on_bad_step != ROLLBACK and self._history.bad_in_a_row:
                self._history = replace(self._history, bad_in_a_row=0)
            return True
        overflow = training.fp16 and found.loss_scale > training.min_loss_scale
        if not math.isfinite(loss):
            self._act(step, "loss", loss)
        elif math.isfinite(norm):
            self._act(step, SPIKE, loss)
        elif not overflow:  # which is part of the method
            self._act(step, "gradient norm", norm)
        return False

    def _act(self, step: Outcome, reason: str, value: float) -> None:
        last = step.state.consumed_samples - 1
        iteration = step.state.iteration
        found = Skipped(iteration, last + 1 - step.samples, last, reason, value)
        if self._training.on_bad_step == STOP:
            raise TrainingError(self._complaint(step, found))
        row = self._history.bad_in_a_row + 1
        self._history = replace(
            self._history, skipped=(*self._history.skipped, found), bad_in_a_row=row
        )
        self._write_line(found)
        samples = f"samples {found.first_sample} to {found.last_sample} are left out"
        self._log.say(f" warning: {reason} {value:.6g} at iteration {iteration}: {samples}")
        if row > self._training.max_bad_steps:
            allowed = f"at most {self._training.max_bad_steps} (--max-bad-steps)"
            do = "lower --lr, look at the data, or go back further"
            raise TrainingError(
                describe(
                    "bad steps",
                    got=f"{row} in a row, the last: {reason} {value:.6g}",
                    expected=allowed,
                    do=do,
                )
            )
        self.goes_back = self._training.on_bad_step == ROLLBACK

    def _complaint(self, step: Outcome, found: Skipped) -> str:
        kept = (
            "the weights were not changed by it"
            if self._clips
            else "without --clip-grad it changed some weights"
        )
        do = (
            f"lower --lr, look at the data of this step, or resume from the last checkpoint; {kept}"
        )
        where = f"{found.reason} at iteration {found.iteration}"
        expected = "a finite number"
        if found.reason == SPIKE:
            factor = self._training.loss_spike_factor
            window = self._training.loss_spike_window
            expected = f"at most {step.read().limit:.6g}, {factor:g} times the mean of the last {window} good steps (--loss-spike-factor)"
        return describe(where, got=found.value, expected=expected, do=do)

    def remember(self, state: TrainState) -> TrainState:
        """``state`` for a checkpoint. Every step before it is settled; bad ones from which the run
        comes back here are behind it."""
        losses = tuple(loss for loss in self._losses.tolist() if not math.isnan(loss))
        row = 0 if self._training.on_bad_step == ROLLBACK else self._history.bad_in_a_row
        self._history = replace(self._history, good_losses=losses, bad_in_a_row=row)
        return replace(state, history=self._history)

    def rewind(self, state: TrainState) -> None:
        """The run is at ``state`` again. What it has left out since then it goes on to leave
        out."""
        self._losses = self._window(state.history)
        self.goes_back = False

    def _write_file(self) -> None:
        """The file says what the history says: of a run that was interrupted, what its checkpoint
        knows."""
        if self._file is not None and (self._history.skipped or self._file.exists()):
            lines = "".join(json.dumps(one.entry()) + "\n" for one in self._history.skipped)
            with writing(self._file):
                write_synced(staging(self._file), lines.encode())
                staging(self._file).replace(self._file)

    def _write_line(self, found: Skipped) -> None:
        if self._file is not None:
            with writing(self._file), self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found.entry()) + "\n")
