"""The view of users' code on a training run, and its requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakMethod

from torch import Tensor

from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Batch
from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import StepResult
from megatron_llama.errors import CheckpointError, UserError
from megatron_llama.train.run.course import Course
from megatron_llama.train.run.prefetch import Interrupts


@dataclass(frozen=True)
class Step:
    """One step of a run, which has been issued but may still be running on a device.

    The tensors are 0-dim, on the device of the rank. Nothing waits for them: ``float(step.loss)``
    does, until the step is over. On CPUs it is over already."""

    iteration: int
    """Optimizer steps taken, this one included."""
    consumed_samples: int
    """Samples consumed, those of this step included."""
    lr: float
    """The learning rate of the step."""
    loss: Tensor
    """Mean loss over the target tokens of the global batch, fp64. All ranks have the same."""
    grad_norm: Tensor
    """L2 norm of the whole gradient before clipping. All ranks have the same."""
    skipped: Tensor
    """1 if the weights stayed as they were, because the step was not finite or was a bad one; else
    0."""
    loss_scale: Tensor
    """The factor of the loss in this step; 1 without ``fp16``."""
    numbers: Mapping[str, Tensor]
    """Numbers of the run's objective beside its loss, by name, fp64: for ``align`` the rewards,
    margins and accuracies of the global batch. All ranks have the same. Empty for others.
    """
    batches: Sequence[Batch]
    """The microbatches of this rank: tensors ``tokens`` and ``labels`` [seq_length, samples], and
    ``loss_mask``, ``position_ids`` and ``document_ids``, which are None where nothing needs
    them. Ranks that share samples (tensor, context and pipeline parallel) read the same ones."""

    @classmethod
    def of(
        cls,
        state: TrainState,
        lr: float,
        loss: Tensor,
        update: StepResult,
        numbers: Mapping[str, Tensor],
        batches: Sequence[Batch],
    ) -> Step:
        """Return the step that leads to ``state``."""
        return cls(
            state.iteration,
            state.consumed_samples,
            lr,
            loss,
            update.grad_norm,
            update.skipped,
            update.loss_scale,
            numbers,
            batches,
        )


class Run:
    """A training run, as a callback sees it on its rank. ``config`` is the configuration with
    everything decided, ``rank`` this rank of ``world_size``."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        course: Course,
        interrupts: Interrupts,
        write_checkpoint: Callable[[Path, float | None], Path],
    ) -> None:
        self.config = config
        self.rank = mesh.rank
        self.world_size = mesh.world.size
        self._course = course
        self._interrupts = interrupts
        # A weak reference: a callback that keeps its run does not keep the engine.
        self._write = WeakMethod(write_checkpoint)

    @property
    def iteration(self) -> int:
        """Optimizer steps taken."""
        return self._course.state.iteration

    @property
    def consumed_samples(self) -> int:
        """Samples consumed."""
        return self._course.state.consumed_samples

    @property
    def is_last(self) -> bool:
        """Whether no step follows, because the run has its planned length."""
        return self._course.is_last

    @property
    def ends(self) -> bool:
        """Whether the run ends after this step, for any reason. Known from ``due`` on."""
        return self._course.ends

    @property
    def is_asked_to_save(self) -> bool:
        """Whether some rank was asked for a checkpoint after this step, by ``save`` or from
        outside. Known from ``due`` on."""
        return self._course.save_asked

    @property
    def validation_loss(self) -> float | None:
        """The validation loss of this very iteration; None where it was not measured."""
        evaluation = self._course.evaluations.get(self.iteration)
        return evaluation.loss if evaluation is not None else None

    @property
    def validation_numbers(self) -> Mapping[str, float]:
        """Numbers of the objective beside its loss (``Step.numbers``), over the last evaluation of
        the run. Empty before the first."""
        return self._course.validation_numbers

    def stop(self) -> None:
        """Ask all ranks to stop, from any rank. The ranks agree on it while the next step runs, so
        that nothing waits: the run saves and ends after that step."""
        self._interrupts.ask_to_stop()

    def save(self) -> None:
        """Ask all ranks for a checkpoint, from any rank. It is saved after the next step. Without
        ``save`` in the options nothing is written."""
        self._interrupts.ask_to_save()

    def write_checkpoint(self, folder: str | Path) -> Path:
        """Write the checkpoint ``folder/iter_NNNNNNN``, from which ``load`` resumes, and return its
        path. Collective: all ranks call it, in ``on_start``, ``on_end``, or where ``due`` has said
        so: then it is known that the last step was a good one. ``folder`` is another one than
        ``save``, whose checkpoints the run itself counts and removes.

        Raises CheckpointError on every rank, and leaves earlier checkpoints as they were."""
        write = self._write()
        if write is None:
            expected = "a run that goes on"
            do = "write in a method of a callback"
            raise CheckpointError(folder, got="a run that is over", expected=expected, do=do)
        return write(Path(folder), self.validation_loss)


