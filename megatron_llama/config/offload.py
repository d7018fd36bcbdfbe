"""The options of an optimizer in the memory of the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OffloadConfig:
    """Optimizer state in the host's memory, updated by its processor while the device
    computes."""

    optimizer_offload: Literal["none", "exact", "zenflow"] = "none"
    """Keep fp32 weights and moments in the host's memory and update them there. exact: to the bit
    what waiting for every update would give, at less waiting. zenflow: an approximation that hides
    more."""
    optimizer_offload_fraction: float = 1.0
    """Share of the optimizer that is offloaded, in whole buckets. What the next forward pass needs
    first stays on the device, and below 1 an embedding that is tied over a pipeline."""
    offload_cores: str = "auto"
    """Processors of a machine that update, such as `0-15,32-47`, in equal parts for its ranks.
    auto: all, one of each physical core."""
    offload_speculative: bool = False
    """With clipping, update during backward as if the norm were below --clip-grad; where it is not,
    do it again. Changes no bit."""
    speculation_bytes: int = 4_294_967_296
    """Most memory of a rank for what --offload-speculative may have to take back. Buckets beyond it
    wait for the norm."""


@dataclass(frozen=True)
class ZenFlowConfig:
    """With --optimizer-offload zenflow: which columns of the weights are updated at every step, and
    how often the others.

    In YAML the names under `zenflow:` may be DeepSpeed's (`topk_ratio`)."""

    zenflow_topk_ratio: float = 0.1
    """Share of each matrix's columns (input channels) that is updated at every step, on the device:
    those with the largest gradients."""
    zenflow_select_strategy: Literal["auto", "step", "epoch"] = "auto"
    """What --zenflow-select-interval counts. auto: columns are chosen once an epoch."""
    zenflow_select_interval: str = "auto"
    """Columns are chosen anew after so many steps or epochs, when no update is pending."""
    zenflow_update_interval: str = "auto"
    """Steps whose gradients of all other columns become one update, on the host. auto: until they
    amount to one step of the chosen ones."""
    zenflow_update_interval_cap: int = 16
    """With auto, most steps of one update."""
    zenflow_full_warm_up_rounds: int = 0
    """Steps at the start that update everything. The first step always does: by its gradient
    columns are chosen."""
    zenflow_overlap_step: bool = False
    """Compute these updates in the background, during the steps that follow: each is in the weights
    when the next one begins."""
    zenflow_config: str | None = None
    """A JSON file of DeepSpeed's with `zero_optimization.zenflow`, or that block alone. Options
    given with it win."""
