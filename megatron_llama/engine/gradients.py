"""Gradient buckets: where layers write, and the reductions that start when a bucket is complete.

    IDLE -> OPEN        the first contribution of a round is written; the slot's last user has been
                        reduced
    OPEN -> REDUCING    every planned contribution is there (those of one microbatch, or of the
                        whole step): sent at once, or behind
                        the gathers of the next use where backward needs those sooner
    REDUCING -> IDLE    somebody needs the slot or the result, and waits

What follows a reduction (the sum, and whatever the engine wants of the result) runs on a stream,
under the rest of backward. All this follows from the schedule, never from when a message arrives:
every rank issues the same collectives in the same sequence, so they cannot deadlock.

A pass may be split (zero-bubble schedules): between ``defer(key)`` and ``defer(None)`` the
contributions of matrices are kept as closures, and ``run_wgrads(key)`` writes them later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from megatron_llama.distributed.comm.exchange import Exchange, Reductions, all_reduce
from megatron_llama.distributed.comm.streams import Future, Stream
from megatron_llama.distributed.mesh import Axis
from megatron_llama.plans.buckets import REDUCTIONS_IN_FLIGHT, BucketPlan, Placement, Slot


class State(Enum):
    """Of one bucket; see above."""

    IDLE = "idle"
    OPEN = "open"
    REDUCING = "being reduced"


def _nobody_reads(bucket: int) -> None:
    """Reduced gradients are of no use to anybody by the time the next ones come."""


class GradientBuckets:
    """Slots for whole gradients and the reduced shards of one rank.

    ``shard_axis`` splits buckets, ``replica_axis`` repeats the shards. With
    ``reduce_every_microbatch`` slots are reused within a step and shards accumulate; otherwise the
    slots accumulate, are reduced when the last microbatch has contributed, and the shard is the
    rank's part of the slot. ``reduced(bucket)`` runs on ``stream`` when a bucket has its final
    value of the step; ``unread(bucket)`` waits until nobody reads that value any more.
    ``more_to_come()``: whether a later use will launch a gather. Where the layout says that
    backward needs those sooner than room for gradients, reductions are then kept back until
    ``release``, which belongs behind every use.
    """

    def __init__(
        self,
        layout: BucketPlan,
        *,
        shard_axis: Axis,
        replica_axis: Axis,
        reduce_every_microbatch: bool,
        dtype: torch.dtype,
        wire: torch.dtype | None,
        device: torch.device,
        stream: Stream,
        chunk_bytes: int,
        reduced: Callable[[int], None],
        unread: Callable[[int], None] = _nobody_reads,
        more_to_come: Callable[[], bool],
    ) -> None:
        self.layout = layout
        self.reduce_every_microbatch = reduce_every_microbatch
        self._recorder = shard_axis.recorder
        self._stream = stream
        self._reduced = reduced
        self._unread = unread
        self.trainable = tuple(bucket.index for bucket in layout.buckets if bucket.kind.trainable)
        self._slots = {
            slot: torch.zeros(size, dtype=dtype, device=device)
            for slot, size in layout.gradient_slot_numel().items()
        }
        self._full = {
            b: self._slots[layout.gradient_slots[b]][: layout.buckets[b].numel]
            for b in self.trainable
        }
        self._views = {
            p.spec.name: full[p.start : p.stop].view(p.spec.shape)
            for b, full in self._full.items()
            for p in layout.buckets[b].placements
        }
        self._gaps = {
            b: _gaps(layout.buckets[b].placements, full) for b, full in self._full.items()
        }
        self._own = {b: full[layout.shard(b, shard_axis.rank)] for b, full in self._full.items()}
        self.shards = {
            b: torch.zeros_like(own) if reduce_every_microbatch else own
            for b, own in self._own.items()
        }
        """Reduced gradients of this rank by bucket, valid after ``finish_all``."""
        slots = {bucket: layout.gradient_slots[bucket] for bucket in self.trainable}
        self._exchanges = _Exchanges(
            self._full, self._own, self.shards, slots, shard_axis, replica_axis, wire, chunk_bytes
        )
        self._state = dict.fromkeys(self.trainable, State.IDLE)
        self._slot_user: dict[Slot, int] = {}
        self._done: dict[int, Future] = {}
        self._rounds = 1
        self._rounds_left = dict.fromkeys(self.trainable, 0)
        self._missing: dict[int, dict[str, int]] = {b: {} for b in self.trainable}
        self._fresh: set[str] = set()
        self._deferring: Hashable | None = None
        self._deferred: dict[Hashable, list[Callable[[], None]]] = {}
        self._more_to_come = more_to_come
        self._kept: list[Callable[[], None]] = []

    @property
    def memory(self) -> list[Tensor]:
        """Slots, and the shards that are apart from them: all that is kept here, beside the buffers
        of messages."""
        return [
            *self._slots.values(),
            *(self.shards.values() if self.reduce_every_microbatch else ()),
        ]

    def begin_step(self, microbatches: int) -> None:
        """A step of so many microbatches starts."""
        each = 1 if self.reduce_every_microbatch else microbatches
        self._rounds = microbatches // each
        for bucket in self.trainable:
            self._rounds_left[bucket] = self._rounds
            self._begin_round(bucket, each)

    def _begin_round(self, bucket: int, microbatches: int) -> None:
        placements = self.layout.buckets[bucket].placements
        self._missing[bucket] = {
            p.spec.name: p.spec.contributions * microbatches for p in placements
        }
        self._fresh |= {p.spec.name for p in placements}

    def postpone_wgrad(self, key: Hashable | None) -> None:
        """From now on keep contributions under ``key``; None: write them at once again."""
        self._deferring = key

    def keep(self, work: Callable[[], None]) -> bool:
        """Keep a contribution for later, if this pass is split."""
        if self._deferring is None:
            return False
        self._deferred.setdefault(self._deferring, []).append(work)
        return True

    def run_wgrads(self, key: Hashable) -> None:
        """Write what was kept under ``key``, in the order of the pass."""
        with torch.no_grad():
            for work in self._deferred.pop(key, ()):
                work()

    def write(self, bucket: int, placement: Placement) -> tuple[Tensor, float]:
        """The view a layer accumulates into, and the factor of what is there: 0 for the first
        contribution of a round."""
        if self._state[bucket] is not State.OPEN:
            self._open(bucket, placement.spec.name)
        name = placement.spec.name
        beta = 0.0 if name in self._fresh else 1.0
        self._fresh.discard(name)
        return self._views[name], beta

    def _open(self, bucket: int, name: str) -> None:
        """Take the slot: what is still being reduced from it is waited for."""
        slot = self.layout.gradient_slots[bucket]
        user = self._slot_user.get(slot)
        if user is not None and self._state[user] is State.OPEN:
            missing = ", ".join(self._missing[user])
            label = self.layout.label
            raise RuntimeError(
                f"{name}: {label(bucket)} needs gradient slot {slot} while {label(user)} still misses {missing}"
            )
        if user is not None and self._state[user] is State.REDUCING:
            self.finish(user)
        if user is not None and user != bucket:
            # What another bucket left in the padding would count in the gradient norm.
            for gap in self._gaps[bucket]:
                gap.zero_()
        self._unread(bucket)
        self._slot_user[slot] = bucket
        self._state[bucket] = State.OPEN

    def written(self, bucket: int, placement: Placement) -> None:
        """One contribution is in place; a complete bucket is sent, or kept for ``release``."""
        missing = self._missing[bucket]
        name = placement.spec.name
        if name not in missing:
            planned = placement.spec.contributions
            raise RuntimeError(
                f"{name}: more gradients than the {planned} planned for each microbatch, in {self.layout.label(bucket)}"
            )
        missing[name] -= 1
        if missing[name] == 0:
            del missing[name]
        if not missing:
            self._recorder.event(f"complete {bucket}")
            self._launch(bucket)

    def _launch(self, bucket: int) -> None:
        first = self._rounds_left[bucket] == self._rounds
        self._rounds_left[bucket] -= 1
        self._state[bucket] = State.REDUCING
        if (user := self._exchanges.buffer_user(bucket)) is not None:
            self._wait(user)
        exchange = self._exchanges.take(bucket, first=first)
        final = self._rounds_left[bucket] == 0
        self._kept.append(partial(self._send, bucket, exchange, first=first, final=final))
        if not final:
            self._begin_round(bucket, 1)
        if not (self.layout.gathers_first and self._more_to_come()):
            self.release()

    def release(self) -> None:
        """Send what was kept back: the gathers that go first have been launched."""
        kept = self._kept
        self._kept = []
        for send in kept:
            send()

    def _send(self, bucket: int, exchange: Exchange, *, first: bool, final: bool) -> None:
        self._recorder.event(f"reduce {bucket}")
        started = self._stream.issue(exchange.start)
        self._done[bucket] = self._stream.run(
            partial(self._follow_up, bucket, exchange, started, first=first, final=final)
        )

    def _follow_up(
        self, bucket: int, exchange: Exchange, started: Future, *, first: bool, final: bool
    ) -> None:
        started.wait()
        exchange.wait()
        self._exchanges.release(bucket)
        if self.reduce_every_microbatch and not first:
            self.shards[bucket].add_(self._own[bucket])
        if final:
            self._exchanges.sum_over_replicas(bucket)
            self._reduced(bucket)

    def finish(self, bucket: int) -> None:
        """Wait for a bucket's reduction. RuntimeError if there is none: nobody may wait for one
        twice."""
        if self._state[bucket] is not State.REDUCING:
            raise RuntimeError(
                f"{self.layout.label(bucket)}: a reduction is waited for, but the bucket is {self._state[bucket].value}"
            )
        self._wait(bucket)
        self._state[bucket] = State.IDLE

    def _wait(self, bucket: int) -> None:
        self.release()
        with self._recorder.exposed("gradients"):
            self._done[bucket].wait()

    def finish_all(self) -> None:
        """Wait for every reduction still in flight.

        Every parameter must have had its gradient: a silent miss would train it with a stale
        one."""
        missing = [
            f"{', '.join(names)} in {self.layout.label(bucket)}"
            for bucket, names in self._missing.items()
            if names
        ]
        if missing or self._deferred:
            raise RuntimeError(
                f"parameters without gradient at the end of the step: {'; '.join(missing)}"
            )
        for bucket in self.trainable:
            if self._state[bucket] is State.REDUCING:
                self.finish(bucket)


class _Exchanges:
    """The reductions of all buckets, made once, and which of them uses which receive buffer.

    ``slots``: of the gradients. A slot has one reduction under way at most, so those of one slot
    share a buffer, and more buffers than slots would never be in use at once."""

    def __init__(
        self,
        full: Mapping[int, Tensor],
        own: Mapping[int, Tensor],
        shards: Mapping[int, Tensor],
        slots: Mapping[int, Slot],
        shard_axis: Axis,
        replica_axis: Axis,
        wire: torch.dtype | None,
        chunk_bytes: int,
    ) -> None:
        self._users: dict[int, int] = {}
        self._replicas: dict[int, Exchange] = {}
        numbers = {slot: number for number, slot in enumerate(dict.fromkeys(slots.values()))}
        self._buffer = {b: numbers[slot] for b, slot in slots.items()}
        if shard_axis.size == 1 < replica_axis.size and all(shards[b] is own[b] for b in full):
            # Nothing is split and nothing accumulates elsewhere: the one message goes out when the
            # bucket is complete.
            whole = {
                b: all_reduce(f, replica_axis, index=b, chunk_bytes=chunk_bytes, wire=wire)
                for b, f in full.items()
            }
            self._first = self._later = whole
            return
        buffers = min(REDUCTIONS_IN_FLIGHT, len(numbers))
        self._buffer = {b: number % buffers for b, number in self._buffer.items()}
        largest = max((f.numel() for f in full.values()), default=0)
        some = next(iter(full.values()), torch.empty(0))
        reductions = Reductions(
            shard_axis,
            largest=largest,
            dtype=some.dtype,
            wire=wire,
            device=some.device,
            chunk_bytes=chunk_bytes,
            in_flight=buffers,
        )
        self._first = {
            b: reductions.scatter(f, shards[b], index=b, buffer=self._buffer[b])
            for b, f in full.items()
        }
        accumulating = {b: f for b, f in full.items() if shards[b] is not own[b]}
        self._later = self._first | {
            b: reductions.scatter(f, own[b], index=b, buffer=self._buffer[b])
            for b, f in accumulating.items()
        }
        if replica_axis.size > 1:
            self._replicas = {
                b: all_reduce(s, replica_axis, index=b, chunk_bytes=chunk_bytes, wire=wire)
                for b, s in shards.items()
            }

    def buffer_user(self, bucket: int) -> int | None:
        """Whose parts are still coming into the buffer that this bucket receives into."""
        return self._users.get(self._buffer[bucket])

    def take(self, bucket: int, *, first: bool) -> Exchange:
        """The exchange of a bucket's first or later round; its buffer is taken from now on."""
        self._users[self._buffer[bucket]] = bucket
        return self._first[bucket] if first else self._later[bucket]

    def release(self, bucket: int) -> None:
        """What was received has been added up."""
        self._users.pop(self._buffer[bucket])

    def sum_over_replicas(self, bucket: int) -> None:
        """Add up the shards of all replicas, in place."""
        if bucket in self._replicas:
            self._replicas[bucket].start()
            self._replicas[bucket].wait()


def _gaps(placements: Sequence[Placement], full: Tensor) -> list[Tensor]:
    """The padding behind every parameter of a bucket."""
    edges = [placed.start for placed in placements[1:]] + [full.numel()]
    return [
        full[placed.stop : edge]
        for placed, edge in zip(placements, edges, strict=True)
        if placed.stop < edge
    ]
