"""The schedule of ZenFlow: when cold columns are updated, and when columns are selected anew.

An *update window* is the steps whose cold gradients become one update. It closes after
``Intervals.update`` steps. With ``auto`` it closes earlier when the cold gradients have added up to
a step (``AutoInterval``). Without ``overlap`` the update of a window is in the
weights when its last step ends. With ``overlap`` it is computed while the next window accumulates,
and is in the weights when that one closes: a moment that no clock decides, so a run can be
repeated.

Until columns have been selected for the first time every step is a window of its own, without
overlap: no column is hot yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.engine.comm.collectives import all_reduce
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.offload.zenflow.columns import Block
from megatron_llama.engine.offload.zenflow.selection import Matrix
from megatron_llama.engine.plan.zenflow import hot_column_count

AUTO_RATIO = 0.99
"""The share of the model's matrices that have to request an update (DeepSpeed's auto_ratio)."""


@dataclass(frozen=True)
class Intervals:
    """The intervals of a run, in steps."""

    update: int
    """Steps of a window; with ``auto`` the most that it may have."""
    auto: bool
    """Whether a window may close earlier, because its gradients have added up to a step."""
    overlap: bool
    """Whether updates are computed while the next window accumulates."""
    warm_up_rounds: int
    """Steps before columns are selected for the first time (at least one is made)."""
    selection: int
    """Steps from one selection of columns to the next; 0: never again."""


@dataclass(frozen=True)
class Step:
    """The plan of one step."""

    closes: bool
    """Its window ends with it."""
    applies: bool
    """The update of its window is in the weights when it ends."""
    selects: bool
    """Columns are selected after it."""


@dataclass
class UpdateWindows:
    """Where a run is in its schedule. A window that is settled early counts as closed."""

    intervals: Intervals
    done: int = 0
    """Steps so far."""
    last_selection: int | None = None
    """Steps that were done when columns were last selected; None: they have not been."""
    opened: int = 0
    """Steps that were done when the window opened."""

    def next(self, *, requested: bool = False) -> Step:
        """Return the plan of the next step. ``requested`` says that its window should close with
        it, if it may."""
        intervals = self.intervals
        done = self.done + 1
        if self.last_selection is None:
            return Step(closes=True, applies=True, selects=done >= max(1, intervals.warm_up_rounds))
        closes = done - self.opened >= intervals.update or (intervals.auto and requested)
        due = intervals.selection > 0 and done - self.last_selection >= intervals.selection
        selects = closes and due
        # Selection moves state between device and host, so nothing may be pending then.
        return Step(closes, closes and (selects or not intervals.overlap), selects)

    def end(self, step: Step) -> None:
        """Count a step that has been made."""
        self.done += 1
        if step.closes:
            self.opened = self.done

    def selected(self) -> None:
        """Note that columns have been selected after the last step."""
        self.last_selection = self.done

    def settled(self) -> None:
        """Note that everything pending has been applied."""
        self.opened = self.done

    def check_staleness(self, oldest: int | None, done: int, what: str) -> None:
        """Raise RuntimeError if after ``done`` steps a gradient is late: two intervals old and not
        in the weights. ``oldest`` is the number of steps before the oldest gradient that is not in
        the weights yet, None if there is none."""
        if oldest is not None and done - oldest >= 2 * self.intervals.update:
            raise RuntimeError(
                f"{what}: gradients of {done - oldest} steps ago are not in the weights, "
                f"at most {2 * self.intervals.update - 1} may be"
            )


class AutoInterval:
    """Decides when a window closes under --zenflow-update-interval auto.

    A matrix requests an update when the magnitudes of its cold gradients, summed over the window's
    steps, reach those of one step of its hot ones, each as the mean over its elements. The window
    closes when AUTO_RATIO of all matrices request it. The decision is made of integers and sums
    that all ranks share; only ``end_step`` is collective."""

    def __init__(self, matrices: Sequence[Matrix], ratio: float, mesh: Mesh) -> None:
        """``ratio`` is the share of columns that are hot."""
        self._mesh = mesh
        device = mesh.device
        totals = {matrix.name: matrix.total for matrix in matrices}
        self._index = [list(totals).index(matrix.name) for matrix in matrices]
        hot = [hot_column_count(ratio, total) for total in totals.values()]
        cold = [total - count for total, count in zip(totals.values(), hot, strict=True)]
        self._hot_count = torch.tensor(hot, dtype=torch.float32, device=device)
        self._cold_count = torch.tensor(cold, dtype=torch.float32, device=device)
        self._masks = [
            torch.zeros(matrix.columns, dtype=torch.bool, device=device) for matrix in matrices
        ]
        self._step = torch.zeros(2, len(totals), device=device)
        """Magnitudes of hot gradients, and of cold ones, in this step, by matrix."""
        self._window = torch.zeros_like(self._step)
        """The same over all steps of the window."""
        self._steps = torch.zeros((), device=device)
        self._votes = torch.zeros(2, device=device)
        """Matrices that request an update, and all matrices."""

    def begin_window(self, masks: Sequence[Tensor]) -> None:
        """Start a window. ``masks`` says for each matrix which columns are hot in it."""
        self._masks = [mask.to(self._mesh.device) for mask in masks]
        self._restart()

    def _restart(self) -> None:
        self._window = torch.zeros_like(self._window)
        self._steps = torch.zeros_like(self._steps)
        self._votes = torch.zeros_like(self._votes)

    def add(self, grad: Tensor, blocks: Iterable[Block]) -> None:
        """Count the gradient of a shard, where this rank is the one to count it."""
        for block in blocks:
            for rows in block.row_views(grad):
                columns = rows.abs().sum(0, dtype=torch.float32)
                hot = torch.where(block.of(self._masks[block.matrix]), columns, 0.0).sum()
                self._step[:, self._index[block.matrix]] += torch.stack([hot, columns.sum() - hot])

    def discard(self) -> None:
        """Forget the gradients that have been counted in this step."""
        self._step.zero_()

    def end_step(self, scale: Tensor, skip: Tensor, *, closed: bool) -> None:
        """End a step whose gradients are to be divided by ``scale``; ``closed`` says whether its
        window closed. Collective."""
        # Every rank has counted its own part of a matrix.
        for axis in (self._mesh.dp_shard, self._mesh.tp):
            all_reduce(self._step, axis).wait()
        # ``where``: a product with zero would keep the NaN of a skipped step.
        self._window += torch.where(skip > 0, 0.0, self._step / scale)
        self._steps += 1.0 - skip
        self._step.zero_()
        if closed:
            self._restart()
            return
        hot_mean = self._window[0] / self._hot_count / self._steps.clamp(min=1.0)
        requests = self._window[1] / self._cold_count.clamp(min=1.0) >= hot_mean
        self._votes = torch.stack(
            [requests.sum(dtype=torch.float32), torch.full_like(self._steps, len(requests))]
        )
        all_reduce(self._votes, self._mesh.world).wait()

    def update_requested(self) -> bool:
        """Whether the next step should close its window. The host waits for the votes of the last
        step."""
        requests, matrices = self._votes.tolist()
        return bool(matrices > 0 and requests >= AUTO_RATIO * matrices)
