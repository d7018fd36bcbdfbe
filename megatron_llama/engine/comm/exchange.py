"""The collectives of the data-parallel engine, over fixed buffers: made once and issued again and
again.

On a device they are those of the backend. Over gloo they are direct transfers (``host/gloo.py``):
gloo's own collectives would send twice the minimum and finish only inside ``wait``. Only this
module chooses between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.host import gloo
from megatron_llama.engine.comm.recorder import Note
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.plan.buckets import ALIGN, align_up

# torch 2.13 renamed both and warns about the old names, the only ones that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
CHUNK_BYTES = 1 << 20
"""Between two hosts, larger pieces go one way at a time: gloo's control messages queue behind
them."""
Group = dist.ProcessGroup | None
"""The communicator of an axis; None for an axis of size 1."""


class Exchange(Protocol):
    """One collective. ``start``, ``wait``, then again; RuntimeError in another order.

    Ranks may start and wait for their exchanges in different orders, except that an all-reduce on
    the host sends its sums inside ``wait``: two of them must be waited for in the same order on all
    ranks. A peer's death is an error of ``wait``."""

    def start(self) -> None:
        """Send the source, which is complete. Received data may be written from now on. Never
        blocks."""

    def wait(self) -> None:
        """Wait until the result is in place and the source may be overwritten; on a device, for the
        next work of its current stream."""


def carried_by_gloo(axis: Axis, device: torch.device) -> bool:
    """Whether gloo moves tensors of a device along an axis."""
    return (
        axis.communicator is not None
        and device.type == "cpu"
        and axis.communicator._get_backend(device).name() == "gloo"
    )


