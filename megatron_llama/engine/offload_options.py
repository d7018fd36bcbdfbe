"""The options of an optimizer in the memory of the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron_llama.option import (
    KEPT,
    NOT_NEGATIVE,
    Check,
    is_count,
    left_out,
    option,
    scaled,
    section,
)

NONE = "none"
EXACT = "exact"
ZENFLOW = "zenflow"
MODES = (NONE, EXACT, ZENFLOW)
"""The values of --optimizer-offload."""

DIGITS = 6
"""Most digits of a processor's number."""
_STEPS_OR_AUTO = Check(
    lambda value: value == "auto" or is_count(value), "a whole number from 1, or auto", "correct it"
)
_WITHIN_STEPS = scaled("within the steps that are run")


def core_list(text: str) -> tuple[int, ...]:
    """Read ``0-2,8`` as 0, 1, 2, 8. Returns nothing if the text is no such list, or has numbers
    with too many digits."""
    cores: list[int] = []
    for entry in text.split(","):
        low, dash, high = entry.strip().partition("-")
        first = _number(low)
        last = _number(high if dash else low)
        if first is None or last is None or first > last:
            return ()
        cores += range(first, last + 1)
    return tuple(sorted(set(cores)))


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS else None


@section()
@dataclass(frozen=True)
class OffloadConfig:
    """Optimizer state in the host's memory, updated by its processor while the device
    computes."""

    optimizer_offload: Literal["none", "exact", "zenflow"] = option("none", small=KEPT)
    """Keep fp32 weights and moments in the host's memory and update them there. exact: to the bit
    what waiting for every update would give, at less waiting. zenflow: an approximation that hides
    more."""
    optimizer_offload_fraction: float = option(
        1.0,
        check=Check(
            lambda value: 0 <= value <= 1,
            "a number from 0 to 1",
            "give the share of the optimizer that is to leave the device",
        ),
        small=KEPT,
    )
    """Share of the optimizer that is offloaded, in whole buckets. Buckets that the next forward
    pass needs first stay on the device, and below 1 an embedding that is tied over a pipeline."""
    offload_cores: str = option(
        "auto",
        check=Check(
            lambda value: value == "auto" or core_list(value) != (),
            "auto, or numbers and ranges such as 0-15,32-47",
            "mend it",
        ),
        changes="nothing",
        small=left_out("all processors of this machine update"),
    )
    """Processors of a machine that update, such as `0-15,32-47`, in equal parts for its ranks.
    auto: all, one of each physical core."""
    offload_speculative: bool = option(False, changes="nothing", small=KEPT)
    """With clipping, update during backward as if the norm were below --clip-grad; where it is not,
    do it again. Changes no bit."""
    speculation_bytes: int = option(
        4_294_967_296, changes="nothing", small=scaled("in the same proportion to a rank's weights")
    )
    """Most memory of a rank for what --offload-speculative may have to take back. Buckets beyond it
    wait for the norm."""


@section()
@dataclass(frozen=True)
class ZenFlowConfig:
    """With --optimizer-offload zenflow: which columns of the weights are updated at every step, and
    how often the others.

    In YAML the names under `zenflow:` may be DeepSpeed's (`topk_ratio`)."""

    zenflow_topk_ratio: float = option(
        0.1,
        check=Check(
            lambda value: 0 < value <= 1,
            "more than 0, at most 1",
            "give the share of columns that are updated at every step",
        ),
        small=KEPT,
    )
    """Share of each matrix's columns (input channels) that is updated at every step, on the device:
    those with the largest gradients."""
    zenflow_select_strategy: Literal["auto", "step", "epoch"] = option("auto", small=_WITHIN_STEPS)
    """Unit of --zenflow-select-interval. auto: columns are chosen once an epoch."""
    zenflow_select_interval: str = option("auto", check=_STEPS_OR_AUTO, small=_WITHIN_STEPS)
    """Columns are chosen anew after so many steps or epochs, when no update is pending."""
    zenflow_update_interval: str = option("auto", check=_STEPS_OR_AUTO, small=_WITHIN_STEPS)
    """Steps whose gradients of all other columns become one update, on the host. auto: until they
    amount to one step of the chosen ones."""
    zenflow_update_interval_cap: int = option(
        16,
        check=Check(lambda value: value >= 1, "1 or more", "give the most steps of a window"),
        small=_WITHIN_STEPS,
    )
    """With auto, most steps of one update."""
    zenflow_full_warm_up_rounds: int = option(
        0, check=replace(NOT_NEGATIVE, do="correct it"), small=_WITHIN_STEPS
    )
    """Steps at the start that update everything. The first step always does: by its gradient
    columns are chosen."""
    zenflow_overlap_step: bool = option(False, small=KEPT)
    """Compute these updates in the background, during the steps that follow: each is in the weights
    when the next one begins."""
    zenflow_config: str | None = option(
        None, small=left_out("it stands for the other options of zenflow")
    )
    """A JSON file of DeepSpeed's with `zero_optimization.zenflow`, or that block alone. Options
    given with it win."""
