"""The agreement of the ranks of one attempt of a job on a part of the launcher's store that no
earlier attempt has written to.

torchrun keeps its store when it restarts a job, and in it the addresses of processes that are gone.
Its count of restarts cannot tell the attempts apart, because each machine counts on its own. So
every rank draws a random number for this attempt and writes it into the store; rank 0 answers each
number with its own, which becomes the name of the attempt. Rank 0 also answers numbers that ranks
of earlier attempts have left there. That is harmless: no rank waits for those answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from uuid import uuid4

from torch.distributed import DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]

from megatron_llama.errors import LostRankError, describe

POLL_SECONDS = 0.005


def meet(
    store: Store,
    rank: int,
    world_size: int,
    seconds: float,
    *,
    found: Callable[[str], None] | None = None,
) -> Store:
    """Return this attempt's part of the store. Collective. Raises LostRankError if a rank does not
    come within ``seconds``.

    ``found`` is called with the name of the attempt as soon as this rank knows it, which may be
    long before all ranks are there."""
    own = uuid4().hex  # on rank 0 the name of the attempt
    if rank == 0:
        if found is not None:
            found(own)
        _answer_all(store, own, range(1, world_size), time.monotonic() + seconds)
        return PrefixStore(own, store)
    store.set(_hello(rank), own)
    try:
        store.wait([own])  # for as long as the timeout of the store
    except DistStoreError:
        raise LostRankError(_absent([0])) from None
    attempt = store.get(own).decode()
    if found is not None:  # before rank 0 counts this rank: then every rank that it counts answers
        found(attempt)
    store.set(_here(attempt, rank), "")
    return PrefixStore(attempt, store)


def _answer_all(store: Store, attempt: str, others: Sequence[int], deadline: float) -> None:
    missing = list(others)
    answered = dict.fromkeys(others, "")
    while missing := [rank for rank in missing if not store.check([_here(attempt, rank)])]:
        if time.monotonic() > deadline:
            raise LostRankError(_absent(missing))
        for rank in missing:
            said = store.get(_hello(rank)).decode() if store.check([_hello(rank)]) else ""
            if said != answered[rank]:
                store.set(said, attempt)
                answered[rank] = said
        time.sleep(POLL_SECONDS)


def _absent(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    do = "look at what those ranks printed, and whether they can reach the first machine"
    return describe(f"rank {names}", got="no sign of it", expected="all ranks at the start", do=do)


def _hello(rank: int) -> str:
    return f"hello/{rank}"


def _here(attempt: str, rank: int) -> str:
    return f"{attempt}/here/{rank}"
