"""Interruptions of a run and their costs: restarts, steps that were left out or done again, gaps
and faults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megatron_llama.config.parse import flag
from megatron_llama.errors import counted
from megatron_llama.metrics.events import END, FAULT, NOT_FINITE, REWIND, START
from megatron_llama.metrics.log import format_duration
from megatron_llama.planner.run.folder import SECONDS, Event, Floats, RunFolder

GAP_SECONDS = 60.0
GAP_FACTOR = 20.0
"""A time between two lines of one process is a gap if it exceeds GAP_SECONDS and GAP_FACTOR times
the usual time."""
GAPS = 50
"""Most gaps that are listed, the longest ones."""
NOT_COMPARED = ("checkpoint.load", "checkpoint.save")
"""Options that usually differ between starts and do not change the training."""

_USER = re.compile(r"://[^/@\s]+@")
_QUERY = re.compile(r"(://[^\s?]+)\?\S+")


@dataclass(frozen=True)
class Incident:
    """A row of the list of incidents."""

    seconds: float | None
    """Time, as in the column SECONDS; None if not known."""
    iteration: int | None
    kind: str
    """One of start, restart, rollback, skip, fault, gap, end and error."""
    words: str


@dataclass(frozen=True)
class Incidents:
    """Incidents of a run, and their sums."""

    run: RunFolder

    @cached_property
    def restarts(self) -> int:
        """Starts after the first."""
        return max(0, len(self.run.starts) - 1)

    @cached_property
    def repeated(self) -> int:
        """Steps that were lost to rollbacks and to ends of processes, as far as the log had
        recorded them."""
        return sum(
            max(0, event.details["reached"] - event.details["iteration"])
            for place, event in enumerate(self._moves)
            # Lines of the log before the first start belong to another run.
            if place or event.what == REWIND
        )

    @property
    def _moves(self) -> list[Event]:
        return [event for event in self.run.events if event.what in (START, REWIND)]

    @cached_property
    def skipped(self) -> int:
        """Steps of the curve that did not change the weights, including overflows of --fp16."""
        return int(np.nansum(self.run.column("skipped_iterations")))

    @cached_property
    def overflows(self) -> int:
        """Steps that the loss scale skipped: all skipped steps except the bad steps in the file."""
        iterations = self.run.steps["iteration"]
        last = int(iterations[-1]) if len(iterations) else 0
        if self._rolls_back:
            return self.skipped
        return max(0, self.skipped - sum(step.iteration <= last for step in self.run.skipped))

    @property
    def _rolls_back(self) -> bool:
        return self.run.config.get("training", {}).get("on_bad_step") == "rollback"

    @cached_property
    def wall_seconds(self) -> float | None:
        """Seconds from the first sign of life to the last; None if the log has no times."""
        known = self._times
        return float(known[-1] - known[0]) if len(known) else None

    @cached_property
    def _times(self) -> Floats:
        """Times of all lines and events, in ascending order."""
        lines = self.run.column(SECONDS)
        every = np.concatenate([lines, [event.seconds for event in self.run.events]])
        return np.sort(every[np.isfinite(every)])

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of the steps that stayed in the curve, without evaluations, saves and repeated
        steps."""
        iterations = self.run.steps["iteration"]
        if not len(iterations):
            return 0.0
        counts = np.diff(iterations, prepend=0.0)
        return float(np.nansum(counts * self.run.column("elapsed_ms")) / 1e3)

    @cached_property
    def down_seconds(self) -> float:
        """Seconds between the last sign of life before a restart and that restart, summed."""
        return sum(seconds for _, seconds in self._downtimes)

    @property
    def _downtimes(self) -> Iterator[tuple[Event, float]]:
        for start in self.run.starts[1:]:
            place = int(np.searchsorted(self._times, start.seconds))
            if place:
                yield start, float(start.seconds - self._times[place - 1])

    @cached_property
    def listed(self) -> tuple[Incident, ...]:
        """All incidents in order of time. Those without a time come first."""
        every = [*self._told(), *self._left_out(), *self._gaps()]
        listed = [replace(entry, words=without_secrets(entry.words)) for entry in every]
        known = [entry.seconds for entry in listed if entry.seconds is not None]
        first = min(known, default=0.0)
        return tuple(
            sorted(listed, key=lambda entry: first if entry.seconds is None else entry.seconds)
        )

    def _told(self) -> Iterator[Incident]:
        """Yield the incidents of events. A process whose end is missing was killed."""
        down = {id(start): seconds for start, seconds in self._downtimes}
        before: Event | None = None
        ended = True
        for event in self.run.events:
            details = event.details
            iteration = details.get("iteration")
            at = iteration if isinstance(iteration, int) else None
            if event.what == START:
                if before is not None and not ended:
                    words = "nothing was said at its end: killed, or its machine failed"
                    yield Incident(event.seconds, None, "error", words)
                words = "; ".join(_start_words(event, before, down.get(id(event))))
                yield Incident(event.seconds, at, "restart" if before else "start", words)
                before = event
                ended = False
            elif event.what == REWIND:
                again = counted(max(0, details["reached"] - details["iteration"]), "step")
                words = f"back to iteration {details['iteration']:,}; {again} done again"
                yield Incident(event.seconds, at, "rollback", words)
            elif event.what == FAULT:
                yield Incident(event.seconds, None, "fault", details["words"])
            elif event.what == NOT_FINITE:
                fate = "kept and marked" if details.get("kept") else "not kept"
                words = f"{details['path']} is {fate}: not finite: {details['words']}"
                yield Incident(event.seconds, at, "fault", words)
            elif event.what == END:
                ended = True
                error = details.get("error")
                words = f"ended: {error if error is not None else details.get('reason')}"
                yield Incident(event.seconds, at, "end" if error is None else "error", words)

    @property
    def is_open(self) -> bool:
        """Whether the last process has not said that it came to its end."""
        ends = [event.what for event in self.run.events if event.what in (START, END)]
        return bool(ends) and ends[-1] == START

    def _left_out(self) -> Iterator[Incident]:
        for step in self.run.skipped:
            samples = f"samples {step.first_sample:,} to {step.last_sample:,} are left out"
            words = f"{step.reason} {step.value:.6g}: {samples}"
            yield Incident(self._time_at(step.iteration), step.iteration, "skip", words)
        if self.overflows:
            words = f"{counted(self.overflows, 'step')} skipped while the loss scale fell (--fp16)"
            yield Incident(self._time_at(self._first_skipped), None, "skip", words)

    @property
    def _first_skipped(self) -> float:
        iterations = self.run.steps["iteration"][self.run.column("skipped_iterations") > 0]
        return float(iterations[0]) if len(iterations) else 0.0

    def _time_at(self, iteration: float) -> float | None:
        iterations = self.run.steps["iteration"]
        place = int(np.searchsorted(iterations, iteration))
        times = self.run.column(SECONDS)
        time = times[place] if place < len(times) else np.nan
        return float(time) if np.isfinite(time) else None

    def _gaps(self) -> Iterator[Incident]:
        """Yield long silences between two lines of the same process."""
        times = self.run.column(SECONDS)
        if len(times) < 3:
            return
        distances = np.diff(times)
        usual = float(np.nanmedian(distances))
        long = np.flatnonzero(distances > max(GAP_SECONDS, GAP_FACTOR * usual))
        moves = np.array([event.seconds for event in self._moves])
        silent = [
            place
            for place in long
            if not np.any((moves >= times[place]) & (moves <= times[place + 1]))
        ]
        for place in sorted(silent, key=lambda place: -distances[place])[:GAPS]:
            length = format_duration(float(distances[place]))
            words = f"no line for {length}, usually {format_duration(usual)}"
            iteration = int(self.run.steps["iteration"][place])
            yield Incident(float(times[place]), iteration, "gap", words)


