"""Options of the commands that plan, draw and report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_llama.config.limits import LARGEST_RANKS
from megatron_llama.config.schema import PipelineSchedule
from megatron_llama.option import Check, option

SMALLEST_GBIT = 1e-6
LARGEST_GBIT = 1e6
"""Bounds of ``nic_gbit``."""


@dataclass(frozen=True)
class PlanConfig:
    """Find the fastest layout for a cluster, without using it. Layout options that are given stay
    as they are."""

    action: Literal["search", "compare", "calibrate", "trace"] = "search"
    """compare: a run that pretrain --record-timeline has recorded, next to its plan. calibrate:
    measure these devices and their links, started like a run, and write a file for --coefficients.
    trace: the step of the layout that a run's options describe, on --gpus processes, operator by
    operator. May stand first, without its name: `plan compare FILE`."""
    file: str | None = None
    """The recorded file, with `plan compare`, or the file to write, with `plan calibrate`. May
    stand after the action without its name."""
    gpus: int = option(
        0,
        check=Check(
            lambda value: 0 <= value <= LARGEST_RANKS, f"1 to {LARGEST_RANKS:,}", "correct it"
        ),
    )
    """GPUs of the whole cluster."""
    gpu: str = "h100"
    """Kind of the GPUs: v100-16, v100, a100-40, a100, h100, h100-96, h200, b200, gb200 or gb300."""
    nic_gbit: float = option(
        0.0,
        check=Check(
            lambda value: value == 0 or SMALLEST_GBIT <= value <= LARGEST_GBIT,
            f"0, or a number from {SMALLEST_GBIT:g} to {LARGEST_GBIT:,.0f}",
            "leave it out",
        ),
    )
    """Gbit/s between nodes for each GPU. 0: that of usual machines with this GPU."""
    coefficients: str | None = None
    """A file of `plan calibrate`, instead of --gpu: plan with the measured device and rates."""
    seconds: float = 120.0
    """About how long `plan calibrate` may take. With less time the coefficients are less exact."""
    top: int = option(10, check=Check(lambda value: value >= 1, "1 or more", "leave it out"))
    """Layouts to show."""
    explain: str | None = None
    """Show one layout only, as the table writes them:
    `tp4/pp4/mbs1/interleaved/v5/optim/recompute-none`."""
    json: str | None = None
    """Also write everything into this file."""
    html: str | None = None
    """Also draw it into this file, for a browser: the pipeline, memory, the table; with `plan
    compare` measured and planned on one axis."""
    svg: str | None = None
    """Also draw the pipeline of the fastest layout into this SVG file; with `plan compare` measured
    and planned on one axis."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Show a pipeline schedule in which all passes take equally long."""

    pipeline_schedule: PipelineSchedule = "1f1b"
    """Order of forward and backward passes over the pipeline stages."""
    pipeline_model_parallel_size: int = 4
    """Pipeline ranks (pp)."""
    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks per rank, for the interleaved schedule. zb-v always has 2."""
    num_microbatches: int = 8
    """Microbatches of a step: global_batch_size / (micro_batch_size x dp)."""
    svg: str | None = None
    """Also draw the schedule into this SVG file."""
    html: str | None = None
    """Also write the drawing and the numbers into this page, for a browser."""


@dataclass(frozen=True)
class ReportConfig:
    """The runs to show, and the files to write."""

    runs: tuple[str, ...] = ()
    """Folders of runs (their `--save`), finished or not, or a `log.jsonl`. Several are compared."""
    html: str | None = None
    """Write this page: one file below 1 MB that needs only a browser. Default: only print the
    numbers."""
    json: str | None = None
    """Also write the numbers of the page into this file."""
    coefficients: str | None = None
    """A file of `plan calibrate`: the speeds with which steps are planned. Default: those of the
    run's GPU, if the planner knows it."""
