"""A recorded timeline in the words of a plan: the run's configuration, and the seconds of its
passes, waits and updates."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, get_origin, get_type_hints

from megatron_llama.config.schema import Config
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.plans.resolve import problems
from megatron_llama.plans.schedule import Op
from megatron_llama.plans.timeline_file import (
    COMPUTE,
    ITERATIONS,
    UPDATES,
    WAITS,
    Recorded,
    Span,
    union,
)

PASSES: Mapping[str, Op] = MappingProxyType(
    {op.value: op for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)}
)


def config_of(recorded: Recorded, path: Path) -> Config:
    """The configuration of the run, with as many microbatches as the recorded steps had. Raises
    ConfigError where it cannot be read, or could not have run on so many ranks."""
    kinds = get_type_hints(Config)
    again = "record it again with this version"
    unknown = [name for name in recorded.config if name not in kinds]
    sections: dict[str, Any] = {}
    for name, kind in kinds.items():
        values = recorded.config.get(name)
        values = values if isinstance(values, Mapping) else {}
        known = {field.name: get_type_hints(kind)[field.name] for field in fields(kind)}
        unknown += [f"{name}.{key}" for key in values if key not in known]
        sections[name] = kind(
            **{key: _restored(known[key], value) for key, value in values.items() if key in known}
        )
    if unknown:
        raise ConfigError(
            describe(
                f"{path} config",
                got=", ".join(unknown),
                expected="options of this version",
                do=again,
            )
        )
    config = Config(**sections)
    try:
        found = problems(config, recorded.ranks)
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            describe(f"{path} config", got=error, expected="values of the options' kinds", do=again)
        ) from None
    if found:
        raise ConfigError(
            listing(
                f"{path} has a configuration that cannot have run on its {recorded.ranks} ranks:",
                found,
            )
        )
    return _with_steps(config, recorded)


def _restored(kind: Any, value: Any) -> Any:
    return tuple(value) if get_origin(kind) is tuple else value


def _with_steps(config: Config, recorded: Recorded) -> Config:
    """A batch that was still growing is as large as the recorded steps."""
    numbers = [
        int(span.details["microbatch"])
        for span in MeasuredSteps(recorded).spans
        if span.lane == COMPUTE
    ]
    parallel = config.parallel
    training = config.training
    model_parallel = (
        parallel.tensor_model_parallel_size
        * parallel.context_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    batch = (max(numbers) + 1) * training.micro_batch_size * (recorded.ranks // model_parallel)
    return replace(
        config, training=replace(training, global_batch_size=batch, rampup_batch_size=())
    )


@dataclass(frozen=True)
class MeasuredSteps:
    """The recorded steps that count: where there are others, without those behind which an
    evaluation came, and without the first, into which nothing had been gathered ahead."""

    recorded: Recorded

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Iterations."""
        every = sorted(
            {
                int(span.details["iteration"])
                for span in self.recorded.spans
                if span.lane == ITERATIONS
            }
        )
        longer = {
            int(span.details["iteration"])
            for span in self.recorded.spans
            if "evaluation" in span.details
        }
        pure = [number for number in every if number not in longer] or every
        return tuple([number for number in pure if number != every[0]] or pure)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What belongs to these steps, and to no evaluation between them. Raises ConfigError if
        that is nothing."""
        numbers = set(self.numbers)
        spans = [
            span
            for span in self.recorded.spans
            if span.details.get("iteration") in numbers and "evaluation" not in span.details
        ]
        if not any(span.lane == COMPUTE for span in spans):
            raise ConfigError(
                describe(
                    "timeline",
                    got="no step",
                    expected="the passes of one step or more",
                    do="record more iterations",
                )
            )
        return tuple(spans)

    @cached_property
    def lanes(self) -> Mapping[tuple[int, str], list[Span]]:
        """The spans of each rank and lane, in order."""
        found: dict[tuple[int, str], list[Span]] = defaultdict(list)
        for span in sorted(self.spans, key=lambda span: span.begin):
            found[span.rank, span.lane].append(span)
        return found

    @cached_property
    def seconds(self) -> float:
        """Of a step, mean."""
        return fmean(span.seconds for span in self.spans if span.lane == ITERATIONS)

    @cached_property
    def typical(self) -> int:
        """The step that takes most nearly as long."""
        lengths = {
            int(span.details["iteration"]): span.seconds
            for span in self.spans
            if span.lane == ITERATIONS
        }
        return min(lengths, key=lambda number: (abs(lengths[number] - self.seconds), number))

    def passes(self, apart: tuple[str, ...]) -> Mapping[tuple[Op, int], tuple[float, float]]:
        """By kind and stage: (mean seconds of a pass, passes of a rank in a step). ``apart``: waits
        for these lanes are no part of one."""
        found: dict[tuple[Op, int], list[float]] = defaultdict(list)
        ranks: dict[int, set[int]] = defaultdict(set)
        for rank in range(self.recorded.ranks):
            for span, waited in self._with_waits(rank, apart):
                key = PASSES[str(span.details["op"])], int(span.details["stage"])
                found[key].append(span.seconds - waited)
                ranks[key[1]].add(rank)
        steps = len(self.numbers)
        return {
            key: (fmean(times), len(times) / len(ranks[key[1]]) / steps)
            for key, times in sorted(found.items(), key=_order)
        }

    def _with_waits(self, rank: int, apart: tuple[str, ...]) -> Iterable[tuple[Span, float]]:
        """The passes of a rank, each with the seconds that it waits for these lanes."""
        spans = [
            span for span in self.lanes.get((rank, COMPUTE), []) if span.details["op"] in PASSES
        ]
        begins = [span.begin for span in spans]
        waited = [0.0] * len(spans)
        for wait in self.lanes.get((rank, WAITS), []):
            place = bisect_right(begins, wait.begin) - 1
            if wait.details["on"] in apart and place >= 0 and wait.end <= spans[place].end + 1e-9:
                waited[place] += wait.seconds
        return zip(spans, waited, strict=True)

    def waits(self, *lanes: str) -> float:
        """Mean seconds of a rank in a step that it waits for messages of these lanes."""
        total = sum(
            span.seconds
            for span in self.spans
            if span.lane == WAITS and span.details["on"] in lanes
        )
        return total / self.recorded.ranks / len(self.numbers)

    @cached_property
    def updates(self) -> float:
        """Mean seconds of a rank's updates in a step."""
        return (
            sum(span.seconds for span in self.spans if span.lane == UPDATES)
            / self.recorded.ranks
            / len(self.numbers)
        )

    @cached_property
    def rest(self) -> float:
        """Mean seconds of a rank in a step in which it neither computes, nor updates, nor waits for
        messages."""
        shown = (COMPUTE, WAITS, UPDATES)
        busy = [
            union([span for lane in shown for span in self.lanes.get((rank, lane), [])])
            for rank in range(self.recorded.ranks)
        ]
        return max(0.0, self.seconds - fmean(busy) / len(self.numbers))


def _order(entry: tuple[tuple[Op, int], list[float]]) -> tuple[int, int]:
    (op, stage), _ = entry
    return list(PASSES.values()).index(op), stage
