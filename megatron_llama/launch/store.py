"""Connections to the job's key-value store, for messages that cannot wait for a collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    PrefixStore,
    Store,
    TCPStore,
)

from megatron_llama.errors import ClusterError, LostRankError, describe
from megatron_llama.launch.launcher import Place


def open_store(place: Place, timeout: timedelta, *, hosts: bool) -> Store:
    """Host the job's store, or connect to its host, for at most ``timeout``. A hosted store lives
    as long as this process. Raises ClusterError where that fails."""
    where = f"{place.master_addr}, port {place.master_port} (MASTER_ADDR, MASTER_PORT)"
    try:
        if not hosts:
            return TCPStore(
                place.master_addr,
                place.master_port,
                is_master=False,
                timeout=timeout,
                # ``meet`` waits instead, and names the missing ranks.
                wait_for_workers=False,
            )
        store = _hosted(place.master_addr, place.master_port)
    except DistError as error:
        if not hosts:
            raise LostRankError(_lost(f"no answer at {where}")) from error
        do = "choose another port: this one may be in use"
        got = f"{where}: {str(error).splitlines()[0]}"
        raise ClusterError("rank 0", got=got, expected="an address to listen on", do=do) from error
    store.set_timeout(timeout)
    return store


# A program may train again. Ranks come to the second run while rank 0 still leaves the first: with
# a server for each run they would have connected to one that goes away.
@cache
def _hosted(address: str, port: int) -> TCPStore:
    return TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)


@contextmanager
def host_named() -> Iterator[None]:
    """Turn the loss of the store during the section into an error that names its host. Raises
    LostRankError."""
    try:
        yield
    except DistError as error:
        raise LostRankError(_lost("a store that went away")) from error


def _lost(got: str) -> str:
    expected = "the store by which the ranks find each other"
    do = "look at what rank 0 printed, and whether this machine can reach its address"
    return describe("rank 0", got=got, expected=expected, do=do)


def connect(place: Place, prefix: str) -> Store:
    """Open a new connection to the part of the store under ``prefix``. A wait on a connection
    blocks all its other users.

    No earlier attempt of the job may have used ``prefix``, since a launcher may keep its store over
    restarts."""
    return PrefixStore(
        prefix,
        TCPStore(
            place.master_addr, place.master_port, is_master=False, timeout=timedelta(seconds=30)
        ),
    )
