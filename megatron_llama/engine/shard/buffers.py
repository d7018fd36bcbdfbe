"""The buffers of a model over ranks: each keeps its own, or has those of rank 0 in each pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_llama.engine.mesh import Axis

OWN = "own"
RANK0 = "rank0"
WHOSE_BUFFERS = (OWN, RANK0)


def broadcast_buffers(model: nn.Module, axis: Axis) -> None:
    """Let all buffers of the model have rank 0's values, in place, by one message. Collective."""
    buffers = list(model.buffers())
    if axis.size == 1 or not buffers:
        return
    with torch.no_grad():
        message = torch.cat([_memory(buffer) for buffer in buffers])
        dist.broadcast(message, group=axis.communicator, group_src=0)
        if axis.rank == 0:
            return
        sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
        for buffer, received in zip(buffers, torch.split_with_sizes(message, sizes), strict=True):
            # A piece of a message begins anywhere, and a view of another dtype does not.
            buffer.copy_(received.clone().view(buffer.dtype).view(buffer.shape))


def _memory(buffer: Tensor) -> Tensor:
    """Return the values as bytes."""
    return buffer.detach().reshape(-1).view(torch.uint8)
