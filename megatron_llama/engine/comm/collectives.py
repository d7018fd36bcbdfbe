"""Collectives on an axis of the mesh. Every function returns a handle, and the result may be used
after its ``wait``.

``async_op=False`` is for a caller that waits at once. On a device NCCL then runs in the caller's
stream (``ProcessGroupNCCL::collective``, torch 2.11 to 2.13), and not in its own, which would need
an event before and one after. The handle is the same, and so is what is counted.

Tensors are handed over as ``.data``. A backend that writes them (gloo does) would otherwise
increase the autograd version of every view of the buffer, and weights that are views of a gathered
buffer would then fail in backward. A result that is waited for at once has no reader before it is
written, and the host saves two operators.

Over gloo, gathers and reduce-scatters are direct transfers (``host/gloo.py``): gloo's own are sent
one way at a time, or with twice the volume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.engine.comm.exchange import (
    CHUNK_BYTES,
    all_gather_single,
    carried_by_gloo,
    reduce_scatter_single,
    same_place,
)
from megatron_llama.engine.comm.host import gloo
from megatron_llama.engine.comm.recorder import Note
from megatron_llama.engine.mesh import Axis


class Work(Protocol):
    """What was issued."""

    def wait(self) -> object:
        """Wait until it is done."""


@dataclass
class Pending:
    """A collective in flight. ``wait`` is called once; on a device the current stream waits, not
    the host."""

    axis: Axis | None
    work: Work | None
    finish: Callable[[], None] | None = None
    operation: str = "messages"
    note: Note | None = None
    """The note of a timeline, if one is recorded."""

    def __str__(self) -> str:
        return self.operation if self.axis is None else f"{self.operation} on {self.axis.name}"

    def wait(self) -> None:
        """Make the result usable by work that is issued next."""
        if self.work is not None and self.axis is not None:
            with self.axis.recorder.exposed(self):
                self.work.wait()
        if self.finish is not None:
            self.finish()
        if self.note is not None:
            self.note.end()


DONE = Pending(None, None)
"""Nothing to wait for."""


def _issue(axis: Axis, operation: str, tensor: Tensor) -> Note | None:
    return axis.recorder.count(axis.name, operation, tensor.numel() * tensor.element_size())


def _start(
    axis: Axis, operation: str, note: Note | None, issue: Callable[[bool], Any], *, async_op: bool
) -> Pending:
    if async_op:
        return Pending(axis, issue(True), operation=operation, note=note)
    # Nothing is left to wait for: a host waits inside the call, which counts as its ``wait`` would.
    pending = Pending(axis, None, operation=operation, note=note)
    with axis.recorder.exposed(pending):
        issue(False)
    return pending


def all_reduce(
    tensor: Tensor,
    axis: Axis,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    *,
    async_op: bool = True,
) -> Pending:
    """Reduce in place over the axis; every rank gets the same result."""
    if axis.size == 1:
        return Pending(axis, None)
    note = _issue(axis, "all_reduce", tensor)

    def issue(is_async: bool) -> Any:
        return dist.all_reduce(tensor.data, op, group=axis.communicator, async_op=is_async)

    return _start(axis, "all_reduce", note, issue, async_op=async_op)


def all_gather(full: Tensor, shard: Tensor, axis: Axis, *, async_op: bool = True) -> Pending:
    """Concatenate the shards of all ranks into ``full`` along the first dim. ``shard`` may be this
    rank's part of ``full``."""
    if axis.size == 1:
        if not same_place(full, shard):
            full.data.copy_(shard.data)
        return Pending(axis, None)
    note = _issue(axis, "all_gather", full)
    if carried_by_gloo(axis, full.device):
        return _gather_directly(full.data.view(-1), shard.data.view(-1), axis, note)

    def issue(is_async: bool) -> Any:
        whole, part = (full.data, shard.data) if is_async else (full, shard)
        return all_gather_single(whole, part, group=axis.communicator, async_op=is_async)

    return _start(axis, "all_gather", note, issue, async_op=async_op)


