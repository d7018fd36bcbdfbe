"""Which recordings have a race, on recordings written here: one for each kind of fault, and one for each kind of order that is none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from tools.stream_check.events import Access, Alloc, Event, Free, Line, Memory, RecordStream, Signal, Site, Wait
from tools.stream_check.order import Kind, Race, check

MAIN, WORKER = Line("thread MainThread", is_thread=True), Line("thread optimizer", is_thread=True)
COMPUTE, ISSUING, COMM = (Line(name, is_thread=False) for name in ("computing stream", "stream issuing", "communicator dp_shard"))
DEVICE, PINNED = Memory.DEVICE, Memory.PINNED


class Recording:
    """Writes a list of events; each has a line of its own in the file ``program.py``, so that tests see who is named."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._tokens = count()
        self._buffers = count()

    def _site(self) -> Site:
        return Site("program.py", len(self.events) + 1)

    def alloc(self, nbytes: int = 100, memory: Memory = DEVICE, *, on: Line = COMPUTE, by: Line = MAIN, name: str = "slot 0") -> int:
        buffer = next(self._buffers)
        self.events.append(Alloc(by, self._site(), on, buffer, nbytes, memory, name))
        return buffer

    def free(self, buffer: int, by: Line = MAIN) -> None:
        self.events.append(Free(by, self._site(), buffer))

    def access(self, buffer: int, on: Line, *, writes: bool, part: tuple[int, int] = (0, 100), by: Line = MAIN) -> None:
        by = on if on.is_thread else by
        self.events.append(Access(by, self._site(), on, "aten.add_" if writes else "aten.mm", buffer, *part, writes))

    def write(self, buffer: int, on: Line, part: tuple[int, int] = (0, 100), by: Line = MAIN) -> None:
        self.access(buffer, on, writes=True, part=part, by=by)

    def read(self, buffer: int, on: Line, part: tuple[int, int] = (0, 100), by: Line = MAIN) -> None:
        self.access(buffer, on, writes=False, part=part, by=by)

    def record(self, on: Line, by: Line = MAIN) -> int:
        token = next(self._tokens)
        self.events.append(Signal(on if on.is_thread else by, self._site(), on, token))
        return token

    def wait(self, on: Line, token: int | None, by: Line = MAIN) -> None:
        self.events.append(Wait(on if on.is_thread else by, self._site(), on, token))

    def order(self, first: Line, then: Line) -> None:
        """What ``wait_stream`` does, between threads a queue, and to a thread ``synchronize``."""
        self.wait(then, self.record(first))

    def record_stream(self, buffer: int, on: Line) -> None:
        self.events.append(RecordStream(MAIN, self._site(), buffer, on))

    def races(self) -> tuple[Race, ...]:
        return check(self.events).races


def one(recording: Recording) -> Race:
    (race,) = recording.races()
    return race


def test_a_reduction_that_does_not_wait_for_the_gradient_is_named() -> None:
    r = Recording()
    slot = r.alloc(name="gradient slot 3")
    r.write(slot, COMPUTE, (0, 60))
    r.order(COMPUTE, ISSUING)
    r.write(slot, COMPUTE, (60, 100))
    r.order(ISSUING, COMM)
    r.read(slot, COMM)
    race = one(r)
    assert race.kind is Kind.STREAMS
    assert str(race) == (
        "two streams use the same bytes in no order: gradient slot 3, bytes 60 to 100\n"
        "  `aten.mm` (reads) on communicator dp_shard, program.py:8\n"
        "  does not wait for `aten.add_` (writes) on computing stream, program.py:5\n"
        "  expected communicator dp_shard.wait_event(an event recorded on computing stream after program.py:5) before program.py:8"
    )


@pytest.mark.parametrize("writes", [True, False], ids=["write", "read"])
def test_a_slot_that_is_written_under_its_last_use(writes: bool) -> None:
    r = Recording()
    slot = r.alloc()
    r.order(COMPUTE, COMM)
    r.access(slot, COMM, writes=writes)
    r.write(slot, COMPUTE)
    race = one(r)
    assert race.kind is Kind.STREAMS and race.first is not None
    assert (race.first.line, race.second.line, race.second.site.line) == (COMM, COMPUTE, 5)


