"""Transfers between neighbouring pipeline stages, and steps of a ring.

Each direction has a communicator of its own (``Mesh.link``). On NCCL, a send and a receive of one
communicator run in the order of their issue, and in 1F1B the two neighbours issue those of opposite
directions in opposite order. Within a direction both sides use the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_llama.engine.comm.collectives import Pending
from megatron_llama.engine.comm.recorder import Note
from megatron_llama.engine.mesh import Axis


@dataclass
class Transfer:
    """A message in flight. It keeps its tensor alive until it has been waited for."""

    axis: Axis
    tensor: Tensor
    work: dist.Work
    direction: str
    """``to`` or ``from``."""
    peer: int
    """The other rank's position on the axis."""
    note: Note | None = None
    """The note of a timeline, if one is recorded."""

    def __str__(self) -> str:
        return f"message {self.direction} rank {self.axis.ranks[self.peer]} on {self.axis.name}"

    def wait(self) -> Tensor:
        """Return the tensor when it may be read (received) or reused (sent)."""
        with self.axis.recorder.exposed(self):
            self.work.wait()
        if self.note is not None:
            self.note.end()
        return self.tensor


def send(tensor: Tensor, axis: Axis, to: int) -> Transfer:
    """Start sending to the rank at position ``to`` of the axis."""
    data = tensor.data.contiguous()
    note = axis.recorder.count(axis.name, "send", data.numel() * data.element_size())
    work = dist.isend(data, group=axis.communicator, group_dst=to)
    assert work is not None
    return Transfer(axis, data, work, "to", to, note)


def receive(buffer: Tensor, axis: Axis, source: int) -> Transfer:
    """Start receiving into ``buffer`` from the rank at position ``source`` of the axis."""
    note = axis.recorder.count(axis.name, "receive", buffer.numel() * buffer.element_size())
    work = dist.irecv(buffer, group=axis.communicator, group_src=source)
    assert work is not None
    return Transfer(axis, buffer, work, "from", source, note)


def exchange(tensor: Tensor, buffer: Tensor, axis: Axis, *, to: int, source: int) -> Pending:
    """Start one step of a ring: send ``tensor`` to the rank at position ``to`` and receive
    ``buffer`` from the rank at position ``source``."""
    return _start([(to, tensor)], [(source, buffer)], axis, "step of the ring")


def exchange_with(
    outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], axis: Axis
) -> Pending:
    """Start sending each tensor of ``outgoing``, and receiving each buffer of ``incoming``, to and
    from the ranks at the positions that are their keys. The ranks agree on the pairs."""
    return _start(list(outgoing.items()), list(incoming.items()), axis, "messages to neighbours")


def _start(
    outgoing: Sequence[tuple[int, Tensor]],
    incoming: Sequence[tuple[int, Tensor]],
    axis: Axis,
    operation: str,
) -> Pending:
    notes = [
        axis.recorder.count(axis.name, kind, tensor.numel() * tensor.element_size())
        for kind, tensors in (("send", outgoing), ("receive", incoming))
        for _, tensor in tensors
    ]
    operations = [
        dist.P2POp(function, tensor.data, group=axis.communicator, group_peer=peer)
        for function, tensors in ((dist.isend, outgoing), (dist.irecv, incoming))
        for peer, tensor in tensors
    ]
    # One batch: NCCL would otherwise run them one after the other, and a ring in which every rank
    # sends first would wait forever.
    works = dist.batch_isend_irecv(operations) if operations else []

    def wait_for_all() -> None:
        with axis.recorder.exposed(pending):
            for work in works:
                work.wait()
        # Until here they have kept the sent tensors alive.
        operations.clear()
        for note in notes:
            if note is not None:
                note.end()

    pending = Pending(axis, None, wait_for_all, operation)
    return pending
