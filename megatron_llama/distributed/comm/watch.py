"""Who is gone, and who is stuck where? When a rank dies, the others only learn that some connection
broke; when one stops, they wait. Together they find out whose fault it is.

A thread on every rank looks at the job's store once a second, and leaves there where its rank is.
The first rank whose communication fails, or does not finish within the timeout, calls the roll
there; the threads answer, also for ranks that are stuck in a collective, and whoever does not
answer is gone or stopped. Ranks that do not leave by themselves after that are ended by their
thread, so that nobody hangs.
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
ANSWER_SECONDS = 5.0
LEAVE_SECONDS = 10.0
PATIENCE_SECONDS = 2 * ANSWER_SECONDS
"""After which a store that does not answer is gone: its host may be the process that was
stopped."""
ROLL_CALL = "roll call"
FAILED = "failed"
STUCK = "stuck"


@dataclass(frozen=True)
class Position:
    """Where a rank is, in words, and whether it waits for others there."""

    place: str
    waits: bool


@dataclass(frozen=True)
class Account:
    """What the ranks found out together."""

    reason: str
    """``rank 2 does not answer``, ``rank 2 stopped in ...``, ``rank 2 failed``."""
    silent: tuple[int, ...]
    stuck: bool
    """The roll was called because nothing went on."""
    places: str = ""
    """Where everybody is, or was last; begins with a separator."""


def account(
    caller: int, stuck: bool, silent: Sequence[int], positions: Mapping[int, Position]
) -> Account:
    """From the answers to a sentence. ``positions``: by rank, those of silent ranks from when they
    were last seen."""
    gone = {rank: positions[rank].place for rank in silent if rank in positions}
    present = {rank: position for rank, position in positions.items() if rank not in silent}
    # With somebody silent, who else stands still does so because of it.
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
    return Account(reason, tuple(silent), stuck, "".join(f"; {place}" for place in places))


class Watch:
    """One per rank of a job with more than one process. Start it when the job's process group
    exists, in the thread of the loop.

    ``recorder``: has the rank's notes. ``timeout``: seconds that the loop may wait for anything."""

    def __init__(self, place: Place, recorder: Recorder, timeout: float = math.inf) -> None:
        self._place = place
        self._recorder = recorder
        self._timeout = timeout
        self._loop = threading.get_ident()
        # Waiting on a connection blocks all its users: the thread and the caller have one each.
        name = [
            f"watch/{uuid4().hex}"
        ]  # what an attempt before this one left in the store is none of its business
        dist.broadcast_object_list(name, src=0)
        self._store = connect(place, name[0])
        thread_store = connect(place, name[0])
        self._over = threading.Event()
        self._account: Account | None = None
        self._post(self._store)
        self._thread = threading.Thread(
            target=self._look, args=(thread_store,), name="watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """The job ends, or this rank leaves by itself."""
        self._over.set()
        self._thread.join(ANSWER_SECONDS)  # it may be asking a store that was stopped

    def _post(self, store: Store) -> None:
        place = hang_report(self._recorder, self._loop)
        seconds = self._waited()
        store.set(_where(self._place.rank), json.dumps([place, seconds is not None]))

    def _waited(self) -> float | None:
        return waited(self._recorder, self._loop, time.perf_counter())

    def _look(self, store: Store) -> None:
        while not self._over.wait(POLL_SECONDS):
            try:
                self._post(store)
                if (self._waited() or 0.0) > self._timeout:
                    store.compare_set(ROLL_CALL, "", f"{STUCK} {self._place.rank}")
                if not store.check([ROLL_CALL]):
                    continue
                store.set(_answer(self._place.rank), "here")
            except RuntimeError:
                pass  # the store's host is gone, which every rank notices
            if self._over.wait(ANSWER_SECONDS):
                return
            found = self._find_out(
                store
            )  # now, while the store's host still waits for those who ask
            if not self._over.wait(0.0 if found.stuck else LEAVE_SECONDS):
                self._end(store, found)

    def _end(self, store: Store, found: Account) -> None:
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

    def _find_out(self, store: Store) -> Account:
        try:
            kind, caller = store.get(ROLL_CALL).decode().split()
            ranks = range(self._place.world_size)
            silent = [rank for rank in ranks if not store.check([_answer(rank)])]
            known = [rank for rank in ranks if store.check([_where(rank)])]
            posted = zip(known, store.multi_get([_where(rank) for rank in known]), strict=True)
            self._account = account(
                int(caller),
                kind == STUCK,
                silent,
                {rank: Position(*json.loads(text)) for rank, text in posted},
            )
            store.set(_heard(self._place.rank), "yes")
            return self._account
        except RuntimeError:
            return self._account or self._hosts_fault()

    def find_out(self) -> Account:
        """Call the roll, unless that was done, and wait for the answers. Rank 0, whose machine may
        host the store, goes with it."""
        found: list[Account] = []
        asking = threading.Thread(
            target=lambda: found.append(self._ask()), name="roll call", daemon=True
        )
        asking.start()
        asking.join(
            PATIENCE_SECONDS + (0.0 if self._place.rank else LEAVE_SECONDS + ANSWER_SECONDS)
        )
        return found[0] if found else self._account or self._hosts_fault()

    def _ask(self) -> Account:
        others = [rank for rank in range(self._place.world_size) if rank != self._place.rank]
        deadline = time.monotonic() + ANSWER_SECONDS
        try:
            self._store.set(_answer(self._place.rank), "here")
            # Set once: who calls after the first one failed only because of that.
            self._store.compare_set(ROLL_CALL, "", f"{FAILED} {self._place.rank}")
            for rank in others:
                self._appears(_answer(rank), deadline)
            found = self._find_out(self._store)
            if self._place.rank == 0:
                self._linger(self._store, found.silent)
            return found
        except RuntimeError:
            return self._account or self._hosts_fault()

    def _linger(self, store: Store, silent: Sequence[int]) -> None:
        """Rank 0 may host the store: leaving now would look like its death to those still
        asking."""
        deadline = time.monotonic() + ANSWER_SECONDS + LEAVE_SECONDS
        try:
            for rank in set(range(1, self._place.world_size)) - set(silent):
                self._appears(_heard(rank), deadline, store)
        except RuntimeError:
            return

    def _hosts_fault(self) -> Account:
        """Nobody else can be asked any more."""
        here = grouped({self._place.rank: hang_report(self._recorder, self._loop)}, "is", "are")[0]
        return Account(
            "rank 0 does not answer",
            (0,) if self._place.rank else (),
            stuck=False,
            places=f"; {here}",
        )

    def _appears(self, key: str, deadline: float, store: Store | None = None) -> bool:
        """Raises RuntimeError when the store is gone."""
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
    return f"{ROLL_CALL}/{rank}"


def _heard(rank: int) -> str:
    return f"{ROLL_CALL}/{rank} knows"


def _where(rank: int) -> str:
    return f"where/{rank}"
