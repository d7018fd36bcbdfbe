"""``plan``: which layout is fastest on a cluster that is not here, and its other actions: each a
line of ``ACTIONS``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from megatron_llama.commands.common.configs import PlanConfig
from megatron_llama.commands.common.plan_inputs import (
    calibrated,
    config_of,
    layout_named,
    machine_of,
)
from megatron_llama.commands.common.plan_outputs import write_json, write_page
from megatron_llama.config.help import config_sections
from megatron_llama.config.parse import Parsed
from megatron_llama.errors import ConfigError, describe
from megatron_llama.planner.candidate import Planned
from megatron_llama.planner.choice import given_of
from megatron_llama.planner.citations import TABLE
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.judge import lines
from megatron_llama.planner.nearest import Citation, nearest, read_table
from megatron_llama.planner.picture_plan import plan_page
from megatron_llama.planner.published import BITS, read_rows
from megatron_llama.planner.report import as_json, command, details, does_not_fit, losses, table
from megatron_llama.planner.score import score
from megatron_llama.planner.search import enough_gpus, search

SECTIONS = (PlanConfig, *config_sections())
ACTIONS: Mapping[str, str] = MappingProxyType(
    {
        "search": "plan:search_layouts",
        "score": "plan:score_runs",
        "calibrate": "plan_calibrate:calibrate",
        "compare": "plan_compare:compare_runs",
        "trace": "plan_trace:trace_layout",
    }
)
"""Where each action lives, module and function of ``commands``; imported only when it is asked for.
All take what was parsed."""


def plan(parsed: Parsed) -> None:
    """Run the action that is asked for. Raises ConfigError."""
    module, _, function = ACTIONS[parsed.get(PlanConfig).action].partition(":")
    getattr(import_module(f"megatron_llama.commands.{module}"), function)(parsed)


def search_layouts(parsed: Parsed) -> None:
    """The fastest layouts, or the one to explain. Raises ConfigError."""
    options = parsed.get(PlanConfig)
    config = config_of(parsed)
    machine = machine_of(parsed)
    pinned = given_of(config, parsed.explicit)
    fit = calibrated(parsed).fit
    if options.explain is not None:
        best: tuple[Planned, ...] = (layout_named(config, machine, fit, options.explain),)
        tried = 1
    else:
        found = search(config, machine, fit, top=options.top, pinned=pinned)
        if not found.best:
            assert found.smallest is not None
            raise ConfigError(
                does_not_fit(found.smallest, enough_gpus(config, machine, fit, pinned))
            )
        best = found.best
        tried = found.tried
    near = _near(best[0])
    print("\n".join(_lines(best, near, tried, explained=options.explain is not None)))
    if options.json is not None:
        write_json(options.json, as_json(best, near, tried))
    if options.html is not None:
        write_page(options.html, plan_page(best, _title(best[0]), near))


def score_runs(parsed: Parsed) -> None:
    """How good such plans are on a table of published runs. Raises ConfigError."""
    options = parsed.get(PlanConfig)
    if options.file is None:
        raise ConfigError(
            describe(
                "plan score",
                got="no file",
                expected="a CSV file of published runs",
                do="write plan score FILE.csv",
            )
        )
    figures = score(read_rows(Path(options.file)), FITTED)
    print("\n".join(lines(figures)))
    if options.json is not None:
        write_json(options.json, figures)


def _near(planned: Planned) -> list[Citation]:
    job = planned.job
    numel = (job.block_numel * job.model.num_hidden_layers + job.head.n * job.head.k) * job.tp
    return nearest(
        read_table(TABLE),
        known=job.machine.gpu.name,
        gpus=job.machine.gpus,
        numel=numel,
        seq=job.seq,
    )


def _lines(
    best: tuple[Planned, ...], near: list[Citation], tried: int, *, explained: bool
) -> list[str]:
    first = best[0]
    moved = first.config.offload.optimizer_offload if not explained and first.host_bytes else None
    away = f", with --optimizer-offload {moved}" if moved is not None else ""
    found = (
        []
        if explained
        else [f"{tried} layouts tried; the fastest that are likelier than not to fit{away}:"]
    )
    reasons = ["", "why the others are slower", *losses(best)] if len(best) > 1 else []
    return [
        *(_title(first), *found, "", *table(best), "", *details(first), *reasons),
        *("", "nearest published runs, of other trainers", *(f"  {citation}" for citation in near)),
        *("", "start it with", f"  {command(first)}"),
    ]


def _title(first: Planned) -> str:
    machine = first.machine
    network = f"{machine.node} in a node, {machine.nic / BITS:.0f} Gbit/s between nodes for each"
    batch = f"{first.config.training.global_batch_size} samples of {first.job.seq} tokens a step"
    return f"{machine.gpus} x {machine.gpu.name} ({network}), {batch}"
