"""Whole parameters, while they are used: slots, the gathers that fill them, and who may read what.

Which bucket is gathered when is decided by ``PrefetchPlan``, integers only; this executes it. A
gather is launched at a use or after an update, and waited for by the first layer that reads one of
its parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_llama.distributed.comm.exchange import gather
from megatron_llama.distributed.comm.queues import CommQueue
from megatron_llama.distributed.comm.streams import Future
from megatron_llama.distributed.mesh import Axis
from megatron_llama.plans.buckets import BucketPlan, Slot
from megatron_llama.plans.traffic import prefetch_plan_of
from megatron_llama.plans.weight_access import WeightAccess


class Weights:
    """Parameter slots of one rank, and its own shards in the compute dtype.

    Two threads come here: the one that computes, and, when buckets are updated during backward, the
    one that does so. The lock covers the bookkeeping; layers wait outside of it."""

    def __init__(
        self,
        layout: BucketPlan,
        axis: Axis,
        *,
        dtype: torch.dtype,
        device: torch.device,
        comm_queue: CommQueue,
        prefetch_bytes: int,
        chunk_bytes: int,
    ) -> None:
        self.layout = layout
        self._axis = axis
        self._comm_queue = comm_queue
        sizes = layout.parameter_slot_numel()
        self._slots = {
            slot: torch.zeros(size, dtype=dtype, device=device) for slot, size in sizes.items()
        }
        self.full = [
            self._slots[layout.parameter_slots[b.index]][: b.numel] for b in layout.buckets
        ]
        """The place of every bucket in its slot."""
        self.own = [self._own(b) for b in range(len(layout.buckets))]
        """This rank's shards: part of the slot where the bucket has it to itself, else memory of
        their own."""
        self._gathers = [
            gather(f, o, axis, index=b, chunk_bytes=chunk_bytes)
            for b, (f, o) in enumerate(zip(self.full, self.own, strict=True))
        ]
        self._prefetch = prefetch_plan_of(
            layout, torch.empty((), dtype=dtype).element_size(), prefetch_bytes
        )
        self._in_flight: dict[Slot, tuple[int, Future]] = {}
        self._updates: dict[int, Future] = {}
        """Of buckets whose gather has not been launched."""
        self._version = [0] * len(layout.buckets)
        self._lock = threading.Lock()

    def _own(self, bucket: int) -> Tensor:
        part = self.full[bucket][self.layout.shard(bucket, self._axis.rank)]
        return part if self.layout.resident(bucket) else torch.zeros_like(part)

    def begin(self, accesses: Sequence[WeightAccess]) -> None:
        """A list of uses starts; its first gathers go out."""
        with self._lock:
            self._launch(self._prefetch.begin(accesses))

    def access(self, access: WeightAccess) -> None:
        """A unit is about to run: gather what it lacks, then what comes next."""
        with self._lock:
            self._launch(self._prefetch.enter(access))

    def changed(self, buckets: Iterable[int]) -> None:
        """New values are coming for these: nothing may read the old ones any more."""
        with self._lock:
            for bucket in buckets:
                self._prefetch.forget(bucket)
                self._version[bucket] += 1

    def publish(self, bucket: int, updated: Future | None = None) -> None:
        """The own shard holds the new values, or will when it is ``updated``: gather it then, if
        its slot is free for it."""
        with self._lock:
            if updated is not None:
                self._updates[bucket] = updated
            if self._prefetch.offer(bucket):
                self._launch((bucket,))

    def whole(self, bucket: int) -> bool:
        """Whether all of a bucket's values are in a slot of its own, now that everything is
        settled."""
        return self.layout.resident(bucket) and self._prefetch.holds(bucket)

    def more_to_come(self) -> bool:
        """Whether later uses of this list need a gather that has not been launched."""
        return self._prefetch.more_to_come

    def _launch(self, buckets: Iterable[int]) -> None:
        for bucket in buckets:
            slot = self.layout.parameter_slots[bucket]
            if slot in self._in_flight:
                self._finish(
                    slot
                )  # gathered ahead for a list of uses that ended before it was read
            self._axis.recorder.event(f"gather {bucket}")
            arriving = self._comm_queue.submit(
                self._gathers[bucket],
                size=self.full[bucket].nbytes,
                after=self._updates.pop(bucket, None),
            )
            self._in_flight[slot] = bucket, arriving

    def _finish(self, slot: Slot) -> None:
        with self._axis.recorder.exposed("parameters"):
            self._in_flight.pop(slot)[1].wait()

    def wait_unsharded(self, bucket: int, parameter: str) -> int:
        """Wait until a bucket may be read. Returns its generation; RuntimeError if its slot does
        not hold it."""
        slot = self.layout.parameter_slots[bucket]
        if not self._prefetch.holds(bucket):
            holder = self._prefetch.occupant(slot)
            found = "nothing" if holder is None else self.layout.label(holder)
            raise RuntimeError(
                f"{parameter}: read while its slot {slot} holds {found}, not {self.layout.label(bucket)}"
            )
        if slot in self._in_flight:
            self._finish(slot)
        return self._version[bucket]

    def check(self, bucket: int, parameter: str, version: int) -> None:
        """In backward: RuntimeError unless the values that forward saw are there."""
        found = self.wait_unsharded(bucket, parameter)
        if found != version:
            raise RuntimeError(
                f"{parameter}: backward reads generation {found} of {self.layout.label(bucket)}, forward saw generation {version}"
            )

    def settle(self) -> None:
        """Wait for every update and every gather in flight."""
        for updated in self._updates.values():
            updated.wait()
        self._updates.clear()
        for slot in list(self._in_flight):
            self._finish(slot)
