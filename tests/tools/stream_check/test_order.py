"""Which recordings have a race, on recordings written here: one for each kind of fault, and one for each kind of order that is none."""

from __future__ import annotations

from itertools import count

import pytest
from tools.stream_check.events import Access, Alloc, Event, Free, Line, Memory, RecordStream, Signal, Site, Wait
from tools.stream_check.order import Kind, Race, check

MAIN, WORKER = Line("thread MainThread", is_thread=True), Line("thread optimizer", is_thread=True)
COMPUTE, ISSUING, COMM = (Line(name, is_thread=False) for name in ("computing stream", "stream issuing", "communicator dp_shard"))
LINES = {"main": MAIN, "worker": WORKER, "compute": COMPUTE, "issuing": ISSUING, "comm": COMM}


def recording(program: str) -> list[Event]:
    """The events of a program, one of its statements after the other. Each has a line of its own in ``program.py``, so that tests see who is
    named.

    ``alloc slot [pinned]``, ``free slot``, ``write slot line [first-last] [by thread]``, ``read ...``, ``record line event``, ``wait line
    event`` (``never``: one that is not recorded), ``keep slot line`` (``record_stream``), and ``order line line``: what ``wait_stream`` does,
    between threads a queue, and to a thread ``synchronize``. A slot that is called ``temporary`` has no name."""
    events: list[Event] = []
    slots: dict[str, int] = {}
    tokens: dict[str, int | None] = {"never": None, "unknown": -1}
    numbers = count()

    def site() -> Site:
        return Site("program.py", len(events) + 1)

    def by(line: Line) -> Line:
        return line if line.is_thread else MAIN

    for verb, *words in (statement.split() for statement in program.split(";")):
        match verb, words:
            case "alloc", [slot, *pinned]:
                slots[slot] = len(slots)
                memory, on = (Memory.PINNED, MAIN) if pinned else (Memory.DEVICE, COMPUTE)
                events.append(Alloc(MAIN, site(), on, slots[slot], 100, memory, "" if slot == "temporary" else slot))
            case "free", [slot]:
                events.append(Free(MAIN, site(), slots[slot]))
            case ("read" | "write"), [slot, name, *others]:
                line = LINES[name]
                thread = LINES[others[-1]] if "by" in others else by(line)
                first, last = map(int, others[0].split("-")) if others and "-" in others[0] else (0, 100)
                events.append(Access(thread, site(), line, "aten.add_" if verb == "write" else "aten.mm", slots[slot], first, last, verb == "write"))
            case "keep", [slot, name]:
                events.append(RecordStream(MAIN, site(), slots[slot], LINES[name]))
            case "record", [name, event]:
                tokens[event] = token = next(numbers)
                events.append(Signal(by(LINES[name]), site(), LINES[name], token))
            case "wait", [name, event]:
                events.append(Wait(by(LINES[name]), site(), LINES[name], tokens[event]))
            case "order", [before, after]:
                token = next(numbers)
                events.append(Signal(by(LINES[before]), site(), LINES[before], token))
                events.append(Wait(by(LINES[after]), site(), LINES[after], token))
            case _:
                raise ValueError(verb)
    return events


def races(program: str) -> tuple[Race, ...]:
    return check(recording(program)).races


