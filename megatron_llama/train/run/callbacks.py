"""What users' code sees of a training run, and what it may ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Batch
from megatron_llama.distributed.recorder import Recorder
from megatron_llama.engine.optimizer import StepResult
from megatron_llama.errors import UserError
from megatron_llama.train.run.prefetch import Interrupts


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation has found. All ranks have the same."""

    loss: float
    count: int
    """What the loss is the mean over: target tokens, or pairs."""
    numbers: Mapping[str, float]
    """What the objective counts beside the loss, by name."""


@dataclass(frozen=True)
class Step:
    """One step of a run, which has been issued but may still be running on a device.

    The tensors are 0-dim, on the device of the rank. Nothing waits for them: ``float(step.loss)``
    does, until the step is over. On CPUs it is over already."""

    iteration: int
    """Optimizer steps taken, this one included."""
    consumed_samples: int
    """Samples behind the run, those of this step included."""
    lr: float
    """The learning rate of the step."""
    loss: Tensor
    """Mean loss over the target tokens of the global batch, fp64. All ranks have the same."""
    grad_norm: Tensor
    """L2 norm of the whole gradient before clipping. All ranks have the same."""
    skipped: Tensor
    """1 if the weights stayed as they were, because the step was not finite or was a bad one; else
    0."""
    numbers: Mapping[str, Tensor]
    """What the objective of the run counts beside its loss, by name, fp64: for ``align`` the
    rewards, margins and accuracies of the global batch. All ranks have the same. Empty for others.
    """
    batches: Sequence[Batch]
    """The microbatches of this rank: tensors ``tokens`` and ``labels`` [seq_length, samples], and
    ``loss_mask``, ``position_ids`` and ``document_ids``, which are None where nothing needs
    them. Ranks that share samples (tensor, context and pipeline parallel) read the same ones."""


class Run:
    """A training run, as a callback sees it on its rank. ``config`` is the configuration with
    everything decided, ``rank`` this rank of ``world_size``."""

    def __init__(
        self, config: Config, interrupts: Interrupts, state: TrainState, rank: int, world_size: int
    ) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self._interrupts = interrupts
        self._state = state
        self._validation_numbers: Mapping[str, float] = {}

    @property
    def iteration(self) -> int:
        """Optimizer steps taken."""
        return self._state.iteration

    @property
    def consumed_samples(self) -> int:
        """Samples behind the run."""
        return self._state.consumed_samples

    @property
    def validation_numbers(self) -> Mapping[str, float]:
        """What the objective counts beside its loss (``Step.numbers``), over the last evaluation of
        the run. Empty before the first."""
        return self._validation_numbers

    def stop(self) -> None:
        """Ask all ranks to stop, from any rank. The ranks agree on it while the next step runs, so
        that nothing waits: the run saves and ends after that step."""
        self._interrupts.ask_to_stop()

    def save(self) -> None:
        """Ask all ranks for a checkpoint, from any rank. It is saved after the next step. Without
        ``save`` in the options nothing is written."""
        self._interrupts.ask_to_save()


class Callback:
    """Base class of what a run calls at certain moments, on every rank. Override what you need.

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

    def on_step(self, run: Run, step: Step) -> None:
        """A step has been issued. Called after each one. With ``on_bad_step="rollback"`` an
        iteration may come again."""

    def on_evaluation(self, run: Run, loss: float) -> None:
        """The validation loss has been measured; ``run.validation_numbers`` are what the objective
        counts beside it."""

    def on_save(self, run: Run, path: Path) -> None:
        """The checkpoint ``path`` has been written; the path is the same on all ranks. With
        ``async_save`` that is known some steps later; on rank 0 all of it is there then, on another
        rank the part of this rank."""

    def on_end(self, run: Run) -> None:
        """The last step is over, and everything is saved and exported. Not called if the run ends
        by an error."""


class Callbacks:
    """The callbacks of one rank, in their order. Without any, nothing is done."""

    def __init__(self, callbacks: Sequence[Callback], run: Run, recorder: Recorder) -> None:
        """``recorder`` has the notes of where this rank is."""
        self._callbacks = tuple(callbacks)
        self._run = run
        self._recorder = recorder

    def start(self) -> None:
        """Call ``on_start``."""
        for callback in self._callbacks:
            with self._one_call():
                callback.on_start(self._run)

    def step(
        self,
        state: TrainState,
        lr: float,
        loss: Tensor,
        update: StepResult,
        numbers: Mapping[str, Tensor],
        batches: Sequence[Batch],
    ) -> None:
        """Call ``on_step`` with what the step that leads to ``state`` has found."""
        self._run._state = state
        if not self._callbacks:
            return
        step = Step(
            state.iteration,
            state.consumed_samples,
            lr,
            loss,
            update.grad_norm,
            update.skipped,
            numbers,
            batches,
        )
        for callback in self._callbacks:
            with self._one_call():
                callback.on_step(self._run, step)

    def rewind(self, state: TrainState) -> None:
        """The run has returned to ``state``."""
        self._run._state = state

    def evaluation(self, found: Evaluation | None) -> None:
        """Call ``on_evaluation``, unless nothing was evaluated."""
        if found is None:
            return
        self._run._validation_numbers = found.numbers
        for callback in self._callbacks:
            with self._one_call():
                callback.on_evaluation(self._run, found.loss)

    def saves(self, paths: Sequence[Path]) -> None:
        """Call ``on_save`` for each of these checkpoints."""
        for path in paths:
            for callback in self._callbacks:
                with self._one_call():
                    callback.on_save(self._run, path)

    def end(self) -> None:
        """Call ``on_end``."""
        for callback in self._callbacks:
            with self._one_call():
                callback.on_end(self._run)

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """A section that may take as long as its author likes, and whose errors are those of this
        rank alone, whatever their class says: the other ranks are somewhere else, and must be
        told."""
        try:
            with self._recorder.outside_steps("a callback"):
                yield
        except UserError as error:
            error.everywhere = False
            raise
