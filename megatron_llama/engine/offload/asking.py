"""Windows that ask to close: when what cold gradients have amounted to is worth a step.

A matrix asks when the magnitudes of its cold gradients, summed over the window's steps, reach those
of one step of its hot ones, each as the mean over its elements. A window closes when nearly all
matrices ask, at the latest after as many steps as it may have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_llama.distributed.comm.collectives import all_reduce
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.engine.offload.columns import Block
from megatron_llama.engine.offload.selection import Matrix
from megatron_llama.plans.checks.zenflow import hot_columns

SHARE = 0.99
"""Of all matrices of the model has to ask."""


class Asking:
    """Measures of one rank, agreed on by all. The methods that are not collective only touch what
    is here."""

    def __init__(self, matrices: Sequence[Matrix], ratio: float, mesh: Mesh) -> None:
        """``ratio``: the share of columns that are hot."""
        self._mesh = mesh
        device = mesh.device
        totals = {matrix.name: matrix.total for matrix in matrices}
        self._index = [list(totals).index(matrix.name) for matrix in matrices]
        hot = [hot_columns(ratio, total) for total in totals.values()]
        self._hot, self._cold = (
            torch.tensor(counts, dtype=torch.float32, device=device)
            for counts in (hot, [t - h for t, h in zip(totals.values(), hot, strict=True)])
        )
        self._masks = [
            torch.zeros(matrix.columns, dtype=torch.bool, device=device) for matrix in matrices
        ]
        self._step, self._window = (torch.zeros(2, len(totals), device=device) for _ in range(2))
        """Sums of magnitudes, of hot gradients and of cold ones, in this step and in all of the
        window."""
        self._steps = torch.zeros((), device=device)
        self._votes = torch.zeros(2, device=device)

    def begin(self, masks: Sequence[Tensor]) -> None:
        """A window begins. ``masks``: which columns are hot in it, by matrix."""
        self._masks = [mask.to(self._mesh.device) for mask in masks]
        self._restart()

    def _restart(self) -> None:
        self._window, self._steps, self._votes = (
            torch.zeros_like(one) for one in (self._window, self._steps, self._votes)
        )

    def add(self, grad: Tensor, blocks: Iterable[Block]) -> None:
        """Count the gradient in a shard, where this rank is the one to count it."""
        for block in blocks:
            for part in block.parts(grad):
                columns = part.abs().sum(0, dtype=torch.float32)
                hot = torch.where(block.of(self._masks[block.matrix]), columns, 0.0).sum()
                self._step[:, self._index[block.matrix]] += torch.stack([hot, columns.sum() - hot])

    def end(self, scale: Tensor, skip: Tensor, *, closed: bool) -> None:
        """A step is over, whose gradients are to be divided by ``scale``; did its window close?
        Collective."""
        for axis in (self._mesh.dp_shard, self._mesh.tp):
            all_reduce(self._step, axis).wait()
        self._window += torch.where(skip > 0, 0.0, self._step / scale)
        self._steps += 1.0 - skip
        self._step.zero_()
        if closed:
            self._restart()
            return
        hot = self._window[0] / self._hot / self._steps.clamp(min=1.0)
        asks = self._window[1] / self._cold.clamp(min=1.0) >= hot
        self._votes = torch.stack(
            [asks.sum(dtype=torch.float32), torch.full_like(self._steps, len(asks))]
        )
        all_reduce(self._votes, self._mesh.world).wait()

    def asked(self) -> bool:
        """Whether the step that follows should close its window. The host waits for the measures of
        the last one."""
        asking, everybody = self._votes.tolist()
        return bool(everybody > 0 and asking >= SHARE * everybody)
