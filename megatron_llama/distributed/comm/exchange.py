"""The collectives of the data-parallel engine: over fixed buffers, made once and issued again and
again.

What differs between backends is decided here and nowhere else: a device's communicator does what it
is made for; on the host gloo's own collectives would send twice the minimum and finish only inside
``wait``, see ``gloo.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.distributed import device as devices
from megatron_llama.distributed.comm.collectives import (
    all_gather_single,
    reduce_scatter_single,
    same_place,
)
from megatron_llama.distributed.comm.host import gloo
from megatron_llama.distributed.mesh import Axis
from megatron_llama.distributed.recorder import Note

CHUNK_BYTES = 1 << 20
"""Larger pieces between two hosts go one way at a time: gloo's control messages queue behind
them."""


class Exchange(Protocol):
    """One collective. ``start``, ``wait``, then again; RuntimeError in another order.

    Ranks may start and wait for their exchanges in different orders, except that an ``all_reduce``
    on the host sends its sums inside ``wait``: two of them must be waited for in the same order on
    all ranks. A peer's death is an error of ``wait``."""

    def start(self) -> None:
        """The source is complete: send it. What is received may be written from now on. Never
        blocks."""

    def wait(self) -> None:
        """The result is in place and the source may be overwritten (a device: for what its current
        stream does next)."""


def gather(
    full: Tensor, own: Tensor, axis: Axis, *, index: int, chunk_bytes: int = CHUNK_BYTES
) -> Exchange:
    """Concatenate the shards ``own`` [n] of all ranks into ``full`` [n x size]. ``own`` may be its
    place inside ``full``.

    ``index``: tells the gathers of one axis apart, the same on all ranks."""
    part = full[axis.rank * own.numel() : (axis.rank + 1) * own.numel()]
    place = (lambda: None) if same_place(part, own) else _copying(part, own)
    if axis.size == 1:
        return _Alone(place)
    if gloo.carries(axis, full.device):
        return _Counted(
            gloo.Gather(full.data, axis, index, chunk_bytes),
            axis,
            "all_gather",
            index,
            full,
            before=place,
        )

    def issue() -> Any:
        return all_gather_single(full.data, own.data, group=axis.group, async_op=True)

    return _Counted(_Native(issue), axis, "all_gather", index, full)


