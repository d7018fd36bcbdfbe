"""Restarts of ranks inside a job that goes on: no new launch, no new queue, no import.

The process that the launcher has started for a rank becomes its *keeper*: it has one thread and no
device, and forks the process that trains. That one may end in any way, by SIGKILL or with a device
that does not answer, and its context, communicators and threads are gone with it, whole. (A process
that only left its groups would keep what a broken communicator holds; one that replaced itself by
``exec`` could not outlive SIGKILL.) The next process of the rank is another fork, so a restart
reads no module from a disk that all ranks of a job read at once.

When a rank ends by a fault, or because of another rank, all keepers come to a *meeting* in the
job's store. It ends when all have come, or MEET_SECONDS after the first: whoever is missing then is
lost with its machine. One of the first who came closes it by writing the roster, which only the
first writer can (``compare_set``), so no leader has to live. All read it and know by it alone who
trains as which rank (``roster.py``). Members that do not fill a layout wait as spares.

A keeper ends with its launcher, and its process with the keeper (the kernel sees to it). Signals to
the keeper are handed on, once: the process has a group of its own, which a terminal does not reach.

The store is that of the launcher, if it has one. Else the keeper of rank 0 forks a process that
holds it. If that machine is lost, so is the store, and the job ends: its launcher has to start it
again.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import count
from math import inf
from typing import Any, NoReturn, Protocol

from torch.distributed import DistError, HashStore, Store  # type: ignore[attr-defined]

from megatron_llama.errors import ClusterError, counted
from megatron_llama.launch.launcher import (
    Place,
    become_rank,
    launcher_hosts_store,
    launching_processes,
)
from megatron_llama.launch.open_files import PER_RANK, require_open_files
from megatron_llama.launch.processes import Process, end_with_parent, this_process
from megatron_llama.launch.rendezvous import meet
from megatron_llama.launch.roster import Arrival, Member, Roster, Seat, cause, reason, seats
from megatron_llama.launch.signs import (
    SILENT_SECONDS,
    SignsOfLife,
    enter,
    has_ended,
    neighbour_processes,
)
from megatron_llama.launch.store import open_store
from megatron_llama.launch.verdict import WAITED, Verdict, verdict_of_status, with_report

MEET_SECONDS = 30.0
"""How long a meeting waits for those who do not come."""
PATIENCE_SECONDS = 20.0
"""How long a rank may go on when another one has failed: it says where it was, and its watch ends
it earlier. Shorter than a meeting, to which its keeper has to come in time."""
CLOSERS = 3
"""How many of the first who came may close a meeting, one after the other: they may be lost too."""
CLOSER_SECONDS = 2.0
LEAVE_SECONDS = 30.0
"""How long the holder of the store waits for the others at the end."""
POLL_SECONDS = 0.5
ASK_SECONDS = 0.05
SILENT_PACES = 6
_LEFT = "left"
"""A line of each spare that was asked to stop."""
OVER = "over"
"""A line of each that needs the store no more."""
STORE_SECONDS = 5e-5
"""How long the store needs for one request, on a slow host."""
REQUESTS = 2
"""How many of them a keeper repeats."""
STORE_SHARE = 0.2
"""The part of its time that these may take."""
STOPS = (signal.SIGTERM, signal.SIGINT)
HEARD = (*STOPS, signal.SIGUSR1, signal.SIGCHLD)


class Plan(Protocol):
    """What a keeper has to know of the run."""

    @property
    def group(self) -> int:
        """Neighbouring ranks that should be on one machine."""
        ...

    @property
    def restarts(self) -> int:
        """How often the job may begin again."""
        ...

    def fitting(self, present: int) -> int:
        """Return how many of the processes that are there can train; 0 if they are too few."""
        ...

    def needs(self) -> str:
        """Say how many are needed, and for what."""
        ...

    def tell_restart(self, number: int, before: Roster, now: Roster) -> None:
        """Tell users of a restart. Called in one keeper."""
        ...


def keep(place: Place, plan: Plan, patience: timedelta, train: Callable[[Place], int]) -> int:
    """Call ``train`` in a process that is started again when it or another rank has failed, as
    ``plan`` says. Returns the exit status: in the keeper that of the job, in the other process what
    ``train`` returns. ``patience``: how long processes wait for each other at the start.

    Called while this process has one thread and has touched no device. Raises ClusterError, and
    what ``train`` raises in its process."""
    outcome = _Keeper(place, plan, patience).keep()
    if isinstance(outcome, int):
        return outcome
    seat, descriptor = outcome
    return with_report(descriptor, lambda: train(seat.place))


class _Keeper:
    def __init__(self, place: Place, plan: Plan, patience: timedelta) -> None:
        self._place = place
        self._plan = plan
        self._patience = patience
        self._pid = os.getpid()
        self._store: Store = HashStore()
        self._host = 0
        """The process that holds the store for this keeper; 0: another one does."""
        self._launchers = launching_processes()
        self._machine = f"{place.machine}/{socket.gethostname()}"
        self._faults = 0
        self._rank = 0
        """The process that trains; 0 while there is none."""
        self._report = -1
        self._stop: signal.Signals | None = None
        """The signal by which this keeper was asked to stop."""
        self._status = 1
        """The exit status of the last process."""
        self._deadline = inf
        """When the process that trains is killed, by ``time.monotonic``."""
        self._present = {*range(place.world_size)}
        """The ranks whose keepers need the store."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def keep(self) -> int | tuple[Seat, int]:
        """Return the exit status of the job; in the process that trains, its seat and the end of a
        pipe for its report."""
        try:
            if self._place.world_size > 1:
                self._store = self._connect()
            # Until here a signal ends this process, as it does any other that waits for the rest.
            signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
            return self._generations()
        except DistError as error:
            raise self._lost_store() from error
        finally:
            if os.getpid() == self._pid:
                self._end()

    def _generations(self) -> int | tuple[Seat, int]:
        verdict = WAITED
        before: Roster | None = None
        for generation in count():
            roster = self._meet(generation, before, verdict)
            self._present = {member.rank for member in roster.members}
            if roster.count == 0 and not roster.end:
                self._present.update(roster.lost)  # it was closed at once: they are on their way
            if roster.count == 0:
                return self._end_of_job(roster)
            chosen = seats(
                roster.members,
                roster.count,
                self._plan.group,
                self._place.master_addr,
                self._place.master_port,
            )
            seat = chosen.get(self._place.rank)
            if seat is not None:
                if before is not None and seat.place.rank == 0:
                    self._plan.tell_restart(generation, before, roster)
                descriptor = self._fork(seat)
                if descriptor is not None:
                    return seat, descriptor
            verdict = self._follow(generation, roster.count, self._signs(roster, chosen))
            if verdict.kind == "done":
                self._leave()
                return verdict.status
            before = roster
        raise AssertionError("a job has no last generation")

    # The store

    def _connect(self) -> Store:
        place = self._place
        by_launcher = launcher_hosts_store()
        # Beside those of its rank a keeper has a connection of its own.
        require_open_files(
            place.world_size, rank=place.rank, in_launcher=by_launcher, per_rank=PER_RANK + 1
        )
        if place.rank == 0 and not by_launcher:
            self._host = _fork_host(place, self._patience)
        store = open_store(place, self._patience, hosts=False)
        return meet(store, place.rank, place.world_size, self._patience.total_seconds())

    def _pace(self, least: float) -> float:
        """Return how often a keeper may ask the store, in seconds: all keepers do."""
        return max(least, self._place.world_size * REQUESTS * STORE_SECONDS / STORE_SHARE)

    @property
    def _meet_seconds(self) -> float:
        """How long a meeting lasts at most: in large jobs keepers learn later that it begins."""
        return MEET_SECONDS + 2 * self._pace(POLL_SECONDS)

    def _lost_store(self) -> ClusterError:
        return ClusterError(
            "the store of --max-restarts-in-place",
            got="no answer",
            expected=f"the process that holds it, at {self._place.master_addr}",
            do="start the job again: it goes on from its newest checkpoint",
        )

    # Meetings

    def _meet(self, generation: int, before: Roster | None, verdict: Verdict) -> Roster:
        """Come to the meeting before a generation, and return its result."""
        store = self._store
        if verdict.kind == "fault":
            self._faults += 1
        known = range(self._place.world_size)
        expected = {m.rank for m in before.members} if before is not None else {*known}
        number = self._arrive(generation, verdict)
        since = time.monotonic()
        key = f"roster/{generation}"
        while not store.check([key]):
            seconds = time.monotonic() - since
            closes = verdict.ends_job
            # The last one closes it, too, if the first ones are lost.
            if not closes and (number <= CLOSERS or number >= len(expected)):
                late = seconds > self._meet_seconds + CLOSER_SECONDS * (min(number, CLOSERS) - 1)
                closes = late or not self._may_come(generation, expected)
            if closes:
                store.compare_set(key, "", self._close(generation, before).text())
                break
            if seconds > self._meet_seconds + CLOSER_SECONDS * (CLOSERS + 1):
                raise ClusterError(
                    "the meeting of --max-restarts-in-place",
                    got="none of those who came first",
                    expected=f"one of {CLOSERS} processes that writes who is there",
                    do="start the job again: it goes on from its newest checkpoint",
                )
            self._hear(self._pace(ASK_SECONDS))
            if self._stop is not None:
                verdict = Verdict("stopped", f"stopped by {self._stop.name}")
                self._arrive(generation, verdict)
        return Roster.read(store.get(key))

    def _arrive(self, generation: int, verdict: Verdict) -> int:
        """Say that this keeper has come, and return how many have."""
        member = Member(self._place.rank, self._machine, self._place.local_rank, self._faults)
        enter(self._store, self._place.rank, this_process())
        _append(self._store, f"came/{generation}", Arrival(member, verdict).line())
        return self._store.add(f"arrived/{generation}", 1)

    def _may_come(self, generation: int, expected: set[int]) -> set[int]:
        """Return the ranks that are waited for: they have neither come, nor left, nor certainly
        ended, which is known of those on this machine."""
        came = {arrival.member.rank: arrival.member for arrival in self._arrivals(generation)}
        left = _lines(self._store, _LEFT)
        return self._living(expected - came.keys() - {int(rank) for rank in left})

    def _living(self, ranks: set[int]) -> set[int]:
        """Return the ranks whose keepers have not certainly ended."""
        neighbours = neighbour_processes(self._store, sorted(ranks))
        return ranks - {rank for rank, process in neighbours.items() if has_ended(process)}

    def _arrivals(self, generation: int) -> list[Arrival]:
        return [Arrival.read(line) for line in _lines(self._store, f"came/{generation}")]

    def _close(self, generation: int, before: Roster | None) -> Roster:
        """Return the roster of those who have come."""
        # The last word of each counts: one that was asked to stop says so after it has come.
        arrivals = {arrival.member.rank: arrival for arrival in self._arrivals(generation)}
        members = tuple(arrivals[rank].member for rank in sorted(arrivals))
        known = before.members if before is not None else ()
        lost = tuple(m.rank for m in known if m.rank not in arrivals)
        reasons = before.reasons if before is not None else ()
        why = cause([*arrivals.values()])
        if why is not None or lost:
            reasons = (*reasons, reason(why, lost))
        ends = why is not None and why.verdict.ends_job
        if ends:
            return Roster(members, 0, reasons, lost)
        if generation > self._plan.restarts:
            end = f"{len(reasons)} failures with --max-restarts-in-place {self._plan.restarts}"
            return Roster(members, 0, reasons, lost, end)
        fitting = self._plan.fitting(len(members))
        came = counted(len(members), "process", "processes")
        end = "" if fitting else f"{came} at the meeting"
        return Roster(members, fitting, reasons, lost, end)

    def _end_of_job(self, roster: Roster) -> int:
        """Return the exit status of a job that cannot go on. Raises ClusterError where it was
        interrupted before."""
        self._leave()
        if self._stop is not None:
            return 128 + self._stop
        if not roster.end and len(roster.reasons) < 2:
            return self._status or 1  # the rank that failed has said why
        needed = self._plan.needs()
        error = ClusterError(
            "the job",
            got=f"{roster.end or 'an error that would come again'} ({'; '.join(roster.reasons)})",
            expected=f"{needed} for a run that goes on",
            do="look at what those ranks printed; started again it goes on from its newest "
            "checkpoint",
        )
        error.printed = roster.members[0].rank != self._place.rank
        raise error

    # The process that trains

    def _fork(self, seat: Seat) -> int | None:
        """Start the process of a rank. Returns the end of a pipe in it, and None in the keeper."""
        sys.stdout.flush()
        sys.stderr.flush()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)  # a terminal's Control-C comes through the keeper, once
            end_with_parent(self._pid)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            os.close(reading)
            become_rank(seat.place, seat.slots)
            return writing
        os.close(writing)
        self._rank = pid
        self._report = reading
        if self._stop is not None:  # it came when the meeting was over
            os.kill(pid, self._stop)
        return None

    def _signs(self, roster: Roster, chosen: Mapping[int, Seat]) -> SignsOfLife:
        """Return the signs of life of the keepers whose ranks train."""
        neighbours = [m.rank for m in roster.members if m.machine == self._machine]
        seat = chosen.get(self._place.rank)
        return SignsOfLife(
            self._store,
            self._place.rank,
            chosen,
            [rank for rank in neighbours if rank in chosen],
            counts=seat is not None and seat.place.rank in (0, roster.count - 1),
        )

    def _follow(self, generation: int, ranks: int, signs: SignsOfLife) -> Verdict:
        """Wait for the end of a generation. Returns the verdict on the rank of this keeper, or one
        that says done if all ``ranks`` came to their ends. Raises ClusterError."""
        failed = f"failed/{generation}"
        done = f"done/{generation}"
        store = self._store
        verdict = WAITED
        self._deadline = inf
        try:
            while True:
                self._hear(self._pace(POLL_SECONDS))
                ended = self._reap()
                if ended is not None:
                    verdict = ended
                    if verdict.kind != "done":
                        store.compare_set(failed, "", "yes")
                        return verdict
                    store.add(done, 1)
                signs.give()
                # Asked before the ranks that are done: when all are, keepers go.
                lost = signs.lost(max(SILENT_SECONDS, SILENT_PACES * self._pace(POLL_SECONDS)))
                if store.check([failed]):
                    if not self._rank:
                        return WAITED  # also if it was done: the last steps may come again
                    self._hurry()
                elif not self._rank and store.add(done, 0) >= ranks:
                    return verdict if verdict.kind == "done" else Verdict("done", status=0)
                elif lost:
                    store.compare_set(failed, "", "yes")
                elif self._stop is not None and not self._rank and verdict == WAITED:
                    _append(store, _LEFT, str(self._place.rank))  # a spare, which is not missed
                    return Verdict("done", status=128 + self._stop)
        except DistError as error:
            # The ranks may come to their end without the store, but not begin again.
            while self._rank:
                self._hear(POLL_SECONDS)
                verdict = self._reap() or verdict
            if verdict.kind == "done":
                return verdict
            if verdict.ends_job:
                return Verdict("done", status=self._status or 1)  # it has said why
            raise self._lost_store() from error

    def _hurry(self) -> None:
        """Give the process that trains a while to end."""
        self._deadline = min(self._deadline, time.monotonic() + PATIENCE_SECONDS)

    def _reap(self) -> Verdict | None:
        """Return the verdict on the process that trains, if it has ended now."""
        if not self._rank:
            return None
        late = time.monotonic() > self._deadline
        if late:
            os.kill(self._rank, signal.SIGKILL)
        pid, status = os.waitpid(self._rank, os.WNOHANG)
        # The end of the pipe is no sign: what the process has forked may hold it open.
        has_report = bool(select.select([self._report], [], [], 0)[0])
        if pid == 0:
            if has_report:
                self._hurry()  # nothing of the run is left to do
            return None
        report = os.read(self._report, 1 << 16) if has_report else b""
        os.close(self._report)
        self._rank = 0
        code = os.waitstatus_to_exitcode(status)
        self._status = code if code >= 0 else 128 - code
        verdict = verdict_of_status(status, report)
        if verdict.kind == "done":
            return verdict
        if self._stop is not None:
            return Verdict("stopped", f"stopped by {self._stop.name}")
        return verdict if report or not late else Verdict("follows", "did not end by itself")

    def _hear(self, seconds: float) -> None:
        """Wait for a signal, at most so long, and hand it on. Ends this process if its launcher is
        gone."""
        heard = signal.sigtimedwait(HEARD, seconds)
        # Where SIGCONT ends the wait after its time, CPython returns what it never filled in.
        if heard is not None and heard.si_signo in (*STOPS, signal.SIGUSR1):
            number = signal.Signals(heard.si_signo)
            if number in STOPS:
                self._stop = number
            if self._rank:
                os.kill(self._rank, number)
        gone = [process for process in self._launchers if not process.state]
        if gone:
            self._end_alone(gone[0])

    # The end

    def _leave(self) -> None:
        """Tell the others that this keeper has read all that it needs. The holder of the store
        waits for them."""
        with suppress(DistError):
            _append(self._store, OVER, str(self._place.rank))
            deadline = time.monotonic() + LEAVE_SECONDS
            while self._host and time.monotonic() < deadline:
                over = {int(rank) for rank in _lines(self._store, OVER)}
                if not self._living(self._present - over):
                    return
                time.sleep(ASK_SECONDS)

    def _end(self) -> None:
        for pid in (self._rank, self._host):
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _end_alone(self, launcher: Process) -> NoReturn:
        with suppress(OSError):  # the launcher may have been the reader of this pipe
            print(
                f"rank {self._place.rank} was ended: its launcher ({launcher}) is gone",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)  # the kernel ends what this process has started


def _fork_host(place: Place, patience: timedelta) -> int:
    """Start a process that holds the job's store, and return it. It ends with this one. Raises
    ClusterError where it cannot listen."""
    parent = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        with os.fdopen(reading) as answer:
            problem = answer.read()
        if problem:
            os.waitpid(pid, 0)
            raise ClusterError(problem)
        return pid
    try:
        # The ranks need the store while they end by these.
        signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        os.setpgid(0, 0)
        end_with_parent(parent)
        store = open_store(place, patience, hosts=True)
    except ClusterError as error:
        os.write(writing, str(error).encode())
        os._exit(1)
    os.close(writing)
    while store is not None:
        signal.pause()
    os._exit(0)


def _append(store: Any, key: str, line: str) -> None:
    """Append a line to a key. ``Any``: torch's stubs do not have the method."""
    store.append(key, f"{line}\n")


def _lines(store: Store, key: str) -> list[str]:
    """Return the lines of a key; none if nobody has appended any."""
    return store.get(key).decode().splitlines() if store.check([key]) else []
