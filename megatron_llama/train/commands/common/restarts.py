"""``--max-restarts-in-place``: ranks that begin again in their job (``launch/keeper.py``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from math import inf
from typing import get_type_hints

from megatron_llama.checkpoint import checkpoint_dir
from megatron_llama.checkpoint.storage_paths import local_folder
from megatron_llama.config.lines import parse_json
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import Config, TrainingConfig
from megatron_llama.errors import UserError, counted
from megatron_llama.launch.join import this_place
from megatron_llama.launch.keeper import keep
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.roster import Roster
from megatron_llama.metrics.events import FAULT, EventFile
from megatron_llama.train.setup.checks.batch import batch_problems
from megatron_llama.train.setup.checks.parallel import parallel_problems
from megatron_llama.train.setup.checks.run import restart_problems
from megatron_llama.train.setup.layout import is_layout_open

SHORTEST_MINUTES = 1e-3
"""What is left of --exit-duration-in-mins when it is over: 0 would mean no limit."""


def with_restarts(parsed: Parsed, train: Callable[[Parsed, Place], int]) -> int:
    """Call ``train`` in a process that begins again as --max-restarts-in-place says, and return the
    exit status. Raises UserError."""
    place = this_place()
    plan = plan_of(parsed)
    if plan is None:
        return train(parsed, place)  # which says what is wrong
    minutes = plan.config.parallel.distributed_timeout_minutes
    begun = time.monotonic()

    def train_again(place: Place) -> int:
        return train(_with_time_left(parsed, begun), place)

    return keep(place, plan, timedelta(minutes=minutes), train_again)


@dataclass(frozen=True)
class RunPlan:
    """What the keepers of a run have to know of it."""

    config: Config

    @property
    def is_valid(self) -> bool:
        """Whether processes can meet by these options, and a layout has processes."""
        parallel = self.config.parallel
        sizes = (self.group, self._least, self.config.training.micro_batch_size)
        return min(sizes) > 0 and 0 < parallel.distributed_timeout_minutes < inf

    @property
    def group(self) -> int:
        """Neighbouring ranks that should be on one machine."""
        return self.config.parallel.tensor_model_parallel_size

    @property
    def restarts(self) -> int:
        """How often the job may begin again."""
        return self.config.parallel.max_restarts_in_place

    @property
    def _unit(self) -> int:
        parallel = self.config.parallel
        sizes = parallel.pipeline_model_parallel_size * parallel.context_parallel_size
        return self.group * sizes

    @property
    def _least(self) -> int:
        """Processes of the smallest layout: of data-parallel ranks those that divide experts."""
        return self._unit * self.config.parallel.expert_model_parallel_size

    def fitting(self, present: int) -> int:
        """Return how many of the processes can train: with the largest dp that divides the batch.
        0 if they are too few. Where a layout has problems with any dp, the run itself names
        them."""
        most = present // self._unit
        for dp in range(most, 0, -1):
            processes = dp * self._unit
            problems = [
                *parallel_problems(self.config, processes),
                *batch_problems(self.config, processes),
            ]
            if not problems:
                return processes
        return most * self._unit if present >= self._least else 0

    def needs(self) -> str:
        """Say how many processes are needed, and for what."""
        parallel = self.config.parallel
        ep = parallel.expert_model_parallel_size
        division = f" x ep {ep}" if ep > 1 else ""
        return (
            f"at least {counted(self._least, 'process', 'processes')} (tp {self.group} x cp "
            f"{parallel.context_parallel_size} x pp {parallel.pipeline_model_parallel_size}"
            f"{division})"
        )

    def tell_restart(self, number: int, before: Roster, now: Roster) -> None:
        """Print what has happened and how the run goes on, and keep it for ``report``."""
        old, new = before.count // self._unit, now.count // self._unit
        words = (
            f"restart {number} of {self.restarts} in place: {now.reasons[-1]}; dp {old} -> {new}, "
            f"{now.count} of {len(now.members)} processes train; {self._steps()}"
        )
        print(f" {words}", flush=True)
        save = self.config.checkpoint.save
        if save is not None:
            EventFile(local_folder(save)).tell(FAULT, words=words)

    def _steps(self) -> str:
        """Say where the run goes on, and which steps are lost."""
        save = self.config.checkpoint.save
        assert save is not None  # ``restart_problems`` has seen to it
        try:
            newest = checkpoint_dir.latest(save)
            saved = checkpoint_dir.complete(save) if newest is not None else {}
        except (UserError, OSError) as error:
            return f"{save}: {error}"  # the run itself says more
        iteration = next((number for number, path in saved.items() if path == newest), 0)
        logged = iteration
        with suppress(OSError, ValueError, KeyError, TypeError):
            for line in (local_folder(save) / "log.jsonl").read_bytes().splitlines():
                logged = max(logged, int(parse_json(line)["iteration"]))
        lost = f", {logged - iteration} logged steps are done again" if logged > iteration else ""
        return f"goes on from iteration {iteration}{lost}"


def plan_of(parsed: Parsed) -> RunPlan | None:
    """Return what the keepers of a run know of it; None without --max-restarts-in-place, or if its
    options do not allow that."""
    sections = get_type_hints(Config)
    config = Config(**{item.name: parsed.get(sections[item.name]) for item in fields(Config)})
    ep = config.parallel.expert_model_parallel_size
    if ep > 1 and not config.model.num_experts:
        # A preset or a folder has them, which the run reads: it says if they cannot be divided.
        config = replace(config, model=replace(config.model, num_experts=ep))
    plan = RunPlan(config)
    if plan.restarts <= 0 or is_layout_open(parsed) or [*restart_problems(config)]:
        return None
    return plan if plan.is_valid else None


def _with_time_left(parsed: Parsed, begun: float) -> Parsed:
    """Return the options with what is left of --exit-duration-in-mins, which is the job's."""
    training = parsed.get(TrainingConfig)
    if not training.exit_duration_in_mins:
        return parsed
    passed = (time.monotonic() - begun) / 60
    left = max(SHORTEST_MINUTES, training.exit_duration_in_mins - passed)
    training = replace(training, exit_duration_in_mins=left)
    return replace(parsed, instances={**parsed.instances, TrainingConfig: training})
