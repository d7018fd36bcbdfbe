"""The messages of gradient buckets: one exchange for each reduction, and the receive and staging
buffers that the exchanges share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_llama.engine.comm.exchange import (
    Exchange,
    Reductions,
    StagingBuffer,
    all_reduce_exchange,
    carried_by_gloo,
    summed_numel,
)
from megatron_llama.engine.mesh import Axis, DataAxes
from megatron_llama.engine.options import BF16
from megatron_llama.engine.plan.buckets import BucketPlan, Slot
from megatron_llama.engine.plan.limits import REDUCTIONS_IN_FLIGHT, STAGED_REDUCTIONS

NO_WIRES: Mapping[int, torch.dtype | None] = MappingProxyType({})


def own_wires(bucket_plan: BucketPlan) -> dict[int, torch.dtype | None]:
    """Return the dtypes in which the gradients of buckets travel that have one of their own, by
    bucket; None: that of the gradient."""
    return {
        bucket.index: torch.bfloat16 if bucket.kind.reduces_in == BF16 else None
        for bucket in bucket_plan.buckets
        if bucket.kind.reduces_in
    }


class BucketExchanges:
    """The reductions of all buckets, made once, and the users of the receive buffers.

    ``unsharded``, ``parts``, ``shards`` and ``slots`` are those of ``GradientBuckets``, by bucket.
    ``axes`` has the data-parallel axes of each bucket, ``wire`` is the dtype in which gradients
    travel, ``own_wires`` has those of buckets with one of their own: those of one dtype along the
    same axes share receive buffers. ``sums_wide``: see ``EngineOptions``."""

    def __init__(
        self,
        unsharded: Mapping[int, Tensor],
        parts: Mapping[int, Tensor],
        shards: Mapping[int, Tensor],
        slots: Mapping[int, Slot],
        axes: Mapping[int, DataAxes],
        wire: torch.dtype | None,
        chunk_bytes: int,
        own_wires: Mapping[int, torch.dtype | None] = NO_WIRES,
        sums_wide: bool = False,
    ) -> None:
        self._by_bucket: dict[int, _WireExchanges] = {}
        self.staging: list[Tensor] = []
        """The memory of the buffers in which a device casts gradients."""
        ways = {
            bucket: (own_wires.get(bucket, wire), axes[bucket].dp.ranks) for bucket in unsharded
        }
        for way in dict.fromkeys(ways.values()):
            buckets = [bucket for bucket in unsharded if ways[bucket] == way]
            shared_axes = axes[buckets[0]]
            exchanges = _WireExchanges(
                {bucket: unsharded[bucket] for bucket in buckets},
                {bucket: parts[bucket] for bucket in buckets},
                {bucket: shards[bucket] for bucket in buckets},
                {bucket: slots[bucket] for bucket in buckets},
                shared_axes.shard,
                shared_axes.replica,
                way[0],
                chunk_bytes,
                sums_wide,
            )
            self.staging += exchanges.staging
            self._by_bucket |= dict.fromkeys(buckets, exchanges)

    def buffer_user(self, bucket: int) -> int | None:
        """Return the bucket whose parts still arrive in the receive buffer of this bucket, if the
        caller has to wait for that. On a device it has not: reductions start and are followed up in
        order, and the stream that starts one waits for its buffer itself."""
        return self._by_bucket[bucket].buffer_user(bucket)

    def take(self, bucket: int, *, first: bool) -> Exchange:
        """Return the exchange of a bucket's first or later round, and take its receive buffer."""
        return self._by_bucket[bucket].take(bucket, first=first)

    def release(self, bucket: int) -> None:
        """Give the receive buffer back: its parts have been added up."""
        self._by_bucket[bucket].release(bucket)

    def sum_over_replicas(self, bucket: int) -> None:
        """Sum the shards of all replicas, in place."""
        self._by_bucket[bucket].sum_over_replicas(bucket)


