"""ZenFlow (Lan et al., 2025, arXiv 2505.12242): the columns with the largest gradients are updated
at every step on the device, all others once an update interval on the host, with the mean of their
accumulated gradients.

This approximates AdamW. It is AdamW where every column is hot, and where every interval is one step
whose update is waited for. Unlike in DeepSpeed, nothing is lost on the way: hot columns have an
fp32 master and fp32 moments, cold ones one set of moments; each column's number of updates corrects
the bias of its moments; a column that becomes hot or cold takes its state along. Gradients of both
kinds are clipped by the norm of their step. A gradient is in the weights less than two intervals
after its step, or the run ends with an error.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.engine.comm.streams import CompletedFuture, Future
from megatron_llama.engine.comm.worker import Task
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.offload.build import Host
from megatron_llama.engine.offload.copies import Copies, Copy
from megatron_llama.engine.offload.pinned_buffer import PinnedBuffer
from megatron_llama.engine.offload.worker import HostWorker, errors_of_bucket
from megatron_llama.engine.offload.zenflow.columns import (
    Block,
    ColdColumns,
    ColumnSet,
    HotColumns,
    State,
    blocks_of,
)
from megatron_llama.engine.offload.zenflow.schedule import (
    AutoInterval,
    Intervals,
    Step,
    UpdateWindows,
)
from megatron_llama.engine.offload.zenflow.selection import ColumnNorms, Matrix, select_columns
from megatron_llama.engine.options import UpdateOptions
from megatron_llama.engine.plan.buckets import BucketPlan
from megatron_llama.engine.plan.offload import FACTORS
from megatron_llama.engine.plan.zenflow import AUTO, longest_window, selection_steps, sends_fp32
from megatron_llama.engine.rules.registry import RuleInputs
from megatron_llama.engine.rules.update_rule import ColumnState, Shard, UpdateRule

ACCUMULATE_FIRST = 0
UPDATE_LAST = 1
"""Priorities of the worker: a gradient that arrives does not wait for the update of the last
window, because the memory it arrives in is needed again at the next step."""
ACCUMULATING = "accumulating"
APPLYING = "applying"
PACKING = "packing"
"""Kinds of work on which the worker spends its time."""
WAITING_FOR_HOST = "the optimizer on the host"


class ScratchBuffers:
    """Memory that all shards of a rank use one after the other, each piece as large as the largest
    shard."""

    def __init__(
        self,
        largest: int,
        device: torch.device,
        *,
        master_dtype: torch.dtype,
        wire: torch.dtype,
        compute_dtype: torch.dtype,
    ) -> None:
        self.hot_grads = torch.empty(largest, dtype=master_dtype, device=device)
        """Packed gradients of hot columns."""
        self.sent_grads = [torch.empty(largest, dtype=wire, device=device) for _ in range(2)]
        """Packed gradients on their way to the host: one buffer is filled while the other one is
        copied."""
        self.received_weights = torch.empty(largest, dtype=compute_dtype, device=device)
        """Packed weights that have come from the host."""
        self.whole_grad = torch.empty(largest, dtype=master_dtype)
        """On the host: the gradient of a whole shard."""
        self._copies: list[tuple[str, Copy] | None] = [None, None]
        """By buffer of ``sent_grads``, the bucket and the copy that used it last."""
        self._number = 0

    def send(
        self, copies: Copies, shard: Tensor, columns: ColumnSet, target: Tensor, label: str
    ) -> Copy:
        """Pack the columns of a gradient shard of the bucket ``label``, and copy them to ``target``
        on the host."""
        self._number ^= 1
        before = self._copies[self._number]
        packing = columns.on_device
        buffer = self.sent_grads[self._number][: packing.numel]
        # The copy before the last one read this buffer. Its error belongs to its own bucket.
        if before is not None:
            with errors_of_bucket(before[0]):
                before[1].wait()
        packing.pack(shard, buffer)
        copy = copies.to_host(target[: packing.numel], buffer)
        self._copies[self._number] = label, copy
        return copy


@dataclass(frozen=True)
class Staging:
    """Pinned host memory of one shard, for the values that cross the bus."""

    grads: Tensor
    """Packed gradients as they arrive, in the dtype of the wire."""
    weights: Tensor
    """Packed weights as they leave, in the compute dtype."""
    factors: Tensor
    """Scale and skip of a step, fp32 [2]."""


class ShardColumns:
    """One shard under ZenFlow: its hot columns on the device, its cold ones on the host, and the
    traffic between them. In every step ``on_reduced`` is called once, then ``step``."""

    def __init__(
        self,
        shard: Shard,
        blocks: list[Block],
        host_state: State,
        totals: Sequence[Tensor],
        staging: Staging,
        scratch: ScratchBuffers,
        copies: Copies,
        worker: HostWorker,
        options: UpdateOptions,
        label: str,
        recorder: Recorder,
    ) -> None:
        """``host_state`` and ``totals`` are those of ``ColdColumns``; ``label`` names the bucket in
        errors."""
        self.shard = shard
        self.blocks = blocks
        self._label = label
        self._recorder = recorder
        self._staging = staging
        self._scratch = scratch
        self._copies = copies
        self._worker = worker
        self._options = options
        self._decay = options.weight_decay if shard.kind.decay else 0.0
        self.cold = ColdColumns(host_state, totals, decay=self._decay, options=options)
        self.steps = torch.zeros((), dtype=torch.float32, device=shard.param_shard.device)
        """Steps that were not skipped, on the device, because the host never learns them."""
        self.to_host_bytes = 0
        """Bytes of packed gradients that have been copied to the host so far. The state of columns
        that become hot or cold does not count, here and below."""
        self.to_device_bytes = 0
        """Bytes of packed weights that have been copied to the device so far."""
        self.taken = 0
        """Steps that it has taken part in."""
        self._open = 0
        """Which of the accumulated gradients belongs to the window that is open."""
        self._factors = torch.zeros(2, dtype=torch.float32, device=shard.param_shard.device)
        """Scale and skip of the last step, kept as long as their copy may be under way."""
        self._sent: Copy | None = None
        self._accumulated: Task | None = None
        self._updated: Task | None = None
        """The update of a window that is not in the weights yet."""
        self._fetched: Copy | None = None

    def select(self, masks: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        """Take other hot columns, or the same ones after their state was written. Nothing may be
        pending. For each matrix ``masks`` says which columns are hot, and ``counts`` how often each
        has been updated; both are on the host."""
        device = self.shard.param_shard.device
        cold_masks = [~mask for mask in masks]
        self.hot = HotColumns(
            ColumnSet.of(self.blocks, masks, counts, device),
            decay=self._decay,
            options=self._options,
            dtype=self.shard.master_dtype,
            device=device,
        )
        self.hot.load(self.cold.state)
        self.cold_columns = ColumnSet.of(self.blocks, cold_masks, counts, device)
        self.cold.select(self.blocks, cold_masks, counts)

    def on_reduced(self, grad: Tensor) -> None:
        """Send the cold columns of the step's gradient, which is final, to the host."""
        if self._accumulated is not None:
            # The worker reads the last gradient from the memory that this one is copied to.
            with self._recorder.exposed(WAITING_FOR_HOST):
                self._accumulated.wait()
        self._sent = self._scratch.send(
            self._copies, grad, self.cold_columns, self._staging.grads, self._label
        )
        size = self.cold_columns.on_device.numel
        self.to_host_bytes += size * self._staging.grads.element_size()

    def step(self, grad: Tensor, plan: Step, *, scale: Tensor, skip: Tensor, lr: float) -> None:
        """Update the hot columns, accumulate the cold ones, and have these updated where the window
        closes."""
        self.hot.step(
            grad, self.shard.param_shard, self._scratch.hot_grads, scale=scale, skip=skip, lr=lr
        )
        self.steps += 1.0 - skip
        self._factors = torch.stack([scale, skip])
        factors = self._copies.to_host(self._staging.factors, self._factors)
        self._accumulated = Task(partial(self._accumulate, self._open, self._sent, factors))
        self._worker.put(self._accumulated, priority=ACCUMULATE_FIRST)
        accumulated = self.cold.accumulated[self._open]
        accumulated.since = self.taken if accumulated.since is None else accumulated.since
        self.taken += 1
        if not plan.closes:
            return
        # The update of the window before has to be in the weights before the next one is made.
        self.apply()
        self._close_window(lr)
        if plan.applies:
            self.apply()

    def _accumulate(self, number: int, sent: Copy | None, factors: Copy) -> None:
        """Called by the worker."""
        with errors_of_bucket(self._label):
            # The worker, unlike the thread that trains, may wait for scale and skip.
            factors.complete()
            if sent is not None:
                sent.complete()
            scale, skip = self._staging.factors
            size = self.cold_columns.on_host.numel
            with self._worker.working(ACCUMULATING, size):
                grads = self._staging.grads[:size]
                self.cold.accumulated[number].add(grads, scale, skip=bool(skip))

    def _close_window(self, lr: float) -> None:
        """Have the worker compute the window's update. If there are two windows, the next step's
        gradients go into the other one."""
        self._updated = Task(partial(self._update, self._open, lr))
        self._worker.put(self._updated, priority=UPDATE_LAST)
        self._open = (self._open + 1) % len(self.cold.accumulated)

    def _update(self, number: int, lr: float) -> None:
        """Called by the worker."""
        packing = self.cold_columns.on_host
        with errors_of_bucket(self._label):
            with self._worker.working(APPLYING, self.shard.param_shard.numel()):
                self.cold.update(number, packing, self._scratch.whole_grad, lr)
            if self._fetched is not None:
                # The last weights must have left the memory that these are packed into.
                self._fetched.complete()
            with self._worker.working(PACKING, packing.numel):
                packing.pack(self.cold.state[0], self._staging.weights)

    def apply(self) -> None:
        """Wait for the update of the window that closed last, and write it into the weights, unless
        that has been done."""
        if self._updated is None:
            return
        packing = self.cold_columns.on_device
        buffer = self._scratch.received_weights[: packing.numel]
        source = self._staging.weights[: packing.numel]
        with errors_of_bucket(self._label), self._recorder.exposed(WAITING_FOR_HOST):
            self._updated.wait()
            self._updated = None
            # All shards use this buffer: the current stream may still unpack the one before.
            copy = self._copies.to_device(buffer, source, after=self._copies.given())
            copy.wait()
        packing.unpack(buffer, self.shard.param_shard)
        self._fetched = copy
        self.to_device_bytes += packing.numel * source.element_size()
        closed = (self._open - 1) % len(self.cold.accumulated)
        self.cold.accumulated[closed].since = None

    @property
    def oldest(self) -> int | None:
        """Steps that were done before the oldest gradient that is not in the weights; None if there
        is none."""
        return min(
            (window.since for window in self.cold.accumulated if window.since is not None),
            default=None,
        )

    def settle(self, lr: float) -> None:
        """Apply everything that is pending, and write the state of the hot columns to the host."""
        self.apply()
        if self.cold.accumulated[self._open].since is not None:
            self._close_window(lr)
            self.apply()
        if self._accumulated is not None:
            with self._recorder.exposed(WAITING_FOR_HOST):
                self._accumulated.wait()
        self.hot.store(self.cold.state)

    def refresh(self) -> None:
        """Write the state on the host, which has changed, into the shard in the compute dtype."""
        self.shard.param_shard.copy_(self.cold.state[0])


