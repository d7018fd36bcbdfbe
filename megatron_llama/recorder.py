"""What a rank sent and how long it waited: exact counts for tests and reports, exposed time for the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Traffic:
    """Calls and payload bytes of one kind of collective on one axis. Bytes are those of the full (gathered) tensor."""

    calls: int = 0
    bytes: int = 0


@dataclass
class Recorder:
    """One per rank, shared by all its axes."""

    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    """By (axis, operation)."""
    events: list[str] | None = None
    """When a list: what happened, in issue order. Off by default."""
    exposed_seconds: float = 0.0
    """Host time spent waiting for communication. Meaningless on a GPU, where the host does not wait."""
    mark: Callable[[], Any] | None = None
    """When set: called before and after every wait, on the stream that waits."""
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    """What ``mark`` returned, in pairs: events, from which a caller learns how long a device waited."""

    def count(self, axis: str, operation: str, size: int) -> None:
        """One collective of ``size`` bytes was issued."""
        traffic = self.traffic.setdefault((axis, operation), Traffic())
        traffic.calls += 1
        traffic.bytes += size

    def event(self, text: str) -> None:
        """Note something in issue order, when a test asked for it."""
        if self.events is not None:
            self.events.append(text)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Time spent here counts as exposed communication."""
        begin, mark = time.perf_counter(), self.mark
        before = mark() if mark is not None else None
        try:
            yield
        finally:
            self.exposed_seconds += time.perf_counter() - begin
            if mark is not None:
                self.marks.append((before, mark()))

    def take_exposed_seconds(self) -> float:
        """Exposed seconds since the last call."""
        seconds, self.exposed_seconds = self.exposed_seconds, 0.0
        return seconds
