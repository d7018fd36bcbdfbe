"""Ids as bytes: native 32-bit integers, end to end.

A corpus is millions of words that are looked up. Joining their ids as bytes costs a copy of memory.
Lists took a Python object for each id, and most of the time of ``preprocess``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

ID_BYTES = array("i").itemsize


def pack(ids: Iterable[int]) -> bytes:
    """Return the ids as bytes. Raises OverflowError for one that is no 32-bit integer."""
    return array("i", ids).tobytes()


def unpack(packed: bytes) -> list[int]:
    """Return the ids that were given to ``pack``."""
    return array("i", packed).tolist()