class Reductions:
    """The reduce-scatters of one rank. They share ``in_flight`` staging buffers: the last user of
    an exchange's buffer must have been waited for when it starts. RuntimeError otherwise."""

    def __init__(
        self,
        axis: Axis,
        *,
        largest: int,
        dtype: torch.dtype,
        wire: torch.dtype | None,
        device: torch.device,
        in_flight: int,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """``largest``: elements of the largest buffer; ``wire``: the dtype in which parts are sent
        (None: ``dtype``)."""
        self._axis = axis
        self._wire = wire if wire != dtype else None
        self._chunk_bytes = chunk_bytes
        self._parts = (
            gloo.Parts.allocate(axis, largest, wire or dtype, dtype, in_flight)
            if gloo.carries(axis, device)
            else []
        )
        casts = in_flight if self._wire is not None and axis.size > 1 else 0
        self._narrow = [torch.empty(largest, dtype=wire, device=device) for _ in range(casts)]
        self._turns = [_Ticket() for _ in range(in_flight)]
        self._sums = [
            torch.empty(-(-largest // axis.size), dtype=wire, device=device)
            for _ in range(0 if self._parts else casts)
        ]

    @property
    def staging_bytes(self) -> int:
        """Bytes of all buffers beside source and result: on the host in_flight x (size - 1) / size
        x largest in the wire dtype; with a wire dtype of its own another in_flight x largest of
        that, and in_flight x largest / size to add in."""
        buffers = [
            *self._narrow,
            *self._sums,
            *(tensor for parts in self._parts for tensor in (parts.received, parts.wide)),
        ]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def scatter(self, full: Tensor, shard: Tensor, *, index: int, buffer: int) -> Exchange:
        """Sum ``full`` [n] over the ranks into ``shard`` [n / size], which may be this rank's place
        inside ``full``. On the host in rank order, at least in the dtype of ``shard``: no value
        depends on where buffers or chunks end. ``index``: tells the reductions of one axis apart,
        the same on all ranks; ``buffer``: number of the staging buffer."""
        axis = self._axis
        if axis.size == 1:
            return _Alone((lambda: None) if same_place(shard, full) else _copying(shard, full))
        sent = full.data
        cast = None
        if self._wire is not None:
            sent = self._narrow[buffer][: full.numel()]
            cast = _copying(sent, full)
        turn = self._turns[buffer]
        if self._parts:
            parts = self._parts[buffer]
            exchange: Exchange = gloo.ReduceScatter(
                sent, shard.data, axis, parts, index, self._chunk_bytes
            )
            return _Counted(exchange, axis, "reduce_scatter", index, sent, before=cast, turn=turn)
        target = shard.data if cast is None else self._sums[buffer][: shard.numel()]

        def issue() -> Any:
            return reduce_scatter_single(target, sent, group=axis.group, async_op=True)

        after = None if cast is None else _copying(shard, target)
        return _Counted(
            _Native(issue), axis, "reduce_scatter", index, sent, before=cast, after=after, turn=turn
        )


def all_reduce(
    tensor: Tensor,
    axis: Axis,
    *,
    index: int,
    wire: torch.dtype | None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Exchange:
    """Sum ``tensor`` over the ranks in place, on the host in rank order: the same bits on every
    rank, and those of a reduce-scatter. With ``wire`` the sums travel in that dtype too, so every
    rank keeps the rounded ones."""
    if axis.size == 1:
        return _Alone(lambda: None)
    narrow = wire is not None and wire != tensor.dtype
    sent = torch.empty_like(tensor.data, dtype=wire) if narrow else tensor.data
    before, after = (_copying(sent, tensor), _copying(tensor, sent)) if narrow else (None, None)
    if gloo.carries(axis, tensor.device):
        exchange = gloo.AllReduce(sent, tensor.dtype, axis, index, chunk_bytes)
        return _Counted(exchange, axis, "all_reduce", index, sent, before=before, after=after)

    def issue() -> Any:
        return dist.all_reduce(sent, group=axis.group, async_op=True)

    return _Counted(_Native(issue), axis, "all_reduce", index, sent, before=before, after=after)


def _copying(target: Tensor, source: Tensor) -> Callable[[], None]:
    target = target.data
    source = source.data

    def copy() -> None:
        target.copy_(source)

    return copy


class _Alone:
    """Nobody to exchange with."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy

    def start(self) -> None:
        """The own part is everything."""
        self._copy()

    def wait(self) -> None:
        """It is done."""


class _Native:
    """A collective of the device's backend."""

    def __init__(self, issue: Callable[[], Any]) -> None:
        self._issue = issue
        self._work: Any = None

    def start(self) -> None:
        """See Exchange."""
        self._work = self._issue()

    def wait(self) -> None:
        """See Exchange."""
        assert self._work is not None
        self._work.wait()
        self._work = None


@dataclass
class _Ticket:
    """Who uses a staging buffer. On a device, where ``wait`` returns at once and the next user may
    start in another stream: when the last one is through."""

    user: _Counted | None = None
    free: torch.Event | None = None

    def take(self, user: _Counted, device: torch.device) -> None:
        """RuntimeError if its last user was not waited for."""
        if self.user is not None:
            raise RuntimeError(
                f"{user} needs the staging buffer of {self.user}, which was not waited for"
            )
        self.user = user
        if self.free is not None:
            devices.current_stream(device).wait_event(self.free)

    def give_back(self, device: torch.device) -> None:
        """The user was waited for."""
        self.user = None
        if not devices.is_host(device):
            self.free = devices.current_stream(device).record_event()


class _Counted:
    """An exchange with what goes before and after it, counted when it starts, and held to its
    order."""

    def __init__(
        self,
        exchange: Exchange,
        axis: Axis,
        operation: str,
        index: int,
        sent: Tensor,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
        turn: _Ticket | None = None,
    ) -> None:
        self._exchange = exchange
        self._axis = axis
        self._operation = operation
        self._index = index
        self._bytes = sent.numel() * sent.element_size()
        self._device = sent.device
        self._before = before
        self._after = after
        self._turn = turn
        self._started = False
        self._note: Note | None = None

    def __str__(self) -> str:
        return f"{self._operation} {self._index} on {self._axis.name}"

    def start(self) -> None:
        """See Exchange."""
        if self._started:
            raise RuntimeError(f"{self} was started again before it was waited for")
        if self._turn is not None:
            self._turn.take(self, self._device)
        self._started = True
        self._note = self._axis.recorder.count(
            self._axis.name, self._operation, self._bytes, self._index
        )
        self._axis.recorder.issued = self
        if self._before is not None:
            self._before()
        self._exchange.start()

    def wait(self) -> None:
        """See Exchange."""
        if not self._started:
            raise RuntimeError(f"{self} was waited for, but not started")
        with self._axis.recorder.waiting(self):
            self._exchange.wait()
        if self._note is not None:
            self._note.end()
        if self._after is not None:
            self._after()
        self._started = False
        if self._turn is not None:
            self._turn.give_back(self._device)
