"""Pipeline schedules as data: a list of actions for every rank, their proof, and the time they
take.

``actions.py`` defines what a rank can do, ``builders.py`` the schedules of ``--pipeline-schedule``
(a new one is added there), ``proof.py`` checks that a schedule is complete and cannot deadlock, and
``replay.py`` computes when each pass runs.
"""

from megatron_llama.plans.schedule.actions import (
    Action,
    Op,
    Schedule,
    ScheduleError,
    backward_comes_next,
)
from megatron_llama.plans.schedule.builders import (
    SCHEDULES,
    forward_only,
    placement_of,
    schedule_named,
    schedule_problems,
)
from megatron_llama.plans.schedule.proof import Report, validate
from megatron_llama.plans.schedule.replay import Costs, TimedPass, Timeline, simulate

__all__ = (
    "SCHEDULES",
    "Action",
    "Costs",
    "Op",
    "Report",
    "Schedule",
    "ScheduleError",
    "TimedPass",
    "Timeline",
    "backward_comes_next",
    "forward_only",
    "placement_of",
    "schedule_named",
    "schedule_problems",
    "simulate",
    "validate",
)
