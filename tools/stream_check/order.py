"""Says whether any two accesses of the same bytes, of which one writes, may happen in either order.

Every line has a vector clock: for each line, how far that one has certainly come when this line
does what it is given next. An access is after an earlier one if the clock of its line has reached
the moment of the earlier one. Clocks advance only by what makes an order on a real device: a wait
for an event, the thread that issues an operator, and a thread that waits for another one.

For each storage only a frontier is kept: the bytes that each line read last, and those that were
written last. What a later write covers needs no comparison any more, because order is transitive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tools.stream_check.events import (
    Access,
    Alloc,
    Event,
    Free,
    Line,
    Memory,
    RecordStream,
    Signal,
    Site,
    Wait,
)


class Kind(Enum):
    """What is wrong."""

    STREAMS = "two streams use the same bytes in no order"
    HOST = "the host and the device use the same bytes in no order"
    THREADS = "two threads of the host use the same bytes in no order"
    ISSUE = "two threads issue to one stream in no order"
    FREED = "memory is freed while it is in use"
    UNRECORDED = "an event is waited for that was never recorded"


@dataclass(frozen=True)
class End:
    """One of the two accesses of a race."""

    what: str
    """The operator, and whether it reads or writes."""
    line: Line
    site: Site

    def __str__(self) -> str:
        return f"{self.what} on {self.line.name}, {place(self.site)}"


@dataclass
class Race:
    """Two accesses without an order; ``first`` was issued first. ``first`` is None where a wait
    itself is wrong."""

    kind: Kind
    buffer: str
    """Its name and the bytes that both use."""
    first: End | None
    second: End
    missing: str
    """The wait that is missing, in words."""
    times: int = 1
    """How often it was found at these two places."""

    @property
    def places(self) -> tuple[Kind, Site | None, Site]:
        """What makes it another race than one of another recording of the same layout."""
        return self.kind, None if self.first is None else self.first.site, self.second.site

    def __str__(self) -> str:
        times = f" ({self.times} times)" if self.times > 1 else ""
        buffer = f": {self.buffer}" if self.buffer else ""
        lines = [f"{self.kind.value}{times}{buffer}", f"  {self.second}"]
        if self.first is not None:
            lines.append(f"  does not wait for {self.first}")
        return "\n".join([*lines, f"  {self.missing}"])


@dataclass(frozen=True)
class Verdict:
    """What a recording shows."""

    races: tuple[Race, ...]
    accesses: int
    """Accesses that were compared with what was before them."""


def place(site: Site) -> str:
    """Return ``file:line``."""
    return f"{site.file}:{site.line}"


def check(events: Sequence[Event]) -> Verdict:
    """Find the races of a recording. Raises ValueError for a recording that contradicts itself: an
    access outside its storage's life or bytes, or a wait for a point that does not come before."""
    return _Checker(events).verdict()


class _Touch(NamedTuple):
    """Bytes of a storage as a line used them last."""

    begin: int
    end: int
    writes: bool
    line: int
    time: int
    """The moment of the line: its own entry in its clock."""
    thread: int
    """The line of the thread that issued it."""
    issued: int
    """The moment of that thread."""
    event: Access | Alloc


@dataclass
class _Storage:
    alloc: Alloc
    owner: int
    touches: list[_Touch]
    recorded: set[int]
    """Lines for which the allocator waits before it hands the memory out again."""


