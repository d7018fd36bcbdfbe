"""The result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

from megatron_llama.config.schema import Config
from megatron_llama.train.setup.inputs import Ready


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. All ranks have the same."""

    config: Config = field(repr=False)
    """The configuration with everything decided."""
    iteration: int
    """Optimizer steps taken, those before a resume included."""
    consumed_samples: int
    """Samples consumed."""
    loss: float | None
    """Loss of the last step; None if no step was left to take."""
    grad_norm: float | None
    """L2 norm of the last step's gradient before clipping; None as with ``loss``."""
    losses: Mapping[int, float]
    """Training loss by iteration, of the steps of this run that were logged (every
    ``log_interval``-th and the last)."""
    numbers: Mapping[str, float]
    """Numbers of the objective beside its loss in the last step, by name: for ``align`` rewards,
    margins and accuracies, NaN where there was nothing to count. Empty for other runs."""
    validation_losses: Mapping[int, float]
    """Validation loss by iteration, of the evaluations of this run."""
    validation_numbers: Mapping[int, Mapping[str, float]]
    """The same ``numbers`` over each of these evaluations, by iteration."""
    checkpoint: Path | None
    """The newest checkpoint that this run has saved; None without ``save``."""
    export: Path | None
    """The HuggingFace folder of ``export_hf``; None if the run has written none."""
    stopped_by: Signals | None
    """The signal that asked the run to stop, if one did. Everything is saved all the same."""


def untrained(inputs: Ready) -> TrainResult:
    """Return the result of a run that has taken no step."""
    state = inputs.state
    return TrainResult(
        inputs.config,
        state.iteration,
        state.consumed_samples,
        loss=None,
        grad_norm=None,
        losses={},
        numbers={},
        validation_losses={},
        validation_numbers={},
        checkpoint=None,
        export=None,
        stopped_by=None,
    )
