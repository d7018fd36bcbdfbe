"""Memory of messages that NCCL knows beforehand.

NCCL copies what it sends through buffers of its own, unless both ends have registered their memory
with the communicator. Slots and shards never move, so they can be registered once: NCCL's user
buffer registration (NCCL documentation, "User Buffer Registration"), which torch offers for the
segments of a memory pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.mesh import Mesh


class RegisteredMemory:
    """A pool from which tensors are made, and the data-parallel communicators that know it.

    The communicators exist already: torch registers nothing with one that its first message makes.
    On a host, where it is not ``wanted`` and where there are no other ranks, there is no pool."""

    def __init__(self, mesh: Mesh, *, wanted: bool) -> None:
        axes = [mesh.dp_gather, mesh.dp_shard, mesh.dp_replica]
        if mesh.experts is not None:
            axes += mesh.experts.all
        groups = dict.fromkeys(axis.communicator for axis in axes if axis.communicator is not None)
        if devices.is_host(mesh.device) or not wanted:
            groups = {}
        self._device = mesh.device
        self._backends: list[Any] = [group._get_backend(mesh.device) for group in groups]
        # Memory of one communicator's allocator can be registered with all.
        self._pool = devices.message_pool(self._backends[0]) if self._backends else None
        self._registered = False

    @contextmanager
    def making(self) -> Iterator[None]:
        """Make the tensors of this thread in the pool, and register them at the end. Once."""
        if self._pool is None:
            yield
            return
        with devices.making_in(self._pool, self._device):
            yield
        for backend in self._backends:
            backend.register_mem_pool(self._pool)
        self._registered = True

    def close(self) -> None:
        """Take the registrations back, while the communicators still exist."""
        if self._registered:
            for backend in self._backends:
                backend.deregister_mem_pool(self._pool)
        self._registered = False