def zenflow(inputs: RuleInputs, host: Host) -> ZenFlow:
    """Build the rule of offload by ZenFlow."""
    options = inputs.options.zenflow
    wire = inputs.dtype
    if sends_fp32(options):
        wire = inputs.master_dtype
    elif wire == torch.float16:
        # Gradients in float16 overflow where the norm, in fp32, does not.
        wire = torch.bfloat16
    return ZenFlow(
        inputs.options.groups,
        options.zenflow_topk_ratio,
        Intervals(
            update=longest_window(options),
            auto=options.zenflow_update_interval == AUTO,
            overlap=options.zenflow_overlap_step,
            warm_up_rounds=options.zenflow_full_warm_up_rounds,
            selection=selection_steps(options, inputs.steps_per_epoch),
        ),
        inputs.bucket_plan,
        inputs.mesh,
        host.plan.buckets,
        master_dtype=inputs.master_dtype,
        compute_dtype=inputs.dtype,
        wire=wire,
        worker=host.worker,
        copies=host.copies,
    )


class ZenFlow(UpdateRule):
    """ZenFlow for the buckets of matrices that are to be updated on the host."""

    def __init__(
        self,
        groups: Sequence[UpdateOptions],
        ratio: float,
        intervals: Intervals,
        bucket_plan: BucketPlan,
        mesh: Mesh,
        buckets: Sequence[int],
        *,
        master_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        wire: torch.dtype,
        worker: HostWorker,
        copies: Copies,
    ) -> None:
        """``groups`` has betas, eps and weight decay of each group of parameters; ``ratio`` is the
        share of columns that are hot; ``wire`` is the dtype of gradients that cross the bus. Raises
        OffloadError where memory is refused."""
        self._groups = tuple(groups)
        self._ratio = ratio
        self._bucket_plan = bucket_plan
        self._mesh = mesh
        self._worker = worker
        self._copies = copies
        self.windows = UpdateWindows(intervals)
        specs = [
            placed.spec for bucket in buckets for placed in bucket_plan.buckets[bucket].placements
        ]
        self._numbers = {spec.name: number for number, spec in enumerate(specs)}
        self._matrices = [Matrix.of(spec) for spec in specs]
        self._columns = [
            ColumnState(
                spec,
                matrix.first,
                matrix.total,
                updates=torch.zeros(matrix.columns, dtype=torch.float64),
                selected=torch.zeros(matrix.columns, dtype=torch.float64),
            )
            for spec, matrix in zip(specs, self._matrices, strict=True)
        ]
        self._progress = torch.zeros(2, dtype=torch.float64)
        """Steps, and one more than the steps before columns were last selected (0: never)."""
        self._norms = ColumnNorms(self._matrices, mesh)
        self._auto = AutoInterval(self._matrices, ratio, mesh) if intervals.auto else None
        total = sum(map(bucket_plan.shard_numel, buckets))
        windows = 1 + intervals.overlap
        device = mesh.device
        self._buffers = {
            "state": PinnedBuffer(3 * total, master_dtype, device, "weights and moments"),
            "gradients": PinnedBuffer(windows * total, master_dtype, device, "sums of gradients"),
            "arriving": PinnedBuffer(total, wire, device, "gradients"),
            "leaving": PinnedBuffer(
                total, compute_dtype, device, "weights on their way to the device"
            ),
            "factors": PinnedBuffer(
                FACTORS * len(buckets), torch.float32, device, "scales of gradients"
            ),
        }
        self._scratch = ScratchBuffers(
            max(map(bucket_plan.shard_numel, buckets), default=0),
            device,
            master_dtype=master_dtype,
            wire=wire,
            compute_dtype=compute_dtype,
        )
        self._shards: dict[int, ShardColumns] = {}
        self._grads: dict[int, Tensor] = {}
        self._plans: dict[int, Step] = {}
        """The plan of the present step, by the number of steps before it."""
        self._lock = threading.Lock()
        """Covers ``_plans``: the thread that updates asks for the plan, and the one that
        computes."""
        self._lr: dict[int, float] = {}
        """The learning rate of each bucket's last step."""
        self._last_steps: Future = CompletedFuture()
        self._settled_at = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all host memory that the rule has allocated."""
        pinned = sum(buffer.nbytes for buffer in self._buffers.values())
        return pinned + self._scratch.whole_grad.nbytes

    def attach(self, shard: Shard) -> Tensor:
        numel = shard.param_shard.numel()
        buffers = self._buffers
        host_state = (
            buffers["state"].take(numel),
            buffers["state"].take(numel),
            buffers["state"].take(numel),
        )
        windows = 1 + self.windows.intervals.overlap
        shard_columns = ShardColumns(
            shard,
            [
                block
                for segment in shard.segments
                for block in blocks_of(segment, self._numbers[segment.spec.name])
            ],
            host_state,
            [buffers["gradients"].take(numel) for _ in range(windows)],
            Staging(
                buffers["arriving"].take(numel),
                buffers["leaving"].take(numel),
                buffers["factors"].take(2),
            ),
            self._scratch,
            self._copies,
            self._worker,
            self._groups[shard.kind.group],
            self._bucket_plan.label(shard.bucket),
            self._mesh.recorder,
        )
        shard_columns.select(self._masks(), self._counts())
        self._shards[shard.bucket] = shard_columns
        return host_state[0]

    def _masks(self) -> list[Tensor]:
        return [column.selected > 0 for column in self._columns]

    def _counts(self) -> list[Tensor]:
        return [column.updates for column in self._columns]

    def on_reduced(self, bucket: int, grad: Tensor, *, speculative_lr: float | None) -> None:
        self._shards[bucket].on_reduced(grad)
        self._grads[bucket] = grad
        if self._auto is not None and self._is_counted(bucket):
            self._auto.add(grad, self._shards[bucket].blocks)

    def _is_counted(self, bucket: int) -> bool:
        """Whether this rank is the one to count the gradient of a shard that several
        tensor-parallel ranks have."""
        return self._mesh.tp.rank % self._bucket_plan.buckets[bucket].kind.copies == 0

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> Future:
        """Update the hot columns, and add the gradient of the cold ones to the window. Raises
        RuntimeError for a gradient that would reach the weights two windows after its step."""
        shard_columns = self._shards[bucket]
        self._lr[bucket] = lr
        shard_columns.step(grad, self._plan(shard_columns.taken), scale=scale, skip=skip, lr=lr)
        label = self._bucket_plan.label(bucket)
        self.windows.check_staleness(shard_columns.oldest, shard_columns.taken, label)
        return CompletedFuture()

    def _plan(self, done: int) -> Step:
        """Return the plan of the step after ``done`` steps. It is decided when the first bucket of
        the step asks: ``windows`` has come that far by then."""
        with self._lock:
            if done not in self._plans:
                assert done == self.windows.done, "all buckets take part in every step"
                requested = self._auto is not None and self._auto.update_requested()
                self._plans = {done: self.windows.next(requested=requested)}
            return self._plans[done]

    def discard(self) -> None:
        if self._auto is not None:
            self._auto.discard()

    def end_step(self, steps: Future, *, scale: Tensor, skip: Tensor) -> None:
        plan = self._plan(self.windows.done)
        self._last_steps = steps
        if self._auto is not None:
            self._auto.end_step(scale, skip, closed=plan.closes)
        self.windows.end(plan)
        if plan.selects:
            steps.wait()
            # A gradient that is not finite has no largest columns.
            if not bool(skip):
                self._select()

    def _select(self) -> None:
        """Make those columns hot whose gradient in this step is largest. Collective."""
        # Columns that change sides take their state along, so it has to be complete on the host.
        self.settle()
        for bucket, shard_columns in self._shards.items():
            if self._is_counted(bucket):
                self._norms.add(self._grads[bucket], shard_columns.blocks)
        selected = select_columns(self._norms.totals(), self._ratio)
        for matrix, column in zip(self._matrices, self._columns, strict=True):
            column.selected.copy_(matrix.local(selected[matrix.name]))
        self._distribute()
        self.windows.selected()
        self._note_progress()

    def _distribute(self) -> None:
        """Tell every shard which columns are hot and how often they have been updated."""
        masks = self._masks()
        for shard_columns in self._shards.values():
            shard_columns.select(masks, self._counts())
        if self._auto is not None:
            self._auto.begin_window(masks)

    def settle(self) -> Mapping[int, Future]:
        """Apply all pending updates at once. When this returns, the state on the host has the hot
        columns too."""
        self._last_steps.wait()
        # Saving, evaluating and comparing replicas each settle, often at the same step.
        if self._settled_at == self.windows.done or not self._shards:
            return {}
        pending = any(shard_columns.oldest is not None for shard_columns in self._shards.values())
        for bucket, shard_columns in self._shards.items():
            shard_columns.settle(self._lr.get(bucket, 0.0))
        # All shards have made the same updates, so one of them says how many.
        first = next(iter(self._shards.values()))
        hot_updates = int(first.hot.steps)  # waits for the device, which only settling may do
        for column in self._columns:
            column.updates.add_(torch.where(column.selected > 0, hot_updates, first.cold.updates))
        self._distribute()
        self.windows.settled()
        self._settled_at = self.windows.done
        self._note_progress()
        return dict.fromkeys(self._shards, CompletedFuture()) if pending else {}

    def refresh(self, bucket: int) -> None:
        shard_columns = self._shards[bucket]
        shard_columns.refresh()
        shard_columns.select(self._masks(), self._counts())

    def reset(self) -> None:
        for column in self._columns:
            column.updates.zero_()
            column.selected.zero_()
        for bucket in self._shards:
            for tensor in self.state(bucket).values():
                tensor.zero_()
        self._progress.zero_()
        self.resume(0)

    def state(self, bucket: int) -> dict[str, Tensor]:
        """Return the state on the host. It has the hot columns only after ``settle``."""
        shard_columns = self._shards[bucket]
        return {
            "exp_avg": shard_columns.cold.state[1],
            "exp_avg_sq": shard_columns.cold.state[2],
            "step": shard_columns.steps,
        }

    def column_state(self) -> Sequence[ColumnState]:
        return self._columns

    def progress(self) -> Tensor:
        return self._progress

    def resume(self, step: int) -> None:
        steps, selected = map(int, self._progress.tolist())
        done = steps or step
        last_selection = selected - 1 if selected else None
        self.windows = UpdateWindows(self.windows.intervals, done, last_selection, done)
        self._settled_at = done
        self._plans = {}
        self._note_progress()
        for shard_columns in self._shards.values():
            shard_columns.taken = done
        self._distribute()

    def _note_progress(self) -> None:
        last = self.windows.last_selection
        self._progress.copy_(
            torch.tensor([float(self.windows.done), 0.0 if last is None else last + 1.0])
        )

    def close(self, timeout: float = 0.0) -> None:
        self._worker.close(timeout)
        self._copies.close(timeout)