def test_the_same_two_places_are_one_race() -> None:
    r = Recording()
    first, second = r.alloc(), r.alloc()
    r.order(COMPUTE, COMM)
    begin = len(r.events)
    for slot in (first, second):
        r.write(slot, COMM)
        r.write(slot, COMPUTE)
    for index, event in enumerate(r.events[begin:]):
        assert isinstance(event, Access)
        r.events[begin + index] = Access(event.thread, Site("loop.py", index % 2), event.line, "aten.mm", event.buffer, 0, 100, True)
    assert one(r).times == 2


def test_the_host_reads_what_the_device_has_not_written() -> None:
    r = Recording()
    loss = r.alloc(name="loss")
    r.write(loss, COMPUTE)
    r.read(loss, MAIN)
    race = one(r)
    assert race.kind is Kind.HOST
    assert race.missing == (
        "expected thread MainThread to synchronize() with an event recorded on computing stream after program.py:2, before program.py:3"
    )


def test_pinned_memory_that_is_written_again_before_it_was_copied() -> None:
    r = Recording()
    source, target = r.alloc(memory=PINNED, on=MAIN), r.alloc()
    r.write(source, MAIN)
    r.read(source, ISSUING)
    r.order(COMPUTE, ISSUING)
    r.write(target, ISSUING)
    r.write(source, MAIN)
    race = one(r)
    assert race.kind is Kind.HOST and race.first is not None and (race.first.line, race.second.line) == (ISSUING, MAIN)


def test_pinned_memory_that_is_freed_before_it_was_copied() -> None:
    r = Recording()
    source = r.alloc(memory=PINNED, on=MAIN)
    r.write(source, MAIN)
    r.read(source, ISSUING)
    r.free(source)
    race = one(r)
    assert race.kind is Kind.FREED and "thread MainThread to synchronize() with an event recorded on stream issuing" in race.missing


def test_pinned_memory_that_its_allocator_or_a_wait_protects() -> None:
    for protect in (lambda r, buffer: r.record_stream(buffer, ISSUING), lambda r, buffer: r.order(ISSUING, MAIN)):
        r = Recording()
        source = r.alloc(memory=PINNED, on=MAIN)
        r.read(source, ISSUING)
        protect(r, source)
        r.free(source)
        assert r.races() == ()


def test_memory_that_is_freed_under_another_stream() -> None:
    r = Recording()
    temporary = r.alloc(name="")
    r.write(temporary, COMPUTE)
    r.order(COMPUTE, COMM)
    r.read(temporary, COMM)
    r.free(temporary)
    race = one(r)
    assert race.kind is Kind.FREED and race.buffer == "a temporary of 100 bytes, made at program.py:1"
    assert "expected computing stream.wait_event(" in race.missing and "record_stream(communicator dp_shard)" in race.missing


def of_its_stream(r: Recording, buffer: int) -> None:
    """Nothing is needed: only the owner uses it."""


def recorded(r: Recording, buffer: int) -> None:
    r.order(COMPUTE, COMM)
    r.read(buffer, COMM)
    r.record_stream(buffer, COMM)


def waited_for_by_the_owner(r: Recording, buffer: int) -> None:
    r.order(COMPUTE, COMM)
    r.read(buffer, COMM)
    r.order(COMM, COMPUTE)


def waited_for_by_the_host(r: Recording, buffer: int) -> None:
    r.order(COMPUTE, COMM)
    r.read(buffer, COMM)
    r.order(COMM, MAIN)


@pytest.mark.parametrize("protect", [of_its_stream, recorded, waited_for_by_the_owner, waited_for_by_the_host])
def test_memory_that_may_be_freed(protect: Callable[[Recording, int], None]) -> None:
    r = Recording()
    temporary = r.alloc()
    r.write(temporary, COMPUTE)
    protect(r, temporary)
    r.free(temporary)
    again = r.alloc()
    r.write(again, COMPUTE)
    assert r.races() == ()


def test_new_memory_that_another_stream_uses_at_once() -> None:
    """The allocator hands out what its stream may still use."""
    r = Recording()
    before = r.alloc()
    r.read(before, COMPUTE)
    r.free(before)
    buffer = r.alloc(name="received")
    r.write(buffer, COMM)
    race = one(r)
    assert race.kind is Kind.STREAMS and race.first is not None and race.first.what == "what had the memory before its allocation"
    r = Recording()
    before = r.alloc()
    r.read(before, COMPUTE)
    r.free(before)
    buffer = r.alloc()
    r.order(COMPUTE, COMM)
    r.write(buffer, COMM)
    assert r.races() == ()


