"""What a rank sent, how long it waited, and where it is: exact counts for tests and reports,
exposed time for the log, and notes for whoever looks for a rank that hangs.

Every thread of a rank writes here, and one that is never seen reads: a note is one assignment,
nothing is formatted, and a reader that comes at the wrong moment reads the note before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Protocol


class Note(Protocol):
    """Something under way that a timeline shows."""

    def end(self) -> None:
        """It is over; on a device, when its current stream has done what it was given so far."""


@dataclass
class Traffic:
    """Calls and payload bytes of one kind of collective on one axis. Bytes are those of the full
    (gathered) tensor."""

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
    """Host time spent waiting for communication. Meaningless on a GPU, where the host does not
    wait."""
    mark: Callable[[], Any] | None = None
    """When set: called before and after every wait, on the stream that waits."""
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    """What ``mark`` returned, in pairs: events, from which a caller learns how long a device
    waited."""
    timeline: Callable[[str, object], Note] | None = None
    """When set: begins a note of an ``action`` of the schedule, a ``message`` (axis, operation,
    bytes, bucket or None), a ``wait`` or the ``update`` of a bucket."""
    computing: int = field(default_factory=get_ident)
    """The thread that computes, by default the one that makes this: what others wait for is not
    exposed."""

    iteration: int = 0
    """The step under way, 1-based; 0 before the first."""
    evaluating: bool = False
    """Whether the action belongs to an evaluation."""
    doing: object = "the start"
    """The action of the schedule under way, or words."""
    issued: object = None
    """What was last sent: an exchange, or axis and operation."""
    waits: dict[int, tuple[object, float]] = field(default_factory=dict)
    """What each waiting thread waits for, and since when (``time.perf_counter``)."""

    def count(self, axis: str, operation: str, size: int, bucket: int | None = None) -> Note | None:
        """One collective of ``size`` bytes is issued. Its note, where there is a timeline."""
        self.issued = axis, operation
        traffic = self.traffic.setdefault((axis, operation), Traffic())
        traffic.calls += 1
        traffic.bytes += size
        return self.begin("message", (axis, operation, size, bucket))

    def begin(self, kind: str, what: object) -> Note | None:
        """Begin a note, where there is a timeline."""
        return None if self.timeline is None else self.timeline(kind, what)

    def event(self, text: str) -> None:
        """Note something in issue order, when a test asked for it."""
        if self.events is not None:
            self.events.append(text)

    @contextmanager
    def waiting(self, what: object) -> Iterator[None]:
        """This thread waits for ``what``, which says so when it is printed."""
        thread = get_ident()
        outer = self.waits.get(thread)
        self.waits[thread] = what, time.perf_counter()
        try:
            yield
        finally:
            if outer is None:
                del self.waits[thread]
            else:
                self.waits[thread] = outer

    @contextmanager
    def exposed(self, what: object) -> Iterator[None]:
        """Time spent here, ``waiting`` for something, counts as exposed communication if the thread
        is the one that computes."""
        if get_ident() != self.computing:
            with self.waiting(what):
                yield
            return
        begin = time.perf_counter()
        mark = self.mark
        note = self.begin("wait", what)
        before = mark() if mark is not None else None
        try:
            with self.waiting(what):
                yield
        finally:
            self.exposed_seconds += time.perf_counter() - begin
            if mark is not None:
                self.marks.append((before, mark()))
            if note is not None:
                note.end()

    def take_exposed_seconds(self) -> float:
        """Exposed seconds since the last call."""
        seconds = self.exposed_seconds
        self.exposed_seconds = 0.0
        return seconds
