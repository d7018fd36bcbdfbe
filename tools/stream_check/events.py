"""What a recorded step is made of: plain data, in the order in which the host did it.

A *line* is an order of execution: a stream of the device, the stream of a communicator, or a thread
of the host. What one line does comes in the order of this list; between lines only ``Signal`` and
``Wait`` make an order. A thread issues work to a stream, so an ``Access`` on a stream also comes
after everything that its thread did before (``thread`` is the line of that thread).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Memory(Enum):
    """Where a buffer is."""

    DEVICE = "device"
    PINNED = "pinned"
    HOST = "host"


@dataclass(frozen=True)
class Line:
    """An order of execution."""

    name: str
    """``computing stream``, ``communicator dp_gather``, ``thread MainThread``, ..."""
    is_thread: bool


@dataclass(frozen=True)
class Site:
    """The place in the package from which something was done."""

    file: str
    """Relative to the repository."""
    line: int


@dataclass(frozen=True)
class Alloc:
    """A storage began to exist. ``line`` is the stream whose allocator pool it comes from."""

    thread: Line
    site: Site
    line: Line
    buffer: int
    """The number of the storage, never used again."""
    nbytes: int
    memory: Memory
    name: str
    """``gradient slot 3``, ``parameter shard of bucket 2``; "" for a temporary one."""


@dataclass(frozen=True)
class Free:
    """The last reference to a storage is gone. The allocator may hand its memory to the next
    allocation on its own stream at once."""

    thread: Line
    site: Site
    buffer: int


@dataclass(frozen=True)
class RecordStream:
    """``Tensor.record_stream``: the memory is not handed out before ``line`` has done what it has
    been given."""

    thread: Line
    site: Site
    buffer: int
    line: Line


@dataclass(frozen=True)
class Access:
    """An operator, a copy or a message reads or writes bytes of a storage."""

    thread: Line
    site: Site
    line: Line
    """The stream that does it, or the thread if the host does it at once."""
    operator: str
    """``aten.mm``, ``reduce_scatter 3 on dp_shard``, ``copy to the host``."""
    buffer: int
    begin: int
    end: int
    """Bytes within the storage."""
    writes: bool


@dataclass(frozen=True)
class Signal:
    """A point in the order of ``line`` that others can wait for: an event recorded on a stream, the
    end of a message, a task put into a queue, a lock released."""

    thread: Line
    site: Site
    line: Line
    token: int
    """The number of this point. An event that is recorded again has a new number."""


@dataclass(frozen=True)
class Wait:
    """From here on ``line`` does nothing before the point ``token`` has been reached. ``line`` may
    be a thread: then the host waits (an event's ``synchronize``, a queue's ``get``)."""

    thread: Line
    site: Site
    line: Line
    token: int | None
    """None for an event that was never recorded: CUDA then does not wait at all."""
    through: tuple[Site, ...] = ()
    """The places in ``engine/shard/`` and in layers that have called what waits: they decide that
    somebody waits, and the engine how."""


Event = Alloc | Free | RecordStream | Access | Signal | Wait
