"""``plan compare FILE``: a run recorded with --record-timeline, next to its plan."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from pathlib import Path

from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import LaunchConfig
from megatron_llama.errors import ConfigError
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.compare import Comparison
from megatron_llama.planner.configs import PlanConfig
from megatron_llama.planner.hardware import CPU, Gpu, gpu_of_device
from megatron_llama.planner.inputs import calibrated, machine_of
from megatron_llama.planner.measured import MeasuredSteps, config_of
from megatron_llama.planner.outputs import write_drawing, write_json, write_page
from megatron_llama.planner.pictures.compare_page import compare_page, steps_chart
from megatron_llama.planner.report import label
from megatron_llama.train.run.timeline_file import Recorded, read_timeline


def compare_runs(parsed: Parsed) -> None:
    """Plan the configuration of a recorded run for the device that ran it, and print which parts
    took longer. Raises ConfigError."""
    options = parsed.get(PlanConfig)
    if options.file is None:
        expected = "a file of pretrain --record-timeline"
        do = "write plan compare FILE"
        raise ConfigError("plan compare", got="no file", expected=expected, do=do)
    path = Path(options.file)
    recorded = read_timeline(path)
    config = config_of(recorded, path)
    device = gpu_of_device(recorded.device, recorded.memory)
    same = _for_machine(parsed, recorded, device)
    given = options.coefficients is not None or "gpu" in parsed.explicit
    known = given or device is not None
    candidate = Candidate(config, machine_of(same), calibrated(same).fit)
    comparison = Comparison(MeasuredSteps(recorded), candidate, known)
    print("\n".join(comparison.lines(path.name)))
    if options.json is not None:
        write_json(options.json, comparison.as_json())
    if options.html is not None:
        write_page(options.html, compare_page(comparison, path.name))
    if options.svg is not None:
        title = f"{path.name}: {label(candidate)}, measured and planned"
        write_drawing(options.svg, steps_chart(comparison).svg(title))


def _for_machine(parsed: Parsed, recorded: Recorded, device: Gpu | None) -> Parsed:
    """Return the options with the machine of the run, where they are not given. ``device`` is its
    kind of GPU, if the planner knows it."""
    options = parsed.get(PlanConfig)
    launch = parsed.get(LaunchConfig)
    gpu = CPU if recorded.host else device
    options = replace(
        options,
        gpus=recorded.ranks,
        gpu=options.gpu if gpu is None or "gpu" in parsed.explicit else gpu.name,
    )
    launch = replace(
        launch, gpus_per_node=launch.gpus_per_node or gcd(recorded.ranks, recorded.per_node)
    )
    return replace(
        parsed, instances={**parsed.instances, PlanConfig: options, LaunchConfig: launch}
    )
