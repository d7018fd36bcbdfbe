"""The file of ``--record-timeline``: the timed actions of every rank, for chrome://tracing,
ui.perfetto.dev and ``plan compare``.

It is JSON in Chrome's trace event format: a process for each rank, a thread for each lane. Where
spans of a lane overlap (two gathers under way), the lane gets a second thread, because a viewer
expects the spans of a thread to be nested. The run's configuration has a key of its own.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_llama.config.fields import finite_number
from megatron_llama.config.limits import LARGEST_RANKS, LARGEST_TIMELINE, ROOM_OF_TIMELINE
from megatron_llama.config.lines import parse_json, require_regular
from megatron_llama.errors import ConfigError

KEY = "megatron_llama"
FORMAT = 1
"""The version of the file, which its own key marks as a timeline."""
ITERATIONS = "iterations"
COMPUTE = "compute"
WAITS = "waits"
UPDATES = "updates"
OTHER = "other"
PIPELINE = "pipeline"
GATHERS = "gathers"
REDUCTIONS = "reductions"
LANES = (
    *(ITERATIONS, COMPUTE, WAITS, "tp", "cp", "ep"),
    *(PIPELINE, GATHERS, REDUCTIONS, UPDATES, OTHER),
)
"""The lanes from top to bottom."""
AXIS_LANES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("tp", "kv"), "tp"),
        **dict.fromkeys(("cp", "cp_heads", "cp_keys"), "cp"),
        "ep": "ep",
        **dict.fromkeys(("pp", "pp_backward", "pp_return", "pp_backward_return"), PIPELINE),
        **dict.fromkeys(("dp_gather", "expert_dp_gather"), GATHERS),
        **dict.fromkeys(("dp", "dp_shard", "dp_replica", "embedding"), REDUCTIONS),
        **dict.fromkeys(("expert_dp", "expert_dp_shard", "expert_dp_replica"), REDUCTIONS),
    }
)
"""The lane of an axis's messages; those of other axes are in ``other``."""
_META: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "ranks": int,
        "per_node": int,
        "device": str,
        "host": bool,
        "memory": int,
        "clock_error": float,
        "labels": lambda labels: tuple(map(str, labels)),
        "config": dict,
    }
)
"""The fields of the run in the file, in order, with their readers."""


@dataclass(frozen=True)
class Span:
    """An action, a message or a wait of a rank."""

    rank: int
    lane: str
    name: str
    begin: float
    """Seconds since the recording began, by the first rank's clock."""
    end: float
    details: Mapping[str, int | str] = field(default_factory=dict)
    """``iteration``; of an action ``op``, ``stage`` and ``microbatch``; of a message ``axis``,
    ``operation``, ``bytes`` and, in the engine, ``bucket``; of a wait ``on``, the lane whose
    messages it waits for; ``evaluation`` if it belongs to one."""

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return self.end - self.begin


@dataclass(frozen=True)
class Recorded:
    """The content of a file."""

    config: Mapping[str, Any]
    """The configuration of the run, section by section."""
    ranks: int
    per_node: int
    """Ranks on the machine with most of them."""
    device: str
    """The vendor's name of the device."""
    host: bool
    """Whether the host itself computed."""
    memory: int
    """Bytes of the device."""
    clock_error: float
    """Seconds by which the clocks of two ranks may differ."""
    labels: tuple[str, ...]
    """The place of every rank on the axes."""
    spans: tuple[Span, ...]


def write_timeline(path: Path, recorded: Recorded) -> None:
    """Write the file, compressed if its name ends in ``.gz``. Raises OSError."""
    content = {
        KEY: {"format": FORMAT, **{name: getattr(recorded, name) for name in _META}},
        "displayTimeUnit": "ms",
        "traceEvents": list(_events(recorded)),
    }
    data = json.dumps(content, separators=(",", ":")).encode()
    # No time in the header: the file depends only on its content.
    path.write_bytes(gzip.compress(data, 5, mtime=0) if path.suffix == ".gz" else data)


