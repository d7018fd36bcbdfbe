"""Who is gone? When a rank dies, the others only learn that some connection broke; together they find out whose.

A thread on every rank looks at the job's store once a second. The first rank whose communication fails calls the roll
there; the threads answer, also for ranks that are stuck in a collective, and whoever does not answer is gone. Ranks that do
not leave by themselves after that are ended by their thread, so that nobody hangs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_llama.mesh import Place

POLL_SECONDS, ANSWER_SECONDS, LEAVE_SECONDS = 1.0, 5.0, 10.0
ROLL_CALL = "roll call"


class Watch:
    """One per rank of a job with more than one process. Start it when the job's process group exists."""

    def __init__(self, place: Place) -> None:
        # Waiting on a connection blocks all its users: the thread and the caller have one each.
        self._place, self._store, thread_store = place, _connect(place), _connect(place)
        self._over = threading.Event()
        self._silent: list[int] = []
        self._thread = threading.Thread(target=self._look, args=(thread_store,), name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The job ends, or this rank leaves by itself."""
        self._over.set()
        self._thread.join()

    def _look(self, store: Store) -> None:
        while not self._over.wait(POLL_SECONDS):
            try:
                if not store.check([ROLL_CALL]):
                    continue
                store.set(_answer(self._place.rank), "here")
            except RuntimeError:
                pass  # the store's host is gone, which every rank notices
            if self._over.wait(ANSWER_SECONDS):
                return
            reason = self._reason(store)  # now, while the store's host still waits for those who ask
            if not self._over.wait(LEAVE_SECONDS):
                print(f"rank {self._place.rank} was stuck, and was ended: {reason}", file=sys.stderr, flush=True)
                os._exit(1)

    def _reason(self, store: Store) -> str:
        try:
            silent = [rank for rank in range(self._place.world_size) if not store.check([_answer(rank)])]
            self._silent = silent
            reason = f"rank {', '.join(map(str, silent))} does not answer" if silent else f"rank {store.get(ROLL_CALL).decode()} failed"
            store.set(_heard(self._place.rank), "yes")
            return reason
        except RuntimeError:
            return "rank 0 does not answer"

    def missing(self) -> list[int]:
        """Call the roll and return the ranks that do not answer. Rank 0, whose machine may host the store, goes with it."""
        others = [rank for rank in range(self._place.world_size) if rank != self._place.rank]
        deadline = time.monotonic() + ANSWER_SECONDS
        try:
            self._store.set(_answer(self._place.rank), "here")
            # Set once: who calls after the first one failed only because of that.
            self._store.compare_set(ROLL_CALL, "", str(self._place.rank))
            silent = [rank for rank in others if not self._appears(_answer(rank), deadline)]
            self._store.set(_heard(self._place.rank), "yes")
            if self._place.rank == 0:  # it may host the store: leaving now would look like its death to those still asking
                for rank in set(others) - set(silent):
                    self._appears(_heard(rank), deadline + ANSWER_SECONDS + LEAVE_SECONDS)
            return silent
        except RuntimeError:
            return self._silent or [0]  # found out by the thread before the store went, if it was there that long

    def _appears(self, key: str, deadline: float) -> bool:
        """Raises RuntimeError when the store is gone."""
        left = deadline - time.monotonic()
        if left <= 0 or self._store.check([key]):
            return self._store.check([key])
        try:
            self._store.wait([key], timedelta(seconds=left))
        except DistStoreError:
            return False
        return True


def _answer(rank: int) -> str:
    return f"{ROLL_CALL}/{rank}"


def _heard(rank: int) -> str:
    return f"{ROLL_CALL}/{rank} knows"


def _connect(place: Place) -> Store:
    """A new connection to the store of this attempt of the job."""
    store = TCPStore(place.master_addr, place.master_port, is_master=False, timeout=timedelta(seconds=30))
    return PrefixStore(f"watch/{place.attempt}", store)
