"""The columns of one shard that are updated now and then, on the host: where their gradients
gather, and their update.

Only these cross the bus: their gradients at every step, packed and in the dtype of the wire, and
their weights once a window, in the compute dtype. The host's slabs hold the whole shard, so that
one fused call serves it: what an update does to the places of hot columns there is of no
consequence, because these are written back from the device whenever anybody is to read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.engine.offload.adam import State, corrections, update_alike, update_columns_
from megatron_llama.engine.offload.columns import ROWS_OF, Block, Packing


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


@dataclass(frozen=True)
class Unusual:
    """Cold columns that have been updated more or less often than most."""

    usual: int
    """How often most elements have been, when they were chosen."""
    packing: Packing
    """Of the others."""
    counts: tuple[Tensor, ...]
    """For each of its parts, how often its columns have been, [c]."""

    @staticmethod
    def of(blocks: Sequence[Block], masks: Sequence[Tensor], counts: Sequence[Tensor]) -> Unusual:
        """``masks`` and ``counts``: by matrix, over its columns, on the host."""
        elements = Counter[int]()
        for block in blocks:
            here = block.of(counts[block.matrix])[block.of(masks[block.matrix])]
            values, columns = torch.unique(here, return_counts=True)
            for count, many in zip(values.tolist(), columns.tolist(), strict=True):
                elements[int(count)] += many * block.rows
        usual = max(elements, key=lambda count: (elements[count], count), default=0)
        packing = Packing(
            blocks,
            [mask & (count != usual) for mask, count in zip(masks, counts, strict=True)],
            torch.device("cpu"),
        )
        return Unusual(
            usual, packing, tuple(part.columns(counts[part.block.matrix]) for part in packing.parts)
        )


class ColdColumns:
    """Weights and moments of one shard on the host, and what is pending for its cold columns."""

    def __init__(
        self, slabs: State, totals: Sequence[Tensor], *, decay: float, config: OptimizerConfig
    ) -> None:
        """``slabs``: [n] each, as are ``totals``: one for each window that may be pending, 1 or
        2."""
        self.slabs = slabs
        self._config = config
        self._decay = decay
        self.windows = [Window(total) for total in totals]
        self.updates = 0
        """Of the cold columns since they were chosen."""
        self._unusual = Unusual(0, Packing((), (), torch.device("cpu")), ())

    def arrange(
        self, blocks: Sequence[Block], masks: Sequence[Tensor], counts: Sequence[Tensor]
    ) -> None:
        """Take other columns. ``masks``: which are cold, ``counts``: how often they have been
        updated."""
        self._unusual = Unusual.of(blocks, masks, counts)
        self.updates = 0

    def gather(self, turn: int, packed: Tensor, scale: Tensor, *, skip: bool) -> None:
        """A step's gradients have arrived."""
        self.windows[turn].add(packed, scale, skip=skip)

    def apply(self, turn: int, packing: Packing, room: Tensor, lr: float) -> None:
        """Update the cold columns with the mean gradient of a window, which is empty then.

        ``packing``: theirs; ``room``: [n], for the gradient of the whole shard."""
        window = self.windows[turn]
        steps = window.steps
        window.steps = 0
        self.updates += steps > 0
        if steps == 0 or packing.numel == 0:
            return
        grad = room[: self.slabs[0].numel()].zero_()
        packing.unpack(window.total, grad)
        unusual = self._update_unusual(grad, steps, lr)
        before = torch.tensor(float(self._unusual.usual + self.updates - 1))
        mean = torch.tensor(float(steps))
        update_alike(
            self.slabs, grad, before, self._config, scale=mean, skip=None, lr=lr, decay=self._decay
        )
        for slab, packed in zip(self.slabs, unusual, strict=True):
            self._unusual.packing.unpack(packed, slab)

    def _update_unusual(self, grad: Tensor, steps: int, lr: float) -> list[Tensor]:
        """What will be the state of these columns, packed. One fused call on the whole shard
        follows, and does not count for them."""
        packing = self._unusual.packing
        *state, new = (tensor.new_empty(packing.numel) for tensor in (*self.slabs, grad))
        for tensor, packed in zip((*self.slabs, grad), (*state, new), strict=True):
            packing.pack(tensor, packed)
        new.div_(steps)
        for part, counts in zip(packing.parts, self._unusual.counts, strict=True):
            places = tuple(part.place(packed) for packed in state)
            corrected = corrections(counts + self.updates, self._config, grad.dtype)
            update_columns_(
                (places[0], places[1], places[2]),
                part.place(new),
                corrected,
                self._config,
                lr=lr,
                decay=self._decay,
            )
        return state
