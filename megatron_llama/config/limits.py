"""Bounds on what a file may claim before anything is allocated or repeated by its word, each with
its reason. A bound is far above what any real file holds, and far below what takes a machine.

What is refused by one of them is refused with what the file claims and what is allowed."""

from __future__ import annotations

LARGEST_INTEGER = 2**63 - 1
"""Integers of files become int64 in torch."""
SHOWN_CHARACTERS = 80
"""An error shows so much of a value."""
LARGEST_DIMENSIONS = 64
"""torch knows no tensor of more dimensions."""
LARGEST_CHECKSUM_LIST = 2**26
"""Bytes of ``SHA256SUMS``: half a million files, one for each rank."""
LARGEST_META = 2**26
"""Bytes of ``meta.json``: tens of megabytes where thousands of lanes read a hundred texts."""
LARGEST_INDEX = 2**30
"""Bytes of ``.metadata``: some 150 for each chunk of 4 million elements. Megatron-Core's has all
plans of all ranks, too."""
LARGEST_TRACKER = 64
"""Bytes of ``latest_checkpointed_iteration.txt``: one number."""
LARGEST_CHUNK_HEADER = 2**16
"""The pickle that describes one tensor has some 200 bytes. A larger one is something else."""
LARGEST_TUPLE = 2**12
"""Values in a tuple of a pickle, those of tuples in it included. Each level of tuples takes a part
of the C stack when a tuple is hashed, and a tuple that holds the one before twice takes twice as
long: 40 levels of 4 bytes would take days."""
PICKLED_BYTES_PER_OBJECT = 4
"""A pickle makes at most one object for so many of its bytes, beside 2**18: real ones take ten. One
byte can make a dict of 64."""
HASHED_PER_PICKLED_BYTE = 16
"""So many values may be hashed for each byte of a pickle: real ones have less than one."""
LARGEST_COVER_WORK = 64
"""Chunks are looked at so often, beside a million times in all, to see that they do not overlap.
Boxes that were cut straight take one look for each direction."""