class _Checker:
    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self._numbers: dict[Line, int] = {}
        for event in events:
            self._numbers.setdefault(event.thread, len(self._numbers))
            if not isinstance(event, Free):
                self._numbers.setdefault(event.line, len(self._numbers))
        self._lines = list(self._numbers)
        count = len(self._lines)
        self._clocks = [[0] * count for _ in range(count)]
        # A stream takes over the clock of the thread that issues to it. Most operators are issued
        # when the thread has learned nothing new, and then its own entry is all that changed.
        self._learned = [0] * count
        """By line, how often its clock has taken over that of another line."""
        self._taken_over: dict[tuple[int, int], int] = {}
        """By stream and thread, ``_learned`` of the thread when the stream took its clock over."""
        self._points: dict[int, tuple[int, ...]] = {}
        """By token, the clock of the line at that point."""
        self._storages: dict[int, _Storage] = {}
        self._races: dict[tuple[object, ...], Race] = {}
        self._accesses = 0

    def verdict(self) -> Verdict:
        for event in self._events:
            match event:
                case Access():
                    self._access(event)
                case Signal():
                    self._points[event.token] = tuple(self._clocks[self._issue(event)])
                case Wait():
                    self._wait(event)
                case Alloc():
                    self._alloc(event)
                case Free():
                    self._free(event)
                case RecordStream():
                    self._issue(event)
                    storage = self._storage(event.buffer, event)
                    storage.recorded.add(self._numbers[event.line])
        return Verdict(tuple(self._races.values()), self._accesses)

    def _issue(self, event: Access | Alloc | RecordStream | Signal | Wait) -> int:
        """The thread does one more thing. Returns the number of the line that it does it on, whose
        clock is then that of the moment before: all that the line, or the thread, waited for."""
        thread = self._numbers[event.thread]
        line = self._numbers[event.line]
        clock = self._clocks[thread]
        clock[thread] += 1
        if line == thread:
            return line
        if self._taken_over.get((line, thread)) == self._learned[thread]:
            self._clocks[line][thread] = clock[thread]
        else:
            self._take_over(line, clock)
            self._taken_over[line, thread] = self._learned[thread]
        return line

    def _take_over(self, line: int, clock: Sequence[int]) -> None:
        own = self._clocks[line]
        self._clocks[line] = [max(one, other) for one, other in zip(own, clock, strict=True)]
        self._learned[line] += 1

    def _wait(self, event: Wait) -> None:
        line = self._issue(event)
        if event.token is None:
            end = End("the wait", event.line, event.site)
            missing = "CUDA does not wait for such an event: expected it to be recorded before"
            self._report(Kind.UNRECORDED, "", None, end, missing)
        elif event.token in self._points:
            self._take_over(line, self._points[event.token])
        else:
            raise ValueError(f"{event} waits for a point that does not come before it")

    def _alloc(self, event: Alloc) -> None:
        line = self._issue(event)
        if event.buffer in self._storages:
            raise ValueError(f"{event}: there was a storage of this number before")
        touches = []
        if event.memory is Memory.DEVICE:
            # The allocator hands out memory that the same stream may still use: what that stream
            # was given before. So the first use on another stream has to come after all of that, as
            # if this stream had written the memory just now.
            thread = self._numbers[event.thread]
            touches = [
                _Touch(
                    0,
                    event.nbytes,
                    True,
                    line,
                    self._clocks[line][line],
                    thread,
                    self._clocks[thread][thread],
                    event,
                )
            ]
        self._storages[event.buffer] = _Storage(event, line, touches, set())

    def _storage(self, number: int, event: Event) -> _Storage:
        if number not in self._storages:
            raise ValueError(f"{event}: there is no storage of this number, or it was freed")
        return self._storages[number]

    def _access(self, event: Access) -> None:
        line = self._issue(event)
        self._accesses += 1
        storage = self._storage(event.buffer, event)
        begin, end = event.begin, event.end
        if not 0 <= begin < end <= storage.alloc.nbytes:
            raise ValueError(f"{event}: the storage has {storage.alloc.nbytes} bytes")
        thread = self._numbers[event.thread]
        clock = self._clocks[line]
        if line != thread:
            clock[line] += 1
        new = _Touch(
            begin, end, event.writes, line, clock[line], thread, self._clocks[thread][thread], event
        )
        kept = []
        for old in storage.touches:
            if old.end <= begin or end <= old.begin:
                kept.append(old)
                continue
            if (old.writes or event.writes) and not self._is_before(old, line, thread):
                self._report_pair(storage, old, event)
            # Whoever comes after this access also comes after ``old``, so the bytes that both have
            # in common need only the later one of them.
            if event.writes or (old.line == line and not old.writes):
                if old.begin < begin:
                    kept.append(old._replace(end=begin))
                if end < old.end:
                    kept.append(old._replace(begin=end))
            else:
                kept.append(old)
        kept.append(new)
        storage.touches = kept

    def _is_before(self, old: _Touch, line: int, thread: int) -> bool:
        """Whether ``old`` is done before what ``thread`` issues to ``line`` now."""
        if old.line != line:
            return self._clocks[line][old.line] >= old.time
        # A stream does its work in the order of issue. Two threads have such an order only if one
        # of them has waited for the other one.
        return old.thread == thread or self._clocks[thread][old.thread] >= old.issued

    def _free(self, event: Free) -> None:
        storage = self._storage(event.buffer, event)
        del self._storages[event.buffer]
        thread = self._numbers[event.thread]
        self._clocks[thread][thread] += 1
        # The next owner of device memory is the same stream, at once. Memory of the host is
        # written at once by whoever gets it.
        knows = [self._clocks[thread]]
        if storage.alloc.memory is Memory.DEVICE:
            knows.append(self._clocks[storage.owner])
        for old in storage.touches:
            # A thread that still used it would have a reference.
            if self._lines[old.line].is_thread or old.line in storage.recorded:
                continue
            if not any(clock[old.line] >= old.time for clock in knows):
                self._report_freed(storage, old, event)

    def _report_freed(self, storage: _Storage, old: _Touch, event: Free) -> None:
        first = _end(old.event)
        if storage.alloc.memory is Memory.DEVICE:
            owner = storage.alloc.line
            second = End(
                "the last reference is gone, its memory goes to the next tensor", owner, event.site
            )
            missing = (
                f"expected {owner.name}.wait_event(an event recorded on {first.line.name} after "
                f"{place(first.site)}) or record_stream({first.line.name}) before "
                f"{place(event.site)}"
            )
        else:
            second = End("the last reference is gone", event.thread, event.site)
            missing = _missing_wait(first, second)
        self._report(Kind.FREED, _name(storage.alloc), first, second, missing)

    def _report_pair(self, storage: _Storage, old: _Touch, event: Access) -> None:
        first = _end(old.event)
        second = _end(event)
        threads = first.line.is_thread + second.line.is_thread
        if first.line == second.line:
            kind = Kind.ISSUE
            missing = (
                f"expected {event.thread.name} to wait for {old.event.thread.name} (a task or a "
                f"queue) before {place(second.site)}"
            )
        else:
            kind = (Kind.STREAMS, Kind.HOST, Kind.THREADS)[threads]
            missing = _missing_wait(first, second)
        begin = max(old.begin, event.begin)
        end = min(old.end, event.end)
        name = f"{_name(storage.alloc)}, bytes {begin:,} to {end:,}"
        self._report(kind, name, first, second, missing)

    def _report(
        self, kind: Kind, buffer: str, first: End | None, second: End, missing: str
    ) -> None:
        """Note a race. One pair of places is one race, for however many buffers it is found."""
        key = (kind, first and (first.line, first.site), second.line, second.site)
        if key in self._races:
            self._races[key].times += 1
        else:
            self._races[key] = Race(kind, buffer, first, second, missing)


def _end(event: Access | Alloc) -> End:
    if isinstance(event, Alloc):
        return End("what had the memory before its allocation", event.line, event.site)
    verb = "writes" if event.writes else "reads"
    return End(f"`{event.operator}` ({verb})", event.line, event.site)


def _name(alloc: Alloc) -> str:
    return alloc.name or f"a temporary of {alloc.nbytes:,} bytes, made at {place(alloc.site)}"


def _missing_wait(first: End, second: End) -> str:
    """Return which wait would have put ``second`` after ``first``."""
    before = f"before {place(second.site)}"
    if first.line.is_thread:
        return f"expected a wait for {first.line.name} (a task or a queue) {before}"
    event = f"an event recorded on {first.line.name} after {place(first.site)}"
    if second.line.is_thread:
        return f"expected {second.line.name} to synchronize() with {event}, {before}"
    return f"expected {second.line.name}.wait_event({event}) {before}"
