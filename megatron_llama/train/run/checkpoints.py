"""The saves of a run, and its returns to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.saver import Saver
from megatron_llama.checkpoint.storage_paths import storage_path
from megatron_llama.data.loader import Samples
from megatron_llama.data.stream_places import furthest, places, text_streams
from megatron_llama.engine.comm.object_collectives import all_gather_object
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.errors import CheckpointError
from megatron_llama.metrics.log import MetricLog
from megatron_llama.train.run.bad_steps import BadSteps
from megatron_llama.train.run.callbacks import Callback, Part, Run
from megatron_llama.train.run.course import Course
from megatron_llama.train.run.prefetch import Interrupts
from megatron_llama.train.setup.inputs import Ready
from megatron_llama.train.setup.weight_check import WeightCheck


class Checkpoints(Part):
    """Saves at the iterations of --save, on request, and at the end of the run.

    A checkpoint has the state from which a run goes on: weights and optimizer, the history of bad
    steps, the places of streams, and the state of users' callbacks."""

    def __init__(
        self,
        inputs: Ready,
        mesh: Mesh,
        optimizer: OverlappedDistributedOptimizer,
        saver: Saver,
        log: MetricLog,
        bad_steps: BadSteps,
        course: Course,
        interrupts: Interrupts,
        *,
        begin: Callable[[], TrainState],
        weight_check: WeightCheck,
        callbacks: Callback,
    ) -> None:
        """``begin`` loads the first weights of the run, and ``weight_check`` compares their files
        with their sums. ``callbacks`` hear of each checkpoint."""
        self._inputs = inputs
        self._config = inputs.config
        self._mesh = mesh
        self._optimizer = optimizer
        self._saver = saver
        self._log = log
        self._bad_steps = bad_steps
        self._course = course
        self._interrupts = interrupts
        self._begin = begin
        self._weight_check = weight_check
        self.are_weights_compared = False
        """At the end of the run: whether its first weights are known to be sound."""
        self._callbacks = callbacks

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint of this run."""
        return self._saver.newest

    def due(self, run: Run) -> bool:
        course = self._course
        return (
            self._saver.due(course.state, last=course.is_last)
            or course.save_asked
            or course.stopping
            # Set by the evaluation, which comes before this part.
            or course.early_stop_reason is not None
        )

    def on_due(self, run: Run) -> None:
        self._wait_for_weights()
        with self._mesh.recorder.outside_steps("saving"):
            self._saver.save(self._state(), self._log, run.validation_loss, last=run.ends)
        self._weight_check.remember_save(self._saver.newest)
        if self._saver.refusal is None:
            self._interrupts.saved()

    def after_step(self, run: Run) -> None:
        if self._saver.failed(self._log):
            self._interrupts.stop()
        self._tell(run)
        # A run that is asked to stop leaves the return to its next start.
        goes_on = self._course.is_complete or not self._course.stopping
        if self._saver.refusal is not None and goes_on:
            self._course.must_return = True
        elif self._saver.found_refusal:
            self._interrupts.ask_to_return()

    def before_end(self, run: Run) -> None:
        self._optimizer.settle()
        with self._mesh.recorder.outside_steps("saving"):
            self._saver.finish(self._log)
        self._tell(run)
        stopped = self._course.stopping and self._course.early_stop_reason is None
        self.are_weights_compared = self._weight_check.wait_at_end(
            self._log, self._is_asked_to_stop, stopped=stopped
        )

    def go_back(self) -> TrainState:
        """Return to the newest good checkpoint, or to the start, and return its state. Collective.
        Raises CheckpointError and TrainingError, the same on every rank."""
        with self._mesh.recorder.outside_steps("returning to a checkpoint"):
            self._saver.finish(self._log)
            if self._saver.refusal is not None:
                self._bad_steps.count_refusal(self._saver.refusal, self._saver.newest_good)
            self._saver.rewind()
            self._optimizer.reset()
            checkpoint = self._saver.return_point
            state = (
                native.load(checkpoint, self._optimizer, self._mesh, self._config.model)
                if checkpoint is not None
                else self._begin()
            )
            self._log.rewind(state.iteration)
            self._log.say(f" back to iteration {state.iteration}")
            return state

    def write(self, folder: Path, validation_loss: float | None) -> Path:
        """Write a checkpoint of the current state into another folder than --save, and return its
        path. Collective. Raises CheckpointError on every rank."""
        save = self._config.checkpoint.save
        if save is not None and storage_path(folder) == storage_path(save):
            raise CheckpointError(
                folder,
                got="the folder of --save",
                expected="another one: a run counts and removes the checkpoints in its own",
                do="give another folder, or ask for a checkpoint with run.save()",
            )
        self._wait_for_weights()
        state = replace(
            self._state(), data=self._inputs.identity, hf_config=self._inputs.carried.hf_config
        )
        with self._mesh.recorder.outside_steps("saving"):
            written = native.save(
                folder,
                self._optimizer,
                self._mesh,
                state,
                self._config,
                validation_loss=validation_loss,
            )
        self._weight_check.remember_save(written)
        return written

    def _state(self) -> TrainState:
        """Return the current state for a checkpoint. Collective for samples of a text."""
        state = self._bad_steps.with_history(self._course.state)
        state = _with_places(state, self._inputs.training, self._mesh.world)
        return replace(state, callbacks=self._callbacks.save_state())

    def _wait_for_weights(self) -> None:
        """Wait until the files of the first weights are compared, but no longer than a save may
        wait. Collective. Raises CheckpointError on every rank."""
        self._weight_check.wait_before_save(
            self._log, self._is_asked_to_stop, stopping=self._course.stopping
        )

    def _is_asked_to_stop(self) -> bool:
        return self._interrupts.stopped_by is not None

    def _tell(self, run: Run) -> None:
        for path in self._saver.take_written():
            self._callbacks.on_save(run, path)


def _with_places(state: TrainState, samples: Samples, world: Axis) -> TrainState:
    """Return the state with the places of the run's streams, which each rank knows for its own
    lanes. Collective for samples of a text."""
    if not text_streams(samples):
        return state
    gathered = all_gather_object(places(samples, state.consumed_samples), world)
    return replace(state, places=furthest(gathered))
