"""ZenFlow (Lan et al., 2025): the columns with the largest gradients are updated at every step on
the device, all others now and then on the host, with the mean of the gradients since.

An approximation of AdamW, unless every column is hot or every window is one step and waited for:
then it is AdamW. Kept in full: an fp32 master and fp32 moments of hot columns; one set of moments
of cold ones; how often each column has been updated, which is what corrects the bias of its
moments; the state of a column that becomes hot or cold. Gradients of both kinds are clipped by the
norm of their step. A gradient is in the weights less than two windows after its step, or the run
ends.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.distributed.comm.streams import CompletedFuture, Future
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.engine.offload.asking import Asking
from megatron_llama.engine.offload.columns import blocks_of
from megatron_llama.engine.offload.copies import Copies
from megatron_llama.engine.offload.selection import Matrix, Norms, choose
from megatron_llama.engine.offload.shard import ScratchBuffers, ShardColumns, Staging
from megatron_llama.engine.offload.slabs import Slab
from megatron_llama.engine.offload.windows import Pace, Step, Windows
from megatron_llama.engine.offload.worker import HostWorker
from megatron_llama.engine.update_rule import Shard
from megatron_llama.plans.buckets import BucketPlan, Placement
from megatron_llama.plans.offload import FACTORS


@dataclass(frozen=True)
class ColumnState:
    """What a checkpoint holds of the columns of one parameter."""

    placement: Placement
    matrix: Matrix
    updates: Tensor
    """How often each column has been updated, fp64 [columns of this rank], live; complete after
    ``settle``."""
    hot: Tensor
    """1 or 0, fp64 [columns of this rank], live."""


class ZenFlow:
    """An update rule (ShardUpdate) for buckets of matrices."""

    def __init__(
        self,
        config: OptimizerConfig,
        ratio: float,
        pace: Pace,
        layout: BucketPlan,
        mesh: Mesh,
        buckets: Sequence[int],
        *,
        dtype: torch.dtype,
        narrow: torch.dtype,
        wire: torch.dtype,
        worker: HostWorker,
        copies: Copies,
    ) -> None:
        """``ratio``: the share of columns that are hot; ``dtype``: of master and gradient;
        ``narrow``: of what is gathered; ``wire``: of gradients that cross. Raises OffloadError
        where memory is refused."""
        self._config = config
        self._ratio = ratio
        self._layout = layout
        self._mesh = mesh
        self._worker = worker
        self._copies = copies
        self.windows = Windows(pace)
        placements = [placed for bucket in buckets for placed in layout.buckets[bucket].placements]
        self.columns = [_column_state(placed) for placed in placements]
        self._numbers = {placed.spec.name: number for number, placed in enumerate(placements)}
        matrices = [column.matrix for column in self.columns]
        self.progress = torch.zeros(2, dtype=torch.float64)
        """For checkpoints: steps, and one more than the steps before columns were last chosen (0:
        never); complete after ``settle``."""
        self._norms = Norms(matrices, mesh)
        self._asking = Asking(matrices, ratio, mesh) if pace.asks else None
        total = sum(map(layout.shard_numel, buckets))
        device = mesh.device
        self._slabs = {
            "state": Slab(3 * total, dtype, device, "weights and moments"),
            "gradients": Slab((1 + pace.overlap) * total, dtype, device, "sums of gradients"),
            "arriving": Slab(total, wire, device, "gradients"),
            "leaving": Slab(total, narrow, device, "weights on their way to the device"),
            "factors": Slab(FACTORS * len(buckets), torch.float32, device, "scales of gradients"),
        }
        largest = max(map(layout.shard_numel, buckets), default=0)
        self._rooms = ScratchBuffers(largest, device, wide=dtype, wire=wire, narrow=narrow)
        self._shards: dict[int, ShardColumns] = {}
        self._grads: dict[int, Tensor] = {}
        self._plans: dict[int, Step] = {}
        self._lock = threading.Lock()
        """Of the plans: the thread that updates makes them, and the one that computes."""
        self._lr = 0.0
        self._last: Future = CompletedFuture()
        self._settled_at = 0

    @property
    def nbytes(self) -> int:
        """Of all memory that it has taken from the host."""
        return sum(slab.nbytes for slab in self._slabs.values()) + self._rooms.whole.nbytes

    def attach(self, shard: Shard) -> Tensor:
        """See ShardUpdate."""
        take = partial(self._take, shard.own.numel())
        blocks = [
            block
            for segment in shard.segments
            for block in blocks_of(segment, self._numbers[segment.spec.name])
        ]
        slabs = (take("state"), take("state"), take("state"))
        totals = [take("gradients") for _ in range(1 + self.windows.pace.overlap)]
        staging = Staging(take("arriving"), take("leaving"), self._slabs["factors"].take(2))
        who = (
            self._copies,
            self._worker,
            self._config,
            self._layout.label(shard.bucket),
            self._mesh.recorder,
        )
        one = ShardColumns(shard, blocks, slabs, totals, staging, self._rooms, *who)
        one.arrange(*self._arrangement())
        self._shards[shard.bucket] = one
        return slabs[0]

    def _take(self, size: int, slab: str) -> Tensor:
        return self._slabs[slab].take(size)

    def _arrangement(self) -> tuple[list[Tensor], list[Tensor]]:
        return [column.hot > 0 for column in self.columns], [
            column.updates for column in self.columns
        ]

    def beside(self, bucket: int) -> bool:
        """See ShardUpdate."""
        return False

    def arrived(self, bucket: int, grad: Tensor, *, ahead: float | None) -> None:
        """See ShardUpdate."""
        self._shards[bucket].arrived(grad)
        self._grads[bucket] = grad
        if self._asking is not None and self._counts(bucket):
            self._asking.add(grad, self._shards[bucket].blocks)

    def _counts(self, bucket: int) -> bool:
        """Whether this rank is the one to count the gradient of a shard that several
        tensor-parallel ranks have."""
        return self._mesh.tp.rank % self._layout.buckets[bucket].kind.copies == 0

    def release(self, bucket: int) -> None:
        """See ShardUpdate. What leaves has been packed."""

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> Future:
        """See ShardUpdate. RuntimeError where a gradient is late."""
        one = self._shards[bucket]
        self._lr = lr
        one.step(grad, self._plan(one.taken), scale=scale, skip=skip, lr=lr)
        self.windows.check(one.oldest, one.taken, self._layout.label(bucket))
        return CompletedFuture()

    def _plan(self, done: int) -> Step:
        """Of the step behind so many. Made when it is first asked for: then ``windows`` has come as
        far."""
        with self._lock:
            if done not in self._plans:
                assert done == self.windows.done, "all buckets take part in every step"
                self._plans = {
                    done: self.windows.next(asked=self._asking is not None and self._asking.asked())
                }
            return self._plans[done]

    def finish(self, steps: Future, *, scale: Tensor, skip: Tensor) -> None:
        """See ShardUpdate."""
        plan = self._plan(self.windows.done)
        self._last = steps
        if self._asking is not None:
            self._asking.end(scale, skip, closed=plan.closes)
        self.windows.end(plan)
        if plan.chooses:
            steps.wait()
            if not bool(skip):
                self._choose()

    def _choose(self) -> None:
        """Take for hot those columns whose gradient in this step is largest. Collective."""
        self.settle()
        for bucket, one in self._shards.items():
            if self._counts(bucket):
                self._norms.add(self._grads[bucket], one.blocks)
        hot = choose(self._norms.totals(), self._ratio)
        for column in self.columns:
            column.hot.copy_(column.matrix.own(hot[column.matrix.name]))
        self._arrange()
        self.windows.chose()
        self._note_progress()

    def _arrange(self) -> None:
        masks, counts = self._arrangement()
        for one in self._shards.values():
            one.arrange(masks, counts)
        if self._asking is not None:
            self._asking.begin(masks)

    def settle(self) -> Mapping[int, Future]:
        """See ShardUpdate. It is over when this returns, and the host's slabs hold the state of hot
        columns too."""
        self._last.wait()
        if self._settled_at == self.windows.done or not self._shards:
            return {}
        pending = any(one.oldest is not None for one in self._shards.values())
        for one in self._shards.values():
            one.settle(self._lr)
        some = next(iter(self._shards.values()))
        hot = int(some.hot.steps)
        cold = some.state.updates
        for column in self.columns:
            column.updates.add_(torch.where(column.hot > 0, hot, cold))
        self._arrange()
        self.windows.settled()
        self._settled_at = self.windows.done
        self._note_progress()
        return dict.fromkeys(self._shards, CompletedFuture()) if pending else {}

    def refresh(self, bucket: int) -> None:
        """See ShardUpdate."""
        one = self._shards[bucket]
        one.refresh()
        one.arrange(*self._arrangement())

    def forget(self) -> None:
        """See ShardUpdate."""
        for column in self.columns:
            column.updates.zero_()
            column.hot.zero_()
        for bucket in self._shards:
            for tensor in self.state(bucket).values():
                tensor.zero_()
        self.progress.zero_()
        self.resume(0)

    def resume(self, done: int) -> None:
        """Go on with columns and ``progress`` as they have been written, nothing pending. ``done``:
        steps before, where progress has none."""
        steps, chosen = map(int, self.progress.tolist())
        done = steps or done
        self.windows = Windows(self.windows.pace, done, chosen - 1 if chosen else None, done)
        self._settled_at = done
        self._plans = {}
        self._note_progress()
        for one in self._shards.values():
            one.taken = done
        self._arrange()

    def _note_progress(self) -> None:
        last = self.windows.last_choice
        self.progress.copy_(
            torch.tensor([float(self.windows.done), 0.0 if last is None else last + 1.0])
        )

    def state(self, bucket: int) -> dict[str, Tensor]:
        """See ShardUpdate. On the host; complete after ``settle``."""
        one = self._shards[bucket]
        return {"exp_avg": one.state.slabs[1], "exp_avg_sq": one.state.slabs[2], "step": one.steps}

    def crossed(self) -> tuple[int, int]:
        """Bytes of packed columns that have crossed the bus so far: to the host, to the device."""
        shards = self._shards.values()
        return sum(one.crossed.to_host for one in shards), sum(
            one.crossed.to_device for one in shards
        )

    def close(self) -> None:
        """See ShardUpdate."""
        self._worker.close()
        self._copies.close()

    def join(self, seconds: float) -> None:
        """See ShardUpdate."""
        self._worker.join(seconds)
        self._copies.join(seconds)


def _column_state(placed: Placement) -> ColumnState:
    matrix = Matrix.of(placed.spec)
    return ColumnState(
        placed, matrix, *(torch.zeros(matrix.columns, dtype=torch.float64) for _ in range(2))
    )
