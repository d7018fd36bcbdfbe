"""Meeting in a store that remembers other attempts."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from megatron_llama.errors import ClusterError
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.rendezvous import meet
from megatron_llama.launch.store import open_store
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from tests.launcher import free_port

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


def test_a_store_that_cannot_be_found_or_hosted() -> None:
    soon = timedelta(seconds=0.3)
    with pytest.raises(ClusterError, match=r"rank 0: got no answer at 127.0.0.1, port \d+ \(MASTER_ADDR, MASTER_PORT\), expected the store "):
        open_store(Place(1, 2, 1, "127.0.0.1", free_port()), soon, hosts=False)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ClusterError, match=f"rank 0: got 127.0.0.1, port {port} .*; choose another port"):
            open_store(Place(0, 2, 0, "127.0.0.1", port), soon, hosts=True)