RACES: dict[str, tuple[str, Kind, str, str]] = {
    "a reduction that does not wait for the gradient": (
        "alloc slot; write slot compute 0-60; order compute issuing; write slot compute 60-100; order issuing comm; read slot comm",
        Kind.STREAMS,
        "compute comm",
        "expected communicator dp_shard.wait_event(an event recorded on computing stream after program.py:5) before program.py:8",
    ),
    "a slot is written while it is still written": (
        "alloc slot; order compute comm; write slot comm; write slot compute", Kind.STREAMS, "comm compute", "before program.py:5"),
    "a slot is written while it is still read": (
        "alloc slot; order compute comm; read slot comm; write slot compute", Kind.STREAMS, "comm compute", "before program.py:5"),
    "the host reads what the device has not written": (
        "alloc loss; write loss compute; read loss main", Kind.HOST, "compute main",
        "thread MainThread to synchronize() with an event recorded on computing stream after program.py:2, before program.py:3"),
    "pinned memory that is written again before it was copied": (
        "alloc source pinned; alloc target; write source main; read source issuing; order compute issuing; write target issuing; write source main",
        Kind.HOST, "issuing main", ""),
    "pinned memory that is freed before it was copied": (
        "alloc source pinned; write source main; read source issuing; free source", Kind.FREED, "",
        "thread MainThread to synchronize() with an event recorded on stream issuing"),
    "memory that is freed under another stream": (
        "alloc slot; write slot compute; order compute comm; read slot comm; free slot", Kind.FREED, "", "record_stream(communicator dp_shard)"),
    "new memory that another stream uses at once": (
        "alloc before; read before compute; free before; alloc received; write received comm", Kind.STREAMS, "",
        "what had the memory before its allocation"),
    "a wait covers nothing behind its event": (
        "alloc slot; order compute comm; record comm early; write slot comm; record comm late; wait compute early; read slot compute",
        Kind.STREAMS, "comm compute", ""),
    "a thread that gives work to two streams orders nothing": (
        "alloc slot; order compute issuing; write slot compute; read slot issuing", Kind.STREAMS, "compute issuing", ""),
    "two threads of the host without a queue": (
        "alloc weights pinned; write weights main; read weights worker", Kind.THREADS, "main worker", "a wait for thread MainThread"),
    "a copy that does not wait for the thread that makes its source": (
        "alloc weights pinned; order main worker; write weights worker; read weights issuing", Kind.HOST, "", "a wait for thread optimizer"),
    "two threads that issue to one stream": (
        "alloc slot; order main worker; write slot compute; read slot compute by worker", Kind.ISSUE, "",
        "expected thread optimizer to wait for thread MainThread (a task or a queue) before program.py:5"),
    "a read is not forgotten when others read": (
        "alloc slot; order compute comm; order compute issuing; read slot comm; read slot issuing; read slot compute; order issuing compute; "
        "write slot compute", Kind.STREAMS, "comm compute", ""),
    "a write in the middle does not hide what is before it": (
        "alloc slot; order compute comm; order compute issuing; write slot comm; order comm compute; write slot compute 20-80; "
        "write slot issuing 0-20",
        Kind.STREAMS, "comm issuing", "slot, bytes 0 to 20"),
    "a write in the middle does not hide what is behind it": (
        "alloc slot; order compute comm; order compute issuing; write slot comm; order comm compute; write slot compute 20-80; "
        "write slot issuing 80-100",
        Kind.STREAMS, "comm issuing", "slot, bytes 80 to 100"),
    "what is ordered after the second access misses nothing itself": (
        "alloc slot; order compute comm; write slot comm; write slot compute; order compute issuing; write slot issuing",
        Kind.STREAMS, "comm compute", ""),
    "memory without a name": (
        "alloc temporary; order compute comm; read temporary comm; free temporary", Kind.FREED, "", "a temporary of 100 bytes, made at program.py:1"),
}  # fmt: skip
"""Program, kind, which line does not wait and which it does not wait for in the order of their accesses, and what is said of it."""


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_found_where_it_begins(name: str) -> None:
    program, kind, lines, said = RACES[name]
    (race,) = races(program)
    assert race.kind is kind and race.times == 1 and said in str(race)
    assert not lines or (race.first is not None and [race.first.line, race.second.line] == [LINES[line] for line in lines.split()])


