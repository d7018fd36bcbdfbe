"""The file of ``--record-timeline``: what every rank did when, for chrome://tracing,
ui.perfetto.dev and ``plan compare``.

JSON in Chrome's format: a process for each rank, a thread for each lane. What overlaps within a
lane (two gathers under way) gets a second thread of that name, so no viewer has to guess. Under a
key of its own the file has the run's configuration.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_llama.errors import ConfigError, describe

KEY = "megatron_llama"
FORMAT = 1
"""Where the file says what it is, and its version."""
ITERATIONS = "iterations"
COMPUTE = "compute"
WAITS = "waits"
UPDATES = "updates"
OTHER = "other"
PIPELINE = "pipeline"
GATHERS = "gathers"
REDUCTIONS = "reductions"
LANES = (ITERATIONS, COMPUTE, WAITS, "tp", "cp", PIPELINE, GATHERS, REDUCTIONS, UPDATES, OTHER)
"""From top to bottom."""
AXIS_LANES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("tp", "kv"), "tp"),
        "cp": "cp",
        **dict.fromkeys(("pp", "pp_backward", "pp_return", "pp_backward_return"), PIPELINE),
        "dp_gather": GATHERS,
        **dict.fromkeys(("dp", "dp_shard", "dp_replica", "embedding"), REDUCTIONS),
    }
)
"""Whose messages a lane shows, by axis of the mesh; others are in ``other``."""
MICRO = 1e6


@dataclass(frozen=True)
class Span:
    """Something that a rank did, sent or waited for."""

    rank: int
    lane: str
    name: str
    begin: float
    """Seconds since the recording began, by the first rank's clock."""
    end: float
    details: Mapping[str, int | str] = field(default_factory=dict)
    """``iteration``; of an action ``op``, ``stage`` and ``microbatch``; of a message ``axis``,
    ``operation``, ``bytes`` and, in the engine, ``bucket``; of a wait ``on``, the lane whose
    messages it waits for; ``evaluation`` where it belongs to one."""

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.begin


@dataclass(frozen=True)
class Recorded:
    """The content of a file."""

    config: Mapping[str, Any]
    """The configuration of the run, section by section."""
    ranks: int
    per_node: int
    """Ranks on the fullest machine."""
    device: str
    """What the vendor calls it."""
    host: bool
    """Whether the host itself computed."""
    memory: int
    """Bytes of the device."""
    clock_error: float
    """Seconds by which the clocks of two ranks may be apart."""
    labels: tuple[str, ...]
    """Of every rank: its place on the axes."""
    spans: tuple[Span, ...]


def write_timeline(path: Path, recorded: Recorded) -> None:
    """Write the file, compressed where its name ends in ``.gz``. Raises OSError."""
    meta = {
        name: getattr(recorded, name)
        for name in (
            "ranks",
            "per_node",
            "device",
            "host",
            "memory",
            "clock_error",
            "labels",
            "config",
        )
    }
    content = {
        KEY: {"format": FORMAT, **meta},
        "displayTimeUnit": "ms",
        "traceEvents": list(_events(recorded)),
    }
    data = json.dumps(content, separators=(",", ":")).encode()
    # Without a time in its header the file depends on its content alone.
    path.write_bytes(gzip.compress(data, 5, mtime=0) if path.suffix == ".gz" else data)


def _events(recorded: Recorded) -> Iterator[dict[str, Any]]:
    for rank, label in enumerate(recorded.labels):
        yield _named(
            "process_name", rank, 0, name=f"rank {rank}: {label}" if label else f"rank {rank}"
        )
        yield _named("process_sort_index", rank, 0, sort_index=rank)
    order = sorted(
        recorded.spans, key=lambda span: (span.rank, LANES.index(span.lane), span.begin, span.end)
    )
    for rank, own in groupby(order, key=lambda span: span.rank):
        thread = 0
        for lane, spans in groupby(own, key=lambda span: span.lane):
            for number, track in enumerate(tracks(list(spans))):
                thread += 1
                yield _named(
                    "thread_name",
                    rank,
                    thread,
                    name=lane if number == 0 else f"{lane} {number + 1}",
                )
                yield _named("thread_sort_index", rank, thread, sort_index=thread)
                yield from (_complete(span, thread) for span in track)


def _named(what: str, rank: int, thread: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _complete(span: Span, thread: int) -> dict[str, Any]:
    begin = round(span.begin * MICRO, 3)
    end = round(span.end * MICRO, 3)
    times = {"ts": begin, "dur": round(end - begin, 3)}
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": span.rank,
        "tid": thread,
        **times,
        "args": dict(span.details),
    }


def tracks(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans in order of their beginning, shared out so that nothing overlaps within a track: as few
    tracks as that takes."""
    found: list[list[Span]] = []
    for span in spans:
        # In the units of the file, so that what is written does not overlap either.
        free = (
            track
            for track in found
            if round(track[-1].end * MICRO, 3) <= round(span.begin * MICRO, 3)
        )
        track = next(free, None)
        if track is None:
            found.append([span])
        else:
            track.append(span)
    return found


def read_timeline(path: Path) -> Recorded:
    """The content of a file. Raises ConfigError for anything that is not a whole one of this
    version."""
    content = _read_object(path)
    meta = content.get(KEY)
    if not isinstance(meta, dict) or "format" not in meta:
        do = "give a file that pretrain --record-timeline has written; traces of --profile have nothing to compare"
        raise ConfigError(
            describe(
                str(path), got="no timeline of this program", expected=f"JSON with {KEY}", do=do
            )
        )
    if meta["format"] != FORMAT:
        do = "record it again with this version"
        raise ConfigError(describe(f"{path} format", got=meta["format"], expected=FORMAT, do=do))
    try:
        events = [event for event in content["traceEvents"] if event["ph"] == "X"]
        return Recorded(
            config=dict(meta["config"]),
            ranks=int(meta["ranks"]),
            per_node=int(meta["per_node"]),
            device=str(meta["device"]),
            host=bool(meta["host"]),
            memory=int(meta["memory"]),
            clock_error=float(meta["clock_error"]),
            labels=tuple(map(str, meta["labels"])),
            spans=tuple(map(_span, events)),
        )
    except (KeyError, TypeError, ValueError) as error:
        got = f"no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(
            describe(
                str(path), got=got, expected="what --record-timeline writes", do="record it again"
            )
        ) from None


def _span(event: Mapping[str, Any]) -> Span:
    begin = float(event["ts"])
    lane = str(event["cat"])
    if lane not in LANES:
        raise ValueError(f"a lane {lane}")
    end = begin + float(event["dur"])
    return Span(
        int(event["pid"]),
        lane,
        str(event["name"]),
        begin / MICRO,
        end / MICRO,
        dict(event.get("args", {})),
    )


def _read_object(path: Path) -> dict[str, Any]:
    where = str(path)
    do = "give the file that pretrain --record-timeline has written, whole"
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as error:
        raise ConfigError(
            describe(where, got=error.strerror or error, expected="a readable timeline", do=do)
        ) from None
    except (ValueError, EOFError, zlib.error) as error:
        raise ConfigError(
            describe(where, got=f"no JSON ({error})", expected="a timeline", do=do)
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            describe(where, got=f"a JSON {type(content).__name__}", expected="a timeline", do=do)
        )
    return content


def union(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of the spans goes on."""
    total = 0.0
    until = float("-inf")
    for span in sorted(spans, key=lambda one: one.begin):
        total += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return total
