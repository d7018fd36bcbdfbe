"""The planner's commands and hooks in the trainer (``megatron_llama/hooks.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron_llama.hooks import Command, Layouts

COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "schedule": Command(
            "planner.commands.schedule",
            "schedule",
            "planner.configs:ScheduleConfig",
            "Show a pipeline schedule: who does what when, bubbles, memory.",
            listed=150,
        ),
        "plan": Command(
            "planner.commands.plan",
            "plan",
            "planner.commands.plan:SECTIONS",
            "The fastest layouts for a cluster, or a recorded run and its plan: plan compare FILE.",
            ("action", "file"),
            "--model NAME --gpus N [--option value ...]",
            listed=160,
        ),
        "report": Command(
            "planner.commands.report",
            "report",
            "planner.configs:ReportConfig",
            "What became of a run: curves, plan and measurement, faults; or of several.",
            words="RUN [RUN ...] [--html FILE] [--option value ...]",
            rest="runs",
            listed=180,
        ),
    }
)

LAYOUTS = Layouts(chosen="planner.auto_parallel:chosen")
