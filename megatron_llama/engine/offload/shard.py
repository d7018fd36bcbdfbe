"""One shard under ZenFlow: its hot columns on the device, its cold ones on the host, and what
crosses the bus between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.distributed.comm.worker import Task
from megatron_llama.distributed.recorder import Recorder
from megatron_llama.engine.offload.adam import State
from megatron_llama.engine.offload.cold import ColdColumns
from megatron_llama.engine.offload.columns import Block
from megatron_llama.engine.offload.copies import Copies, Copy
from megatron_llama.engine.offload.failures import of_bucket
from megatron_llama.engine.offload.hot import HotColumns, Packed
from megatron_llama.engine.offload.windows import Step
from megatron_llama.engine.offload.worker import HostWorker
from megatron_llama.engine.update_rule import Shard

GATHERING = 0
UPDATING = 1
"""Turns of the worker: gradients that arrive do not wait for the updates of the window before."""
ADDING_UP = "adding up"
APPLYING = "applying"
PACKING = "packing"
"""What the worker's time is spent at."""
HOST = "the optimizer on the host"


@dataclass
class Crossed:
    """What has crossed the bus, in bytes: packed columns alone, not the state of columns that
    move."""

    to_host: int = 0
    to_device: int = 0


class ScratchBuffers:
    """Memory that all shards of a rank take turns in, each as large as the largest of them."""

    def __init__(
        self,
        largest: int,
        device: torch.device,
        *,
        wide: torch.dtype,
        wire: torch.dtype,
        narrow: torch.dtype,
    ) -> None:
        self.hot = torch.empty(largest, dtype=wide, device=device)
        """Where gradients of hot columns are packed."""
        self.leaving = [torch.empty(largest, dtype=wire, device=device) for _ in range(2)]
        """Packed gradients on their way to the host: one is filled while the other one is
        copied."""
        self.arriving = torch.empty(largest, dtype=narrow, device=device)
        """Packed weights that have come from the host."""
        self.whole = torch.empty(largest, dtype=wide)
        """On the host: gradients of a whole shard."""
        self._copied: list[tuple[str, Copy] | None] = [None, None]
        self._turn = 0

    def leave(
        self, copies: Copies, shard: Tensor, columns: Packed, target: Tensor, label: str
    ) -> Copy:
        """Pack the columns of a shard, which is part of the bucket ``label``, and copy them to
        ``target`` on the host."""
        self._turn ^= 1
        before = self._copied[self._turn]
        room = self.leaving[self._turn][: columns.here.numel]
        if before is not None:
            with of_bucket(before[0]):
                before[1].wait()
        columns.here.pack(shard, room)
        copy = copies.to_host(target[: columns.here.numel], room)
        self._copied[self._turn] = label, copy
        return copy


@dataclass(frozen=True)
class Staging:
    """Pinned memory of one shard."""

    grads: Tensor
    """Packed gradients as they arrive, in the dtype of the wire."""
    weights: Tensor
    """Packed weights as they leave, in the compute dtype."""
    factors: Tensor
    """Scale and skip of a step, fp32 [2]."""