FINE = {
    "pinned memory that its allocator protects": "alloc source pinned; read source issuing; keep source issuing; free source",
    "pinned memory that a wait protects": "alloc source pinned; read source issuing; order issuing main; free source",
    "used by its own stream alone": "alloc slot; write slot compute; free slot; alloc again; write again compute",
    "recorded for its allocator": (
        "alloc slot; write slot compute; order compute comm; read slot comm; keep slot comm; free slot; alloc again; write again compute"),
    "waited for by its stream": (
        "alloc slot; write slot compute; order compute comm; read slot comm; order comm compute; free slot; alloc again; write again compute"),
    "waited for by the host": (
        "alloc slot; write slot compute; order compute comm; read slot comm; order comm main; free slot; alloc again; write again compute"),
    "new memory that another stream waits for": "alloc before; read before compute; free before; alloc slot; order compute comm; write slot comm",
    "an event that is recorded again stands for its new place": (
        "alloc slot; order compute comm; record comm event; write slot comm; record comm event; wait compute event; read slot compute"),
    "order is transitive through events": (
        "alloc slot; write slot compute; order compute issuing; order issuing comm; read slot comm; order comm issuing; order issuing compute; "
        "write slot compute"),
    "one wait covers all messages of a communicator before it": (
        "alloc first; alloc second; order compute comm; write first comm; write second comm; order comm compute; read first compute"),
    "what the host has waited for is over on every stream": (
        "alloc slot; order compute comm; write slot comm; order comm main; read slot issuing"),
    "a queue: put, get, done, wait": (
        "alloc weights pinned; write weights main; order main worker; write weights worker; order worker main; read weights issuing"),
    "two threads that issue to one stream in turn": "alloc slot; write slot compute; order main worker; read slot compute by worker",
    "reads need no order": (
        "alloc slot; write slot compute; order compute comm; order compute issuing; read slot comm; read slot issuing; read slot compute"),
    "nor do disjoint bytes": "alloc slot; order compute comm; write slot compute 0-50; write slot comm 50-100",
    "memory of the host that a thread used may be freed": "alloc buffer pinned; order main worker; write buffer worker; free buffer",
    "a thread issues after what it has done itself": (
        "alloc first pinned; alloc second pinned; write first main; read first issuing; write second main; read second issuing"),
}  # fmt: skip


@pytest.mark.parametrize("name", FINE)
def test_what_is_in_order(name: str) -> None:
    assert races(FINE[name]) == ()


def test_an_event_that_was_never_recorded() -> None:
    (race,) = races("wait compute never")
    assert (race.kind, race.first, race.second.line, race.second.site.line) == (Kind.UNRECORDED, None, COMPUTE, 1)


def test_the_same_two_places_are_one_race() -> None:
    twice = "write first comm; write first compute; write second comm; write second compute"
    events = recording(f"alloc first; alloc second; order compute comm; {twice}")
    for index, event in enumerate(events):
        if isinstance(event, Access):
            events[index] = Access(event.thread, Site("loop.py", index % 2), event.line, "aten.mm", event.buffer, 0, 100, True)
    (race,) = check(events).races
    assert race.times == 2 and check(events).accesses == 4


@pytest.mark.parametrize(("part", "times"), [("0-20", 1), ("40-60", 0), ("80-100", 1), ("10-90", 1)])
def test_a_write_in_the_middle_leaves_what_is_around_it(part: str, times: int) -> None:
    program = "alloc slot; order compute comm; write slot comm; order comm compute; record compute done; write slot compute 0-40; "
    found = races(program + f"write slot compute 60-100; wait issuing done; write slot issuing {part}")
    assert len({race.second for race in found}) == times


@pytest.mark.parametrize(
    "rest", ["free slot; read slot compute", "read slot compute 90-101", "wait compute unknown", "read slot compute 5-5", "twice"]
)
def test_a_recording_that_contradicts_itself_is_refused(rest: str) -> None:
    events = recording("alloc slot") * 2 if rest == "twice" else recording(f"alloc slot; {rest}")
    with pytest.raises(ValueError, match=r"storage|point"):
        check(events)
