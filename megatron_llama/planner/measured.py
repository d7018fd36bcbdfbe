"""A recorded timeline in the terms of a plan: the run's configuration, and the seconds of passes,
waits and updates."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, get_origin, get_type_hints

from megatron_llama.config.schema import Config
from megatron_llama.errors import ConfigError, listing
from megatron_llama.schedule import Op
from megatron_llama.train.run.timeline_file import (
    COMPUTE,
    ITERATIONS,
    UPDATES,
    WAITS,
    Recorded,
    Span,
    union,
)
from megatron_llama.train.setup.resolve import problems

PASSES: Mapping[str, Op] = MappingProxyType(
    {op.value: op for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)}
)
"""Kinds of passes by their names in a file, in the order of tables."""


def config_of(recorded: Recorded, path: Path) -> Config:
    """Return the configuration of the run, with as many microbatches as the recorded steps had.
    Raises ConfigError if it cannot be read, or cannot have run on the recorded ranks."""
    config = read_config(recorded.config, f"{path} config")
    again = "record it again with this version"
    try:
        refused = problems(config, recorded.ranks)
    except (TypeError, AttributeError) as error:
        expected = "values of the options' kinds"
        raise ConfigError(f"{path} config", got=error, expected=expected, do=again) from None
    if refused:
        on = f"its {recorded.ranks} ranks"
        raise ConfigError(
            listing(f"{path} has a configuration that cannot have run on {on}:", refused)
        )
    # A batch that was still ramping up gets the size that it had in the recorded steps.
    passes = [span for span in MeasuredSteps(recorded).spans if span.lane == COMPUTE]
    microbatches = max(int(span.details["microbatch"]) for span in passes) + 1
    parallel = config.parallel
    model_parallel = (
        parallel.tensor_model_parallel_size
        * parallel.context_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    samples = microbatches * config.training.micro_batch_size
    batch = samples * (recorded.ranks // model_parallel)
    training = replace(config.training, global_batch_size=batch, rampup_batch_size=())
    return replace(config, training=training)


def read_config(content: Mapping[str, Any], where: str) -> Config:
    """Return the configuration whose ``asdict`` is ``content``. Raises ConfigError for options
    that this version does not have."""
    kinds = get_type_hints(Config)
    unknown = [name for name in content if name not in kinds]
    sections: dict[str, Any] = {}
    for name, kind in kinds.items():
        hints = get_type_hints(kind)
        values = content.get(name)
        values = values if isinstance(values, Mapping) else {}
        known = {item.name for item in fields(kind)}
        unknown += [f"{name}.{key}" for key in values if key not in known]
        sections[name] = kind(
            **{
                key: tuple(value) if get_origin(hints[key]) is tuple else value
                for key, value in values.items()
                if key in known
            }
        )
    if unknown:
        expected = "options of this version"
        raise ConfigError(
            where, got=", ".join(unknown), expected=expected, do="record it again with this version"
        )
    return Config(**sections)


@dataclass(frozen=True)
class MeasuredSteps:
    """The recorded steps that are compared. Steps before an evaluation are left out, and the first
    step, for which nothing had been gathered ahead, unless there are no others."""

    recorded: Recorded

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Iterations of these steps."""
        spans = self.recorded.spans
        every = sorted(int(span.details["iteration"]) for span in self._iterations(spans))
        every = list(dict.fromkeys(every))
        longer = {span.details["iteration"] for span in spans if "evaluation" in span.details}
        pure = [number for number in every if number not in longer] or every
        return tuple([number for number in pure if number != every[0]] or pure)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Spans of these steps, without evaluations between them. Raises ConfigError if there is no
        pass."""
        numbers = set(self.numbers)
        spans = [
            span
            for span in self.recorded.spans
            if span.details.get("iteration") in numbers and "evaluation" not in span.details
        ]
        if not any(span.lane == COMPUTE for span in spans):
            expected = "the passes of one step or more"
            do = "record more iterations"
            raise ConfigError("timeline", got="no step", expected=expected, do=do)
        return tuple(spans)

    @staticmethod
    def _iterations(spans: tuple[Span, ...]) -> list[Span]:
        return [span for span in spans if span.lane == ITERATIONS]

    @cached_property
    def lanes(self) -> Mapping[tuple[int, str], list[Span]]:
        """Spans of each rank and lane, in order of time."""
        lanes: dict[tuple[int, str], list[Span]] = defaultdict(list)
        for span in sorted(self.spans, key=lambda span: span.begin):
            lanes[span.rank, span.lane].append(span)
        return lanes

    @cached_property
    def seconds(self) -> float:
        """Mean seconds of a step."""
        return fmean(span.seconds for span in self._iterations(self.spans))

    @cached_property
    def typical(self) -> int:
        """The iteration whose seconds are nearest to the mean."""
        lengths = {
            int(span.details["iteration"]): span.seconds for span in self._iterations(self.spans)
        }
        return min(lengths, key=lambda number: (abs(lengths[number] - self.seconds), number))

    def passes(self, excluded: tuple[str, ...]) -> Mapping[tuple[Op, int], tuple[float, float]]:
        """Return by kind and stage the mean seconds of a pass, without waits for the ``excluded``
        lanes, and the number of passes of a rank in a step."""
        seconds: dict[tuple[Op, int], list[float]] = defaultdict(list)
        ranks: dict[int, set[int]] = defaultdict(set)
        for rank in range(self.recorded.ranks):
            for span, waited in self._passes_with_waits(rank, excluded):
                stage = int(span.details["stage"])
                seconds[PASSES[str(span.details["op"])], stage].append(span.seconds - waited)
                ranks[stage].add(rank)
        steps = len(self.numbers)
        order = list(PASSES.values())
        return {
            key: (fmean(seconds[key]), len(seconds[key]) / len(ranks[key[1]]) / steps)
            for key in sorted(seconds, key=lambda key: (order.index(key[0]), key[1]))
        }

    def _passes_with_waits(
        self, rank: int, excluded: tuple[str, ...]
    ) -> Iterator[tuple[Span, float]]:
        """Yield the passes of a rank, each with its seconds of waiting for the excluded lanes."""
        passes = self.lanes.get((rank, COMPUTE), [])
        passes = [span for span in passes if span.details["op"] in PASSES]
        begins = [span.begin for span in passes]
        waited = [0.0] * len(passes)
        for wait in self.lanes.get((rank, WAITS), []):
            place = bisect_right(begins, wait.begin) - 1
            inside = place >= 0 and wait.end <= passes[place].end + 1e-9
            if wait.details["on"] in excluded and inside:
                waited[place] += wait.seconds
        yield from zip(passes, waited, strict=True)

    def waits(self, *lanes: str) -> float:
        """Return the mean seconds in a step that a rank waits for messages of these lanes."""
        waits = [span for span in self.spans if span.lane == WAITS and span.details["on"] in lanes]
        return sum(span.seconds for span in waits) / self.recorded.ranks / len(self.numbers)

    @cached_property
    def updates(self) -> float:
        """Mean seconds of a rank's updates in a step."""
        updates = [span.seconds for span in self.spans if span.lane == UPDATES]
        return sum(updates) / self.recorded.ranks / len(self.numbers)

    @cached_property
    def rest(self) -> float:
        """Mean seconds in a step in which a rank neither computes, nor updates, nor waits for
        messages."""
        busy = []
        for rank in range(self.recorded.ranks):
            lanes = [self.lanes.get((rank, lane), []) for lane in (COMPUTE, WAITS, UPDATES)]
            busy.append(union([span for spans in lanes for span in spans]))
        return max(0.0, self.seconds - fmean(busy) / len(self.numbers))