class ShardColumns:
    """The state machine of one shard. ``step`` is called once in every step, ``arrived`` before
    it."""

    def __init__(
        self,
        shard: Shard,
        blocks: list[Block],
        slabs: State,
        totals: Sequence[Tensor],
        staging: Staging,
        scratch_buffers: ScratchBuffers,
        copies: Copies,
        worker: HostWorker,
        config: OptimizerConfig,
        label: str,
        recorder: Recorder,
    ) -> None:
        """``slabs`` and ``totals``: see ColdColumns. ``label``: the bucket for people."""
        self._label = label
        self._recorder = recorder
        self.shard = shard
        self.blocks = blocks
        self._staging = staging
        self._rooms = scratch_buffers
        self._copies = copies
        self._worker = worker
        self._config = config
        self._decay = config.weight_decay if shard.kind.decay else 0.0
        self.state = ColdColumns(slabs, totals, decay=self._decay, config=config)
        self.steps = torch.zeros((), dtype=torch.float32, device=shard.own.device)
        """Steps that were not skipped, as the host never learns them."""
        self.crossed = Crossed()
        self.taken = 0
        """Steps that it has taken part in."""
        self._turn = 0
        """Of the window that is open."""
        self._factors = torch.empty(0)
        """Scale and skip of the last step, as long as they may be on their way."""
        self._sent: Copy | None = None
        self._gathered: Task | None = None
        self._applied: Task | None = None
        """The update of a window that is not in the weights yet."""
        self._fetched: Copy | None = None

    def arrange(self, masks: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        """Take other columns, or the same ones after their state was written. Nothing is pending.
        ``masks``, ``counts``: by matrix, on the host: which columns are hot, and how often each has
        been updated."""
        device = self.shard.own.device
        blocks = self.blocks
        hot, cold = (
            Packed.of(blocks, which, counts, device) for which in (masks, [~mask for mask in masks])
        )
        self.hot = HotColumns(
            hot, decay=self._decay, config=self._config, dtype=self.shard.dtype, device=device
        )
        self.hot.fetch(self.state.slabs)
        self.cold = cold
        self.state.arrange(blocks, [~mask for mask in masks], counts)

    def arrived(self, grad: Tensor) -> None:
        """The gradient of the step is final: what is cold of it leaves."""
        if self._gathered is not None:
            with self._recorder.exposed(HOST):
                self._gathered.wait()  # has read the memory that it leaves for
        self._sent = self._rooms.leave(
            self._copies, grad, self.cold, self._staging.grads, self._label
        )
        self.crossed.to_host += self.cold.here.numel * self._staging.grads.element_size()

    def step(self, grad: Tensor, plan: Step, *, scale: Tensor, skip: Tensor, lr: float) -> None:
        """Update what is hot, gather what is cold, and where the window closes have it updated."""
        self.hot.step(grad, self.shard.own, self._rooms.hot, scale=scale, skip=skip, lr=lr)
        self.steps += 1.0 - skip
        self._factors = torch.stack([scale, skip])
        factors = self._copies.to_host(self._staging.factors, self._factors)
        self._gathered = Task(partial(self._gather, self._turn, self._sent, factors))
        self._worker.put(self._gathered, turn=GATHERING)
        window = self.state.windows[self._turn]
        window.since = self.taken if window.since is None else window.since
        self.taken += 1
        if not plan.closes:
            return
        self.deliver()
        self._close_window(lr)
        if plan.inline:
            self.deliver()

    def _gather(self, turn: int, sent: Copy | None, factors: Copy) -> None:
        """In the worker."""
        with of_bucket(self._label):
            factors.complete()
            if sent is not None:
                sent.complete()
            scale, skip = self._staging.factors
            size = self.cold.there.numel
            with self._worker.working(ADDING_UP, size):
                self.state.gather(turn, self._staging.grads[:size], scale, skip=bool(skip))

    def _close_window(self, lr: float) -> None:
        """Have the open window's update computed; the next step's gradients go into another one, if
        there is one."""
        self._applied = Task(partial(self._apply, self._turn, lr))
        self._worker.put(self._applied, turn=UPDATING)
        self._turn = (self._turn + 1) % len(self.state.windows)

    def _apply(self, turn: int, lr: float) -> None:
        """In the worker."""
        with of_bucket(self._label):
            with self._worker.working(APPLYING, self.shard.own.numel()):
                self.state.apply(turn, self.cold.there, self._rooms.whole, lr)
            if self._fetched is not None:
                self._fetched.complete()
            with self._worker.working(PACKING, self.cold.there.numel):
                self.cold.there.pack(self.state.slabs[0], self._staging.weights)

    def deliver(self) -> None:
        """Wait for the update of the window that closed last, if it is not in the weights yet, and
        put it there."""
        if self._applied is None:
            return
        size = self.cold.here.numel
        packing = self.cold.here
        room = self._rooms.arriving[:size]
        source = self._staging.weights[:size]
        with of_bucket(self._label), self._recorder.exposed(HOST):
            self._applied.wait()
            self._applied = None
            copy = self._copies.to_device(room, source, after=self._copies.given())
            copy.wait()
        packing.unpack(room, self.shard.own)
        self._fetched = copy
        self.crossed.to_device += size * source.element_size()
        closed = self.state.windows[(self._turn - 1) % len(self.state.windows)]
        closed.since = None

    @property
    def oldest(self) -> int | None:
        """Steps that were done before the oldest gradient that is not in the weights; None: there
        is none."""
        return min(
            (window.since for window in self.state.windows if window.since is not None),
            default=None,
        )

    def settle(self, lr: float) -> None:
        """Apply everything that is pending, on the host and on the device, and write what is hot
        back to the host."""
        self.deliver()
        if self.state.windows[self._turn].since is not None:
            self._close_window(lr)
            self.deliver()
        if self._gathered is not None:
            with self._recorder.exposed(HOST):
                self._gathered.wait()
        self.hot.store(self.state.slabs)

    def refresh(self) -> None:
        """The slabs were written: the shard in the compute dtype follows."""
        self.shard.own.copy_(self.state.slabs[0])
