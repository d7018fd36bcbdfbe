"""The job's key-value store, for what cannot wait for the next collective."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_llama.mesh import Place


def connect(place: Place, purpose: str) -> Store:
    """A new connection to the store of this attempt of the job. Waiting on a connection blocks all its users."""
    store = TCPStore(place.master_addr, place.master_port, is_master=False, timeout=timedelta(seconds=30))
    return PrefixStore(f"{purpose}/{place.attempt}", store)
