"""The job's key-value store, for what cannot wait for the next collective."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_llama.distributed.mesh import Place


def connect(place: Place, room: str) -> Store:
    """A new connection to a part of the store. Waiting on a connection blocks all its users.

    ``room``: a name that no attempt of the job before this one has used, since a launcher may keep
    its store over restarts."""
    return PrefixStore(
        room,
        TCPStore(
            place.master_addr, place.master_port, is_master=False, timeout=timedelta(seconds=30)
        ),
    )
