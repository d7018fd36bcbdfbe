"""The search for a dead rank: each rank's own watch in its turn, on a store that counts."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.watch import ALARM, FAILED, STUCK, Diagnosis, Watch
from tools.scaling.rows import COMPUTED, MEASURED, Row
from tools.scaling.store import Counted, request_seconds

RANKS_OF_A_MACHINE = 8


@dataclass(frozen=True)
class Search:
    """What a search has found, and what it has cost."""

    found: list[Diagnosis]
    """The findings of each rank that is alive."""
    requests: Counter[int]
    """Requests to the store, by rank."""
    waits: float
    """Seconds that a rank waits for the answers of others."""
    reader_seconds: float
    """Seconds of the first rank that reads the answers."""

    def seconds(self, request: float) -> float:
        """Return the seconds until the last rank has heard, with ``request`` seconds for each
        request: the store answers one after the other."""
        return self.waits + self.requests.total() * request


def search(world: int, kind: str, *, dead: int, caller: int) -> Search:
    """All ranks but the ``dead`` one answer an alarm of the ``caller``, and learn what was found.
    Nothing waits: each rank comes when all before it are done."""
    store = Counted()
    watches = [
        Watch(Place(rank, world, rank % RANKS_OF_A_MACHINE), Recorder()) for rank in range(world)
    ]
    for rank, watch in enumerate(watches):
        store.asking = rank
        watch._post(store)  # type: ignore[arg-type]
    store.requests.clear()
    store.asking = caller
    store.compare_set(ALARM, "", f"{kind} {caller}")
    alive = [rank for rank in range(world) if rank != dead]
    for rank in alive:
        store.asking = rank
        watches[rank]._answer(store)  # type: ignore[arg-type]
        # Its thread and the one that asks: it counts once.
        watches[rank]._answer(store)  # type: ignore[arg-type]
    found = []
    seconds = []
    for rank in alive:
        store.asking = rank
        begun = time.perf_counter()
        found.append(watches[rank]._findings(store))  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - begun)
    return Search(found, store.requests, watches[0]._answer_seconds, seconds[0])


def watch(world: int) -> list[Row]:
    """Return the seconds until the right rank is named. Raises AssertionError for a wrong one."""
    rows = []
    dead = world * 2 // 7
    for kind, words in ((FAILED, "another fails"), (STUCK, "another waits too long")):
        result = search(world, kind, dead=dead, caller=world // 50)
        reasons = {(one.reason, one.silent) for one in result.found}
        assert reasons == {(f"rank {dead} does not answer", (dead,))}, reasons
        words = f"right rank named after {words}"
        total = result.seconds(request_seconds())
        (_, first), *others = result.requests.most_common()
        asked = f"{words}: {first} requests"
        rows += [
            Row("watch", words, "all", total, None, COMPUTED),
            Row("watch", asked, "reader", result.reader_seconds, None, MEASURED),
            Row("watch", f"{words}: {others[0][1]} requests", "others", None, None, MEASURED),
        ]
    return rows
