"""Evaluations of a run on its validation samples."""

from __future__ import annotations

import math

import torch

from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Samples
from megatron_llama.distributed.comm.object_collectives import broadcast_object
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.errors import TrainingError
from megatron_llama.loop.build import ValidationBatches
from megatron_llama.metrics.log import LANGUAGE_MODEL, LossNames, MetricLog, ValidationRecord
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.train.run.callbacks import Evaluation


class Validation:
    """Evaluates the mean loss over the validation samples, the same ones every time."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        runtime: PipelineRuntime,
        samples: Samples | None,
        names: LossNames = LANGUAGE_MODEL,
    ) -> None:
        """``samples``: None in a run that never evaluates. ``names`` are those of the loss in the
        log."""
        self._names = names
        self._training = config.training
        self._runtime = runtime
        self._world = mesh.world
        if samples is not None:
            self._batches = ValidationBatches(
                config.training, samples, data_rank=mesh.data_rank, data_size=mesh.data_size
            )

    def due(self, state: TrainState, *, last: bool) -> bool:
        """Whether the run evaluates after this step, which may be its last one."""
        interval = self._training.eval_interval
        return interval > 0 and (state.iteration % interval == 0 or last)

    def early_stop_reason(self, log: MetricLog) -> str | None:
        """Why the run should end, if the last --early-stop-patience evaluations have brought no
        lower loss; else None. Collective."""
        patience = self._training.early_stop_patience
        if patience == 0:
            return None
        losses = broadcast_object(sorted(log.evaluated.items()), self._world)
        best, least = min(losses, key=lambda entry: (entry[1], entry[0]))
        since = sum(iteration > best for iteration, _ in losses)
        if since < patience:
            return None
        return (
            f"{since} evaluations without a lower loss than {least:.6E} of iteration {best} "
            "(--early-stop-patience)"
        )

    def run(self, state: TrainState, log: MetricLog, *, last: bool) -> Evaluation | None:
        """Evaluate, log what is found and return it; None in a run that never evaluates. Where no
        evaluation is due, at the start of a resumed run, the loss is only printed. Collective.
        Raises TrainingError, on every rank, if the loss is not finite."""
        if self._training.eval_interval == 0:
            return None
        found = self._evaluate()
        if not math.isfinite(found.loss):
            where = f"validation loss at iteration {state.iteration}"
            do = "look at the weights, or go back to an earlier checkpoint"
            raise TrainingError(where, got=found.loss, expected="a finite number", do=do)
        record = ValidationRecord(
            state.iteration,
            state.consumed_samples,
            found.loss,
            found.count,
            found.numbers,
            self._names,
        )
        log.write_validation(record, in_curve=self.due(state, last=last))
        return found

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
        # Nothing was there to count, for example no bad answer among those that are held out.
        numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}
        return Evaluation(total / max(counted, 1.0), int(counted), numbers)
