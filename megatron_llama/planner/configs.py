"""Options of the commands that plan, draw and report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_llama.config.schema import PipelineSchedule


@dataclass(frozen=True)
class PlanConfig:
    """Find the fastest layout for a cluster that is not here; options of a layout that are given
    stay as they are."""

    action: Literal["search", "compare", "calibrate", "trace"] = "search"
    """compare: a run that pretrain --record-timeline has recorded, next to its plan. calibrate:
    measure these devices and their links, started like a run, and write a file for --coefficients.
    trace: the step of the layout that a run's options describe, on --gpus processes, operator by
    operator. May stand first, without its name: `plan compare FILE`."""
    file: str | None = None
    """What was recorded, with `plan compare`, or the file to write, with `plan calibrate`. May
    stand after the action without its name."""
    gpus: int = 0
    """GPUs of the whole cluster."""
    gpu: str = "h100"
    """Their kind: v100-16, v100, a100-40, a100, h100, h100-96, h200, b200, gb200 or gb300."""
    nic_gbit: float = 0.0
    """Gbit/s between nodes for each GPU. 0: what machines with this GPU usually have."""
    coefficients: str | None = None
    """A file of `plan calibrate`, instead of --gpu: plan with the device and the rates that were
    measured."""
    seconds: float = 120.0
    """How long `plan calibrate` may take, about. Of less it makes less exact coefficients."""
    top: int = 10
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
    """Show a pipeline schedule, for passes that all last equally long."""

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
    """Which runs are shown, and where."""

    runs: tuple[str, ...] = ()
    """Folders of runs (their `--save`), finished or not, or a `log.jsonl`. Several are compared."""
    html: str | None = None
    """Write this page: one file below 1 MB that needs nothing but a browser. Default: the numbers
    are printed, and that is all."""
    json: str | None = None
    """Also write the numbers of the page into this file."""
    coefficients: str | None = None
    """A file of `plan calibrate`: the speeds with which steps are planned. Default: those of the
    run's GPU, if the planner knows it."""
