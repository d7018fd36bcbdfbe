"""``plan``: the fastest layout on a cluster, found without it. The other actions are in modules of
their own, listed in ``ACTIONS``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import MappingProxyType

from megatron_llama.config.parse import Parsed
from megatron_llama.config.sections import config_sections
from megatron_llama.planner.api.plan import search_plan
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.configs import PlanConfig
from megatron_llama.planner.hardware import GBIT
from megatron_llama.planner.inputs import with_cluster
from megatron_llama.planner.nearest import Citation
from megatron_llama.planner.outputs import write_drawing, write_json, write_page
from megatron_llama.planner.pictures.plan_page import pipeline_chart, plan_page
from megatron_llama.planner.report import command, details, label, losses, near_heading, table

SECTIONS = (PlanConfig, *config_sections())
ACTIONS: Mapping[str, str] = MappingProxyType(
    {
        "search": "plan:search_layouts",
        "calibrate": "plan_calibrate:calibrate",
        "compare": "plan_compare:compare_runs",
        "trace": "plan_trace:trace_layout",
    }
)
"""Module and function of each action. They are imported on use, since some need torch."""


def plan(parsed: Parsed) -> None:
    """Run the action that the user named. Raises ConfigError."""
    module, _, function = ACTIONS[parsed.get(PlanConfig).action].partition(":")
    getattr(import_module(f"{__package__}.{module}"), function)(with_cluster(parsed))


def search_layouts(parsed: Parsed) -> None:
    """Print the fastest layouts, or the one that --explain names. Raises ConfigError."""
    options = parsed.get(PlanConfig)
    result = search_plan(parsed)
    best = result.candidates
    near = list(result.near)
    if result.assumed is not None:
        print(result.assumed)
    print("\n".join(_lines(best, near, result.tried, explained=options.explain is not None)))
    if options.json is not None:
        write_json(options.json, result.as_json())
    if options.html is not None:
        write_page(options.html, plan_page(best, _title(best[0]), near))
    if options.svg is not None:
        write_drawing(options.svg, pipeline_chart(best[0]).svg(label(best[0])))


def _lines(
    best: tuple[Candidate, ...], near: list[Citation], tried: int, *, explained: bool
) -> Iterator[str]:
    first = best[0]
    yield _title(first)
    if not explained:
        offload = first.config.offload.optimizer_offload
        away = f", with --optimizer-offload {offload}" if first.host_bytes else ""
        yield f"{tried} layouts tried; the fastest that are likelier than not to fit{away}:"
    yield from ("", *table(best), "", *details(first))
    if len(best) > 1:
        yield from ("", "why the others are slower", *losses(best))
    yield from ("", near_heading(first), *(f"  {run}" for run in near))
    yield from ("", "start it with", f"  {command(first)}")


def _title(first: Candidate) -> str:
    machine = first.machine
    network = f"{machine.node} in a node, {machine.nic / GBIT:.0f} Gbit/s between nodes for each"
    batch = f"{first.config.training.global_batch_size} samples of {first.job.seq} tokens a step"
    return f"{machine.gpus} x {machine.gpu.name} ({network}), {batch}"
