"""Pipeline schedules as data: a list of actions for every rank, their proof, and the time they
take.

``actions.py`` defines what a rank can do, ``builders.py`` the schedules of ``--pipeline-schedule``
(a new one is added there), ``proof.py`` checks that a schedule is complete and cannot deadlock,
``replay.py`` computes when each pass runs, and ``connections.py`` lists the links that are
connected before the first step.
"""

from megatron_llama.schedule.actions import (
    Action,
    Link,
    Op,
    Schedule,
    ScheduleError,
    StagePlacement,
    backward_comes_next,
    link_of,
)
from megatron_llama.schedule.builders import (
    SCHEDULES,
    forward_only,
    placement_of,
    schedule_named,
    schedule_problems,
)
from megatron_llama.schedule.connections import connection_order, prove_first_uses
from megatron_llama.schedule.proof import Report, validate
from megatron_llama.schedule.replay import Costs, TimedPass, Timeline, simulate

__all__ = (
    "SCHEDULES",
    "Action",
    "Costs",
    "Link",
    "Op",
    "Report",
    "Schedule",
    "ScheduleError",
    "StagePlacement",
    "TimedPass",
    "Timeline",
    "backward_comes_next",
    "connection_order",
    "forward_only",
    "link_of",
    "placement_of",
    "prove_first_uses",
    "schedule_named",
    "schedule_problems",
    "simulate",
    "validate",
)
