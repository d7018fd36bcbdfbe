"""The columns of one shard that are updated now and then, on the host: where their gradients gather, and their update.

Only these cross the bus: their gradients at every step, packed and in the dtype of the wire, and their weights once a window, in the
compute dtype. The host's slabs hold the whole shard, so that one fused call serves it: what an update does to the places of hot
columns there is of no consequence, because these are written back from the device whenever anybody is to read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.config import OptimizerConfig
from megatron_llama.optim.offload.adam import State, corrections, update_alike, update_columns_
from megatron_llama.optim.offload.columns import ROWS_OF, Block
from megatron_llama.optim.offload.hot import Packed


@dataclass
class Window:
    """What one window of steps has gathered."""

    total: Tensor
    """Sum of the clipped gradients, packed, as wide as the master."""
    steps: int = 0
    """In the sum: those that were not skipped."""
    since: int | None = None
    """Steps that were done before the first of its gradients; None: it has none."""

    def add(self, grads: Tensor, scale: Tensor, *, skip: bool) -> None:
        """Take in the packed gradient of one step, divided by ``scale`` (0-dim on the host)."""
        if skip:
            return
        self.steps += 1
        for low in range(0, grads.numel(), ROWS_OF):
            grad = grads[low : low + ROWS_OF]
            place = self.total[low : low + grad.numel()]
            wide = grad.to(place.dtype)
            if self.steps == 1:
                torch.div(wide, scale, out=place)
            else:
                place.add_(wide / scale)


class ColdColumns:
    """Weights and moments of one shard on the host, and what is pending for its cold columns."""

    def __init__(self, slabs: State, totals: Sequence[Tensor], *, decay: float, config: OptimizerConfig) -> None:
        """``slabs``: [n] each, as are ``totals``: one for each window that may be pending, 1 or 2."""
        self.slabs, self._config, self._decay = slabs, config, decay
        self.windows = [Window(total) for total in totals]
        self.updates = 0
        """Of the cold columns since they were chosen."""

    def gather(self, turn: int, packed: Tensor, scale: Tensor, *, skip: bool) -> None:
        """A step's gradients have arrived."""
        self.windows[turn].add(packed, scale, skip=skip)

    def apply(self, turn: int, columns: Packed, blocks: list[Block], room: Tensor, lr: float) -> None:
        """Update the cold columns with the mean gradient of a window, which is empty then.

        ``room``: [n], for the gradient of the whole shard."""
        window = self.windows[turn]
        steps, window.steps = window.steps, 0
        self.updates += steps > 0
        if steps == 0 or columns.there.numel == 0:
            return
        grad = room[: self.slabs[0].numel()].zero_()
        columns.there.unpack(window.total, grad)
        if columns.alike is not None:
            count, mean = torch.tensor(float(columns.alike + self.updates - 1)), torch.tensor(float(steps))
            update_alike(self.slabs, grad, count, self._config, scale=mean, skip=None, lr=lr, decay=self._decay)
        else:
            self._apply_columns(columns, blocks, grad.div_(steps), lr)

    def _apply_columns(self, columns: Packed, blocks: list[Block], grad: Tensor, lr: float) -> None:
        """Hot columns are counted as if they had their first update: any number will do that does not divide by zero."""
        counted = {part.block: (part, counts) for part, counts in zip(columns.there.parts, columns.counts, strict=True)}
        for block in blocks:
            count = torch.ones(block.cols, dtype=torch.float64)
            if block in counted:
                part, before = counted[block]
                count[part.chosen] = before + self.updates
            state = tuple(block.view(slab) for slab in self.slabs)
            corrected = corrections(count, self._config, grad.dtype)
            update_columns_((state[0], state[1], state[2]), block.view(grad), corrected, self._config, lr=lr, decay=self._decay)
