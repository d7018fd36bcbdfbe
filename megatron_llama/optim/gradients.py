"""Gradient buckets: where layers write, and the reductions that start as soon as a bucket is complete.

Layers *write* contributions, one or two per parameter and microbatch. A bucket is *complete* when every parameter has all
that are planned before its reduction: those of one microbatch, or of the whole step. It is then *launched* at once; the
result is taken (*finished*) only when its slot is needed again or the step ends. All this follows from the schedule, never
from when a message arrives: every rank issues the same collectives in the same sequence, so they cannot deadlock.

A pass may be split (zero-bubble schedules): between ``defer(key)`` and ``defer(None)`` the contributions of matrices are
kept as closures, and ``run_deferred(key)`` writes them later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.comm.collectives import Pending, all_reduce_through, reduce_scatter
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

    def defer(self, work: Callable[[], None]) -> bool:
        """See GradSink."""
        return self.owner.keep(work)


class GradientBuckets:
    """Slots for whole gradients and the reduced shards of one rank.

    ``shard_axis`` splits buckets, ``replica_axis`` repeats them (plain data parallelism); one of them has size 1.
    With ``reduce_every_microbatch`` slots are reused within a step and shards accumulate; otherwise the slots accumulate,
    are reduced when the last microbatch has contributed, and the shard is the rank's part of the slot.
    """

    def __init__(
        self,
        layout: ShardLayout,
        *,
        shard_axis: Axis,
        replica_axis: Axis,
        reduce_every_microbatch: bool,
        dtype: torch.dtype,
        wire: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self.layout, self.shard_axis, self.replica_axis = layout, shard_axis, replica_axis
        self.reduce_every_microbatch = reduce_every_microbatch
        self._wire = wire
        self._recorder = shard_axis.recorder
        self._slots = {slot: torch.zeros(size, dtype=dtype, device=device) for slot, size in layout.slot_numel().items()}
        self._full = [self._slots[layout.gradient_slots[b.index]][: b.numel] for b in layout.buckets]
        self._gaps = [_gaps(layout.buckets[b].placements, full) for b, full in enumerate(self._full)]
        self._own = [full[layout.shard(b, shard_axis.rank)] for b, full in enumerate(self._full)]
        self.shards = [torch.zeros_like(own) for own in self._own] if reduce_every_microbatch else self._own
        """Reduced gradients of this rank, valid after ``finish_all``."""
        self._slot_user: dict[tuple[int, int], int] = {}
        self._pending: dict[int, Pending] = {}
        self._accumulates: set[int] = set()
        self._rounds_left = [0] * len(layout.buckets)
        self._first_round = [True] * len(layout.buckets)
        self._missing: list[dict[str, int]] = [{} for _ in layout.buckets]
        self._fresh: set[str] = set()
        self._deferring: Hashable | None = None
        self._deferred: dict[Hashable, list[Callable[[], None]]] = {}

    def sink(self, bucket: int, placement: Placement) -> ParameterSink:
        """Where the layer of a parameter writes its gradient."""
        return ParameterSink(self, bucket, placement)

    def begin_step(self, microbatches: int) -> None:
        """A step of so many microbatches starts."""
        each = 1 if self.reduce_every_microbatch else microbatches
        for bucket in range(len(self.layout.buckets)):
            self._rounds_left[bucket] = microbatches // each
            self._first_round[bucket] = True
            self._begin_round(bucket, each)

    def _begin_round(self, bucket: int, microbatches: int) -> None:
        placements = self.layout.buckets[bucket].placements
        self._missing[bucket] = {p.spec.name: p.spec.contributions * microbatches for p in placements}
        self._fresh |= {p.spec.name for p in placements}

    def defer(self, key: Hashable | None) -> None:
        """From now on keep contributions under ``key``; None: write them at once again."""
        self._deferring = key

    def keep(self, work: Callable[[], None]) -> bool:
        """Keep a contribution for later, if this pass is split."""
        if self._deferring is None:
            return False
        self._deferred.setdefault(self._deferring, []).append(work)
        return True

    def run_deferred(self, key: Hashable) -> None:
        """Write what was kept under ``key``, in the order of the pass."""
        with torch.no_grad():
            for work in self._deferred.pop(key, ()):
                work()

    def write(self, bucket: int, placement: Placement) -> tuple[Tensor, float]:
        """The view a layer accumulates into. Opening a bucket first frees its slot from the reduction still in it."""
        slot = self.layout.gradient_slots[bucket]
        user = self._slot_user.get(slot)
        if user is not None and (user != bucket or user in self._pending):
            self._finish(user)
        if user is not None and user != bucket:
            # What another bucket left in the padding would count in the gradient norm.
            for gap in self._gaps[bucket]:
                gap.zero_()
        self._slot_user[slot] = bucket
        name = placement.spec.name
        beta = 0.0 if name in self._fresh else 1.0
        self._fresh.discard(name)
        return self._full[bucket][placement.start : placement.stop].view(placement.spec.shape), beta

    def written(self, bucket: int, placement: Placement) -> None:
        """One contribution is in place; a complete bucket is reduced at once."""
        missing, name = self._missing[bucket], placement.spec.name
        if name not in missing:
            raise RuntimeError(f"{name}: more gradients than the {placement.spec.contributions} planned for each microbatch")
        missing[name] -= 1
        if missing[name] == 0:
            del missing[name]
        if not missing:
            self._recorder.event(f"complete {bucket}")
            self._launch(bucket)

    def _launch(self, bucket: int) -> None:
        self._recorder.event(f"reduce {bucket}")
        full, target = self._full[bucket], self.shards[bucket]
        if self.reduce_every_microbatch and not self._first_round[bucket]:
            target = self._own[bucket]
            self._accumulates.add(bucket)
        if self.shard_axis.size > 1 or self.replica_axis.size == 1:
            self._pending[bucket] = reduce_scatter(target, full, self.shard_axis, wire=self._wire)
        else:
            self._pending[bucket] = all_reduce_through(full, self.replica_axis, self._wire)
        self._rounds_left[bucket] -= 1
        self._first_round[bucket] = False
        if self._rounds_left[bucket]:
            self._begin_round(bucket, 1)

    def _finish(self, bucket: int) -> None:
        pending = self._pending.pop(bucket, None)
        if pending is None:
            return
        pending.wait()
        if bucket in self._accumulates:
            self._accumulates.discard(bucket)
            self.shards[bucket].add_(self._own[bucket])

    def finish_all(self) -> None:
        """Wait for every reduction still in flight, in launch order.

        Every parameter must have had its gradient: a silent miss would train it with a stale one."""
        missing = [name for bucket in self._missing for name in bucket]
        if missing or self._deferred:
            raise RuntimeError(f"parameters without gradient at the end of the step: {', '.join(missing)}")
        for bucket in list(self._pending):
            self._finish(bucket)


def _gaps(placements: Sequence[Placement], full: Tensor) -> list[Tensor]:
    """The padding behind every parameter of a bucket."""
    edges = [placed.start for placed in placements[1:]] + [full.numel()]
    return [full[placed.stop : edge] for placed, edge in zip(placements, edges, strict=True) if placed.stop < edge]
