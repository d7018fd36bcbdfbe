"""The record of a rank: counts of messages for tests and reports, exposed communication time for
the log, and notes of its position for hang reports and timelines.

Every thread of a rank writes here, and the watch's thread reads at any moment. So a note is one
assignment of immutable values, and nothing is formatted when it is written."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Protocol
from weakref import WeakSet

from megatron_llama.engine.comm import device as devices


class Note(Protocol):
    """Something in progress that a timeline shows."""

    def end(self) -> None:
        """End the note now; on a device, after the work so far of the current stream."""


class Disconnects(Protocol):
    """Something that holds on to connections."""

    def disconnect(self) -> None:
        """Let go of them. The object cannot be used any more."""


@dataclass
class Traffic:
    """Calls of one operation on one axis, and their bytes. For a collective these are the bytes of
    the full (gathered) tensor."""

    calls: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Wait:
    """One wait of a thread."""

    what: object
    """The awaited thing, named by its ``str``."""
    since: float
    """A time of ``time.perf_counter``."""
    computes: bool
    """Whether the thread is one that computes. Other threads wait on its behalf."""


@dataclass
class Recorder:
    """The notes of one rank. All its axes share them."""

    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    """By (axis, operation)."""
    evaluation_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Those bytes of ``traffic`` that evaluations have issued."""
    events: list[str] | None = None
    """If a list, the events in the order of issue; tests set it."""
    exposed_seconds: float = 0.0
    """Time that the computing threads spent waiting for communication. It means nothing on a GPU,
    where the host does not wait."""
    mark: Callable[[], Any] | None = None
    """If set, called before and after every wait, on the stream that waits."""
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    """Results of ``mark`` before and after each wait: events that tell how long a device waited."""
    timeline: Callable[[str, object], Note] | None = None
    """If set, begins a note: of an ``action`` of the schedule, a ``message`` (axis, operation,
    bytes, bucket or None), a ``wait``, or the ``update`` of a bucket."""

    iteration: int = 0
    """The current step, 1-based; 0 before the first."""
    evaluating: bool = False
    """Whether the action belongs to an evaluation."""
    doing: object = "the start"
    """The current action of the schedule, or a description."""
    part: Hashable = None
    """The kind of part of a step that ``doing`` is; None if it is no part of a step, and may take
    as long as files take."""
    performed: set[Hashable] = field(default_factory=set)
    """The parts of steps that this rank has done before. The first time they compile kernels, and
    may take as long as that takes."""
    progress: int = 0
    """A count that grows with everything that this rank begins or sends. While it stands still,
    this rank makes no visible progress."""
    issued: object = None
    """The last message: an exchange, or axis and operation."""
    waits: dict[int, Wait] = field(default_factory=dict)
    """The current wait of each thread."""
    told: Callable[[str], None] | None = None
    """If set, called with the watch's words about ranks that hang or are gone, from any thread."""
    transfers: WeakSet[Disconnects] = field(default_factory=WeakSet, repr=False)
    """Holders of connections of gloo, which end only when all holders have let go."""

    def enter(self, doing: object, part: Hashable = None) -> None:
        """Note what this rank does from now on, and which kind of part of a step that is."""
        if self.part is not None:
            self.performed.add(self.part)
        self.part = part
        self.doing = doing
        self.progress += 1

    @contextmanager
    def outside_steps(self, words: str) -> Iterator[None]:
        """Mark a section of the loop as no part of a step: it may take as long as files take."""
        doing = self.doing
        self.evaluating = False
        self.enter(words)
        yield
        self.enter(doing)

    def tell(self, words: str) -> None:
        """Hand ``words`` about hanging or missing ranks to ``told``."""
        if self.told is not None:
            self.told(words)

    def count(self, axis: str, operation: str, size: int, bucket: int | None = None) -> Note | None:
        """Count one operation of ``size`` bytes that is issued now. Returns its note if a timeline
        is recorded."""
        self.issued = axis, operation
        self.progress += 1
        traffic = self.traffic.setdefault((axis, operation), Traffic())
        traffic.calls += 1
        traffic.bytes += size
        if self.evaluating:
            self.evaluation_bytes[axis, operation] += size
        return self.begin("message", (axis, operation, size, bucket))

    def begin(self, kind: str, what: object) -> Note | None:
        """Begin a note if a timeline is recorded."""
        return None if self.timeline is None else self.timeline(kind, what)

    def event(self, text: str) -> None:
        """Append to ``events``, if a test has asked for them."""
        if self.events is not None:
            self.events.append(text)

    @contextmanager
    def waiting(self, what: object) -> Iterator[None]:
        """Note, in a section, that this thread waits for ``what``, whose ``str`` names it."""
        thread = get_ident()
        outer = self.waits.get(thread)
        self.waits[thread] = Wait(what, time.perf_counter(), devices.computes())
        try:
            yield
        finally:
            if outer is None:
                del self.waits[thread]
            else:
                self.waits[thread] = outer

    @contextmanager
    def exposed(self, what: object) -> Iterator[None]:
        """Note, in a section, that this thread waits for communication. The time counts as exposed
        if the thread is one that computes."""
        if not devices.computes():
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
        """Return the exposed seconds since the last call."""
        seconds = self.exposed_seconds
        self.exposed_seconds = 0.0
        return seconds
