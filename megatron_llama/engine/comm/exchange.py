"""The collectives of the data-parallel engine, over fixed buffers: made once and issued again and
again.

On a device they are those of the backend. Over gloo they are direct transfers (``host/gloo.py``):
gloo's own collectives would send twice the minimum and finish only inside ``wait``. Which of the
two is taken is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.collectives import (
    all_gather_single,
    reduce_scatter_single,
    same_place,
)
from megatron_llama.engine.comm.host import gloo
from megatron_llama.engine.comm.recorder import Note
from megatron_llama.engine.mesh import Axis

CHUNK_BYTES = 1 << 20
"""Between two hosts, larger pieces go one way at a time: gloo's control messages queue behind
them."""


class Exchange(Protocol):
    """One collective. ``start``, ``wait``, then again; RuntimeError in another order.

    Ranks may start and wait for their exchanges in different orders, except that an ``all_reduce``
    on the host sends its sums inside ``wait``: two of them must be waited for in the same order on
    all ranks. A peer's death is an error of ``wait``."""

    def start(self) -> None:
        """Send the source, which is complete. What is received may be written from now on. Never
        blocks."""

    def wait(self) -> None:
        """Wait until the result is in place and the source may be overwritten; on a device, for
        what its current stream does next."""


def gather(
    full: Tensor, shard: Tensor, axis: Axis, *, index: int, chunk_bytes: int = CHUNK_BYTES
) -> Exchange:
    """Concatenate the shards [n] of all ranks into ``full`` [n x size]. ``shard`` may be its place
    inside ``full``.

    ``index`` tells the gathers of one axis apart and is the same on all ranks."""
    place = full[axis.rank * shard.numel() : (axis.rank + 1) * shard.numel()]
    copy = None if same_place(place, shard) else _copying(place, shard)
    if axis.size == 1:
        return _LocalExchange(copy, full.device)
    if gloo.carries(axis, full.device):
        exchange = gloo.Gather(full.data, axis, index, chunk_bytes)
        return _CheckedExchange(exchange, axis, "all_gather", index, full.nbytes, before=copy)

    def issue() -> Any:
        return all_gather_single(full.data, shard.data, group=axis.communicator, async_op=True)

    return _CheckedExchange(_BackendExchange(issue), axis, "all_gather", index, full.nbytes)


