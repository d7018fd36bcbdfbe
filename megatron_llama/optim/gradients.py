"""Gradient buckets: where layers write, and the reductions that start as soon as a bucket is complete.

A backward pass *opens* a bucket at its first gradient, *completes* it at its last and *launches* its reduction; the result
is taken (*finished*) only when its slot is needed again or the step begins. One thread launches, in bucket order, never in
completion order: every rank issues the same collectives in the same sequence, which is why they cannot deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.comm.collectives import Pending, all_reduce, reduce_scatter
from megatron_llama.layout import Placement, ShardLayout
from megatron_llama.mesh import Axis


@dataclass(frozen=True)
class ParameterSink:
    """The GradSink of one parameter: its view in the bucket's slot."""

    owner: GradientBuckets
    bucket: int
    placement: Placement

    def buffer(self) -> tuple[Tensor, float]:
        """See GradSink."""
        return self.owner.write(self.bucket, self.placement)

    def done(self) -> None:
        """See GradSink."""
        self.owner.written(self.bucket, self.placement)


class GradientBuckets:
    """Slots for whole gradients and the reduced shards of one rank.

    ``shard_axis`` splits buckets, ``replica_axis`` repeats them (plain data parallelism); one of them has size 1.
    With ``reduce_every_microbatch`` slots are reused within a step and shards accumulate; otherwise the slots accumulate,
    are reduced in the last backward pass, and the shard is the rank's part of the slot.
    """

    def __init__(
        self,
        layout: ShardLayout,
        *,
        shard_axis: Axis,
        replica_axis: Axis,
        reduce_every_microbatch: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout, self.shard_axis, self.replica_axis = layout, shard_axis, replica_axis
        self.reduce_every_microbatch = reduce_every_microbatch
        self._recorder = shard_axis.recorder
        self._slots = {slot: torch.zeros(size, dtype=dtype, device=device) for slot, size in layout.slot_numel().items()}
        self._full = [self._slots[layout.gradient_slots[b.index]][: b.numel] for b in layout.buckets]
        self._own = [full[layout.shard(b, shard_axis.rank)] for b, full in enumerate(self._full)]
        self.shards = [torch.zeros_like(own) for own in self._own] if reduce_every_microbatch else self._own
        """Reduced gradients of this rank, valid after ``finish_all``."""
        self._slot_user: dict[tuple[int, int], int] = {}
        self._pending: dict[int, Pending] = {}
        self._accumulates: set[int] = set()
        self._fresh: set[str] = set()
        self._missing: list[dict[str, int]] = []
        self._next_launch = 0
        self._first = self._reduces = True

    def sink(self, bucket: int, placement: Placement) -> ParameterSink:
        """Where the layer of a parameter writes its gradient."""
        return ParameterSink(self, bucket, placement)

    def begin_backward(self, *, first: bool, last: bool) -> None:
        """A backward pass starts; ``first`` and ``last`` of the step's microbatches on this stage."""
        self._first, self._reduces = first, last or self.reduce_every_microbatch
        if first or self.reduce_every_microbatch:
            self._fresh = {p.spec.name for b in self.layout.buckets for p in b.placements}
        self._missing = [{p.spec.name: p.spec.contributions for p in b.placements} for b in self.layout.buckets]
        self._next_launch = 0

    def end_backward(self) -> None:
        """Every parameter must have had its gradient: a silent miss would train it with a stale one."""
        missing = [name for bucket in self._missing for name in bucket]
        if missing:
            raise RuntimeError(f"parameters without gradient after backward: {', '.join(missing)}")

    def write(self, bucket: int, placement: Placement) -> tuple[Tensor, float]:
        """The view a layer accumulates into. Opening a bucket first frees its slot from the reduction still in it."""
        slot = self.layout.gradient_slots[bucket]
        user = self._slot_user.get(slot)
        if user is not None and (user != bucket or user in self._pending):
            self._finish(user)
        self._slot_user[slot] = bucket
        name = placement.spec.name
        beta = 0.0 if name in self._fresh else 1.0
        self._fresh.discard(name)
        return self._full[bucket][placement.start : placement.stop].view(placement.spec.shape), beta

    def written(self, bucket: int, placement: Placement) -> None:
        """One contribution is in place; a complete bucket is reduced at once, behind those before it in order."""
        missing, name = self._missing[bucket], placement.spec.name
        if name not in missing:
            raise RuntimeError(f"{name}: more gradients in one backward pass than the {placement.spec.contributions} planned")
        missing[name] -= 1
        if missing[name] == 0:
            del missing[name]
        if not missing:
            self._recorder.event(f"complete {bucket}")
            self._launch_complete()

    def _launch_complete(self) -> None:
        while self._reduces and self._next_launch < len(self._missing) and not self._missing[self._next_launch]:
            self._launch(self._next_launch)
            self._next_launch += 1

    def _launch(self, bucket: int) -> None:
        self._recorder.event(f"reduce {bucket}")
        full, target = self._full[bucket], self.shards[bucket]
        if self.reduce_every_microbatch and not self._first:
            target = self._own[bucket]
            self._accumulates.add(bucket)
        if self.shard_axis.size > 1 or self.replica_axis.size == 1:
            self._pending[bucket] = reduce_scatter(target, full, self.shard_axis)
        else:
            self._pending[bucket] = all_reduce(full, self.replica_axis)

    def _finish(self, bucket: int) -> None:
        pending = self._pending.pop(bucket, None)
        if pending is None:
            return
        pending.wait()
        if bucket in self._accumulates:
            self._accumulates.discard(bucket)
            self.shards[bucket].add_(self._own[bucket])

    def finish_all(self) -> None:
        """Wait for every reduction still in flight, in launch order."""
        for bucket in list(self._pending):
            self._finish(bucket)
