"""Transfers between neighbouring pipeline stages, never waited for before their data is needed.

Each direction has its own communicator: on NCCL a send and a receive of opposite directions on one communicator run in
issue order, and 1F1B's two neighbours issue them in opposite order. Within a direction both sides use one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_llama.mesh import Axis


@dataclass
class Transfer:
    """A message in flight. Keeps the tensor alive until it has been waited for."""

    axis: Axis
    tensor: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """The tensor, when it may be read (received) or reused (sent)."""
        with self.axis.recorder.exposed():
            self.work.wait()
        return self.tensor


def send(tensor: Tensor, axis: Axis, to: int) -> Transfer:
    """Start sending to the rank at position ``to`` of the axis."""
    data = tensor.data.contiguous()
    axis.recorder.count(axis.name, "send", data.numel() * data.element_size())
    work = dist.isend(data, group=axis.group, group_dst=to)
    assert work is not None
    return Transfer(axis, data, work)


def receive(buffer: Tensor, axis: Axis, source: int) -> Transfer:
    """Start receiving into ``buffer`` from the rank at position ``source`` of the axis."""
    axis.recorder.count(axis.name, "receive", buffer.numel() * buffer.element_size())
    work = dist.irecv(buffer, group=axis.group, group_src=source)
    assert work is not None
    return Transfer(axis, buffer, work)
