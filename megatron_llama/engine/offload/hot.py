"""The columns of one shard that are updated at every step, on the device: packed, in fp32, whatever
the model computes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.engine.offload.adam import State, corrections, update_alike, update_columns
from megatron_llama.engine.offload.columns import Block, Packing, in_rows


@dataclass(frozen=True)
class Packed:
    """Columns of one shard that are alike in where they are updated, and how often they have been
    before they were chosen."""

    here: Packing
    """With its indices on the device."""
    there: Packing
    """The same on the host."""
    counts: tuple[Tensor, ...]
    """For each part of the packing, updates of its columns when they were chosen, [c] on the
    host."""
    alike: int | None
    """What all of them are, if they are."""

    @staticmethod
    def of(
        blocks: Sequence[Block],
        masks: Sequence[Tensor],
        counts: Sequence[Tensor],
        device: torch.device,
    ) -> Packed:
        """``masks`` and ``counts``: by matrix, over its columns, on the host."""
        there = Packing(blocks, masks, torch.device("cpu"))
        here = there if device.type == "cpu" else Packing(blocks, masks, device)
        found = [part.columns(counts[part.block.matrix]) for part in there.parts]
        values = {int(value) for one in found for value in torch.unique(one).tolist()}
        return Packed(here, there, tuple(found), values.pop() if len(values) == 1 else None)


class HotColumns:
    """Weights and moments of the hot columns of one shard. ``steps``: how often they have been
    updated since they were chosen, as a tensor on the device, because only that knows which steps
    were skipped."""

    def __init__(
        self,
        columns: Packed,
        *,
        decay: float,
        config: OptimizerConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = columns.here.padded
        self.columns = columns
        self._config = config
        self._decay = decay
        self.state: State = tuple(torch.zeros(size, dtype=dtype, device=device) for _ in range(3))  # type: ignore[assignment]
        self.steps = torch.zeros((), dtype=torch.float32, device=device)
        self._counts = [count.to(device) for count in columns.counts]

    def step(
        self, grad: Tensor, own: Tensor, room: Tensor, *, scale: Tensor, skip: Tensor, lr: float
    ) -> None:
        """Update the columns with their part of the gradient shard, and write them into the shard
        ``own`` in the compute dtype.

        ``room``: to pack the gradient into, in the dtype of the state."""
        packing = self.columns.here
        self.steps += 1.0 - skip
        if packing.numel == 0:
            return
        packed = room[: packing.padded]
        packed[packing.numel :].zero_()
        packing.pack(grad, packed)
        if self.columns.alike is not None:
            count = self.steps + self.columns.alike - (1.0 - skip)
            update_alike(
                self.state,
                packed,
                count,
                self._config,
                scale=scale,
                skip=skip,
                lr=lr,
                decay=self._decay,
            )
        else:
            self._step_columns(packed.div_(scale), skip, lr)
        packing.unpack(self.state[0], own)

    def _step_columns(self, grad: Tensor, skip: Tensor, lr: float) -> None:
        """With as many corrections as there are columns. A skipped step computes as well, and keeps
        nothing of it."""
        for part, before in zip(self.columns.here.parts, self._counts, strict=True):
            corrected = corrections(before + self.steps, self._config, grad.dtype)
            places = [part.place(one) for one in (*self.state, grad)]
            for rows in in_rows(*part.shape):
                *old, arrived = (place[rows] for place in places)
                new = update_columns(
                    (old[0], old[1], old[2]),
                    arrived,
                    corrected,
                    self._config,
                    lr=lr,
                    decay=self._decay,
                )
                for tensor, values in zip(old, new, strict=True):
                    tensor.copy_(torch.where(skip > 0, tensor, values))

    def fetch(self, slabs: State) -> None:
        """Take the columns' state from that of the whole shard on the host."""
        self._exchange(slabs, to_host=False)

    def store(self, slabs: State) -> None:
        """Put it back there."""
        self._exchange(slabs, to_host=True)

    def _exchange(self, slabs: State, *, to_host: bool) -> None:
        packing = self.columns.there
        for packed, slab in zip(self.state, slabs, strict=True):
            if to_host:
                packing.unpack(packed.cpu(), slab)
            else:
                room = torch.zeros(packing.padded, dtype=packed.dtype)
                packing.pack(slab, room)
                packed.copy_(room)
