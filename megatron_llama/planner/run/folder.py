"""Reads the files in a run's folder: the curve, the events, the steps that were left out."""

from __future__ import annotations

import math
import os
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
from megatron_llama.config.limits import LARGEST_COLUMNS, LARGEST_LINE
from megatron_llama.config.lines import bounded_lines, parse_json
from megatron_llama.errors import CheckpointError, DataError
from megatron_llama.metrics import events, log
from megatron_llama.metrics.events import END, FAULT, NOT_FINITE, REWIND, SAVED, START

SKIPPED = "skipped.jsonl"
SHOWN = 60
"""Characters shown of a line that is not understood."""
LOSSES = ("lm_loss", "loss")
"""Names of the training loss. A log has one of them."""
TIME = "time"
SECONDS = "seconds"
"""The column with the time of a line, in seconds since 1970 on the clock of the run's machine."""
BEYOND = 1e100
"""Numbers of at least this size were not written by a trainer."""
CHUNK = 4096
"""Lines that are turned into arrays together."""
CHUNK_CELLS = 200_000
"""Values that are turned into arrays together: one line may have a million names."""
SPARSE_CELLS = 10_000_000
"""Most cells of all columns, empty ones included, unless half of them or more have values."""
KEPT_PROBLEMS = 1_000
LARGEST_COUNT = 2**53 - 1
"""Largest count that is exact as fp64, the dtype of columns."""
EARLIEST = 62_135_596_800.0
"""Seconds from the year 1, where Python's dates begin, to 1970."""
MIDDLE = (253_402_300_799.0 - EARLIEST) / 2
"""The middle of Python's dates, in seconds since 1970."""
_EPOCH = datetime(1970, 1, 1)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Event:
    """A line of ``events.jsonl``."""

    what: str
    seconds: float
    """Time of the event, as in the column SECONDS."""
    details: Mapping[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Contents of a run's folder. Columns have NaN where a line has null or no such number."""

    name: str
    """Name that the user gave."""
    steps: Mapping[str, Floats]
    """The lines of training, by column. ``iteration`` grows."""
    evaluations: Mapping[str, Floats]
    """The lines of evaluations, by column."""
    events: tuple[Event, ...]
    """Events in the order in which they were written."""
    skipped: tuple[Skipped, ...]
    """Bad steps that were left out."""
    checkpoint: Mapping[str, Any]
    """Configuration and torch version from the newest checkpoint, for runs without events."""
    problems: tuple[str, ...]
    """Lines that were not understood: file, line number and reason."""

    @cached_property
    def starts(self) -> tuple[Event, ...]:
        """The events of starts."""
        return tuple(event for event in self.events if event.what == START)

    @property
    def config(self) -> Mapping[str, Mapping[str, Any]]:
        """The newest configuration, section by section; empty if none is known."""
        config = self.starts[-1].details["config"] if self.starts else self.checkpoint.get("config")
        return config if isinstance(config, dict) and _is_config(config) else {}

    @property
    def loss(self) -> str:
        """The column of the training loss."""
        return next((name for name in LOSSES if name in self.steps), LOSSES[0])

    def column(self, name: str) -> Floats:
        """Return a column of the steps; all NaN if the log does not have it."""
        column = self.steps.get(name)
        return np.full(len(self.steps["iteration"]), np.nan) if column is None else column


def read_run(name: str) -> RunFolder:
    """Return the contents of a run's folder. ``name`` is the folder, its ``log.jsonl``, or a URL
    that was given to --save, whose log is in a local folder. Raises DataError if nothing can be
    shown."""
    path = local_folder(name)
    folder = path.parent if path.is_file() else path
    problems = _Problems()
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
        unread = f": {problems.kept[0]}" if problems.kept else ""
        do = "give the folder of a run that has trained a step"
        raise DataError(name, got=f"no line that is understood{unread}", expected="a log", do=do)
    skipped = tuple(_skipped(files[SKIPPED], problems))
    checkpoint = {} if happened else _newest_meta(folder, problems)
    return RunFolder(name, steps, evaluations, happened, skipped, checkpoint, problems.said())


class _Problems:
    """Collects lines that are not understood, up to a limit: every line of a file may be one."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self._left_out = 0

    def add(self, problem: str) -> None:
        """Append a problem."""
        if len(self.kept) < KEPT_PROBLEMS:
            self.kept.append(problem)
        else:
            self._left_out += 1

    def said(self) -> tuple[str, ...]:
        """Return the problems that were kept, and the number of the others."""
        more = f"and {self._left_out:,} more lines"
        return (*self.kept, more) if self._left_out else tuple(self.kept)


class _Columns:
    """Collects numbers by name, with a row for each line. Many lines at a time are turned into
    arrays, since a log may have a million lines."""

    def __init__(self) -> None:
        self._lines: list[Mapping[str, Any]] = []
        self._cells = 0
        """Number of values in these lines."""
        self._pieces: dict[str, list[tuple[int, Floats]]] = {}
        """Arrays of each column, each with the row at which it begins."""
        self._rows = 0
        self.names_left_out = 0
        """Number of columns that are not kept because there are too many."""

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append a line."""
        self._lines.append(entry)
        self._cells += len(entry)
        if len(self._lines) == CHUNK or self._cells > CHUNK_CELLS:
            self._flush()

    def _flush(self) -> None:
        lines = self._lines
        names = dict.fromkeys(name for line in lines for name in line)
        for name in names:
            if name not in self._pieces and len(self._pieces) == LARGEST_COLUMNS:
                self.names_left_out += 1
                continue
            values = [line.get(name) for line in lines]
            numbers = _times(values) if name == TIME else _numbers(values)
            if np.isfinite(numbers).any() or name == "iteration":
                self._pieces.setdefault(name, []).append((self._rows, numbers))
        self._rows += len(lines)
        self._lines = []
        self._cells = 0

    def arrays(self) -> dict[str, Floats]:
        """Return all columns that have a number, in equal lengths, and always ``iteration``."""
        self._flush()
        columns = {"iteration": np.zeros(0)}
        cells = sum(len(numbers) for pieces in self._pieces.values() for _, numbers in pieces)
        for name, pieces in self._pieces.items():
            # A column with few numbers takes as much memory as a full one.
            if len(columns) * self._rows > max(SPARSE_CELLS, 2 * cells):
                self.names_left_out += 1
                continue
            whole = np.full(self._rows, np.nan)
            for row, numbers in pieces:
                whole[row : row + len(numbers)] = numbers
            columns[SECONDS if name == TIME else name] = whole
        return columns


def _numbers(values: Sequence[object]) -> Floats:
    """Return values as fp64, with NaN for everything that is not a number."""
    plain = all(type(value) is int or type(value) is float for value in values)
    array = np.array(values) if plain else None
    if array is None or array.dtype.kind not in "if":
        known = [value if _is_number(value) else math.nan for value in values]
        array = np.array(known, np.float64)
    numbers = array.astype(np.float64)
    return np.where(np.abs(numbers) < BEYOND, numbers, np.nan)


def _is_number(value: object) -> bool:
    """Whether a trainer can have written this number."""
    return type(value) in (int, float) and abs(value) < BEYOND  # type: ignore[arg-type]


def _is_count(value: object) -> bool:
    """Whether this is a number of steps, samples or processes."""
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def _times(values: Sequence[object]) -> Floats:
    """Return times of day as seconds since 1970, with NaN for everything else."""
    # numpy reads the trainer's format at once. A million calls of ``_seconds`` would be slow.
    if all(isinstance(value, str) and len(value) == len("2026-01-01T00:00:00") for value in values):
        with suppress(ValueError):
            seconds = np.array(values, "datetime64[s]").astype(np.float64)
            return np.where(np.abs(seconds - MIDDLE) < MIDDLE + EARLIEST, seconds, np.nan)
    known = (_seconds(value) for value in values)
    return np.array([math.nan if seconds is None else seconds for seconds in known])


def _curves(path: Path, problems: _Problems) -> tuple[Mapping[str, Floats], Mapping[str, Floats]]:
    """Return the columns of training lines and the columns of evaluation lines."""
    steps = _Columns()
    evaluations = _Columns()
    last = {True: -1, False: -1}
    for number, entry in _entries(path, problems):
        iteration: Any = entry.get("iteration")
        evaluated = "validation_loss" in entry
        where = f"{path.name}:{number}"
        known = _is_number(entry["validation_loss"]) if evaluated else "learning_rate" in entry
        if not (_is_count(iteration) and known):
            problems.add(f"{where}: no line of a step or an evaluation")
        elif iteration <= last[evaluated]:
            before = last[evaluated]
            problems.add(f"{where}: iteration {iteration} comes after iteration {before}")
        else:
            last[evaluated] = iteration
            (evaluations if evaluated else steps).add(entry)
    arrays = steps.arrays(), evaluations.arrays()
    names = steps.names_left_out + evaluations.names_left_out
    if names:
        most = f"{LARGEST_COLUMNS:,} columns"
        problems.add(f"{path.name}: {names:,} names of numbers are left out, beyond {most}")
    return arrays


def _entries(path: Path, problems: _Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON objects of a file with their line numbers. Other lines are problems."""
    if not path.is_file():
        if os.path.lexists(path):
            problems.add(f"{path.name}: neither a file nor a link to one")
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(
            path, got=error.strerror, expected="a file that can be read", do="mend its permissions"
        ) from error
    with file:
        for number, line in enumerate(bounded_lines(file), 1):
            if line is None:
                problems.add(f"{path.name}:{number}: a line of more than {LARGEST_LINE:,} bytes")
                continue
            try:
                entry = parse_json(line)
            except ValueError:
                entry = None
            if isinstance(entry, dict):
                yield number, entry
            elif not line.endswith(b"\n"):
                problems.add(f"{path.name}:{number}: not finished; the run may be writing it")
            elif line.strip():
                text = line.decode(errors="replace").strip()
                shown = text[:SHOWN] + ("..." if len(text) > SHOWN else "")
                problems.add(f"{path.name}:{number}: no JSON object: {shown}")


def _seconds(time: object) -> float | None:
    """Return a time as seconds since 1970; None if it is not a time."""
    if not isinstance(time, str):
        return None
    try:
        return (datetime.fromisoformat(time).replace(tzinfo=None) - _EPOCH).total_seconds()
    except ValueError:
        return None


def time_of(seconds: float) -> str:
    """Return a value of the column SECONDS as day and time."""
    return f"{_EPOCH + timedelta(seconds=math.floor(seconds)):%Y-%m-%d %H:%M:%S}"


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_config(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(section, dict) for section in value.values())


def _are_datasets(value: object) -> bool:
    """Whether a start's ``data`` has the form that ``train/setup/facts.py`` writes."""
    return isinstance(value, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and (entry.get("samples") is None or _is_count(entry["samples"]))
        and (entry.get("weight") is None or (_is_number(entry["weight"]) and entry["weight"] >= 0))
        for entry in value
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
"""Checks of the keys that each kind of event must have."""
_MORE: _Needs = MappingProxyType(
    {
        "data": _are_datasets,
        "versions": lambda value: isinstance(value, dict),
        "device_memory": lambda value: value is None or _is_count(value),
        "processes_per_machine": _is_count,
    }
)
"""Checks of the keys that only starts of some versions have."""


def _events(path: Path, problems: _Problems) -> Iterator[Event]:
    for number, entry in _entries(path, problems):
        where = f"{path.name}:{number}"
        what = entry.get("event")
        time = _seconds(entry.get("time"))
        needs = _KINDS.get(what) if isinstance(what, str) else None
        if needs is None or time is None:
            problems.add(f"{where}: no event that this version knows")
            continue
        wrong = [key for key, fits in needs.items() if not fits(entry.get(key))]
        wrong += [key for key, fits in _MORE.items() if key in entry and not fits(entry[key])]
        if wrong:
            problems.add(f"{where}: {what} whose {', '.join(wrong)} cannot be used")
        else:
            assert isinstance(what, str)
            yield Event(what, time, entry)


def _skipped(path: Path, problems: _Problems) -> Iterator[Skipped]:
    for number, entry in _entries(path, problems):
        try:
            step = Skipped(**{**entry, "value": float(entry["value"])})
        except (KeyError, TypeError, ValueError, OverflowError):
            step = None
        counts = () if step is None else (step.iteration, step.first_sample, step.last_sample)
        if step is None or not all(map(_is_count, counts)) or not isinstance(step.reason, str):
            problems.add(f"{path.name}:{number}: no step that was left out")
        else:
            yield step


def _newest_meta(folder: Path, problems: _Problems) -> Mapping[str, Any]:
    """Return ``config`` and ``torch_version`` of the newest readable checkpoint, or nothing."""
    if not any(folder.glob("iter_*")):
        return {}
    # Imported here because these import torch, which is only needed for checkpoints.
    from megatron_llama.checkpoint.checkpoint_dir import complete
    from megatron_llama.checkpoint.meta import parse_meta

    for checkpoint in reversed(complete(folder).values()):
        try:
            meta = parse_meta(checkpoint)
        except CheckpointError as error:
            problems.add(f"{error}")
        else:
            return {"config": meta.config, "torch_version": meta.torch_version}
    return {}
