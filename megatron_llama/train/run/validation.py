"""Evaluations of a run on its validation samples."""

from __future__ import annotations

import math

import torch

from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Samples
from megatron_llama.engine.comm.object_collectives import broadcast_object
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import TrainingError
from megatron_llama.metrics.log import LANGUAGE_MODEL, LossNames, MetricLog, ValidationRecord
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.train.run.callbacks import Callback, Part, Run
from megatron_llama.train.run.course import Course, Evaluation
from megatron_llama.train.setup.build import ValidationBatches


class Evaluator:
    """Evaluates the mean loss over the validation samples, the same ones every time."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        runtime: PipelineRuntime,
        samples: Samples,
        names: LossNames = LANGUAGE_MODEL,
    ) -> None:
        """``names``: those of the loss in the log."""
        self._names = names
        self._runtime = runtime
        self._batches = ValidationBatches(
            config.training, samples, data_rank=mesh.data_rank, data_size=mesh.data_size
        )

    def measure(self, state: TrainState, log: MetricLog, *, in_curve: bool) -> Evaluation:
        """Evaluate, log the result and return it. Outside of the curve the loss is only printed.
        Collective. Raises TrainingError, on every rank, if the loss is not finite."""
        evaluation = self._evaluate()
        if not math.isfinite(evaluation.loss):
            where = f"validation loss at iteration {state.iteration}"
            do = "look at the weights, or go back to an earlier checkpoint"
            raise TrainingError(where, got=evaluation.loss, expected="a finite number", do=do)
        record = ValidationRecord(
            state.iteration,
            state.consumed_samples,
            evaluation.loss,
            evaluation.count,
            evaluation.numbers,
            self._names,
        )
        log.write_validation(record, in_curve=in_curve)
        return evaluation

    def _evaluate(self) -> Evaluation:
        total = 0.0
        counted = 0.0
        sums = torch.zeros_like(self._runtime.sums)
        for batches in self._batches:
            loss, count = self._runtime.evaluate(batches)
            total += float(loss) * float(count)
            counted += float(count)
            sums += self._runtime.sums
        means = self._runtime.objective.means(sums)
        numbers = {name: float(value) for name, value in means.items()}
        # A number is not finite if there was nothing to count, as without bad answers in the split.
        numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}
        return Evaluation(total / max(counted, 1.0), int(counted), numbers)


class Validation(Part):
    """Evaluates before the first step and every --eval-interval steps, and ends the run when the
    loss falls no more (--early-stop-patience)."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        evaluator: Evaluator | None,
        log: MetricLog,
        course: Course,
        callbacks: Callback,
    ) -> None:
        """``evaluator``: None in a run that never evaluates. ``callbacks`` hear of each
        evaluation."""
        self._training = config.training
        self._world = mesh.world
        self._evaluator = evaluator
        self._log = log
        self._course = course
        self._callbacks = callbacks

    def due(self, run: Run) -> bool:
        interval = self._training.eval_interval
        return interval > 0 and (run.iteration % interval == 0 or run.is_last)

    def after_start(self, run: Run) -> None:
        if self._evaluator is not None:
            # An evaluation that is not due, at the start of a resumed run, is in no curve.
            evaluation = self._evaluator.measure(
                self._course.state, self._log, in_curve=self.due(run)
            )
            self._tell(run, evaluation)

    def on_due(self, run: Run) -> None:
        assert self._evaluator is not None
        evaluation = self._evaluator.measure(self._course.state, self._log, in_curve=True)
        self._course.early_stop_reason = self._early_stop_reason()
        self._tell(run, evaluation)

    def _tell(self, run: Run, evaluation: Evaluation) -> None:
        self._course.keep_evaluation(evaluation)
        self._callbacks.on_evaluation(run, evaluation.loss)

    def _early_stop_reason(self) -> str | None:
        """Return why the run should end, if the last --early-stop-patience evaluations brought no
        lower loss; else None. Collective."""
        patience = self._training.early_stop_patience
        if patience == 0:
            return None
        losses = broadcast_object(sorted(self._log.evaluated.items()), self._world)
        best, least = min(losses, key=lambda entry: (entry[1], entry[0]))
        since = sum(iteration > best for iteration, _ in losses)
        if since < patience:
            return None
        return (
            f"{since} evaluations without a lower loss than {least:.6E} of iteration {best} "
            "(--early-stop-patience)"
        )
