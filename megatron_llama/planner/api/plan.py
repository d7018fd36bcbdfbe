"""``plan``: the fastest layouts for a cluster, found without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from megatron_llama.config.parse import Parsed
from megatron_llama.config.parts import completed, part_of
from megatron_llama.config.sections import config_sections
from megatron_llama.errors import ConfigError
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.choice import given_of
from megatron_llama.planner.configs import PlanConfig
from megatron_llama.planner.inputs import (
    assumed,
    calibrated,
    config_of,
    layout_named,
    machine_of,
    with_cluster,
)
from megatron_llama.planner.nearest import Citation, nearest, read_citations
from megatron_llama.planner.report import as_json, command, does_not_fit, label, run_options
from megatron_llama.planner.search import enough_gpus, search
from megatron_llama.train.api.common.options import Options, read_options


@dataclass(frozen=True)
class PlannedLayout:
    """A layout, with the planned time and memory of a run in it."""

    name: str
    """The name that ``explain`` takes: ``tp4/pp4/cp1/dp4/mbs1/1f1b/optim/recompute-none``."""
    options: Mapping[str, Any]
    """The options of the run that differ from their defaults, for ``train``. ``train`` also needs
    ``data_path``, and the length of the run if it was not given."""
    command: str
    """The line that starts the run on the cluster."""
    step_seconds: float
    tokens_per_second_per_gpu: float
    memory_bytes: int
    """Bytes of the fullest GPU."""
    probability_out_of_memory: float
    """Probability that this exceeds the memory, from 0 to 1."""


@dataclass(frozen=True)
class Plan:
    """The result of ``plan``."""

    candidates: tuple[Candidate, ...]
    """The layouts with all that the planner knows of them."""
    near: tuple[Citation, ...]
    """The nearest published runs, of other trainers."""
    tried: int
    """Number of layouts that were tried."""
    assumed: str | None
    """Options that were assumed because they were not given, in words; None if all were given."""

    @property
    def layouts(self) -> tuple[PlannedLayout, ...]:
        """The layouts, fastest first."""
        return tuple(
            PlannedLayout(
                label(candidate),
                run_options(candidate),
                command(candidate),
                candidate.seconds,
                candidate.speed,
                candidate.needed,
                candidate.oom_probability,
            )
            for candidate in self.candidates
        )

    def as_json(self) -> dict[str, Any]:
        """Return the contents that the command ``plan`` writes with --json."""
        return as_json(self.candidates, list(self.near), self.tried)


def plan(
    config: Options = None,
    *,
    gpus: int | None = None,
    gpu: str | None = None,
    nic_gbit: float | None = None,
    coefficients: str | PathLike[str] | None = None,
    top: int | None = None,
    explain: str | None = None,
    **options: object,
) -> Plan:
    """Find the fastest layouts for a run on ``gpus`` GPUs, without any of them and without torch.

    ``config`` and keyword ``options`` are those of ``train``; given options of the layout are kept.
    ``gpu`` is the kind of GPU (``"h100"`` by default; docs/options.md of ``plan`` lists all),
    ``nic_gbit`` the Gbit/s between nodes for each GPU (by default that of usual machines with this
    GPU), ``coefficients`` a file of ``plan calibrate`` instead of ``gpu``. ``top`` layouts are
    returned (10), or the one that ``explain`` names.

    ```python
    import megatron_llama as ml

    best = ml.plan(model="llama2-7b", gpus=16, gpu="h100", global_batch_size=256, top=3).layouts[0]
    print(best.name, best.step_seconds, best.tokens_per_second_per_gpu)
    print(best.options)  # ml.train(best.options, data_path=..., train_iters=...)
    ```

    Raises ConfigError for options that cannot be used, and if no layout fits."""
    given = {
        "gpus": gpus,
        "gpu": gpu,
        "nic_gbit": nic_gbit,
        "coefficients": coefficients,
        "top": top,
        "explain": explain,
    }
    own = {name: value for name, value in given.items() if value is not None}
    # The other options of the command are about its output.
    part = part_of(PlanConfig, "", *given)
    sections = (part, *config_sections())
    parsed = read_options(config, {**options, **own}, sections, weights=False)
    whole = completed(PlanConfig, parsed)
    return search_plan(replace(parsed, instances={**parsed.instances, PlanConfig: whole}))


def search_plan(parsed: Parsed) -> Plan:
    """Return the fastest layouts, or the one that --explain names. Raises ConfigError."""
    parsed = with_cluster(parsed)
    options = parsed.get(PlanConfig)
    config = config_of(parsed)
    machine = machine_of(parsed)
    pinned = given_of(config, parsed.explicit)
    fit = calibrated(parsed).fit
    if options.explain is not None:
        best: tuple[Candidate, ...] = (layout_named(config, machine, fit, options.explain),)
        tried = 1
    else:
        result = search(config, machine, fit, top=options.top, pinned=pinned)
        if not result.best:
            assert result.smallest is not None
            enough = enough_gpus(config, machine, fit, pinned)
            raise ConfigError(does_not_fit(result.smallest, enough))
        best = result.best
        tried = result.tried
    job = best[0].job
    near = nearest(
        read_citations(),
        known=job.machine.gpu.name,
        gpus=job.machine.gpus,
        numel=job.matrix_numel,
        seq=job.seq,
    )
    return Plan(best, tuple(near), tried, assumed(parsed, config))
