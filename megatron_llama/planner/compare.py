"""A recorded run next to its plan: the parts of a step, with measured and planned times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from megatron_llama.engine.plan.memory import sized
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.kernels import Kernels, PassTime
from megatron_llama.planner.links import RankGroup
from megatron_llama.planner.measured import MeasuredSteps
from megatron_llama.planner.report import label
from megatron_llama.planner.simulate import StageTimes, simulate
from megatron_llama.planner.steps import BlockTime, block_time
from megatron_llama.schedule import Schedule, Timeline, schedule_named
from megatron_llama.train.run.timeline_file import GATHERS, OTHER, PIPELINE, REDUCTIONS, Span

HEAD = ("", "a step", "measured", "planned", "ratio", "more in a step")


@dataclass(frozen=True)
class ComparedPart:
    """One part of a step: seconds of one occurrence, as the mean over the ranks that have it."""

    what: str
    count: float
    """Occurrences on a rank in a step."""
    measured: float
    planned: float | None
    """None if there is no plan for it."""

    @property
    def more(self) -> float:
        """Seconds of a step beyond the plan; below 0 if it is faster."""
        return 0.0 if self.planned is None else self.count * (self.measured - self.planned)

    @property
    def cells(self) -> tuple[str, ...]:
        """Texts of a table row with the columns of HEAD."""
        start = self.what, f"{self.count:.3g}", ms(self.measured)
        if self.planned is None:
            return *start, "?", "", ""
        ratio = f"{self.measured / self.planned:.2f}" if self.planned else ""
        return *start, ms(self.planned), ratio, ms(self.more)

    def as_json(self) -> dict[str, Any]:
        """Return the same as numbers."""
        return {
            "what": self.what,
            "count": self.count,
            "measured_seconds": self.measured,
            "planned_seconds": self.planned,
            "more_seconds": self.more,
        }


@dataclass(frozen=True)
class Comparison:
    """Recorded steps and the plan of the same configuration. ``known`` says whether the plan is for
    the device that ran the steps. If not, kernels are planned for another device and scaled by one
    factor, and communication has no plan."""

    steps: MeasuredSteps
    candidate: Candidate
    known: bool

    @cached_property
    def excluded(self) -> tuple[str, ...]:
        """Lanes whose waits do not count as time of a pass, since the plan of a pass does not
        contain them."""
        between = (PIPELINE, GATHERS, REDUCTIONS)
        return between if self.known else (*between, "tp", "cp", "ep")

    @cached_property
    def scale(self) -> float:
        """Measured seconds of kernels for one planned second; 1 for a known device."""
        if self.known:
            return 1.0
        measured = self.steps.passes(self.excluded)
        planned = sum(
            self._unscaled[stage].of(op) * count for (op, stage), (_, count) in measured.items()
        )
        return sum(seconds * count for seconds, count in measured.values()) / planned

    @cached_property
    def times(self) -> tuple[StageTimes, ...]:
        """Planned times of the passes of each stage, scaled, without overlapped messages."""
        return tuple(
            replace(
                times,
                forward=self.scale * times.forward,
                backward_input=self.scale * times.backward_input,
                backward_weight=self.scale * times.backward_weight,
            )
            for times in self._unscaled
        )

    @cached_property
    def _unscaled(self) -> tuple[StageTimes, ...]:
        candidate = self.candidate
        times = [stage_times.alone for stage_times in candidate.stage_times]
        if self.known:
            return tuple(times)
        for stage, stage_times in enumerate(times):
            embedding = 0.5 * candidate.groups.tp.reduce(candidate.job.stream) * (stage == 0)
            shown = [self.shown(stage, kind) for kind in ("tensor", "context", "expert")]
            forward = embedding + sum(first for first, _ in shown)
            backward = sum(second for _, second in shown)
            times[stage] = replace(
                stage_times,
                forward=max(0.0, stage_times.forward - forward),
                backward_input=max(0.0, stage_times.backward_input - backward),
            )
        return tuple(times)

    @cached_property
    def _block(self) -> BlockTime:
        job = self.candidate.job
        fit = self.candidate.fit
        return block_time(job, self.candidate.groups, Kernels(job, fit), fit)

    def shown(self, stage: int, part: str) -> tuple[float, float]:
        """Return the planned seconds of communication over tp (``tensor``), cp (``context``) or
        ep (``expert``) in one forward and one backward pass of a stage."""

        def share(pass_time: PassTime) -> float:
            return pass_time.seconds - replace(pass_time, **{part: 0.0}).seconds

        layers = len(self.candidate.short.partition.layers[stage])
        return layers * share(self._block.forward), layers * share(self._block.backward)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule with all microbatches."""
        parallel = self.candidate.config.parallel
        job = self.candidate.job
        return schedule_named(
            parallel.pipeline_schedule,
            ranks=job.pp,
            microbatches=job.microbatches,
            virtual=parallel.virtual_pipeline_model_parallel_size,
        )

    @cached_property
    def hop(self) -> float:
        """Planned seconds of a message between stages; 0 if the links are not known."""
        return self.candidate.hop if self.known else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline of the planned passes."""
        return simulate(self.schedule, self.times, self.hop)

    @cached_property
    def rows(self) -> tuple[ComparedPart, ...]:
        """All parts, sorted by seconds beyond the plan, largest first. Parts without a plan come
        last."""
        return tuple(sorted(self._parts(), key=lambda row: (row.planned is None, -row.more)))

    def _parts(self) -> Iterator[ComparedPart]:
        job = self.candidate.job
        steps = self.steps
        planned = self.candidate.step_time
        known = self.known
        for (op, stage), (seconds, count) in steps.passes(self.excluded).items():
            name = f"{op.value.replace('_', ' ')}, stage {stage}"
            yield ComparedPart(name, count, seconds, self.times[stage].of(op))
        if steps.recorded.ranks > 1:
            timeline = self.timeline
            idle = fmean(timeline.makespan - timeline.busy(rank) for rank in range(job.pp))
            waited = steps.waits(PIPELINE, OTHER)
            yield ComparedPart("waiting for stages, the norm and the loss", 1, waited, idle)
        if job.dp * job.cp > 1:
            waited = steps.waits(GATHERS, REDUCTIONS)
            data = planned.data if known else None
            yield ComparedPart("waiting for parameters and gradients", 1, waited, data)
        axes = ("tp", "tensor", job.tp), ("cp", "context", job.cp), ("ep", "expert", job.ep)
        for axis, kind, size in axes:
            if size > 1:
                stages = range(len(self.times))
                within = sum(sum(self.shown(stage, kind)) for stage in stages)
                seconds_planned = job.microbatches * within / job.pp if known else None
                name = f"waiting for {axis}{' (within passes)' if known else ''}"
                yield ComparedPart(name, 1, steps.waits(axis), seconds_planned)
        yield ComparedPart("updates", 1, steps.updates, self.scale * planned.update)
        other = planned.other if known else None
        yield ComparedPart("the rest: samples, starting kernels, logging", 1, steps.rest, other)

    @cached_property
    def messages(self) -> tuple[ComparedPart, ...]:
        """Collectives, timed from their issue, whether passes hide them or not. The times include
        the wait for the last rank."""
        issued: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in self.steps.spans:
            axis = str(span.details.get("axis"))
            if span.lane in (GATHERS, REDUCTIONS, "tp", "cp", "ep") and self._group(axis).size > 1:
                issued[axis, str(span.details["operation"])].append(span)
        rank_steps = self.steps.recorded.ranks * len(self.steps.numbers)
        rows = []
        for (axis, operation), spans in issued.items():
            group = self._group(axis)
            times = {
                "all_reduce": group.reduce,
                "all_to_all": group.exchange,
                "send": group.send,
                "receive": group.send,
            }
            size = fmean(int(span.details["bytes"]) for span in spans)
            planned = times.get(operation, group.gather)(size) if self.known else None
            name = f"{operation} on {axis}, {sized(int(size))}"
            measured = fmean(span.seconds for span in spans)
            rows.append(ComparedPart(name, len(spans) / rank_steps, measured, planned))
        return tuple(sorted(rows, key=lambda row: -row.count * row.measured))

    def _group(self, axis: str) -> RankGroup:
        groups = self.candidate.groups
        if axis in ("tp", "kv"):
            return groups.tp
        if axis == "ep":
            return groups.ep
        if axis.startswith("expert_dp"):
            is_whole = groups.expert_shards.size == 1
            return groups.expert_replicas if is_whole else groups.expert_shards
        if axis.startswith("cp"):
            return {"cp_heads": groups.cp_heads, "cp_keys": groups.cp_keys}.get(axis, groups.cp)
        replicas = axis == "dp_replica" or groups.shards.size == 1
        return groups.replicas if replicas else groups.shards

    def as_json(self) -> dict[str, Any]:
        """Return the contents of ``lines`` for programs."""
        return {
            "layout": label(self.candidate),
            "gpu": self.candidate.machine.gpu.name,
            "known": self.known,
            "scale": self.scale,
            "measured_step_seconds": self.steps.seconds,
            "planned_step_seconds": self.candidate.seconds if self.known else None,
            "parts": [row.as_json() for row in self.rows],
            "messages": [row.as_json() for row in self.messages],
        }

    def lines(self, name: str) -> Iterator[str]:
        """Yield lines for a terminal. ``name`` is the file's name."""
        recorded = self.steps.recorded
        numbers = self.steps.numbers
        yield (
            f"{name}: {recorded.ranks} ranks on {recorded.device}, iterations {numbers[0]} to "
            f"{numbers[-1]}, clocks within {ms(recorded.clock_error)}"
        )
        yield f"{label(self.candidate)}, {self.candidate.job.microbatches} microbatches"
        yield from self.verdict()
        yield ""
        for cells in (HEAD, *(row.cells for row in self.rows)):
            yield f"{_columns(cells)} {cells[5]:>14}".rstrip()
        if self.messages:
            yield ""
            yield (
                "messages, from being issued to being there: hidden by passes or not, "
                "with waiting for the last rank"
            )
        for row in self.messages:
            yield _columns(row.cells).rstrip()

    def verdict(self) -> Iterator[str]:
        """Yield the measured and planned seconds of the whole step in words."""
        gpu = self.candidate.machine.gpu.name
        measured = self.steps.seconds
        if self.known:
            planned = self.candidate.seconds
            ratio = f"ratio {measured / planned:.2f}"
            yield f"a step took {ms(measured)}, planned for {gpu} are {ms(planned)}: {ratio}"
            return
        yield f"a step took {ms(measured)}"
        yield (
            f"nobody has measured {self.steps.recorded.device} for the planner: kernels are "
            f"planned for {gpu} and multiplied by {self.scale:.4g}, with which all passes together "
            "take as long as here. Compare proportions, or give --gpu NAME or "
            "--coefficients FILE (plan calibrate)"
        )


def _columns(cells: tuple[str, ...]) -> str:
    what, count, measured, planned, ratio, _ = cells
    return f"{what:<45} {count:>6} {measured:>12} {planned:>12} {ratio:>6}"


def ms(seconds: float) -> str:
    """Return seconds as milliseconds for people."""
    return f"{seconds * 1e3:,.2f} ms"
