"""The update rules that a run may choose, their inputs, and their modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.offload_options import EXACT, NONE, ZENFLOW
from megatron_llama.engine.options import ADAM, MUON, SCHEDULE_FREE, TORCH, EngineOptions
from megatron_llama.engine.plan.buckets import BucketPlan
from megatron_llama.engine.rules.update_rule import UpdateRules
from megatron_llama.registry import Registry

if TYPE_CHECKING:
    from megatron_llama.engine.offload.copies import Copies
    from megatron_llama.engine.offload.worker import WorkerFactory


@dataclass(frozen=True)
class RuleInputs:
    """The inputs of the update rules of one rank. ``build_engine`` explains the rest."""

    options: EngineOptions
    bucket_plan: BucketPlan
    mesh: Mesh
    dtype: torch.dtype
    """The dtype of the parameters."""
    tp_bucket_plans: Sequence[BucketPlan]
    steps_per_epoch: int
    copies: Copies | None
    worker_factory: WorkerFactory | None
    blocking: bool

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of masters and gradients."""
        return torch.promote_types(self.dtype, torch.float32)


RULES: Registry[Callable[[RuleInputs], UpdateRules]] = Registry(
    {
        ADAM: "engine.rules.divisible:adamw_rules",
        MUON: "engine.rules.muon:muon_rules",
        SCHEDULE_FREE: "engine.rules.schedule_free:schedule_free_rules",
        TORCH: "engine.rules.torch_rule:torch_rules",
        EXACT: "engine.offload.build:offloaded_rules",
        ZENFLOW: "engine.offload.build:offloaded_rules",
    }
)
"""Builders of the update rules of one rank, by the rule or else by the mode of AdamW's offload.
Collective. They raise ConfigError or OffloadError, on every rank, if processors or memory for
offload are missing."""


def build_update_rules(inputs: RuleInputs) -> UpdateRules:
    """Build the update rules of one rank, from the entry of ``RULES`` that the options choose."""
    options = inputs.options
    offload = options.offload.optimizer_offload
    # A run has one rule, and all others together are four times as long as the engine's step. The
    # engine is built once, before the first step, so the import stalls none.
    return RULES[offload if options.rule == ADAM and offload != NONE else options.rule](inputs)
