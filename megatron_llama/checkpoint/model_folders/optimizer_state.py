"""The optimizer's state of a checkpoint of any format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_llama.config.schema import Config
from megatron_llama.engine.optimizer import WeightSource

STATES = ("master", "exp_avg", "exp_avg_sq")
"""Tensors that an optimizer holds for each parameter, by their names in the engine."""


@dataclass(frozen=True)
class OptimizerState:
    """The state with which a run goes on beside its weights."""

    sources: Mapping[str, WeightSource]
    """Values of each of STATES by rectangles of HuggingFace tensors, fp32."""
    step: int
    """Updates so far: iterations that were not skipped."""
    iteration: int
    consumed_samples: int
    lr: float | None
    """Learning rate of the next step; None if the checkpoint has none."""
    config: Config
    """Options of the run, as far as the checkpoint has them. The model's are not filled in."""
