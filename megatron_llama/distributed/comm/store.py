"""Connections to the job's key-value store, for messages that cannot wait for a collective."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_llama.distributed.mesh import Place


def connect(place: Place, prefix: str) -> Store:
    """Open a new connection to the part of the store under ``prefix``. One who waits on a
    connection blocks all its other users.

    No earlier attempt of the job may have used ``prefix``, since a launcher may keep its store over
    restarts."""
    return PrefixStore(
        prefix,
        TCPStore(
            place.master_addr, place.master_port, is_master=False, timeout=timedelta(seconds=30)
        ),
    )