def reduce_scatter(shard: Tensor, full: Tensor, axis: Axis, *, async_op: bool = True) -> Pending:
    """Sum ``full`` over the ranks and write this rank's part of its first dim to ``shard``, which
    may be that part of ``full``."""
    if axis.size == 1:
        if not same_place(full, shard):
            shard.data.copy_(full.data)
        return Pending(axis, None)
    note = _issue(axis, "reduce_scatter", full)
    if carried_by_gloo(axis, full.device):
        return _sum_directly(shard.data.view(-1), full.data.view(-1), axis, note)

    def issue(is_async: bool) -> Any:
        part, whole = (shard.data, full.data) if is_async else (shard, full)
        return reduce_scatter_single(part, whole, group=axis.communicator, async_op=is_async)

    return _start(axis, "reduce_scatter", note, issue, async_op=async_op)


def all_to_all(received: Tensor, sent: Tensor, axis: Axis, *, async_op: bool = True) -> Pending:
    """Send each rank of the axis its part of the first dim of ``sent``, and write the parts that
    the ranks send to this one to ``received``, in rank order. Both are contiguous."""
    note = _issue(axis, "all_to_all", sent)
    if carried_by_gloo(axis, sent.device):
        theirs, ours = (part.data.view(-1).chunk(axis.size) for part in (received, sent))
        return _send_parts(theirs, ours, axis, note)

    def issue(is_async: bool) -> Any:
        group = axis.communicator
        return dist.all_to_all_single(received.data, sent.data, group=group, async_op=is_async)

    return _start(axis, "all_to_all", note, issue, async_op=async_op)


def all_to_all_rows(
    received: Tensor,
    sent: Tensor,
    axis: Axis,
    counts: tuple[Sequence[int], Sequence[int]],
    *,
    async_op: bool = True,
) -> Pending:
    """Send each rank of the axis its rows of ``sent``, and write those that the ranks send to this
    one to ``received``, in rank order. ``counts``: of each rank, how many rows come from it and
    how many go to it. Both tensors are contiguous."""
    note = _issue(axis, "all_to_all", sent)
    incoming, outgoing = map(list, counts)
    if carried_by_gloo(axis, sent.device):
        theirs = torch.split(received.data, incoming)
        ours = torch.split(sent.data, outgoing)
        return _send_parts(
            [part.view(-1) for part in theirs], [part.view(-1) for part in ours], axis, note
        )

    def issue(is_async: bool) -> Any:
        return dist.all_to_all_single(
            received.data, sent.data, incoming, outgoing, group=axis.communicator, async_op=is_async
        )

    return _start(axis, "all_to_all", note, issue, async_op=async_op)


def _gather_directly(full: Tensor, shard: Tensor, axis: Axis, note: Note | None) -> Pending:
    own = full[axis.rank * shard.numel() : (axis.rank + 1) * shard.numel()]
    if not same_place(own, shard):
        own.copy_(shard)
    gather = gloo.Gather(full, axis, gloo.UNPLANNED, CHUNK_BYTES)
    gather.start()
    return Pending(axis, gather, operation="all_gather", note=note)


def _send_parts(
    theirs: Sequence[Tensor], ours: Sequence[Tensor], axis: Axis, note: Note | None
) -> Pending:
    theirs[axis.rank].copy_(ours[axis.rank])
    peers = [(axis.rank + step) % axis.size for step in range(1, axis.size)]
    transfer = gloo.Transfer(
        [(peer, ours[peer]) for peer in peers],
        [(peer, theirs[peer]) for peer in reversed(peers)],
        *(axis, gloo.UNPLANNED, 1, CHUNK_BYTES),
    )
    transfer.start()
    return Pending(axis, transfer, operation="all_to_all", note=note)


def _sum_directly(shard: Tensor, full: Tensor, axis: Axis, note: Note | None) -> Pending:
    # Summed in rank order, so that every element has the same value in any bucket.
    [received] = gloo.ReceivedParts.allocate(axis, full.numel(), full.dtype, full.dtype, 1)
    reduction = gloo.ReduceScatter(full, shard, axis, received, gloo.UNPLANNED, CHUNK_BYTES)
    reduction.start()
    return Pending(axis, reduction, operation="reduce_scatter", note=note)