def test_an_event_that_was_never_recorded() -> None:
    r = Recording()
    r.wait(COMPUTE, None)
    race = one(r)
    assert (race.kind, race.first, race.second.line, race.second.site.line) == (Kind.UNRECORDED, None, COMPUTE, 1)


def test_an_event_that_is_recorded_again_stands_for_its_new_place() -> None:
    r = Recording()
    slot = r.alloc()
    r.order(COMPUTE, COMM)
    early = r.record(COMM)
    r.write(slot, COMM)
    late = r.record(COMM)
    r.wait(COMPUTE, late)
    r.read(slot, COMPUTE)
    assert r.races() == ()
    r.events[r.events.index(Wait(MAIN, Site("program.py", 7), COMPUTE, late))] = Wait(MAIN, Site("program.py", 7), COMPUTE, early)
    assert one(r).kind is Kind.STREAMS


def test_order_is_transitive_through_events() -> None:
    r = Recording()
    slot = r.alloc()
    r.write(slot, COMPUTE)
    r.order(COMPUTE, ISSUING)
    r.order(ISSUING, COMM)
    r.read(slot, COMM)
    r.order(COMM, ISSUING)
    r.order(ISSUING, COMPUTE)
    r.write(slot, COMPUTE)
    assert r.races() == ()


def test_one_wait_covers_all_messages_of_a_communicator_before_it() -> None:
    r = Recording()
    first, second = r.alloc(), r.alloc()
    r.order(COMPUTE, COMM)
    r.write(first, COMM)
    r.write(second, COMM)
    r.order(COMM, COMPUTE)
    r.read(first, COMPUTE)
    assert r.races() == ()


def test_a_wait_does_not_cover_what_comes_after_its_event() -> None:
    r = Recording()
    slot = r.alloc()
    r.order(COMPUTE, COMM)
    event = r.record(COMM)
    r.write(slot, COMM)
    r.wait(COMPUTE, event)
    r.read(slot, COMPUTE)
    assert one(r).kind is Kind.STREAMS


def test_what_the_host_has_waited_for_is_over_on_every_stream() -> None:
    r = Recording()
    slot = r.alloc()
    r.order(COMPUTE, COMM)
    r.write(slot, COMM)
    r.order(COMM, MAIN)
    r.read(slot, ISSUING)
    assert r.races() == ()


def test_issuing_is_not_waiting() -> None:
    """A thread that gave work to one stream and then to another has made no order between them."""
    r = Recording()
    slot = r.alloc()
    r.order(COMPUTE, ISSUING)
    r.write(slot, COMPUTE)
    r.read(slot, ISSUING)
    assert one(r).kind is Kind.STREAMS


def test_a_queue_orders_what_two_threads_do() -> None:
    """The worker updates, the main thread's copy reads what it wrote: put, get, done, wait."""
    r = Recording()
    weights = r.alloc(memory=PINNED, on=MAIN)
    r.write(weights, MAIN)
    r.order(MAIN, WORKER)
    r.write(weights, WORKER)
    r.order(WORKER, MAIN)
    r.read(weights, ISSUING)
    assert r.races() == ()


def test_two_threads_of_the_host_without_a_queue() -> None:
    r = Recording()
    weights = r.alloc(memory=PINNED, on=MAIN)
    r.write(weights, MAIN)
    r.read(weights, WORKER)
    race = one(r)
    assert race.kind is Kind.THREADS and "a wait for thread MainThread" in race.missing


def test_a_copy_that_does_not_wait_for_the_thread_that_makes_its_source() -> None:
    r = Recording()
    weights = r.alloc(memory=PINNED, on=MAIN)
    r.order(MAIN, WORKER)
    r.write(weights, WORKER)
    r.read(weights, ISSUING)
    race = one(r)
    assert race.kind is Kind.HOST and "a wait for thread optimizer" in race.missing


def test_two_threads_that_issue_to_one_stream() -> None:
    r = Recording()
    slot = r.alloc()
    r.order(MAIN, WORKER)
    r.write(slot, COMPUTE)
    r.read(slot, COMPUTE, by=WORKER)
    race = one(r)
    assert (
        race.kind is Kind.ISSUE
        and race.missing == "expected thread optimizer to wait for thread MainThread (a task or a queue) before program.py:5"
    )


def test_two_threads_that_issue_to_one_stream_in_turn() -> None:
    r = Recording()
    slot = r.alloc()
    r.write(slot, COMPUTE)
    r.order(MAIN, WORKER)
    r.read(slot, COMPUTE, by=WORKER)
    assert r.races() == ()


