"""Turns what a step returns into log lines, one step late, so that the host never waits for the device inside a step."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from torch import Tensor

from megatron_llama import device as devices
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config import Config
from megatron_llama.errors import TrainingError, describe
from megatron_llama.mesh import Mesh
from megatron_llama.metrics.flops import flops_per_token, peak_flops
from megatron_llama.metrics.log import MetricLog, StepRecord
from megatron_llama.metrics.window import Interval, Work, averages
from megatron_llama.optim.distributed import StepResult


@dataclass(frozen=True)
class _Step:
    state: TrainState
    lr: float
    loss: Tensor
    update: StepResult


class Progress:
    """Checks every step, logs every ``log_interval``-th and the last."""

    def __init__(self, config: Config, mesh: Mesh, log: MetricLog) -> None:
        self._config, self._mesh, self._log = config, mesh, log
        training = config.training
        self._work = Work(
            tokens_per_step=training.global_batch_size * training.seq_length,
            flops_per_token=flops_per_token(config.model, training.seq_length, causal=False),
            world_size=mesh.world.size,
            peak_flops=peak_flops(devices.name(mesh.device)),
        )
        self._pending: _Step | None = None
        self._steps, self._since, self._skipped = 0, time.perf_counter(), 0

    def step(self, state: TrainState, lr: float, loss: Tensor, update: StepResult) -> None:
        """The step that leads to ``state`` was issued. Raises TrainingError if the one before it was not finite."""
        self.settle()
        self._pending = _Step(state, lr, loss, update)
        self._steps += 1
        self._log.advance()
        if state.iteration % self._config.log.log_interval == 0 or state.iteration == self._config.training.train_iters:
            self._write(self._pending)

    def settle(self) -> None:
        """Look at the last step. Raises TrainingError, the same on every rank, if its loss or gradient was not finite.

        With --fp16 an overflowing gradient is part of the method: the step was skipped, and is counted."""
        step, self._pending = self._pending, None
        if step is None:
            return
        training = self._config.training
        if training.fp16 and step.update.skipped and math.isfinite(float(step.loss)) and step.update.loss_scale > training.min_loss_scale:
            self._skipped += 1
            return
        for name, value in (("loss", float(step.loss)), ("gradient norm", float(step.update.grad_norm))):
            if not math.isfinite(value):
                kept = (
                    "the weights were not changed by it"
                    if self._config.optimizer.clip_grad
                    else "without --clip-grad it changed some weights"
                )
                do = f"lower --lr, look at the data of this step, or resume from the last checkpoint; {kept}"
                raise TrainingError(describe(f"{name} at iteration {step.state.iteration}", got=value, expected="a finite number", do=do))

    def _write(self, step: _Step) -> None:
        self.settle()
        mesh, training = self._mesh, self._config.training
        devices.synchronize(mesh.device)
        exposed = mesh.recorder.take_exposed_seconds() if devices.is_host(mesh.device) else None
        interval = Interval(self._steps, time.perf_counter() - self._since, exposed)
        mean = averages(interval, self._work, steps_left=training.train_iters - step.state.iteration)
        self._log.write(
            StepRecord(
                iteration=step.state.iteration,
                train_iters=training.train_iters,
                consumed_samples=step.state.consumed_samples,
                learning_rate=step.lr,
                global_batch_size=training.global_batch_size,
                lm_loss=float(step.loss),
                grad_norm=None if step.update.skipped else float(step.update.grad_norm),
                loss_scale=float(step.update.loss_scale),
                skipped_iterations=self._skipped,
                peak_memory_bytes=devices.peak_memory_bytes(mesh.device),
                elapsed_ms=mean.elapsed_ms,
                tokens_per_second=mean.tokens_per_second,
                tokens_per_second_per_gpu=mean.tokens_per_second_per_gpu,
                tflops_per_gpu=mean.tflops_per_gpu,
                mfu=mean.mfu,
                exposed_comm_ms=mean.exposed_comm_ms,
                eta_seconds=mean.eta_seconds,
            )
        )
        self._skipped = 0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave what happened since the last line (an evaluation, a save) out of the averages."""
        self._mesh.recorder.take_exposed_seconds()
        self._steps, self._since = 0, time.perf_counter()