def _start_words(start: Event, before: Event | None, down: float | None) -> Iterator[str]:
    """Yield descriptions of a start and of its differences from the start before."""
    details = start.details
    if details.get("resumes"):
        yield f"resumed from {details['resumes']}"
    elif details.get("weights"):
        yield f"began with the weights of {details['weights']}"
    else:
        yield "began with random weights"
    if before is None:
        yield f"{counted(details['world_size'], 'process', 'processes')}"
        return
    if down is not None:
        yield f"{format_duration(down)} after the last sign of life"
    again = details["reached"] - details["iteration"]
    if again > 0:
        reached = f"the log had come to {details['reached']:,}"
        yield f"{counted(again, 'step')} done again ({reached})"
    if details["world_size"] != before.details["world_size"]:
        yield f"{before.details['world_size']} processes before, {details['world_size']} now"
    for name, values in differing([before.details, details]).items():
        yield f"{name} {values[0]} before, {values[1]} now"


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by ``section.option``."""
    return {
        f"{section}.{name}": value
        for section, options in config.items()
        if isinstance(options, Mapping)
        for name, value in options.items()
    }


def differing(starts: list[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the options that differ between starts: by flag, one text for each start."""
    configs = [flat(start["config"]) for start in starts]
    names = dict.fromkeys(name for config in configs for name in config)
    return {
        flag(name.partition(".")[2]): [text(config.get(name)) for config in configs]
        for name in names
        if name not in NOT_COMPARED and len({text(config.get(name)) for config in configs}) > 1
    }


def text(value: object) -> str:
    """Return an option's value as text for people, without the secrets of URLs."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == [] or value == ():
        return "none"
    if isinstance(value, list | tuple):
        return " ".join(text(item) for item in value)
    return without_secrets(str(value))


def without_secrets(words: str) -> str:
    """Return a text with the users and the queries of its URLs removed. Pages are shared, and a
    signed URL is a key."""
    return _QUERY.sub(r"\1?...", _USER.sub("://...@", words))