def same_place(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors begin with the same element of the same storage."""
    # Not ``data_ptr``: the tensors of a traced run have no memory.
    same_storage = first.untyped_storage()._cdata == second.untyped_storage()._cdata
    return same_storage and first.storage_offset() == second.storage_offset()


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
    if carried_by_gloo(axis, full.device):
        exchange = gloo.Gather(full.data, axis, index, chunk_bytes)
        return _CheckedExchange(exchange, axis, "all_gather", index, full.nbytes, before=copy)

    def issue(group: Group) -> Any:
        return all_gather_single(full.data, shard.data, group=group, async_op=True)

    return _CheckedExchange(_BackendExchange(axis, issue), axis, "all_gather", index, full.nbytes)


class StagingBuffer:
    """Memory that reductions use one after the other: on a device gradients are cast into it, and
    summed in it or received in it, on the host it goes with a receive buffer.

    It knows its user, and on a device the event after which the next user may write it: ``wait``
    returns at once there, and the next user starts in another stream."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """``numel`` elements in the dtype of the wire; 0 where nothing is cast."""
        self.memory = torch.empty(numel, dtype=dtype, device=device)
        self._device = device
        self._user: _CheckedExchange | None = None
        self._free: torch.Event | None = None

    def acquire(self, user: _CheckedExchange) -> None:
        """Reserve the memory for a user who is about to write it. Raises RuntimeError if the last
        user was not waited for."""
        if self._user is not None:
            raise RuntimeError(
                f"{user} needs the receive buffer of {self._user}, which was not waited for"
            )
        self._user = user
        # Only the stream in which the user starts waits, until the last user's sum has been read in
        # the stream that followed it. The host and the layers do not wait.
        if self._free is not None:
            devices.current_stream(self._device).wait_event(self._free)

    def release(self) -> None:
        """Release the memory: the user was waited for, and only the work so far of its stream reads
        it."""
        self._user = None
        if not devices.is_host(self._device):
            self._free = devices.current_stream(self._device).record_event()


class Reductions:
    """The reduce-scatters of one rank. They share ``in_flight`` receive buffers: the last user of
    an exchange's buffer must have been waited for when it starts. RuntimeError otherwise, where
    there are buffers.

    On the host a receive buffer holds the parts of all other ranks, (size - 1) / size x largest in
    the dtype of the wire, and with a wire of its own a cast of the whole and one part to add in. On
    a device it is a cast of the whole, in which the backend sums, and nothing without a wire; with
    ``sums_wide`` it is the cast, and the parts of all ranks beside it."""

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
        sums_wide: bool = False,
    ) -> None:
        """``largest``: elements of the largest buffer. ``wire``: the dtype in which parts are sent;
        None means ``dtype``. ``sums_wide``: see ``EngineOptions``."""
        self._axis = axis
        self._casts = wire is not None and wire != dtype and axis.size > 1
        self._chunk_bytes = chunk_bytes
        on_host = carried_by_gloo(axis, device)
        self._received = (
            gloo.ReceivedParts.allocate(axis, largest, wire or dtype, dtype, in_flight)
            if on_host
            else []
        )
        self._sums_wide = sums_wide and self._casts and not on_host
        self._buffers = [
            StagingBuffer(largest * (self._casts + self._sums_wide), wire or dtype, device)
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
        the dtype of the wire; with ``sums_wide`` this rank does, in that of ``shard``.

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
        follow_up = None
        if self._received:
            exchange = gloo.ReduceScatter(
                sent, shard.data, axis, self._received[buffer], index, self._chunk_bytes
            )
        elif self._sums_wide:
            received = self._buffers[buffer].memory[-full.numel() :]
            exchange = _BackendExchange(axis, _sending_parts(received, sent))
            follow_up = _summing(shard, received, axis.size)
        else:
            target = shard.data
            if self._casts:
                # In place: the sum replaces this rank's part of the sent buffer.
                target = sent[axis.rank * shard.numel() : (axis.rank + 1) * shard.numel()]
                follow_up = _copying(shard, target)

            def issue(group: Group) -> Any:
                return reduce_scatter_single(target, sent, group=group, async_op=True)

            exchange = _BackendExchange(axis, issue)
        return _CheckedExchange(
            exchange,
            axis,
            "reduce_scatter",
            index,
            sent.nbytes,
            before=cast,
            after=follow_up,
            # A device that casts nothing has no buffer to wait for.
            buffer=self._buffers[buffer] if self._received or self._casts else None,
        )


def all_reduce_exchange(
    tensor: Tensor,
    axis: Axis,
    *,
    index: int,
    wire: torch.dtype | None,
    chunk_bytes: int = CHUNK_BYTES,
    staging: StagingBuffer | None = None,
    sums_wide: bool = False,
) -> Exchange:
    """Sum ``tensor`` over the ranks in place. On the host the sum is taken in rank order: the same
    bits on every rank, and those of a reduce-scatter. With ``wire`` the sums travel in that dtype
    too, so every rank keeps the rounded ones.

    A tensor with a ``wire`` of another dtype is cast in ``staging``, whose last user must have been
    waited for when this exchange starts. Without it the exchange has its own memory for that.
    ``sums_wide``: see ``EngineOptions``; ``staging`` then has ``summed_numel`` elements."""
    if axis.size == 1:
        return _LocalExchange(None, tensor.device)
    sent = tensor.data
    cast = None
    cast_back = None
    sums_wide = sums_wide and not carried_by_gloo(axis, tensor.device)
    if wire is not None and wire != tensor.dtype:
        numel = summed_numel(tensor.numel(), axis.size) if sums_wide else tensor.numel()
        staging = staging or StagingBuffer(numel, wire, tensor.device)
        sent = staging.memory[: tensor.numel()]
        cast = _copying(sent, tensor)
        cast_back = _copying(tensor, sent)
    exchange: Exchange
    if carried_by_gloo(axis, tensor.device):
        exchange = gloo.AllReduce(sent, tensor.dtype, axis, index, chunk_bytes)
    elif sums_wide and cast is not None and staging is not None:
        exchange = _SumsOfParts(staging.memory[: summed_numel(tensor.numel(), axis.size)], axis)
    else:

        def issue(group: Group) -> Any:
            return dist.all_reduce(sent, group=group, async_op=True)

        exchange = _BackendExchange(axis, issue)
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
    """Send some tensors to peers, and receive others from them. The tensors from one rank to
    another are in the same order in the lists of both.

    ``index`` tells the exchanges of one axis apart, reductions and gathers among them, and
    ``phase``, 0 or 1, two transfers with one index; both are the same on all ranks."""
    exchange: Exchange
    if not outgoing and not incoming:
        return _LocalExchange(None, device)
    if carried_by_gloo(axis, device):
        exchange = gloo.Transfer(outgoing, incoming, axis, index, phase, chunk_bytes)
    else:

        def issue(group: Group) -> Any:
            # One batch: NCCL would otherwise run them one after the other, and two ranks that both
            # first send would wait forever.
            operations = [
                dist.P2POp(function, tensor.data, group=group, group_peer=peer)
                for function, pieces in ((dist.isend, outgoing), (dist.irecv, incoming))
                for peer, tensor in pieces
            ]
            return _Batch(dist.batch_isend_irecv(operations))

        exchange = _BackendExchange(axis, issue)
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


def summed_numel(numel: int, ranks: int) -> int:
    """Return the elements of the staging buffer of an all-reduce with ``sums_wide``: twice the
    tensor's, in whole parts, to send and to receive."""
    return 2 * ranks * align_up(-(-numel // ranks), ALIGN)


def _sending_parts(received: Tensor, sent: Tensor) -> Callable[[Group], Any]:
    """Send each rank its part of ``sent``, and receive the own part of all."""

    def issue(group: Group) -> Any:
        return dist.all_to_all_single(received, sent, group=group, async_op=True)

    return issue


def _summing(total: Tensor, received: Tensor, ranks: int) -> Callable[[], None]:
    """Add up the parts of all ranks. Additions are at least in fp32, whatever ``total`` is in."""
    total = total.data
    parts = received.view(ranks, -1)

    def add_up() -> None:
        torch.sum(parts, 0, dtype=total.dtype, out=total)

    return add_up


class _SumsOfParts:
    """An all-reduce in two messages: parts, which each rank adds up for one part, then the sums.

    ``memory`` begins with the tensor that is summed in place; its second half receives."""

    def __init__(self, memory: Tensor, axis: Axis) -> None:
        sent, received = memory.chunk(2)
        own = sent.chunk(axis.size)[axis.rank]
        self._parts = _BackendExchange(axis, _sending_parts(received, sent))
        self._add_up = _summing(own, received, axis.size)
        self._sums = _BackendExchange(
            axis, lambda group: all_gather_single(sent, own, group=group, async_op=True)
        )

    def start(self) -> None:
        self._parts.start()
        # The stream in which exchanges start waits here, not the host.
        self._parts.wait()
        self._add_up()
        self._sums.start()

    def wait(self) -> None:
        self._sums.wait()


class _LocalExchange:
    """An exchange without other ranks: the own part is everything."""

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

    def __init__(self, axis: Axis, issue: Callable[[Group], Any]) -> None:
        self._axis = axis
        self._issue = issue
        self._work: Any = None

    def start(self) -> None:
        self._work = self._issue(self._axis.communicator)

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
        # Only now: an exchange whose peer died stays started, and raises again at another wait.
        self._started = False
        if self._buffer is not None:
            self._buffer.release()