class StagingBuffer:
    """Memory that reductions use one after the other: on a device gradients are cast into it and
    summed in it, on the host it goes with a receive buffer.

    It knows its user, and on a device the event after which the next user may write it: ``wait``
    returns at once there, and the next user starts in another stream."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """``numel`` elements in the dtype of the wire; 0 where nothing is cast."""
        self.memory = torch.empty(numel, dtype=dtype, device=device)
        self._device = device
        self._user: _CheckedExchange | None = None
        self._free: torch.Event | None = None

    def acquire(self, user: _CheckedExchange) -> None:
        """The user is about to write the memory. Raises RuntimeError if the last user was not
        waited for."""
        if self._user is not None:
            raise RuntimeError(
                f"{user} needs the receive buffer of {self._user}, which was not waited for"
            )
        self._user = user
        # The stream in which the user starts waits until the last user's sum has been read, in the
        # stream that followed it. Nobody else waits: not the host, not the layers.
        if self._free is not None:
            devices.current_stream(self._device).wait_event(self._free)

    def release(self) -> None:
        """The user was waited for, and what its stream was given so far is all that reads the
        memory."""
        self._user = None
        if not devices.is_host(self._device):
            self._free = devices.current_stream(self._device).record_event()


class Reductions:
    """The reduce-scatters of one rank. They share ``in_flight`` receive buffers: the last user of
    an exchange's buffer must have been waited for when it starts. RuntimeError otherwise, where
    there are buffers.

    On the host a receive buffer holds the parts of all other ranks, (size - 1) / size x largest in
    the dtype of the wire, and with a wire of its own a cast of the whole and one part to add in. On
    a device it is a cast of the whole, in which the backend sums, and nothing without a wire."""

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
        """``largest``: elements of the largest buffer. ``wire``: the dtype in which parts are sent;
        None means ``dtype``."""
        self._axis = axis
        self._casts = wire is not None and wire != dtype and axis.size > 1
        self._chunk_bytes = chunk_bytes
        self._received = (
            gloo.ReceivedParts.allocate(axis, largest, wire or dtype, dtype, in_flight)
            if gloo.carries(axis, device)
            else []
        )
        self._buffers = [
            StagingBuffer(largest if self._casts else 0, wire or dtype, device)
            for _ in range(in_flight)
        ]

    @property
    def staging(self) -> list[Tensor]:
        """The memory in which gradients are cast to the dtype of the wire."""
        return [buffer.memory for buffer in self._buffers]

    def scatter(self, full: Tensor, shard: Tensor, *, index: int, buffer: int) -> Exchange:
        """Sum ``full`` [n] over the ranks into ``shard`` [n / size], which may be this rank's place
        inside ``full``. On the host the sum is taken in rank order and at least in the dtype of
        ``shard``: no value depends on where buffers or chunks end. On a device the backend sums, in
        the dtype of the wire.

        ``index`` tells the reductions of one axis apart and is the same on all ranks; ``buffer`` is
        the number of the receive buffer."""
        axis = self._axis
        if axis.size == 1:
            copy = None if same_place(shard, full) else _copying(shard, full)
            return _LocalExchange(copy, full.device)
        sent = full.data
        cast = None
        if self._casts:
            sent = self._buffers[buffer].memory[: full.numel()]
            cast = _copying(sent, full)
        exchange: Exchange
        cast_back = None
        if self._received:
            received = self._received[buffer]
            exchange = gloo.ReduceScatter(
                sent, shard.data, axis, received, index, self._chunk_bytes
            )
        else:
            target = shard.data
            if self._casts:
                # In place: the sum takes the place of this rank's part of what is sent.
                target = sent[axis.rank * shard.numel() : (axis.rank + 1) * shard.numel()]
                cast_back = _copying(shard, target)

            def issue() -> Any:
                return reduce_scatter_single(target, sent, group=axis.communicator, async_op=True)

            exchange = _BackendExchange(issue)
        return _CheckedExchange(
            exchange,
            axis,
            "reduce_scatter",
            index,
            sent.nbytes,
            before=cast,
            after=cast_back,
            # A device that casts nothing has no buffer to wait for.
            buffer=self._buffers[buffer] if self._received or self._casts else None,
        )


def all_reduce(
    tensor: Tensor,
    axis: Axis,
    *,
    index: int,
    wire: torch.dtype | None,
    chunk_bytes: int = CHUNK_BYTES,
    staging: StagingBuffer | None = None,
) -> Exchange:
    """Sum ``tensor`` over the ranks in place. On the host the sum is taken in rank order: the same
    bits on every rank, and those of a reduce-scatter. With ``wire`` the sums travel in that dtype
    too, so every rank keeps the rounded ones.

    ``staging`` is where a tensor with a ``wire`` of another dtype is cast; the last user of it must
    have been waited for when this exchange starts. Without one the exchange has memory of its own
    for that."""
    if axis.size == 1:
        return _LocalExchange(None, tensor.device)
    sent = tensor.data
    cast = None
    cast_back = None
    if wire is not None and wire != tensor.dtype:
        staging = staging or StagingBuffer(tensor.numel(), wire, tensor.device)
        sent = staging.memory[: tensor.numel()]
        cast = _copying(sent, tensor)
        cast_back = _copying(tensor, sent)
    exchange: Exchange
    if gloo.carries(axis, tensor.device):
        exchange = gloo.AllReduce(sent, tensor.dtype, axis, index, chunk_bytes)
    else:

        def issue() -> Any:
            return dist.all_reduce(sent, group=axis.communicator, async_op=True)

        exchange = _BackendExchange(issue)
    return _CheckedExchange(
        exchange,
        axis,
        "all_reduce",
        index,
        sent.nbytes,
        before=cast,
        after=cast_back,
        buffer=None if cast is None else staging,
    )


Piece = tuple[int, Tensor]
"""A peer's position on an axis, and a contiguous flat tensor that goes to it or comes from it."""


