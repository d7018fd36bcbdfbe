"""The search for ranks that are gone or stuck, and where. When a rank dies the others only learn
that a connection broke, and when one stops they only wait.

A thread on every rank looks at the job's store once a second, and writes there where its rank is.
The first rank whose communication fails, or does not finish within the timeout, sets an alarm in
the store. The threads answer it, also those of ranks that are stuck in a collective. So a rank that
does not answer is gone or stopped, unless it has announced its end before. One rank reads the
answers and writes what it finds, for all: the store of a job of thousands, which answers one
request after the other, could not tell every rank about every other one in time. A rank that then
does not leave by itself is ended by its thread, so that no rank hangs.

A separate thread does this, because the loop may be inside a collective, or inside the launch of a
kernel: the host of a GPU that stands still goes on until the queue of launches is full, and then
waits there silently. So a rank is also stuck if nothing begins on it inside of a step for as long
as the timeout. Work outside of steps (loads of weights, saves, exports, the first reading of data)
does not count as stuck, and neither does the first time of any work, when kernels are compiled: one
of the ranks then says where it is.

A rank that was stopped (SIGSTOP) hears no SIGTERM either, and its launcher would wait for it. When
the run ends because of it, the other ranks of its machine kill it.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.launch import flight_recorder
from megatron_llama.launch.flight_recorder import GroupNotes
from megatron_llama.launch.hang_report import grouped, hang_report, named, waiting
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.processes import STOPPED, TRACED, Process, this_process
from megatron_llama.launch.store import connect

POLL_SECONDS = 1.0
"""How often a rank writes its position and looks for an alarm, in jobs that their store can answer
so often."""
STORE_SECONDS = 5e-5
"""How long the store needs for one request, on a slow host."""
STORE_SHARE = 0.2
"""The part of its time that requests which all ranks repeat may take."""
ANSWER_SECONDS = 5.0
"""How long the ranks have to answer an alarm: several polls, since a loaded machine may keep the
thread from running, and how long the rank that reads them may take."""
LEAVE_SECONDS = 10.0
"""How long a rank that heard the alarm has to leave by itself before its watch ends it, and how
long rank 0 waits at its end for the ends of the others."""
READ_SECONDS = 2.0
"""How long the flight recorder may take, so that its notes are there when the answers are read."""
LAST_SECONDS = 2.0
"""How long a rank without a launcher tells others why it ends. Nothing else delays it."""
ASK_SECONDS = 0.01
STDERR = 2
PATIENCE_SECONDS = 2 * ANSWER_SECONDS
"""How long a rank waits for the store itself, whose host may be the process that was stopped."""
ALARM = "alarm"
ANSWERS = "answers"
"""A line of JSON of each rank that has heard the alarm: its number and its position."""
ENDED = "ended"
"""A line of each rank that has announced its end."""
ANSWERED = "answered"
"""How many have answered."""
GONE = "gone"
"""How many have announced their end."""
READ_FLIGHTS = "flights"
"""How many have sent the notes of their flight recorder."""
READER = "reader"
READERS = 3
"""How many ranks try to read the answers, one after the other: the first may die as well."""
FINDINGS = "findings"
FAILED = "failed"
STUCK = "stuck"


@dataclass(frozen=True)
class Position:
    """Where a rank is, in words, and whether it waits there for others."""

    place: str
    waits: bool


@dataclass(frozen=True)
class Diagnosis:
    """The findings of the ranks about a failure."""

    reason: str
    """``rank 2 does not answer``, ``rank 2 stopped in ...``, ``rank 2 failed``."""
    silent: tuple[int, ...]
    """The ranks that did not answer."""
    stuck: bool
    """Whether the alarm was set because a rank waited, or stood still, longer than the timeout."""
    places: str = ""
    """Where each rank is, or was last; begins with a separator."""
    failed: int | None = None
    """The rank that failed where all have answered. Others failed because it did."""


def diagnose(
    caller: int,
    stuck: bool,
    silent: Sequence[int],
    positions: Mapping[int, Position],
    collectives: Sequence[str] = (),
) -> Diagnosis:
    """Put the answers into words. ``caller`` is the rank that set the alarm. ``positions`` has the
    position of each rank; for silent ranks, the last one that they wrote. ``collectives`` are
    sentences about those that do not end."""
    # A rank that has failed has left its last written place.
    left = silent if silent or stuck else (caller,)
    gone = {rank: positions[rank].place for rank in left if rank in positions}
    never = [rank for rank in silent if rank not in positions]
    present = {rank: position for rank, position in positions.items() if rank not in left}
    # If some rank is silent, the others stand still because of it.
    stopped = (
        {rank: at.place for rank, at in present.items() if not at.waits}
        if stuck and not silent
        else {}
    )
    others = {rank: at.place for rank, at in present.items() if rank not in stopped}
    reason = (
        f"{named(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
        if silent
        else f"rank {caller} failed"
    )
    if stuck and not silent:
        waiting_alone = f"{named(list(others))} waits for what does not come"
        mutual = "all ranks wait for each other" if len(others) > 1 else waiting_alone
        reason = "; ".join(grouped(stopped, "stopped", "stopped")) or mutual
    places = [
        *([f"{named(never)} never came"] if never else []),
        *grouped(gone, "was last seen", "were last seen"),
        *grouped(others, "is", "are"),
        *collectives,
    ]
    return Diagnosis(
        reason,
        tuple(silent),
        stuck,
        "".join(f"; {place}" for place in places),
        None if silent or stuck else caller,
    )


class Standstill:
    """The time for which nothing has begun on a rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last: object = None
        self._since = time.perf_counter()

    def look(self) -> None:
        """Compare the rank's progress with that of the last call, a moment ago."""
        recorder = self._recorder
        # A wait that is over is no standstill.
        seen = recorder.progress, recorder.part, waiting(recorder)
        if seen != self._last:
            self._last = seen
            self._since = time.perf_counter()

    def seconds(self) -> float:
        """Seconds since the first ``look`` that saw the same as the last one."""
        return time.perf_counter() - self._since


