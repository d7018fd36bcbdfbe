"""Finds out which rank is gone, or stuck, and where. When a rank dies the others learn no more than
that a connection broke, and when one stops they only wait.

A thread on every rank looks at the job's store once a second, and writes there where its rank is.
The first rank whose communication fails, or does not finish within the timeout, sets an alarm in
the store. The threads answer it, also those of ranks that are stuck in a collective, so a rank that
does not answer is gone or stopped. Ranks that do not leave by themselves after that are ended by
their thread, so that no rank hangs.

A thread of its own does this and not the loop, because the loop may be inside a collective.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from megatron_llama.distributed.comm.store import connect
from megatron_llama.distributed.hang_report import grouped, hang_report, named, waited
from megatron_llama.distributed.mesh import Place
from megatron_llama.distributed.recorder import Recorder

POLL_SECONDS = 1.0
"""How often a rank writes its position and looks for an alarm."""
ANSWER_SECONDS = 5.0
"""How long the ranks have to answer an alarm: several polls, of a thread that a loaded machine may
keep from running."""
LEAVE_SECONDS = 10.0
"""How long a rank that heard the alarm has to leave by itself before its watch ends it."""
PATIENCE_SECONDS = 2 * ANSWER_SECONDS
"""How long a rank waits for the store itself, whose host may be the process that was stopped."""
ALARM = "alarm"
FAILED = "failed"
STUCK = "stuck"


@dataclass(frozen=True)
class Position:
    """Where a rank is, in words, and whether it waits there for others."""

    place: str
    waits: bool


@dataclass(frozen=True)
class Diagnosis:
    """What the ranks have found out about a failure."""

    reason: str
    """``rank 2 does not answer``, ``rank 2 stopped in ...``, ``rank 2 failed``."""
    silent: tuple[int, ...]
    """The ranks that did not answer."""
    stuck: bool
    """Whether the alarm was set because a rank waited longer than the timeout."""
    places: str = ""
    """Where each rank is, or was last; begins with a separator."""


def diagnose(
    caller: int, stuck: bool, silent: Sequence[int], positions: Mapping[int, Position]
) -> Diagnosis:
    """Put the answers into words. ``caller`` is the rank that set the alarm. ``positions`` has, by
    rank, where each one is; for silent ranks, where they were when they last wrote it."""
    gone = {rank: positions[rank].place for rank in silent if rank in positions}
    present = {rank: position for rank, position in positions.items() if rank not in silent}
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
        reason = (
            "; ".join(grouped(stopped, "stopped", "stopped")) or "all ranks wait for each other"
        )
    places = [*grouped(gone, "was last seen", "were last seen"), *grouped(others, "is", "are")]
    return Diagnosis(reason, tuple(silent), stuck, "".join(f"; {place}" for place in places))


class Watch:
    """The watch of one rank, in a job with more than one process. It is made when the job's process
    group exists, in the thread of the loop."""

    def __init__(self, place: Place, recorder: Recorder, timeout: float = math.inf) -> None:
        """``recorder`` has the rank's notes. ``timeout``: seconds that the loop may wait for
        anything. Collective."""
        self._place = place
        self._recorder = recorder
        self._timeout = timeout
        self._loop = threading.get_ident()
        # A fresh part of the store: earlier attempts of the job may have left alarms in it.
        name = [f"watch/{uuid4().hex}"]
        dist.broadcast_object_list(name, src=0)
        # Waiting on a connection blocks all its users, so the thread and the caller have one each.
        self._store = connect(place, name[0])
        thread_store = connect(place, name[0])
        self._over = threading.Event()
        self._diagnosis: Diagnosis | None = None
        self._post(self._store)
        self._thread = threading.Thread(
            target=self._run, args=(thread_store,), name="watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the watch: the job ends, or this rank leaves by itself."""
        self._over.set()
        self._thread.join(ANSWER_SECONDS)  # no longer: it may be asking a store that was stopped

    def _post(self, store: Store) -> None:
        place = hang_report(self._recorder, self._loop)
        seconds = self._waited()
        store.set(_where(self._place.rank), json.dumps([place, seconds is not None]))

    def _waited(self) -> float | None:
        return waited(self._recorder, self._loop, time.perf_counter())

    def _run(self, store: Store) -> None:
        while not self._over.wait(POLL_SECONDS):
            try:
                self._post(store)
                if (self._waited() or 0.0) > self._timeout:
                    store.compare_set(ALARM, "", f"{STUCK} {self._place.rank}")
                if not store.check([ALARM]):
                    continue
                store.set(_answer(self._place.rank), "here")
            except RuntimeError:
                pass  # the host of the store is gone, which every rank notices
            if self._over.wait(ANSWER_SECONDS):
                return
            # Now, while the host of the store still waits for those who ask.
            found = self._read_answers(store)
            if not self._over.wait(0.0 if found.stuck else LEAVE_SECONDS):
                self._end(store, found)

    def _end(self, store: Store, found: Diagnosis) -> None:
        late = (
            f"; nothing went on for {self._timeout:g} s (--distributed-timeout-minutes)"
            if found.stuck
            else ""
        )
        print(
            f"rank {self._place.rank} was stuck, and was ended: {found.reason}{found.places}{late}",
            file=sys.stderr,
            flush=True,
        )
        if found.stuck and self._place.rank == 0:
            self._linger(store, found.silent)
        os._exit(1)

    def _read_answers(self, store: Store) -> Diagnosis:
        try:
            kind, caller = store.get(ALARM).decode().split()
            ranks = range(self._place.world_size)
            silent = [rank for rank in ranks if not store.check([_answer(rank)])]
            known = [rank for rank in ranks if store.check([_where(rank)])]
            posted = zip(known, store.multi_get([_where(rank) for rank in known]), strict=True)
            self._diagnosis = diagnose(
                int(caller),
                kind == STUCK,
                silent,
                {rank: Position(*json.loads(text)) for rank, text in posted},
            )
            store.set(_heard(self._place.rank), "yes")
            return self._diagnosis
        except RuntimeError:
            return self._diagnosis or self._diagnose_lost_store()

    def diagnose(self) -> Diagnosis:
        """Set the alarm, unless it is set, and wait for the answers. Rank 0 returns last, because
        it may host the store."""
        found: list[Diagnosis] = []
        asking = threading.Thread(
            target=lambda: found.append(self._ask()), name="alarm", daemon=True
        )
        asking.start()
        asking.join(
            PATIENCE_SECONDS + (0.0 if self._place.rank else LEAVE_SECONDS + ANSWER_SECONDS)
        )
        return found[0] if found else self._diagnosis or self._diagnose_lost_store()

    def _ask(self) -> Diagnosis:
        others = [rank for rank in range(self._place.world_size) if rank != self._place.rank]
        deadline = time.monotonic() + ANSWER_SECONDS
        try:
            self._store.set(_answer(self._place.rank), "here")
            # Set once: ranks that call later failed because the first one did.
            self._store.compare_set(ALARM, "", f"{FAILED} {self._place.rank}")
            for rank in others:
                self._appears(_answer(rank), deadline)
            found = self._read_answers(self._store)
            if self._place.rank == 0:
                self._linger(self._store, found.silent)
            return found
        except RuntimeError:
            return self._diagnosis or self._diagnose_lost_store()

    def _linger(self, store: Store, silent: Sequence[int]) -> None:
        """Stay until the other ranks have read the answers. Rank 0 may host the store, and to those
        who still ask its leaving would look like its death."""
        deadline = time.monotonic() + ANSWER_SECONDS + LEAVE_SECONDS
        try:
            for rank in set(range(1, self._place.world_size)) - set(silent):
                self._appears(_heard(rank), deadline, store)
        except RuntimeError:
            return

    def _diagnose_lost_store(self) -> Diagnosis:
        """The store is gone, so no other rank can be asked."""
        here = grouped({self._place.rank: hang_report(self._recorder, self._loop)}, "is", "are")[0]
        return Diagnosis(
            "rank 0 does not answer",
            (0,) if self._place.rank else (),
            stuck=False,
            places=f"; {here}",
        )

    def _appears(self, key: str, deadline: float, store: Store | None = None) -> bool:
        """Wait until ``key`` is set or the deadline comes, and return whether it is set. Raises
        RuntimeError if the store is gone."""
        store = store or self._store
        left = deadline - time.monotonic()
        if left <= 0 or store.check([key]):
            return store.check([key])
        try:
            store.wait([key], timedelta(seconds=left))
        except DistStoreError:
            return False
        return True


def _answer(rank: int) -> str:
    return f"{ALARM}/{rank}"


def _heard(rank: int) -> str:
    return f"{ALARM}/{rank} knows"


def _where(rank: int) -> str:
    return f"where/{rank}"
