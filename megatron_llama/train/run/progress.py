"""Log lines of the steps' results, one step late, so that the host never waits for the device
inside a step."""

from __future__ import annotations

import math
import time
from functools import partial

from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config.schema import Config
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.object_collectives import all_gather_float
from megatron_llama.engine.mesh import Mesh
from megatron_llama.metrics.flops import flops_per_token, peak_flops, run_peak
from megatron_llama.metrics.log import LANGUAGE_MODEL, LossNames, MetricLog, StepRecord
from megatron_llama.metrics.window import Interval, Spread, Work, averages, spread
from megatron_llama.train.run.bad_steps import BadSteps, Numbers, Outcome
from megatron_llama.train.run.callbacks import Part, Run, Step
from megatron_llama.train.run.course import Course


class Progress(Part):
    """Checks every step and logs every ``log_interval``-th one and the last."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        log: MetricLog,
        bad_steps: BadSteps,
        course: Course,
        names: LossNames = LANGUAGE_MODEL,
    ) -> None:
        """``names``: those of the loss in the log."""
        self._config = config
        self._mesh = mesh
        self._log = log
        self._bad_steps = bad_steps
        self._course = course
        self._names = names
        training = config.training
        self._work = Work(
            flops_per_token=flops_per_token(
                config.model, training.seq_length, causal=False, lora=config.lora
            ),
            world_size=mesh.world.size,
            peak_flops=run_peak(config, peak_flops(devices.name(mesh.device))),
        )
        if config.log.log_straggler and not devices.is_host(mesh.device):
            # On a device two events measure a wait. They are recorded only on request.
            mesh.recorder.mark = partial(devices.timed_event, mesh.device)
        self._pending: Outcome | None = None
        self._checked: Outcome | None = None
        self.losses: dict[int, float] = {}
        """The loss of each step that was logged, by its iteration."""
        self._steps = 0
        self._samples = 0
        self._since = time.perf_counter()
        self._sent = self._data_parallel_bytes()
        """Bytes sent before the last line."""
        self._sent_until: int | None = None
        """The iteration of that line."""
        self._skipped = 0
        self._good = 0
        self._good_losses = 0.0
        """Sum over the good steps since the last line."""

    def on_step(self, run: Run, step: Step) -> None:
        self.record_step(self._course.state, step, last=run.is_last)

    def on_return(self, run: Run) -> None:
        self.rewind(run.iteration)

    def before_end(self, run: Run) -> None:
        self.check_last_step()

    def record_step(self, state: TrainState, step: Step, *, last: bool) -> None:
        """Record the step that leads to ``state`` and has been issued, and check the one before it.
        ``last``: it is the last one of the run. Raises TrainingError if the run must not go on."""
        if self._sent_until is None:
            self._sent_until = state.iteration - 1
        self.check_last_step()
        if self._bad_steps.rollback_needed:
            return
        outcome = self._bad_steps.outcome(state, step)
        self._pending = outcome
        self._steps += 1
        self._samples += outcome.samples
        self._log.advance()
        if last or state.iteration % self._config.log.log_interval == 0:
            self._write(outcome, step.lr)

    def check_last_step(self) -> None:
        """Wait for the last step and check it, unless that was done. Raises TrainingError, the same
        on every rank, if the run must not go on."""
        outcome = self._pending
        self._pending = None
        if outcome is not None:
            with self._mesh.recorder.waiting("the device"):
                good = self._bad_steps.check(outcome)
            if good:
                self._good += 1
                self._good_losses += outcome.read().loss
            else:
                self._skipped += 1
            self._checked = outcome

    @property
    def last(self) -> Numbers | None:
        """The numbers of the last step that was checked; None before the first."""
        return self._checked.read() if self._checked is not None else None

    def rewind(self, iteration: int) -> None:
        """Forget all later steps: the run has returned to ``iteration``."""
        self._pending = None
        self._checked = None
        self.losses = {step: loss for step, loss in self.losses.items() if step <= iteration}
        self._sent = self._data_parallel_bytes()
        self._sent_until = iteration
        self._begin_interval()

    def _write(self, outcome: Outcome, lr: float) -> None:
        self.check_last_step()
        if self._bad_steps.rollback_needed:
            return
        mesh = self._mesh
        training = self._config.training
        numbers = outcome.read()
        self.losses[outcome.state.iteration] = numbers.loss
        with mesh.recorder.waiting("the device"):
            devices.synchronize(mesh.device)
        tokens = self._samples * training.seq_length
        interval = Interval(
            self._steps, tokens, time.perf_counter() - self._since, self._exposed_seconds()
        )
        mean = averages(
            interval, self._work, steps_left=training.train_iters - outcome.state.iteration
        )
        self._log.write(
            StepRecord(
                iteration=outcome.state.iteration,
                train_iters=training.train_iters,
                consumed_samples=outcome.state.consumed_samples,
                learning_rate=lr,
                global_batch_size=outcome.samples,
                lm_loss=_finite(numbers.loss),
                mean_lm_loss=self._good_losses / self._good if self._good else None,
                grad_norm=_finite(numbers.grad_norm),
                loss_scale=numbers.loss_scale,
                skipped_iterations=self._skipped,
                peak_memory_bytes=devices.peak_memory_bytes(mesh.device),
                elapsed_ms=mean.elapsed_ms,
                tokens_per_second=mean.tokens_per_second,
                tokens_per_second_per_gpu=mean.tokens_per_second_per_gpu,
                tflops_per_gpu=mean.tflops_per_gpu,
                mfu=mean.mfu,
                exposed_comm_ms=mean.exposed_comm_ms,
                eta_seconds=mean.eta_seconds,
                compute=self._spread(interval),
                numbers={name: _finite(value) for name, value in numbers.counted.items()},
                names=self._names,
                data_parallel_bytes=self._take_data_parallel_bytes(outcome.state.iteration),
            )
        )
        self._begin_interval()

    def _begin_interval(self) -> None:
        """Reset the counts and sums for the next line. An evaluation or a save does not reset
        them."""
        self._skipped = 0
        self._good = 0
        self._good_losses = 0.0
        self.restart_clock()

    def _exposed_seconds(self) -> float | None:
        """Return the seconds since the last line in which this rank waited for communication; None
        where they are not measured. The device is idle."""
        recorder = self._mesh.recorder
        if devices.is_host(self._mesh.device):
            return recorder.take_exposed_seconds()
        return (
            sum(before.elapsed_time(after) for before, after in recorder.marks) / 1e3
            if recorder.mark is not None
            else None
        )

    def _spread(self, interval: Interval) -> Spread | None:
        """Return the compute times of the ranks in a step, with --log-straggler. They are gathered
        only at log lines, by a collective."""
        if not self._config.log.log_straggler:
            return None
        seconds = (interval.seconds - (interval.exposed_seconds or 0.0)) / interval.steps
        return spread(all_gather_float(seconds * 1e3, self._mesh.world))

    def restart_clock(self) -> None:
        """Restart the averages. Called after an evaluation or a save, which they leave out."""
        self._mesh.recorder.take_exposed_seconds()
        self._mesh.recorder.marks.clear()
        self._steps = 0
        self._samples = 0
        self._since = time.perf_counter()

    def _take_data_parallel_bytes(self, iteration: int) -> float:
        """Return the bytes that a step has sent since the last line. A message may go out a moment
        after its step, so one line may have more and the next one less; none is lost."""
        sent = self._data_parallel_bytes()
        bytes_a_step = (sent - self._sent) / (iteration - (self._sent_until or 0))
        self._sent = sent
        self._sent_until = iteration
        return bytes_a_step

    def _data_parallel_bytes(self) -> int:
        """Return the bytes that this rank has issued over the data-parallel axes so far, without
        evaluations."""
        # Other threads add kinds of messages while the loop reads.
        recorder = self._mesh.recorder
        return sum(
            sent.bytes - recorder.evaluation_bytes[kind]
            for kind, sent in recorder.traffic.copy().items()
            if kind[0].startswith(("dp", "expert_dp")) and kind[1] != "receive"
        )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
