"""A recorded run beside its plan: which parts of a step take longer than planned, and by how
much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.kernels import Kernels, PassTime
from megatron_llama.planner.links import RankGroup, RankGroups, rank_groups
from megatron_llama.planner.measured import MeasuredSteps
from megatron_llama.planner.report import label
from megatron_llama.planner.simulate import StageTimes, simulate
from megatron_llama.planner.steps import block_time
from megatron_llama.plans.memory import gib
from megatron_llama.plans.schedule import Op, Schedule, Timeline, schedule_named
from megatron_llama.plans.timeline_file import GATHERS, OTHER, PIPELINE, REDUCTIONS, Span

HEAD = ("", "a step", "measured", "planned", "ratio", "more in a step")
LANES_APART = (PIPELINE, GATHERS, REDUCTIONS)
"""Waits within a pass that the plan of a pass does not count; where links are not known, nor those
for tp and cp."""


@dataclass(frozen=True)
class ComparedPart:
    """One part of a step. Seconds of one, mean over the ranks that have it."""

    what: str
    count: float
    """On a rank, in a step."""
    measured: float
    planned: float | None
    """None: nobody knows."""

    @property
    def more(self) -> float:
        """Seconds of a step beyond the plan; below 0: it is faster."""
        return 0.0 if self.planned is None else self.count * (self.measured - self.planned)

    @property
    def cells(self) -> tuple[str, ...]:
        """For a table with the columns of HEAD."""
        known = ("?", "", "")
        if self.planned is not None:
            known = (
                ms(self.planned),
                f"{self.measured / self.planned:.2f}" if self.planned else "",
                ms(self.more),
            )
        return self.what, f"{self.count:.3g}", ms(self.measured), *known

    def as_json(self) -> dict[str, Any]:
        """The same as numbers."""
        times = {
            "measured_seconds": self.measured,
            "planned_seconds": self.planned,
            "more_seconds": self.more,
        }
        return {"what": self.what, "count": self.count, **times}


@dataclass(frozen=True)
class Comparison:
    """Recorded steps and the plan of the same configuration. ``known``: the plan is one for the
    device that ran them; if not, kernels are planned for another one and scaled by one factor, and
    what links take is not planned."""

    steps: MeasuredSteps
    planned: Candidate
    known: bool

    @cached_property
    def scale(self) -> float:
        """What kernels take here, beside the plan; 1 for a device that is planned for."""
        if self.known:
            return 1.0
        measured = self.steps.passes(self.apart)
        planned = self._passes
        return sum(seconds * count for seconds, count in measured.values()) / sum(
            planned[key] * measured[key][1] for key in measured
        )

    @property
    def apart(self) -> tuple[str, ...]:
        """Waits that are no part of a pass here."""
        return LANES_APART if self.known else (*LANES_APART, "tp", "cp")

    @cached_property
    def times(self) -> tuple[StageTimes, ...]:
        """The passes of each stage as planned, scaled, without what travels beside them."""
        return tuple(self._bare(stage) for stage in range(len(self.planned.stage_times)))

    @property
    def _passes(self) -> Mapping[tuple[Op, int], float]:
        """Before scaling."""
        stages = range(len(self.planned.stage_times))
        return {
            (op, stage): self._bare(stage, 1.0).of(op)
            for stage in stages
            for op in self.planned.short.schedule.passes
        }

    def _bare(self, stage: int, scale: float | None = None) -> StageTimes:
        factor = self.scale if scale is None else scale
        times = replace(
            self.planned.stage_times[stage], gather_forward=0.0, gather_backward=0.0, reduce=0.0
        )
        forward = backward = 0.0
        if not self.known:
            ends = 0.5 * self._axes.tp.reduce(self.planned.job.stream) * (stage == 0)
            shown = [self.shown(stage, part) for part in ("tensor", "context")]
            forward = ends + sum(first for first, _ in shown)
            backward = sum(second for _, second in shown)
        return replace(
            times,
            forward=factor * max(0.0, times.forward - forward),
            backward_input=factor * max(0.0, times.backward_input - backward),
            backward_weight=factor * times.backward_weight,
        )

    @cached_property
    def _axes(self) -> RankGroups:
        return rank_groups(self.planned.job, self.planned.fit)

    def shown(self, stage: int, part: str) -> tuple[float, float]:
        """Candidate seconds of communication over tp (``tensor``) or cp (``context``) in one forward
        and one backward pass of a stage."""
        job = self.planned.job
        fit = self.planned.fit
        block = block_time(job, self._axes, Kernels(job, fit), fit)
        layers = len(self.planned.short.partition.layers[stage])
        return layers * _share(block.forward, part), layers * _share(block.backward, part)

    @cached_property
    def schedule(self) -> Schedule:
        """With all microbatches."""
        parallel = self.planned.config.parallel
        job = self.planned.job
        virtual = parallel.virtual_pipeline_model_parallel_size
        return schedule_named(
            parallel.pipeline_schedule, ranks=job.pp, microbatches=job.microbatches, virtual=virtual
        )

    @cached_property
    def hop(self) -> float:
        """Seconds of a message between stages; 0 where links are not known."""
        job = self.planned.job
        size = job.stream / (job.tp if job.sequence_parallel else 1)
        return float(self._axes.pp.send(size)) if self.known else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """The passes as planned."""
        return simulate(self.schedule, self.times, self.hop)

    @cached_property
    def rows(self) -> tuple[ComparedPart, ...]:
        """Every part, those first that cost most beyond the plan; at the end what nobody
        planned."""
        rows = [*self._pass_rows(), *self._wait_rows(), *self._other_rows()]
        return tuple(sorted(rows, key=lambda row: (row.planned is None, -row.more)))

    @cached_property
    def messages(self) -> tuple[ComparedPart, ...]:
        """Collectives from the moment at which a rank issues one, hidden by passes or not: with the
        wait for the last of the ranks."""
        found: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in self.steps.spans:
            if (
                span.lane in (GATHERS, REDUCTIONS, "tp", "cp")
                and self._link(str(span.details["axis"])).size > 1
            ):
                found[str(span.details["axis"]), str(span.details["operation"])].append(span)
        each = self.steps.recorded.ranks * len(self.steps.numbers)
        rows = []
        for (axis, operation), spans in found.items():
            size = fmean(int(span.details["bytes"]) for span in spans)
            link = self._link(axis)
            seconds = {"all_reduce": link.reduce, "send": link.send, "receive": link.send}.get(
                operation, link.gather
            )(size)
            what = f"{operation} on {axis}, {gib(int(size))}"
            rows.append(
                ComparedPart(
                    what,
                    len(spans) / each,
                    fmean(span.seconds for span in spans),
                    seconds if self.known else None,
                )
            )
        return tuple(sorted(rows, key=lambda row: -row.count * row.measured))

    def _link(self, axis: str) -> RankGroup:
        if axis in ("tp", "kv", "cp"):
            return self._axes.tp if axis in ("tp", "kv") else self._axes.cp
        return (
            self._axes.replicas
            if axis == "dp_replica" or self._axes.shards.size == 1
            else self._axes.shards
        )

    def _pass_rows(self) -> Iterator[ComparedPart]:
        for (op, stage), (seconds, count) in self.steps.passes(self.apart).items():
            yield ComparedPart(
                f"{op.value.replace('_', ' ')}, stage {stage}",
                count,
                seconds,
                self.times[stage].of(op),
            )

    def _wait_rows(self) -> Iterator[ComparedPart]:
        job = self.planned.job
        steps = self.steps
        idle = fmean(self.timeline.makespan - self.timeline.busy(rank) for rank in range(job.pp))
        if steps.recorded.ranks > 1:
            yield ComparedPart(
                "waiting for stages, the norm and the loss", 1, steps.waits(PIPELINE, OTHER), idle
            )
        if job.dp * job.cp > 1:
            planned = self.planned.step_time.data if self.known else None
            yield ComparedPart(
                "waiting for parameters and gradients", 1, steps.waits(GATHERS, REDUCTIONS), planned
            )
        for axis, part, size in (("tp", "tensor", job.tp), ("cp", "context", job.cp)):
            if size > 1:
                stages = range(len(self.planned.stage_times))
                planned = (
                    job.microbatches
                    * sum(sum(self.shown(stage, part)) for stage in stages)
                    / job.pp
                    if self.known
                    else None
                )
                within = " (within passes)" if self.known else ""
                yield ComparedPart(f"waiting for {axis}{within}", 1, steps.waits(axis), planned)

    def _other_rows(self) -> Iterator[ComparedPart]:
        step = self.planned.step_time
        yield ComparedPart("updates", 1, self.steps.updates, self.scale * step.update)
        yield ComparedPart(
            "the rest: samples, starting kernels, logging",
            1,
            self.steps.rest,
            step.other if self.known else None,
        )

    def as_json(self) -> dict[str, Any]:
        """Everything that ``lines`` say."""
        return {
            "layout": label(self.planned),
            "gpu": self.planned.machine.gpu.name,
            "known": self.known,
            "scale": self.scale,
            "measured_step_seconds": self.steps.seconds,
            "planned_step_seconds": self.planned.seconds if self.known else None,
            "parts": [row.as_json() for row in self.rows],
            "messages": [row.as_json() for row in self.messages],
        }

    def lines(self, name: str) -> Iterator[str]:
        """What a terminal shows. ``name``: of the file."""
        recorded = self.steps.recorded
        numbers = self.steps.numbers
        which = (
            f"iterations {numbers[0]} to {numbers[-1]}, clocks within {ms(recorded.clock_error)}"
        )
        yield f"{name}: {recorded.ranks} ranks on {recorded.device}, {which}"
        yield f"{label(self.planned)}, {self.planned.job.microbatches} microbatches"
        yield from self.verdict()
        yield ""
        for what, count, measured, planned, ratio, more in (
            HEAD,
            *(row.cells for row in self.rows),
        ):
            yield f"{what:<45} {count:>6} {measured:>12} {planned:>12} {ratio:>6} {more:>14}".rstrip()
        if self.messages:
            yield ""
            yield "messages, from being issued to being there: hidden by passes or not, with waiting for the last rank"
        for what, count, measured, planned, ratio, _ in (row.cells for row in self.messages):
            yield f"{what:<45} {count:>6} {measured:>12} {planned:>12} {ratio:>6}".rstrip()

    def verdict(self) -> Iterator[str]:
        """The whole step."""
        gpu = self.planned.machine.gpu.name
        step = self.steps.seconds
        if self.known:
            yield f"a step took {ms(step)}, planned for {gpu} are {ms(self.planned.seconds)}: ratio {step / self.planned.seconds:.2f}"
            return
        yield f"a step took {ms(step)}"
        yield (
            f"nobody has measured {self.steps.recorded.device} for the planner: kernels are planned for {gpu} and multiplied by "
            f"{self.scale:.4g}, with which all passes together take as long as here. Compare proportions, or give --gpu NAME or "
            "--coefficients FILE (plan calibrate)"
        )


def _share(one: PassTime, part: str) -> float:
    return one.seconds - replace(one, **{part: 0.0}).seconds


def ms(seconds: float) -> str:
    """Milliseconds for people."""
    return f"{seconds * 1e3:,.2f} ms"