def test_reads_need_no_order() -> None:
    r = Recording()
    slot = r.alloc()
    r.write(slot, COMPUTE)
    r.order(COMPUTE, COMM)
    r.order(COMPUTE, ISSUING)
    for line in (COMM, ISSUING, COMPUTE):
        r.read(slot, line)
    assert r.races() == ()


def test_a_read_is_not_forgotten_when_others_read() -> None:
    r = Recording()
    slot = r.alloc()
    r.order(COMPUTE, COMM)
    r.order(COMPUTE, ISSUING)
    r.read(slot, COMM)
    r.read(slot, ISSUING)
    r.read(slot, COMPUTE)
    r.order(ISSUING, COMPUTE)
    r.write(slot, COMPUTE)
    race = one(r)
    assert race.first is not None and race.first.line == COMM


def test_disjoint_bytes_need_no_order() -> None:
    r = Recording()
    slot = r.alloc()
    r.order(COMPUTE, COMM)
    r.write(slot, COMPUTE, (0, 50))
    r.write(slot, COMM, (50, 100))
    assert r.races() == ()


def test_a_write_in_the_middle_leaves_what_is_around_it() -> None:
    for part, races in (((0, 20), 1), ((40, 60), 0), ((80, 100), 1), ((10, 90), 1)):
        r = Recording()
        slot = r.alloc()
        r.order(COMPUTE, COMM)
        r.write(slot, COMM)
        r.order(COMM, COMPUTE)
        done = r.record(COMPUTE)
        r.write(slot, COMPUTE, (0, 40))
        r.write(slot, COMPUTE, (60, 100))
        r.wait(ISSUING, done)
        r.write(slot, ISSUING, part)
        assert len({race.second for race in r.races()}) == races, part


@pytest.mark.parametrize("part", [(0, 20), (80, 100)])
def test_a_write_in_the_middle_does_not_hide_what_is_around_it(part: tuple[int, int]) -> None:
    r = Recording()
    slot = r.alloc()
    r.order(COMPUTE, COMM)
    r.order(COMPUTE, ISSUING)
    r.write(slot, COMM)
    r.order(COMM, COMPUTE)
    r.write(slot, COMPUTE, (20, 80))
    r.write(slot, ISSUING, part)
    race = one(r)
    assert race.first is not None and race.first.line == COMM and race.buffer == f"slot 0, bytes {part[0]} to {part[1]}"


def test_a_race_is_reported_where_it_begins() -> None:
    """What is ordered after the second access, but not after the first, misses nothing itself."""
    r = Recording()
    slot = r.alloc()
    r.order(COMPUTE, COMM)
    r.write(slot, COMM)
    r.write(slot, COMPUTE)
    r.order(COMPUTE, ISSUING)
    r.write(slot, ISSUING)
    race = one(r)
    assert (race.second.line, race.times) == (COMPUTE, 1)


def test_memory_of_the_host_that_a_thread_used_may_be_freed() -> None:
    r = Recording()
    buffer = r.alloc(memory=PINNED, on=MAIN)
    r.order(MAIN, WORKER)
    r.write(buffer, WORKER)
    r.free(buffer)
    assert r.races() == ()


def test_a_thread_issues_after_what_it_has_done_itself() -> None:
    r = Recording()
    first, second = (r.alloc(memory=PINNED, on=MAIN) for _ in range(2))
    for buffer in (first, second):
        r.write(buffer, MAIN)
        r.read(buffer, ISSUING)
    assert r.races() == ()


@pytest.mark.parametrize("wrong", ["freed", "outside", "unknown point", "empty", "twice"])
def test_a_recording_that_contradicts_itself_is_refused(wrong: str) -> None:
    r = Recording()
    slot = r.alloc()
    if wrong == "freed":
        r.free(slot)
        r.read(slot, COMPUTE)
    elif wrong == "outside":
        r.read(slot, COMPUTE, (90, 101))
    elif wrong == "unknown point":
        r.wait(COMPUTE, 7)
    elif wrong == "empty":
        r.read(slot, COMPUTE, (5, 5))
    else:
        r.events.append(r.events[0])
    with pytest.raises(ValueError, match=r"storage|point"):
        r.races()


def test_the_accesses_are_counted() -> None:
    r = Recording()
    slot = r.alloc()
    r.write(slot, COMPUTE)
    r.read(slot, COMPUTE)
    assert check(r.events).accesses == 2
