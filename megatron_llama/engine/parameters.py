"""Parameter buckets: the slots that hold whole (unsharded) buckets while layers read them, and the
all-gathers that fill the slots.

``PrefetchPlan`` decides the order of gathers, with integers only; this module carries it out. A
gather is launched when a unit is about to run or when a shard has been updated. The first layer
that reads one of the bucket's parameters waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from megatron_llama.engine.comm.exchange import gather
from megatron_llama.engine.comm.queues import CommQueue
from megatron_llama.engine.comm.streams import Future
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.plan.buckets import BucketPlan, Slot
from megatron_llama.engine.plan.prefetch import prefetch_plan_of
from megatron_llama.engine.plan.weight_access import WeightAccess


class ParameterBuckets:
    """Parameter slots of one rank, and its shards in the compute dtype of each bucket.

    Two threads call this: the one that computes, and the one that updates buckets during backward.
    The lock covers the bookkeeping. Layers wait for gathers outside of it: the second thread only
    changes buckets that have their slots to themselves and that no layer reads again in the step.
    """

    def __init__(
        self,
        bucket_plan: BucketPlan,
        mesh: Mesh,
        *,
        dtypes: Sequence[torch.dtype],
        comm_queue: CommQueue,
        prefetch_bytes: int,
        chunk_bytes: int,
    ) -> None:
        self.bucket_plan = bucket_plan
        self._recorder = mesh.recorder
        self._comm_queue = comm_queue
        dtype_of = dict(zip(bucket_plan.parameter_slots, dtypes, strict=True))
        self._slots = {
            slot: torch.zeros(size, dtype=dtype_of[slot], device=mesh.device)
            for slot, size in bucket_plan.parameter_slot_numel().items()
        }
        # A bucket always uses the same slot, so views of it never move, and weights that autograd
        # saved in forward are valid in backward: the second gather fills the same addresses.
        self.unsharded = [
            self._slots[bucket_plan.parameter_slots[b.index]][: b.numel]
            for b in bucket_plan.buckets
        ]
        """The place of every whole bucket in its slot."""
        axes = [mesh.data_axes(bucket.kind).gather for bucket in bucket_plan.buckets]
        places = [
            whole[bucket_plan.shard(b, axis.rank)]
            for b, (whole, axis) in enumerate(zip(self.unsharded, axes, strict=True))
        ]
        self.shards = [
            place if bucket_plan.has_own_slot(b) else torch.zeros_like(place)
            for b, place in enumerate(places)
        ]
        """This rank's shards: a part of the slot if the bucket has the slot to itself, else memory
        of their own."""
        self._gathers = [
            gather(whole, self.shards[b], axes[b], index=b, chunk_bytes=chunk_bytes)
            for b, whole in enumerate(self.unsharded)
        ]
        self._prefetch = prefetch_plan_of(
            bucket_plan, [whole.nbytes for whole in self.unsharded], prefetch_bytes
        )
        self._in_flight: dict[Slot, tuple[int, Future]] = {}  # the gather's number and its end
        self._updates: dict[int, Future] = {}
        """Updates under way, of buckets whose gather has not been launched."""
        self._version = [0] * len(bucket_plan.buckets)
        """Number of changes of each bucket's values."""
        self._lock = threading.Lock()
        self.launched = 0
        """How many gathers have been launched."""
        self.awaited = 0
        """The gather for which the computing thread waits, by its number; 0: none."""

    def begin(self, accesses: Sequence[WeightAccess]) -> None:
        """Start a list of weight accesses: launch its first gathers."""
        with self._lock:
            self._launch(self._prefetch.begin(accesses))

    def access(self, access: WeightAccess) -> None:
        """Begin a unit's pass: gather the buckets that it lacks, then those of the next units."""
        with self._lock:
            self._launch(self._prefetch.advance(access))

    def access_unplanned(self, unit: int, following: int | None = None) -> None:
        """Begin a unit's pass that is in no list: gather the buckets that it lacks, then those of
        the unit ``following``, which is expected next."""
        with self._lock:
            self._launch(self._prefetch.access_unplanned(unit, following))

    def abandon(self) -> None:
        """End the list: no later access of it will come, and another may begin."""
        with self._lock:
            self._prefetch.abandon()

    def invalidate(self, buckets: Iterable[int]) -> None:
        """Forget the values of these buckets: new ones are coming, so the old must not be read."""
        with self._lock:
            for bucket in buckets:
                self._prefetch.invalidate(bucket)
                self._version[bucket] += 1

    def publish(self, bucket: int, updated: Future | None = None) -> None:
        """Gather a bucket whose shard holds new values, or will when ``updated`` ends, unless its
        slot is still needed. (Then ``begin`` or ``access`` gathers it later.)"""
        with self._lock:
            if updated is not None:
                self._updates[bucket] = updated
            if self._prefetch.try_gather(bucket):
                self._launch((bucket,))

    def holds(self, bucket: int) -> bool:
        """Whether the slot of a bucket holds it, or is being filled with it."""
        return self._prefetch.holds(bucket)

    def is_unsharded(self, bucket: int) -> bool:
        """Whether all values of a bucket are in a slot of its own. Call ``settle`` first."""
        return self.bucket_plan.has_own_slot(bucket) and self._prefetch.holds(bucket)

    def gathers_to_come(self) -> bool:
        """Whether later accesses of the list need a gather that has not been launched."""
        return self._prefetch.gathers_to_come

    def _launch(self, buckets: Iterable[int]) -> None:
        for bucket in buckets:
            slot = self.bucket_plan.parameter_slots[bucket]
            if slot in self._in_flight:
                # It was prefetched for a list that ended before it was read. Two gathers must not
                # write one slot.
                self._wait(slot)
            self._recorder.event(f"gather {bucket}")
            gathered = self._comm_queue.submit(
                self._gathers[bucket],
                size=self.unsharded[bucket].nbytes,
                after=self._updates.pop(bucket, None),
            )
            self.launched += 1
            self._in_flight[slot] = self.launched, gathered

    def _wait(self, slot: Slot) -> None:
        self.awaited, gathered = self._in_flight.pop(slot)
        with self._recorder.exposed("parameters"):
            gathered.wait()
        self.awaited = 0

    def wait_unsharded(self, bucket: int, parameter: str) -> int:
        """Wait until a bucket may be read. Returns its version. Raises RuntimeError if its slot
        does not hold it."""
        slot = self.bucket_plan.parameter_slots[bucket]
        if not self._prefetch.holds(bucket):
            holder = self._prefetch.occupant(slot)
            label = self.bucket_plan.label
            content = "nothing" if holder is None else label(holder)
            raise RuntimeError(
                f"{parameter}: read while its slot {slot} holds {content}, not {label(bucket)}"
            )
        # Only the layer that reads the bucket waits for it: the attention half of a block does not
        # wait for the weights of the MLP.
        if slot in self._in_flight:
            self._wait(slot)
        return self._version[bucket]

    def check_version(self, bucket: int, parameter: str, version: int) -> None:
        """Wait as ``wait_unsharded`` does, in backward. Raises RuntimeError unless the slot has the
        values that forward read."""
        present = self.wait_unsharded(bucket, parameter)
        if present != version:
            label = self.bucket_plan.label(bucket)
            raise RuntimeError(
                f"{parameter}: backward reads version {present} of {label}, "
                f"forward saw version {version}"
            )

    def settle(self) -> None:
        """Wait for all updates and all gathers in flight."""
        for updated in self._updates.values():
            updated.wait()
        self._updates.clear()
        for slot in list(self._in_flight):
            self._wait(slot)
