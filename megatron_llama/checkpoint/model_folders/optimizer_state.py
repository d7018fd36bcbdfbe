"""The optimizer's state of a checkpoint of any format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_llama.config.schema import Config
from megatron_llama.engine.optimizer import WeightSource

STATES = ("master", "exp_avg", "exp_avg_sq")
"""What an optimizer holds for each parameter, by the names that it has in the engine."""


@dataclass(frozen=True)
class OptimizerState:
    """Everything with which a run goes on beside its weights."""

    sources: Mapping[str, WeightSource]
    """The values of each of STATES by rectangles of HuggingFace tensors, fp32."""
    step: int
    """Updates so far: iterations that were not skipped."""
    iteration: int
    consumed_samples: int
    lr: float | None
    """The learning rate of the next step; None where the checkpoint does not say."""
    config: Config
    """The options of the run, as far as the checkpoint says them. The model's are not filled in."""
