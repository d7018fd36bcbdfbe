"""The heads that each context-parallel rank computes when the ranks exchange the sequence for heads
(``engine/comm/head_exchange.py``): plain integers, no torch."""

from __future__ import annotations

from math import gcd


def sent_key_heads(queries: int, keys: int, size: int) -> tuple[int, ...]:
    """Return the key/value heads that go to ``size`` ranks, rank after rank, as many to each. Rank
    r computes the r-th of ``size`` equal parts of the query heads.

    The query heads of a rank are divided equally among the key/value heads that it gets. Several
    ranks get a copy of a head if there are fewer heads than ranks. Where a rank's query heads end
    inside the group of a key/value head, and neither number divides the other, a rank may get
    several copies of one."""
    group = queries // keys
    step = gcd(queries // size, group)
    return tuple(first // group for first in range(0, queries, step))


def exchanged_heads(queries: int, keys: int, size: int) -> int:
    """Return the heads of queries, keys and values in the message before attention, to all ranks
    together."""
    return queries + 2 * len(sent_key_heads(queries, keys, size))
