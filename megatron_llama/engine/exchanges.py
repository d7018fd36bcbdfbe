"""The messages of gradient buckets: one exchange for each reduction, and the receive and staging
buffers that the exchanges share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_llama.engine.comm.exchange import Exchange, Reductions, StagingBuffer, all_reduce
from megatron_llama.engine.comm.host.gloo import carries
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.plan.buckets import Slot
from megatron_llama.engine.plan.memory import REDUCTIONS_IN_FLIGHT, STAGED_REDUCTIONS


class BucketExchanges:
    """The reductions of all buckets, made once, and who uses which receive buffer.

    ``unsharded``, ``parts``, ``shards`` and ``slots`` are those of ``GradientBuckets``, by bucket.
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
    ) -> None:
        self._users: dict[int, int] = {}
        self._replicas: dict[int, Exchange] = {}
        self.staging: list[Tensor] = []
        """The memory of the buffers in which a device casts gradients."""
        some = next(iter(unsharded.values()), torch.empty(0))
        numbers = {slot: number for number, slot in enumerate(dict.fromkeys(slots.values()))}
        self._on_host = any(carries(axis, some.device) for axis in (shard_axis, replica_axis))
        most = REDUCTIONS_IN_FLIGHT if self._on_host else STAGED_REDUCTIONS
        buffers = min(most, len(numbers))
        self._buffer = {b: numbers[slot] % buffers for b, slot in slots.items()}
        largest = max((tensor.numel() for tensor in unsharded.values()), default=0)
        casts = wire is not None and wire != some.dtype
        accumulates = any(shards[b] is not parts[b] for b in unsharded)
        if shard_axis.size == 1 < replica_axis.size and not accumulates:
            # no_shard: one all-reduce of the whole bucket, in place.
            staging = self._open_staging(buffers * casts, largest, wire, some.device)
            if not staging:
                self._buffer = {b: numbers[slot] for b, slot in slots.items()}
            whole = {
                b: all_reduce(
                    tensor,
                    replica_axis,
                    index=b,
                    chunk_bytes=chunk_bytes,
                    wire=wire,
                    staging=staging[self._buffer[b]] if staging else None,
                )
                for b, tensor in unsharded.items()
            }
            self._first = self._later = whole
            return
        reductions = Reductions(
            shard_axis,
            largest=largest,
            dtype=some.dtype,
            wire=wire,
            device=some.device,
            chunk_bytes=chunk_bytes,
            in_flight=buffers,
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
        if replica_axis.size > 1:
            # Hybrid sharding: the shards of all replicas are summed, 1/dp of the bytes. One buffer
            # is enough: these sums are made one after the other, in one stream.
            largest_shard = max((shard.numel() for shard in shards.values()), default=0)
            staging = self._open_staging(int(casts), largest_shard, wire, some.device)
            self._replicas = {
                b: all_reduce(
                    shard,
                    replica_axis,
                    index=b,
                    chunk_bytes=chunk_bytes,
                    wire=wire,
                    staging=staging[0] if staging else None,
                )
                for b, shard in shards.items()
            }

    def _open_staging(
        self, count: int, numel: int, wire: torch.dtype | None, device: torch.device
    ) -> list[StagingBuffer]:
        """Returns the buffers in which all-reduces cast gradients: none on the host, where each has
        memory of its own."""
        if self._on_host or wire is None:
            return []
        buffers = [StagingBuffer(numel, wire, device) for _ in range(count)]
        self.staging += [buffer.memory for buffer in buffers]
        return buffers

    def buffer_user(self, bucket: int) -> int | None:
        """Returns the bucket whose parts still arrive in the receive buffer of this bucket, where
        somebody has to wait for that. On a device nobody has to: reductions start and are followed
        up in order, and the stream that starts one waits for its buffer itself."""
        return self._users.get(self._buffer[bucket])

    def take(self, bucket: int, *, first: bool) -> Exchange:
        """Returns the exchange of a bucket's first or later round, and takes its receive buffer."""
        if self._on_host:
            self._users[self._buffer[bucket]] = bucket
        return self._first[bucket] if first else self._later[bucket]

    def release(self, bucket: int) -> None:
        """Give the receive buffer back: what arrived in it has been added up."""
        if self._on_host:
            self._users.pop(self._buffer[bucket])

    def sum_over_replicas(self, bucket: int) -> None:
        """Sum the shards of all replicas, in place."""
        if bucket in self._replicas:
            self._replicas[bucket].start()
            self._replicas[bucket].wait()
