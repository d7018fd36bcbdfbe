"""Meeting in a store that remembers other attempts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from megatron_llama.distributed.rendezvous import meet
from megatron_llama.errors import ClusterError
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

RANKS = 3


def attempt(store: Store, ranks: range = range(RANKS), seconds: float = 30.0) -> list[Store]:
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda rank: meet(store, rank, RANKS, seconds), ranks))


def test_ranks_of_an_attempt_share_what_no_other_sees() -> None:
    store, rooms = HashStore(), []
    for number in range(3):
        rooms.append(attempt(store))
        assert not rooms[-1][2].check(["address"])
        rooms[-1][0].set("address", str(number))
        assert [room.get("address") for room in rooms[-1]] == [str(number).encode()] * RANKS
    assert [room[1].get("address") for room in rooms] == [b"0", b"1", b"2"]


def test_who_does_not_come_is_named() -> None:
    store = HashStore()
    attempt(store)
    with pytest.raises(ClusterError, match="rank 1, 2: got no sign of it, expected all ranks at the start; "):
        meet(store, 0, RANKS, seconds=0.1)
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(ClusterError, match="rank 0: got no sign of it, "):
        meet(store, 1, RANKS, seconds=30.0)
