"""How good the planner is on a table of published runs, of step times or of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.footprint import footprint
from megatron_llama.planner.oom_probability import out_of_memory
from megatron_llama.planner.steps import estimate
from tools.planner_eval.judge import Figures, Prediction, byte_figures, step_figures, sweep_figures
from tools.planner_eval.published import (
    Cells,
    PublishedRun,
    number,
    runs_of,
    says_recompute,
    workspaces,
)

PERSISTENT_CLOSE = 0.01
PEAK_CLOSE = 0.08
GAPS = 1.05
CONTEXT = 2e9
"""What a tool sees beyond allocated bytes: gaps between allocations, and bytes of the driver's
context and of communicators."""


def score(rows: Sequence[Cells], fit: Coefficients) -> Figures:
    """Return all figures that a file's columns allow. Rows of quality C, and rows that say too
    little of their layout, are counted and left out."""
    runs = list(runs_of(rows))
    figures = {"rows": float(len(rows)), "rows_judged": float(len(runs))}
    if any("mem_alloc_bytes" in row for row in rows[:1]):
        return {**figures, **_memory_figures(runs)}
    predictions = [
        Prediction(run, estimate(run.job, fit).seconds) for run in runs if run.seconds is not None
    ]
    return {
        **figures,
        **step_figures(predictions),
        **sweep_figures(predictions),
        **_fit_figures(runs),
    }


def needed(run: PublishedRun) -> float:
    """Return the bytes of the fuller end of the pipeline. If the row does not say what is
    recomputed, these are the least that recomputation leaves."""
    job = run.job if says_recompute(run.cells) else replace(run.job, recomputed=1.0)
    return max(footprint(job, last=last).peak for last in (False, True))


def _fit_figures(runs: Sequence[PublishedRun]) -> Figures:
    """How often it was right whether a run fits, which is predicted if it is likelier than not."""
    if not runs:
        return {}
    right = {True: [0, 0], False: [0, 0]}
    for run in runs:
        told = out_of_memory(needed(run), run.job.machine.gpu.memory) < 0.5
        right[run.fits][0] += told == run.fits
        right[run.fits][1] += 1
    figures = {
        "fits_rows": float(len(runs)),
        "fits_right_percent": 100 * sum(count for count, _ in right.values()) / len(runs),
    }
    for fits, name in (
        (True, "fits_right_of_those_that_ran_percent"),
        (False, "fits_right_of_those_out_of_memory_percent"),
    ):
        if right[fits][1]:
            figures[name] = 100 * right[fits][0] / right[fits][1]
    return figures


def _memory_figures(runs: Sequence[PublishedRun]) -> Figures:
    """Errors of the allocator's bytes of the last rank, if the row has them, else of the peak that
    a tool reported."""
    persistent = []
    peak = []
    reported = []
    for run in runs:
        allocated = number(run.cells, "mem_alloc_bytes")
        highest = number(run.cells, "mem_peak_bytes")
        if allocated and highest:
            found = footprint(run.job, last=True, workspaces=workspaces(run.cells))
            persistent.append(found.persistent / allocated - 1)
            peak.append(found.peak / highest - 1)
        elif (tool := _reported(run.cells)) is not None:
            allocated = max(footprint(run.job, last=last).peak for last in (False, True))
            reported.append((GAPS * allocated + CONTEXT) / tool - 1)
    return {
        **byte_figures("persistent", persistent, PERSISTENT_CLOSE),
        **byte_figures("peak", peak, PEAK_CLOSE),
        **byte_figures("reported_peak", reported, PEAK_CLOSE),
    }


def _reported(cells: Cells) -> float | None:
    unit = cells.get("mem_unit", "")
    value = number(cells, "mem_value")
    if not value or not unit.startswith(("GB", "GiB", "nvidia-smi GB")):
        return None
    return value * (2**30 if unit.startswith("GiB") else 1e9)
