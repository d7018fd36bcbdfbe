"""Reads what a run has left in its folder: the curve, the events, the steps that were left out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_llama.checkpoint.history import Skipped
from megatron_llama.checkpoint.storage_paths import local_folder
from megatron_llama.errors import DataError
from megatron_llama.metrics import events, log
from megatron_llama.metrics.events import END, FAULT, NOT_FINITE, REWIND, SAVED, START

SKIPPED = "skipped.jsonl"
SHOWN = 60
"""Characters of a line that is not understood."""
LOSSES = ("lm_loss", "loss")
"""Names of the training loss, of which a log has one."""
TIME = "time"
SECONDS = "seconds"
"""The column with the time of a line, in seconds since 1970 on the clock of the run's machine."""
BEYOND = 1e100
"""A number as large as this is none that a trainer has written."""
CHUNK = 4096
"""Lines that are turned into arrays together."""
_EPOCH = datetime(1970, 1, 1)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Event:
    """A line of ``events.jsonl``."""

    what: str
    seconds: float
    """Its time of day, as in the column SECONDS."""
    details: Mapping[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Everything that was understood. Columns have NaN where a line has null or no such number."""

    name: str
    """As the user called it."""
    steps: Mapping[str, Floats]
    """The lines of training, by column. ``iteration`` grows."""
    evaluations: Mapping[str, Floats]
    """The lines of evaluations, by column."""
    events: tuple[Event, ...]
    """In the order in which they were written."""
    skipped: tuple[Skipped, ...]
    """Bad steps that were left out."""
    checkpoint: Mapping[str, Any]
    """What the newest checkpoint keeps of the configuration, for runs without events; or empty."""
    problems: tuple[str, ...]
    """What was not understood: file, line, and why."""

    @cached_property
    def starts(self) -> tuple[Event, ...]:
        """The events of starts."""
        return tuple(event for event in self.events if event.what == START)

    @property
    def config(self) -> Mapping[str, Mapping[str, Any]]:
        """The newest configuration, section by section; empty if none is known."""
        found = self.starts[-1].details["config"] if self.starts else self.checkpoint.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def loss(self) -> str:
        """The column of the training loss."""
        return next((name for name in LOSSES if name in self.steps), LOSSES[0])

    def column(self, name: str) -> Floats:
        """A column of the steps; NaN where the log has none."""
        found = self.steps.get(name)
        return np.full(len(self.steps["iteration"]), np.nan) if found is None else found


def read_run(name: str) -> RunFolder:
    """Read the folder of a run, or its ``log.jsonl``; of a URL that was given to --save, the folder
    here with its log. Raises DataError where nothing can be shown."""
    path = local_folder(name)
    folder = path.parent if path.is_file() else path
    problems: list[str] = []
    files = {file: folder / file for file in (log.FILE_NAME, events.FILE_NAME, SKIPPED)}
    if path.is_file():
        files[log.FILE_NAME] = path
    if not files[log.FILE_NAME].is_file() and not files[events.FILE_NAME].is_file():
        got = f"neither {log.FILE_NAME} nor {events.FILE_NAME}" if folder.is_dir() else "no folder"
        do = "give the --save of a run that has begun"
        raise DataError(name, got=got, expected="the folder of a run", do=do)
    steps, evaluations = _curves(files[log.FILE_NAME], problems)
    happened = tuple(_events(files[events.FILE_NAME], problems))
    if not len(steps["iteration"]) and not len(evaluations["iteration"]) and not happened:
        unread = f": {problems[0]}" if problems else ""
        do = "give the folder of a run that has trained a step"
        raise DataError(name, got=f"no line that is understood{unread}", expected="a log", do=do)
    skipped = tuple(_skipped(files[SKIPPED], problems))
    checkpoint = {} if happened else _newest_meta(folder)
    return RunFolder(name, steps, evaluations, happened, skipped, checkpoint, tuple(problems))


class _Columns:
    """Numbers by name, a row for each line. A million lines take seconds: they are turned into
    arrays many at a time."""

    def __init__(self) -> None:
        self._lines: list[Mapping[str, Any]] = []
        self._chunks: dict[str, list[Floats]] = {}
        self._rows = 0

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append the numbers of a line."""
        self._lines.append(entry)
        if len(self._lines) == CHUNK:
            self._flush()

    def _flush(self) -> None:
        lines = self._lines
        names = dict.fromkeys(name for line in lines for name in line)
        for name in names:
            values = [line.get(name) for line in lines]
            numbers = _times(values) if name == TIME else _numbers(values)
            before = self._chunks.setdefault(name, [])
            known = sum(map(len, before))
            if known < self._rows:
                before.append(np.full(self._rows - known, np.nan))
            before.append(numbers)
        self._rows += len(lines)
        self._lines = []

    def arrays(self) -> dict[str, Floats]:
        """Return all columns that have a number somewhere, equally long, and an ``iteration``."""
        self._flush()
        found = {"iteration": np.zeros(0)}
        for name, chunks in self._chunks.items():
            whole = np.concatenate(chunks)
            rest = np.full(self._rows - len(whole), np.nan)
            whole = np.concatenate([whole, rest]) if len(rest) else whole
            if np.isfinite(whole).any() or name == "iteration":
                found[SECONDS if name == TIME else name] = whole
        return found


def _numbers(values: Sequence[object]) -> Floats:
    """Numbers as they are, NaN for everything else."""
    found = np.array(values) if not any(isinstance(value, list) for value in values) else None
    if found is None or found.dtype.kind not in "if":
        known = [value if _is_number(value) else math.nan for value in values]
        found = np.array(known, np.float64)
    numbers = found.astype(np.float64)
    return np.where(np.abs(numbers) < BEYOND, numbers, np.nan)


def _is_number(value: object) -> bool:
    """Whether a trainer may have written this as a number."""
    return isinstance(value, int | float) and value is not True and abs(value) < BEYOND


def _is_count(value: object) -> bool:
    """Whether this is a number of steps, samples or processes."""
    return isinstance(value, int) and value is not True and 0 <= value < 2**53


def _times(values: Sequence[object]) -> Floats:
    """Seconds of times of day."""
    # A million times take seconds, one by one: numpy reads those that a trainer writes.
    if all(isinstance(value, str) and len(value) == len("2026-01-01T00:00:00") for value in values):
        with suppress(ValueError):
            return np.array(values, "datetime64[s]").astype(np.float64)
    known = (_seconds(value) for value in values)
    return np.array([math.nan if one is None else one for one in known])


def _curves(path: Path, problems: list[str]) -> tuple[Mapping[str, Floats], Mapping[str, Floats]]:
    """The columns of the lines of training and of those of evaluations."""
    steps = _Columns()
    evaluations = _Columns()
    last = {True: -1, False: -1}
    for number, entry in _entries(path, problems):
        iteration: Any = entry.get("iteration")
        evaluated = "validation_loss" in entry
        where = f"{path.name}:{number}"
        known = _is_number(entry["validation_loss"]) if evaluated else "learning_rate" in entry
        if not (_is_count(iteration) and known):
            problems.append(f"{where}: no line of a step or an evaluation")
        elif iteration <= last[evaluated]:
            before = last[evaluated]
            problems.append(f"{where}: iteration {iteration} comes after iteration {before}")
        else:
            last[evaluated] = iteration
            (evaluations if evaluated else steps).add(entry)
    return steps.arrays(), evaluations.arrays()


def _entries(path: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file with the numbers of their lines. What is none is a problem."""
    if not path.is_file():
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(
            path, got=error.strerror, expected="a file that can be read", do="mend its permissions"
        ) from error
    with file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
            except ValueError:
                entry = None
            if isinstance(entry, dict):
                yield number, entry
            elif not line.endswith(b"\n"):
                problems.append(f"{path.name}:{number}: not finished; the run may be writing it")
            elif line.strip():
                text = line.decode(errors="replace").strip()
                shown = text[:SHOWN] + ("..." if len(text) > SHOWN else "")
                problems.append(f"{path.name}:{number}: no JSON object: {shown}")


def _seconds(time: object) -> float | None:
    """The time of a line."""
    if not isinstance(time, str):
        return None
    try:
        return (datetime.fromisoformat(time).replace(tzinfo=None) - _EPOCH).total_seconds()
    except ValueError:
        return None


def time_of(seconds: float) -> str:
    """Return the day and time of a column SECONDS in words."""
    return f"{_EPOCH + timedelta(seconds=round(seconds)):%Y-%m-%d %H:%M:%S}"


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_config(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(part, dict) for part in value.values())


def _are_datasets(value: object) -> bool:
    """Whether this is what a start says of its data, as ``loop/facts.py`` gathers it."""
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("name"), str)
        and (one.get("samples") is None or _is_count(one["samples"]))
        and (one.get("weight") is None or (_is_number(one["weight"]) and one["weight"] >= 0))
        for one in value
    )


_Needs = Mapping[str, Callable[[object], bool]]
_KINDS: Mapping[str, _Needs] = MappingProxyType(
    {
        START: {
            "iteration": _is_count,
            "reached": _is_count,
            "world_size": _is_count,
            "config": _is_config,
        },
        REWIND: {"iteration": _is_count, "reached": _is_count},
        SAVED: {"path": _is_text},
        NOT_FINITE: {"path": _is_text, "words": _is_text},
        FAULT: {"words": _is_text},
        END: {},
    }
)
"""Events and what they need to be understood."""
_MORE: _Needs = MappingProxyType(
    {
        "data": _are_datasets,
        "versions": lambda value: isinstance(value, dict),
        "device_memory": lambda value: value is None or _is_count(value),
        "processes_per_machine": _is_count,
    }
)
"""What starts of some versions have as well."""


def _events(path: Path, problems: list[str]) -> Iterator[Event]:
    for number, entry in _entries(path, problems):
        where = f"{path.name}:{number}"
        what = entry.get("event")
        time = _seconds(entry.get("time"))
        needs = _KINDS.get(what) if isinstance(what, str) else None
        if needs is None or time is None:
            problems.append(f"{where}: no event that this version knows")
            continue
        wrong = [key for key, fits in needs.items() if not fits(entry.get(key))]
        wrong += [key for key, fits in _MORE.items() if key in entry and not fits(entry[key])]
        if wrong:
            problems.append(f"{where}: {what} whose {', '.join(wrong)} cannot be used")
        else:
            assert isinstance(what, str)
            yield Event(what, time, entry)


def _skipped(path: Path, problems: list[str]) -> Iterator[Skipped]:
    for number, entry in _entries(path, problems):
        try:
            found = Skipped(**{**entry, "value": float(entry["value"])})
        except (KeyError, TypeError, ValueError):
            found = None
        counts = () if found is None else (found.iteration, found.first_sample, found.last_sample)
        if found is None or not all(map(_is_count, counts)) or not isinstance(found.reason, str):
            problems.append(f"{path.name}:{number}: no step that was left out")
        else:
            yield found


def _newest_meta(folder: Path) -> Mapping[str, Any]:
    """What the newest checkpoint says of the run; empty if there is none that can be read."""
    for path in sorted(folder.glob("iter_*/meta.json"), reverse=True):
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return {}