def transfer(
    outgoing: Sequence[Piece],
    incoming: Sequence[Piece],
    axis: Axis,
    device: torch.device,
    *,
    operation: str,
    index: int,
    phase: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Exchange:
    """Send some tensors to peers, and receive others from them. What goes from one rank to another
    stands in the same order in the lists of both.

    ``index`` tells the exchanges of one axis apart, reductions and gathers among them, and
    ``phase``, 0 or 1, two transfers with one index; both are the same on all ranks."""
    exchange: Exchange
    if not outgoing and not incoming:
        return _LocalExchange(None, device)
    if gloo.carries(axis, device):
        exchange = gloo.Transfer(outgoing, incoming, axis, index, phase, chunk_bytes)
    else:

        def issue() -> Any:
            # One batch: NCCL would otherwise run them one after the other, and two ranks that both
            # first send would wait forever.
            operations = [
                dist.P2POp(function, tensor.data, group=axis.communicator, group_peer=peer)
                for function, pieces in ((dist.isend, outgoing), (dist.irecv, incoming))
                for peer, tensor in pieces
            ]
            return _Batch(dist.batch_isend_irecv(operations))

        exchange = _BackendExchange(issue)
    sent = sum(tensor.nbytes for _, tensor in outgoing)
    return _CheckedExchange(exchange, axis, operation, index, sent)


class _Batch:
    """The works of one batch of messages, as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _copying(target: Tensor, source: Tensor) -> Callable[[], None]:
    target = target.data
    source = source.data

    def copy() -> None:
        target.copy_(source)

    return copy


class _LocalExchange:
    """There is no other rank: the own part is everything."""

    def __init__(self, copy: Callable[[], None] | None, device: torch.device) -> None:
        self._copy = copy
        self._device = device
        self._copied: torch.Event | None = None

    def start(self) -> None:
        if self._copy is None:
            return
        self._copy()
        if not devices.is_host(self._device):
            self._copied = devices.current_stream(self._device).record_event()

    def wait(self) -> None:
        # Exchanges start in a stream of their own, whether there are other ranks or not.
        if self._copied is not None:
            devices.current_stream(self._device).wait_event(self._copied)


class _BackendExchange:
    """A collective of the device's backend."""

    def __init__(self, issue: Callable[[], Any]) -> None:
        self._issue = issue
        self._work: Any = None

    def start(self) -> None:
        self._work = self._issue()

    def wait(self) -> None:
        if self._work is None:
            raise RuntimeError("a message was waited for that could not be sent")
        self._work.wait()
        self._work = None


class _CheckedExchange:
    """An exchange of ``sent`` bytes, with the copies before and after it. It is counted when it
    starts, and raises when it is not used in the order of ``Exchange``."""

    def __init__(
        self,
        exchange: Exchange,
        axis: Axis,
        operation: str,
        index: int,
        sent: int,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
        buffer: StagingBuffer | None = None,
    ) -> None:
        self._exchange = exchange
        self._axis = axis
        self._operation = operation
        self._index = index
        self._bytes = sent
        self._before = before
        self._after = after
        self._buffer = buffer
        self._started = False
        self._note: Note | None = None

    def __str__(self) -> str:
        return f"{self._operation} {self._index} on {self._axis.name}"

    def start(self) -> None:
        if self._started:
            raise RuntimeError(f"{self} was started again before it was waited for")
        if self._buffer is not None:
            self._buffer.acquire(self)
        self._started = True
        self._note = self._axis.recorder.count(
            self._axis.name, self._operation, self._bytes, self._index
        )
        self._axis.recorder.issued = self
        if self._before is not None:
            self._before()
        self._exchange.start()

    def wait(self) -> None:
        if not self._started:
            raise RuntimeError(f"{self} was waited for, but not started")
        with self._axis.recorder.waiting(self):
            self._exchange.wait()
        if self._note is not None:
            self._note.end()
        if self._after is not None:
            self._after()
        # Only now: an exchange whose peer died stays started, and raises again when it is waited
        # for once more.
        self._started = False
        if self._buffer is not None:
            self._buffer.release()