class Callback:
    """Base class of objects that a run calls at certain moments, on every rank. Override what you
    need.

    An exception ends the run on all ranks: this one raises it, the others raise a ClusterError that
    names this rank. A callback that communicates must do so on all ranks alike.

    ```python
    import megatron_llama as ml


    class Target(ml.Callback):
        # Ends the run when a loss is reached, and keeps the losses that it has looked at.
        def __init__(self, loss: float) -> None:
            self.loss = loss
            self.seen: list[float] = []

        def on_step(self, run: ml.Run, step: ml.Step) -> None:
            if step.iteration % 10 == 0:
                self.seen.append(float(step.loss))  # waits for this step
                if self.seen[-1] < self.loss:
                    run.stop()


    target = Target(5.5)
    result = ml.train(
        {"data_path": "data/docs", "load": "runs/small", "finetune": True},
        [target],
        seq_length=64,
        global_batch_size=8,
        train_iters=200,
        lr=3e-3,
    )
    print(result.iteration, target.seen)
    ```"""

    def on_start(self, run: Run) -> None:
        """The weights are loaded, and the first step comes next."""

    def before_step(self, run: Run) -> None:
        """The next step begins."""

    def on_step(self, run: Run, step: Step) -> None:
        """A step has been issued. Called after each one. With ``on_bad_step="rollback"`` an
        iteration may come again."""

    def due(self, run: Run) -> bool:
        """Return whether ``on_due`` is to be called after this step; all ranks return the same. It
        may be asked more than once."""
        return False

    def on_due(self, run: Run) -> None:
        """The step for which ``due`` has said so is over and was a good one, and the weights are
        what it left. The time that this takes is left out of the log's averages."""

    def after_step(self, run: Run) -> None:
        """Evaluation, checkpoint and whatever else was due after this step are done; ``on_save``
        comes next. Not called for a step that the run takes back."""

    def on_return(self, run: Run) -> None:
        """The run has gone back to the checkpoint of ``run.iteration``, or to its start."""

    def on_evaluation(self, run: Run, loss: float) -> None:
        """The validation loss has been measured; ``run.validation_numbers`` has the objective's
        other numbers."""

    def on_save(self, run: Run, path: Path) -> None:
        """The checkpoint ``path`` has been written; the path is the same on all ranks. With
        ``async_save`` that is known some steps later; on rank 0 all of it is there then, on another
        rank the part of this rank."""

    def save_state(self) -> Mapping[str, Any]:
        """Return what this callback needs to go on where it was, in values that JSON has. A
        checkpoint of the run keeps it: that of rank 0, under the name of the class."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up a ``state`` of ``save_state``: that of the checkpoint from which the run resumes,
        before ``on_start``, or to which it goes back, before ``on_return``. Not called where there
        is none."""

    def before_end(self, run: Run) -> None:
        """The last step is over: finish what must be complete when the run ends."""

    def on_end(self, run: Run) -> None:
        """The last step is over, and everything is saved and exported. Not called if the run ends
        by an error."""


class Part(Callback):
    """A part of every run: a callback whose ``on_due`` may come before the step was checked."""

    needs_checked_step = True
    """Whether ``on_due`` waits until the host knows that the step was a good one. Otherwise the
    host learns that one step later."""

    def after_start(self, run: Run) -> None:
        """All parts, the callbacks of users included, have seen the run start."""


class Callbacks(Part):
    """The callbacks of users on one rank, in their order, as one part of a run."""

    # Each hook has its own loop: a nested function would keep its variables, and so the whole
    # engine, for as long as a program keeps an error of a callback.

    def __init__(self, callbacks: Sequence[Callback], course: Course, recorder: Recorder) -> None:
        """``recorder`` has the notes of this rank's position."""
        # Callbacks of one class get different names.
        names = [type(callback).__qualname__ for callback in callbacks]
        self._callbacks = {
            f"{name} {names[:number].count(name) + 1}": callback
            for number, (name, callback) in enumerate(zip(names, callbacks, strict=True))
        }
        self._course = course
        self._recorder = recorder

    def on_start(self, run: Run) -> None:
        self.load_state(self._course.state.callbacks)
        for callback in self._callbacks.values():
            with self._section():
                callback.on_start(run)

    def before_step(self, run: Run) -> None:
        for callback in self._callbacks.values():
            with self._section():
                callback.before_step(run)

    def on_step(self, run: Run, step: Step) -> None:
        for callback in self._callbacks.values():
            with self._section():
                callback.on_step(run, step)

    def due(self, run: Run) -> bool:
        due = False
        for callback in self._callbacks.values():
            with self._section():
                due = callback.due(run) or due
        return due

    def on_due(self, run: Run) -> None:
        for callback in self._callbacks.values():
            with self._section():
                if callback.due(run):
                    callback.on_due(run)

    def after_step(self, run: Run) -> None:
        for callback in self._callbacks.values():
            with self._section():
                callback.after_step(run)

    def on_return(self, run: Run) -> None:
        self.load_state(self._course.state.callbacks)
        for callback in self._callbacks.values():
            with self._section():
                callback.on_return(run)

    def on_evaluation(self, run: Run, loss: float) -> None:
        for callback in self._callbacks.values():
            with self._section():
                callback.on_evaluation(run, loss)

    def on_save(self, run: Run, path: Path) -> None:
        for callback in self._callbacks.values():
            with self._section():
                callback.on_save(run, path)

    def save_state(self) -> Mapping[str, Any]:
        states = dict[str, Any]()
        for name, callback in self._callbacks.items():
            with self._section():
                state = callback.save_state()
                if state:
                    # Values that JSON does not have are an error here, at the author's line, and
                    # not in the middle of a save.
                    states[name] = json.loads(json.dumps(state, allow_nan=False))
        return states

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, callback in self._callbacks.items():
            if name in state:
                with self._section():
                    callback.load_state(state[name])

    def before_end(self, run: Run) -> None:
        for callback in self._callbacks.values():
            with self._section():
                callback.before_end(run)

    def on_end(self, run: Run) -> None:
        for callback in self._callbacks.values():
            with self._section():
                callback.on_end(run)

    @contextmanager
    def _section(self) -> Iterator[None]:
        """Run a user's code, which may take any time. Its errors are those of this rank alone,
        whatever their class: the other ranks are somewhere else, and must be told."""
        try:
            with self._recorder.outside_steps("a callback"):
                yield
        except UserError as error:
            error.everywhere = False
            raise
