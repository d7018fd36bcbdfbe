"""The integers that follow from ZenFlow's options."""

from __future__ import annotations

import math

from megatron_llama.engine.offload_options import ZenFlowConfig

AUTO = "auto"


def steps_of(text: str) -> int:
    """Read a whole number above 0. Returns 0 for any other text."""
    return int(text) if text.isascii() and text.isdecimal() else 0


def longest_window(options: ZenFlowConfig) -> int:
    """Return the steps of an update window; with interval auto the most that it may have."""
    return steps_of(options.zenflow_update_interval) or options.zenflow_update_interval_cap


def sends_fp32(options: ZenFlowConfig) -> bool:
    """Whether gradients are copied to the host in fp32 and not in the compute dtype: if the result
    has to be AdamW's to the bit."""
    alone = options.zenflow_update_interval == "1" and not options.zenflow_overlap_step
    return alone or options.zenflow_topk_ratio == 1


def hot_column_count(ratio: float, total: int) -> int:
    """Return how many of a matrix's columns are hot: the share ``ratio``, rounded up. The product
    is rounded to six digits first: as a float 0.1 is not exactly a tenth, and a product just above
    a whole number must not gain a column."""
    return min(total, max(1, math.ceil(round(ratio * total, 6))))


def selection_steps(options: ZenFlowConfig, steps_per_epoch: int) -> int:
    """Return the steps from one selection of columns to the next; 0: never again.
    ``steps_per_epoch`` is 0 if an epoch has no meaning; then columns that an epoch would change
    stay as they are."""
    if options.zenflow_select_strategy == "step":
        return steps_of(options.zenflow_select_interval)
    return steps_per_epoch * (
        steps_of(options.zenflow_select_interval)
        if options.zenflow_select_strategy == "epoch"
        else 1
    )