def _events(recorded: Recorded) -> Iterator[dict[str, Any]]:
    def meta(what: str, rank: int, thread: int, **args: object) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}

    for rank, label in enumerate(recorded.labels):
        yield meta(
            "process_name", rank, 0, name=f"rank {rank}: {label}" if label else f"rank {rank}"
        )
        yield meta("process_sort_index", rank, 0, sort_index=rank)
    order = sorted(
        recorded.spans, key=lambda span: (span.rank, LANES.index(span.lane), span.begin, span.end)
    )
    for rank, own in groupby(order, key=lambda span: span.rank):
        thread = 0
        for lane, spans in groupby(own, key=lambda span: span.lane):
            for number, track in enumerate(tracks(spans), 1):
                thread += 1
                yield meta(
                    "thread_name", rank, thread, name=lane if number == 1 else f"{lane} {number}"
                )
                yield meta("thread_sort_index", rank, thread, sort_index=thread)
                for span in track:
                    begin = _microseconds(span.begin)
                    yield {
                        "ph": "X",
                        "name": span.name,
                        "cat": span.lane,
                        "pid": rank,
                        "tid": thread,
                        "ts": begin,
                        "dur": round(_microseconds(span.end) - begin, 3),
                        "args": dict(span.details),
                    }


def _microseconds(seconds: float) -> float:
    """Return a time in the unit of the file."""
    return round(seconds * 1e6, 3)


def tracks(spans: Iterable[Span]) -> list[list[Span]]:
    """Divide spans, given in order of their beginning, into as few tracks without overlap as
    possible."""
    filled: list[list[Span]] = []
    for span in spans:
        # Times are compared in the units of the file, so that the written spans do not overlap
        # either.
        begin = _microseconds(span.begin)
        free = (track for track in filled if _microseconds(track[-1].end) <= begin)
        track = next(free, None)
        if track is None:
            filled.append([span])
        else:
            track.append(span)
    return filled


def read_timeline(path: Path) -> Recorded:
    """Return the content of a file. Raises ConfigError for anything but a complete file of this
    version."""
    do = "give the file that pretrain --record-timeline has written, whole"
    try:
        content = parse_json(_unpacked(path))
    except OSError as error:
        got = error.strerror or error
        raise ConfigError(path, got=got, expected="a readable timeline", do=do) from None
    except (ValueError, EOFError, zlib.error) as error:
        raise ConfigError(path, got=f"no JSON ({error})", expected="a timeline", do=do) from None
    if not isinstance(content, dict):
        got = f"a JSON {type(content).__name__}"
        raise ConfigError(path, got=got, expected="a timeline", do=do)
    meta = content.get(KEY)
    if not isinstance(meta, dict) or "format" not in meta:
        do = (
            "give a file that pretrain --record-timeline has written; "
            "traces of --profile have nothing to compare"
        )
        expected = f"JSON with {KEY}"
        raise ConfigError(path, got="no timeline of this program", expected=expected, do=do)
    if meta["format"] != FORMAT:
        do = "record it again with this version"
        raise ConfigError(f"{path} format", got=meta["format"], expected=FORMAT, do=do)
    try:
        events = [event for event in content["traceEvents"] if event["ph"] == "X"]
        run = {name: read(meta[name]) for name, read in _META.items()}
        ranks = run["ranks"]
        if not 1 <= ranks <= LARGEST_RANKS or not 1 <= run["per_node"] <= LARGEST_RANKS:
            raise ValueError(f"{ranks} ranks, {run['per_node']} on a machine")
        if finite_number(run["clock_error"]) is None:
            raise ValueError(f"a clock error of {run['clock_error']}")
        return Recorded(**run, spans=tuple(map(_span, events)))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        got = f"no {error}" if isinstance(error, KeyError) else str(error)
        expected = "what --record-timeline writes"
        raise ConfigError(path, got=got, expected=expected, do="record it again") from None


def _unpacked(path: Path) -> bytes:
    """Return the content of a file, unpacked. Raises OSError, and ValueError for a packed file that
    becomes far larger than any timeline."""
    require_regular(path)
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if not packed:
        return path.read_bytes()
    most = LARGEST_TIMELINE * path.stat().st_size + ROOM_OF_TIMELINE
    with gzip.open(path) as unpacked:
        data: bytes = unpacked.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it unpacks to more than {most:,} bytes")
    return data


def _span(event: Mapping[str, Any]) -> Span:
    begin = float(event["ts"])
    end = begin + float(event["dur"])
    if not math.isfinite(begin) or not math.isfinite(end) or end < begin:
        raise ValueError(f"a span from {begin} to {end}")
    if not 0 <= int(event["pid"]) < LARGEST_RANKS:
        raise ValueError(f"a span of rank {event['pid']}")
    lane = str(event["cat"])
    if lane not in LANES:
        raise ValueError(f"a lane {lane}")
    details = dict(event.get("args", {}))
    return Span(int(event["pid"]), lane, str(event["name"]), begin / 1e6, end / 1e6, details)


def union(spans: Sequence[Span]) -> float:
    """Return the seconds that are covered by at least one span."""
    total = 0.0
    until = float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return total