class Watch:
    """The watch of one rank, in a job with more than one process. It is made in the thread of the
    loop, and starts when this rank has met the others, before anything collective."""

    def __init__(self, place: Place, recorder: Recorder, timeout: float = math.inf) -> None:
        """``recorder`` has the rank's notes. ``timeout``: seconds that the loop may wait for
        anything, or stand still inside a step."""
        self.recorder = recorder
        self._place = place
        self._timeout = timeout
        self._standstill = Standstill(recorder)
        self._noted = False
        self._over = threading.Event()
        self._ended = threading.Event()
        self._diagnosis: Diagnosis | None = None
        self._store: Store | None = None
        self._hosted: Store | None = None
        self._threads: list[threading.Thread] = []
        self._siblings: dict[int, Process] = {}
        self._posted = Position("nowhere yet", waits=False)
        self._answering = threading.Lock()
        self._answered = False

    def keep(self, store: Store) -> None:
        """Keep the job's store open until the watch is over. The process group, which uses it too,
        may be gone before: if this rank hosts the store, the others could no longer announce their
        ends."""
        self._hosted = store

    def start(self, attempt: str) -> None:
        """Begin to watch. ``attempt`` names a part of the store, the same on all ranks, that no
        earlier attempt of the job has used: there may be alarms of that attempt."""
        # Waiting on a connection blocks all its users, so the thread and the caller have one each.
        self._store = connect(self._place, f"{attempt}/watch")
        thread_store = connect(self._place, f"{attempt}/watch")
        self._standstill = Standstill(self.recorder)
        self._store.set(_process(self._place.rank), json.dumps(asdict(this_process())))
        self._post(self._store)
        self._threads = [
            threading.Thread(target=self._run, args=(thread_store,), name="watch", daemon=True),
            threading.Thread(target=self._outlast, name="outlast", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, *, ended: bool = False) -> None:
        """End the watch: this rank leaves by itself. ``ended``: it has come to its end, and is not
        to be missed."""
        if ended and self._store is not None:
            self._ended.set()
            # In a thread: the host of the store may have been stopped meanwhile.
            leaving = threading.Thread(
                target=self._leave, args=(self._store,), name="leave", daemon=True
            )
            leaving.start()
            leaving.join(PATIENCE_SECONDS + 2 * (LEAVE_SECONDS + ANSWER_SECONDS))
        self._over.set()
        for thread in self._threads:
            thread.join(ANSWER_SECONDS)  # no longer: it may be asking a store that was stopped
        self._hosted = None

    def _leave(self, store: Store) -> None:
        """Announce the end of this rank. Rank 0 may host the store, so it stays for a while, until
        all others have ended too; if one of them sets the alarm, until they know who is missing."""
        try:
            _append(store, ENDED, str(self._place.rank))
            store.set(_left(self._place.rank), "yes")
            store.add(GONE, 1)
            if self._place.rank:
                return
            others = range(1, self._place.world_size)
            deadline = time.monotonic() + LEAVE_SECONDS
            while not all(store.check([_left(rank)]) for rank in others):
                if store.check([ALARM]):
                    self._linger(store, self._hear_answers(store).silent)
                    return
                if time.monotonic() > deadline:
                    return
                time.sleep(ASK_SECONDS)
        except RuntimeError:
            return  # the host of the store is gone, and this rank needs no other any more

    def _pace(self, least: float) -> float:
        """Return how often a rank may ask the store, in seconds: all ranks do."""
        return max(least, self._place.world_size * STORE_SECONDS / STORE_SHARE)

    def _post(self, store: Store) -> None:
        self._posted = Position(hang_report(self.recorder), waiting(self.recorder) is not None)
        store.set(_where(self._place.rank), json.dumps(astuple(self._posted)))

    def _answer(self, store: Store) -> None:
        """Answer the alarm, once, with the position that this rank has posted last: one that fails
        is elsewhere by now."""
        with self._answering:
            if not self._answered:
                line = [self._place.rank, *astuple(self._posted)]
                _append(store, ANSWERS, json.dumps(line))
                store.add(ANSWERED, 1)
                self._answered = True

    def _stuck_for(self) -> float:
        """Seconds for which the rank has been waiting, or has stood still where it should not."""
        wait = waiting(self.recorder)
        if wait is not None:
            return time.perf_counter() - wait.since
        return self._standstill.seconds() if self.recorder.part in self.recorder.performed else 0.0

    def _note_standstill(self, store: Store) -> None:
        """Say once where this rank stands still outside of steps. Of the ranks at the same place
        one says so."""
        seconds = self._standstill.seconds()
        if seconds <= self._timeout or waiting(self.recorder) is not None:
            self._noted = False
            return
        if self._ended.is_set():  # nothing is to come
            return
        place = hang_report(self.recorder)
        rank = str(self._place.rank)
        if not self._noted and store.compare_set(f"slow/{place}", "", rank) == rank.encode():
            words = f"rank {rank} has been in {place} for {seconds:.0f} s: it is slow, or it "
            words += "stands still"
            print(f"note: {words}", file=sys.stderr, flush=True)
            self.recorder.tell(words)
        self._noted = True

    def _run(self, store: Store) -> None:
        while not self._over.wait(self._pace(POLL_SECONDS)):
            try:
                self._post(store)
                self._learn_siblings(store)
                if self._stuck_for() > self._timeout:
                    store.compare_set(ALARM, "", f"{STUCK} {self._place.rank}")
                else:
                    self._note_standstill(store)
                if not store.check([ALARM]):
                    continue
                self._answer(store)
                if _is_of_stuck(store):
                    notes = read_within(READ_SECONDS, LEAVE_SECONDS)
                    store.set(_flight(self._place.rank), flight_recorder.encode(notes))
                    store.add(READ_FLIGHTS, 1)
            except RuntimeError:
                pass  # the host of the store is gone, which every rank notices
            if self._over.wait(self._answer_seconds):
                return
            # Read them now, while the host of the store still waits for readers.
            diagnosis = self._findings(store)
            if self._ended.is_set():  # this rank leaves, and rank 0 does so when all others know
                return
            if not self._over.wait(0.0 if diagnosis.stuck else LEAVE_SECONDS):
                self._end(store, diagnosis)

    def _outlast(self) -> None:
        """End this rank if the store does not answer either: its host was stopped, and a request
        waits forever. Called in a thread that asks no store, so it also looks at the clock."""
        limit = self._timeout + PATIENCE_SECONDS
        while not self._over.wait(POLL_SECONDS):
            self._standstill.look()
            if self._diagnosis is None and self._stuck_for() > limit:
                self._end(None, replace(self._diagnose_lost_store(), stuck=True))

    def _end(self, store: Store | None, diagnosis: Diagnosis) -> None:
        late = (
            f"; nothing went on for {self._timeout:g} s (--distributed-timeout-minutes)"
            if diagnosis.stuck
            else ""
        )
        words = f"rank {self._place.rank} was stuck, and was ended: {diagnosis.reason}"
        words += f"{diagnosis.places}{late}"
        print(words, file=sys.stderr, flush=True)
        self.recorder.tell(words)
        self.end_silent(diagnosis, asked=store is not None)
        if store is not None and diagnosis.stuck and self._place.rank == 0:
            self._linger(store, diagnosis.silent)
        os._exit(1)

    def end_alone(self, why: str) -> None:
        """End this process at once. The others are told, if possible, that this rank is dead."""
        rank = self._place.rank

        def tell() -> None:
            words = f"rank {rank} was ended: {why}; it was in {hang_report(self.recorder)}"
            with suppress(OSError):  # the launcher may have been the reader of this pipe
                print(words, file=sys.stderr, flush=True)
            if self._store is not None:
                with suppress(RuntimeError):  # the launcher may have been the host of the store
                    self._store.compare_set(ALARM, "", f"{FAILED} {rank}")
            self.recorder.tell(words)

        telling = threading.Thread(target=tell, name="last words", daemon=True)
        telling.start()
        telling.join(LAST_SECONDS)
        os._exit(1)

    def end_silent(self, found: Diagnosis | None, *, asked: bool = True) -> None:
        """Kill ranks of this machine that have not answered and would keep their launcher from
        ending: if the run ends because of them, or they are stopped. A rank that a debugger holds
        stays. ``asked``: they could have answered."""
        if found is None:
            return
        for rank in found.silent:
            process = self._siblings.get(rank)
            if process is None or not process.visible:
                continue
            to_blame = asked and found.stuck and process.state not in ("", TRACED)
            if (to_blame or process.state == STOPPED) and process.kill():
                words = f"rank {rank} ({process}) did not answer, and was killed"
                print(words, file=sys.stderr, flush=True)

    def _learn_siblings(self, store: Store) -> None:
        """Learn the processes of the other ranks of this machine, while they can tell them."""
        first = self._place.rank - self._place.local_rank
        ranks = range(first, min(first + self._place.local_world_size, self._place.world_size))
        missing = [r for r in ranks if r != self._place.rank and r not in self._siblings]
        keys = [_process(rank) for rank in missing]
        if first < 0 or not keys or not store.check(keys):
            return
        for rank, text in zip(missing, store.multi_get(keys), strict=True):
            self._siblings[rank] = Process(**json.loads(text))

    @property
    def _answer_seconds(self) -> float:
        """The time to answer: a rank hears the alarm at its next poll."""
        return ANSWER_SECONDS + self._pace(POLL_SECONDS) - POLL_SECONDS

    def _hear_answers(self, store: Store) -> Diagnosis:
        """Wait until all ranks have answered the alarm, or the time to answer is over."""
        deadline = time.monotonic() + self._answer_seconds
        pause = self._pace(ASK_SECONDS)
        stuck = _is_of_stuck(store)
        # Where ranks are stuck their threads end them, and say so: a rank whose connection breaks
        # because of that lets its own thread be first.
        while time.monotonic() < deadline and (stuck or not store.check([FINDINGS])):
            answered = store.add(ANSWERED, 0)
            heard = answered + store.add(GONE, 0) >= self._place.world_size
            if heard and (not stuck or store.add(READ_FLIGHTS, 0) >= answered):
                break
            time.sleep(pause)
        return self._findings(store)

    def _findings(self, store: Store) -> Diagnosis:
        """Return what the ranks' answers say. The first rank that asks reads them, and writes what
        it finds for the others."""
        try:
            for attempt in range(READERS):
                me = str(self._place.rank)
                if store.compare_set(f"{READER}/{attempt}", "", me) == me.encode():
                    found = self._read_answers(store)
                    store.set(FINDINGS, json.dumps(asdict(found)))
                elif not _appears(
                    store, [FINDINGS], time.monotonic() + ANSWER_SECONDS, self._pace(ASK_SECONDS)
                ):
                    continue  # the reader has died as well
                values = json.loads(store.get(FINDINGS))
                self._diagnosis = Diagnosis(**values | {"silent": tuple(values["silent"])})
                store.set(_heard(self._place.rank), "yes")
                return self._diagnosis
        except RuntimeError:
            pass  # the store is gone
        return self._diagnosis or self._diagnose_lost_store()

    def _read_answers(self, store: Store) -> Diagnosis:
        kind, caller = store.get(ALARM).decode().split()
        answers = [json.loads(line) for line in _lines(store, ANSWERS)]
        positions = {rank: Position(place, waits) for rank, place, waits in answers}
        # A rank that has ended is not missing: it left before it could hear the alarm. And it is no
        # longer where it was seen last.
        ended = set(map(int, _lines(store, ENDED)))
        silent = [r for r in range(self._place.world_size) if r not in positions and r not in ended]
        positions = {rank: at for rank, at in positions.items() if rank not in ended}
        for rank in silent:
            if store.check([_where(rank)]):
                positions[rank] = Position(*json.loads(store.get(_where(rank))))
        return diagnose(int(caller), kind == STUCK, silent, positions, self._read_flights(store))

    def _read_flights(self, store: Store) -> list[str]:
        """Return sentences about the collectives that do not end, from the ranks' notes."""
        ranks = [rank for rank in range(self._place.world_size) if store.check([_flight(rank)])]
        texts = store.multi_get([_flight(rank) for rank in ranks]) if ranks else []
        notes = zip(ranks, map(flight_recorder.decode, texts), strict=True)
        return flight_recorder.stuck_collectives(dict(notes))

    def diagnose(self) -> Diagnosis | None:
        """Set the alarm, unless it is set, and return the diagnosis of the answers; None before the
        start. Rank 0 returns last, because it may host the store."""
        diagnoses: list[Diagnosis] = []
        if self._store is None:  # the others have not been met
            return None
        store = self._store
        asking = threading.Thread(
            target=lambda: diagnoses.append(self._ask(store)), name="alarm", daemon=True
        )
        asking.start()
        asking.join(
            2 * self._answer_seconds + (0.0 if self._place.rank else LEAVE_SECONDS + ANSWER_SECONDS)
        )
        return diagnoses[0] if diagnoses else self._diagnosis or self._diagnose_lost_store()

    def _ask(self, store: Store) -> Diagnosis:
        try:
            self._answer(store)
            # Only the first call sets it: ranks that call later failed because the first one did.
            store.compare_set(ALARM, "", f"{FAILED} {self._place.rank}")
            diagnosis = self._hear_answers(store)
            if self._place.rank == 0:
                self._linger(store, diagnosis.silent)
            return diagnosis
        except RuntimeError:
            return self._diagnosis or self._diagnose_lost_store()

    def _linger(self, store: Store, silent: Sequence[int]) -> None:
        """Stay until the other ranks have read the answers. Rank 0 may host the store, and ranks
        that still ask would take its end for its death."""
        deadline = time.monotonic() + ANSWER_SECONDS + LEAVE_SECONDS
        try:
            for rank in set(range(1, self._place.world_size)) - set(silent):
                _appears(store, (_heard(rank), _left(rank)), deadline)
        except RuntimeError:
            return

    def _diagnose_lost_store(self) -> Diagnosis:
        """Return the diagnosis where the store is gone, so that no other rank can be asked."""
        here = grouped({self._place.rank: hang_report(self.recorder)}, "is", "are")[0]
        return Diagnosis(
            "rank 0 does not answer",
            (0,) if self._place.rank else (),
            stuck=False,
            places=f"; {here}",
        )


def read_within(seconds: float, then_end: float) -> list[GroupNotes]:
    """Return the notes of the flight recorder; none if reading takes more than ``seconds``, or
    fails. Reading asks the device which collectives are done, and a device that stands still may
    not answer. If torch holds the interpreter meanwhile, no thread of Python can go on, and this
    process is ended after ``then_end`` seconds."""
    notes: list[GroupNotes] = []

    def work() -> None:
        try:
            notes.extend(flight_recorder.read())
        except Exception:
            return  # the hang is reported without it

    # The timer is a thread of faulthandler, which needs no interpreter.
    faulthandler.dump_traceback_later(then_end, exit=True, file=STDERR)
    reading = threading.Thread(target=work, name="flight recorder", daemon=True)
    reading.start()
    reading.join(seconds)
    faulthandler.cancel_dump_traceback_later()
    return list(notes)


def _appears(
    store: Store, keys: Sequence[str], deadline: float, pause: float = ASK_SECONDS
) -> bool:
    """Wait until one of the keys is set or the deadline comes. Returns whether one is. Raises
    RuntimeError if the store is gone."""
    # The store's own wait cannot wait for one of several keys, and gives no sign meanwhile.
    while not any(store.check([key]) for key in keys):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True


def _append(store: Any, key: str, line: str) -> None:
    """Append a line to a key. ``Any``: torch's stubs do not have the method."""
    store.append(key, f"{line}\n")


def _lines(store: Store, key: str) -> list[str]:
    """Return the lines that ranks have appended to a key; none if nobody has."""
    return store.get(key).decode().splitlines() if store.check([key]) else []


def _is_of_stuck(store: Store) -> bool:
    """Whether the alarm, which is set, means a rank that is stuck, and not one that failed."""
    return bool(store.get(ALARM).decode().startswith(STUCK))


def _heard(rank: int) -> str:
    return f"{ALARM}/{rank} knows"


def _left(rank: int) -> str:
    return f"left/{rank}"


def _flight(rank: int) -> str:
    return f"flight/{rank}"


def _process(rank: int) -> str:
    return f"process/{rank}"


def _where(rank: int) -> str:
    return f"where/{rank}"