class _WireExchanges:
    """The reductions of the buckets whose gradients travel in one dtype along the same axes.
    Arguments and methods are those of ``BucketExchanges``.

    A slot has at most one reduction under way, so the buckets of one slot share a receive buffer:
    more buffers than slots would never be in use at once."""

    def __init__(
        self,
        unsharded: Mapping[int, Tensor],
        parts: Mapping[int, Tensor],
        shards: Mapping[int, Tensor],
        slots: Mapping[int, Slot],
        shard_axis: Axis,
        replica_axis: Axis,
        wire: torch.dtype | None,
        chunk_bytes: int,
        sums_wide: bool,
    ) -> None:
        self._users: dict[int, int] = {}
        some = next(iter(unsharded.values()), torch.empty(0))
        numbers = {slot: number for number, slot in enumerate(dict.fromkeys(slots.values()))}
        self._on_host = any(
            carried_by_gloo(axis, some.device) for axis in (shard_axis, replica_axis)
        )
        most = REDUCTIONS_IN_FLIGHT if self._on_host else STAGED_REDUCTIONS
        buffers = min(most, len(numbers))
        accumulates = any(shards[b] is not parts[b] for b in unsharded)
        sums_whole = shard_axis.size == 1 < replica_axis.size and not accumulates
        # no_shard: one all-reduce of the whole bucket, in place. Hybrid sharding: the shards of all
        # replicas are summed, 1/dp of the bytes.
        repeated = unsharded if sums_whole else shards if replica_axis.size > 1 else {}
        largest = max((tensor.numel() for tensor in unsharded.values()), default=0)
        largest_repeated = max((tensor.numel() for tensor in repeated.values()), default=0)
        staging: list[StagingBuffer] = []
        # On the host each sum casts in its own memory.
        if wire is not None and wire != some.dtype and repeated and not self._on_host:
            # One is enough for shards: their sums are made one after the other, in one stream.
            count = buffers if sums_whole else 1
            if sums_wide:
                largest_repeated = summed_numel(largest_repeated, replica_axis.size)
            staging = [StagingBuffer(largest_repeated, wire, some.device) for _ in range(count)]
        self.staging = [buffer.memory for buffer in staging]
        """The memory of the buffers in which a device casts gradients."""
        # A sum of whole buckets that casts nothing has no buffer to share.
        shared = len(numbers) if sums_whole and not staging else buffers
        self._buffer = {b: numbers[slot] % shared for b, slot in slots.items()}
        sums = {
            b: all_reduce_exchange(
                tensor,
                replica_axis,
                index=b,
                chunk_bytes=chunk_bytes,
                wire=wire,
                staging=staging[self._buffer[b] % len(staging)] if staging else None,
                sums_wide=sums_wide,
            )
            for b, tensor in repeated.items()
        }
        self._replicas: Mapping[int, Exchange] = {} if sums_whole else sums
        if sums_whole:
            self._first = self._later = sums
            return
        reductions = Reductions(
            shard_axis,
            largest=largest,
            dtype=some.dtype,
            wire=wire,
            device=some.device,
            chunk_bytes=chunk_bytes,
            in_flight=buffers,
            sums_wide=sums_wide,
        )
        if not self._on_host:
            self.staging += reductions.staging
        self._first = {
            b: reductions.scatter(tensor, shards[b], index=b, buffer=self._buffer[b])
            for b, tensor in unsharded.items()
        }
        # A later round may not be received into the shard, which has the first one: it comes into
        # this rank's part of the slot, which has been sent, and is added from there.
        self._later = self._first | {
            b: reductions.scatter(tensor, parts[b], index=b, buffer=self._buffer[b])
            for b, tensor in unsharded.items()
            if shards[b] is not parts[b]
        }

    def buffer_user(self, bucket: int) -> int | None:
        return self._users.get(self._buffer[bucket])

    def take(self, bucket: int, *, first: bool) -> Exchange:
        if self._on_host:
            self._users[self._buffer[bucket]] = bucket
        return self._first[bucket] if first else self._later[bucket]

    def release(self, bucket: int) -> None:
        if self._on_host:
            self._users.pop(self._buffer[bucket])

    def sum_over_replicas(self, bucket: int) -> None:
        if bucket in self._replicas:
            self._replicas[bucket].start()
            self._replicas[bucket].wait()
