"""What the search for a dead rank asks of the job's one store, in a job of 16,384 ranks: the watch itself, on a store that counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.launch import watch as watching
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.watch import ALARM, FAILED, STUCK, Diagnosis, Watch
from torch.distributed import HashStore

REQUEST_SECONDS = 21e-6
"""As measured with 512 ranks."""
NAMED_WITHIN = 15.0
DEAD, CALLER = 4711, 300


class Counted:
    """A store that counts who asks it how often."""

    def __init__(self) -> None:
        self.store, self.asking, self.requests = HashStore(), -1, Counter[int]()

    def __getattr__(self, name: str) -> Any:
        self.requests[self.asking] += 1
        return getattr(self.store, name)


def search(world: int, kind: str) -> tuple[list[Diagnosis], Counter[int], float]:
    """All ranks but one answer an alarm and learn what was found: their findings, who has asked how often, and seconds until the last has heard."""
    store = Counted()
    watches = [Watch(Place(rank, world, rank % 8), Recorder()) for rank in range(world)]
    for rank, watch in enumerate(watches):
        store.asking = rank
        watch._post(store)  # type: ignore[arg-type]
    store.requests.clear()
    store.asking = CALLER
    store.compare_set(ALARM, "", f"{kind} {CALLER}")
    alive = [rank for rank in range(world) if rank != DEAD]
    for rank in alive:
        store.asking = rank
        watches[rank]._answer(store)  # type: ignore[arg-type]
        watches[rank]._answer(store)  # type: ignore[arg-type]  # its thread and the one that asks: counted once
    found = []
    for rank in alive:
        store.asking = rank
        found.append(watches[rank]._findings(store))  # type: ignore[arg-type]
    waits = watches[0]._answer_seconds
    return found, store.requests, waits + store.requests.total() * REQUEST_SECONDS


@pytest.mark.parametrize("kind", [FAILED, STUCK])
def test_the_right_rank_is_named_in_time_at_16384_ranks(kind: str) -> None:
    found, requests, seconds = search(16384, kind)
    assert {(one.reason, one.silent) for one in found} == {(f"rank {DEAD} does not answer", (DEAD,))}
    assert seconds < NAMED_WITHIN
    (reader, _), *others = requests.most_common()
    assert reader == 0, "the first who asked"
    assert max(count for _, count in others) <= 8, "however many ranks there are"


def test_polls_leave_the_store_most_of_its_time() -> None:
    for world in (8, 1024, 16384):
        watch = Watch(Place(0, world, 0), Recorder())
        assert world * watching.STORE_SECONDS / watch._pace(watching.POLL_SECONDS) <= watching.STORE_SHARE + 1e-9
    assert Watch(Place(0, 8, 0), Recorder())._pace(watching.POLL_SECONDS) == watching.POLL_SECONDS


def test_a_reader_that_dies_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has claimed to read, and nothing came."""
    monkeypatch.setattr(watching, "ANSWER_SECONDS", 0.05)
    store = HashStore()
    store.set(ALARM, f"{FAILED} 1")
    store.compare_set(f"{watching.READER}/0", "", "2")
    watches = [Watch(Place(rank, 3, rank), Recorder()) for rank in range(2)]
    for watch in watches:
        watch._post(store)
        watch._answer(store)
    assert [watch._findings(store).silent for watch in watches] == [(2,), (2,)]
