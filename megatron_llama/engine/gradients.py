"""Gradient buckets: the slots that layers write gradients into, and the reduce-scatters that start
when a bucket is complete.

A bucket goes through three states:

    IDLE -> OPEN        the first contribution of a round is written; the bucket that had the slot
                        before has been reduced
    OPEN -> REDUCING    all planned contributions are there (those of one microbatch, or of the
                        whole step); the reduction is sent at once, or after the gathers of the next
                        unit where backward needs these sooner
    REDUCING -> IDLE    the slot or the result is needed: a thread waits for the reduction

The follow-up work of a reduction (adding up the shard, and the engine's use of the result) runs on
its own stream, while the rest of backward computes. All of this follows from the schedule and never
from the moment when a message arrives, so all ranks issue the same collectives in the same order
and cannot deadlock.

``Counting`` decides which contributions end a round: for our own model by the bucket plan
(``counting.py``), for a user's model by its first step (``engine/shard/open_counting.py``). Rounds
of one bucket are summed.

Zero-bubble schedules split a backward pass: between ``postpone_wgrads(key)`` and
``postpone_wgrads(None)`` the weight gradients of matrices are kept as closures, and
``run_wgrads(key)`` computes them later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from megatron_llama.engine.comm.exchange import Exchange
from megatron_llama.engine.comm.streams import Future, Stream
from megatron_llama.engine.counting import Counting, PlannedCounting, planned_rounds
from megatron_llama.engine.exchanges import BucketExchanges, own_wires
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.plan.buckets import BucketPlan, PlacedParam, Slot


class State(Enum):
    """The state of one bucket; the docstring of the module describes the transitions."""

    IDLE = "idle"
    OPEN = "open"
    REDUCING = "being reduced"


class GradientBuckets:
    """Slots for whole gradients, and the reduced gradient shards of one rank.

    The axes of ``mesh`` split buckets into shards and repeat the shards. With
    ``reduce_every_microbatch`` slots are reused within a step and the shards accumulate. Otherwise
    the slots accumulate, are reduced when the last microbatch has contributed, and the shard is
    this rank's part of the slot.

    ``stream`` has two orders of execution: ``issue`` starts reductions, and ``run`` does the
    follow-up work, on the stream (or thread) ``follow_up``. There ``reduced(bucket)`` is called
    when a bucket has its final value of the step; ``before_reuse(bucket)`` has to wait until that
    value is not read any more. ``gathers_to_come()`` says whether a later weight access will launch
    a gather: where the plan says that backward needs gathers sooner than room for gradients,
    reductions are then delayed until ``send_delayed``, which has to be called after every weight
    access.
    """

    def __init__(
        self,
        bucket_plan: BucketPlan,
        mesh: Mesh,
        *,
        reduce_every_microbatch: bool,
        dtype: torch.dtype,
        wire: torch.dtype | None,
        stream: Stream,
        chunk_bytes: int,
        sums_wide: bool = False,
        reduced: Callable[[int], None],
        before_reuse: Callable[[int], None],
        gathers_to_come: Callable[[], bool],
    ) -> None:
        self.bucket_plan = bucket_plan
        self.reduce_every_microbatch = reduce_every_microbatch
        self._recorder = mesh.recorder
        self._stream = stream
        self._reduced = reduced
        self._before_reuse = before_reuse
        self._gathers_to_come = gathers_to_come
        self.trainable = tuple(
            bucket.index for bucket in bucket_plan.buckets if bucket.kind.trainable
        )
        self._slots = {
            slot: torch.zeros(size, dtype=dtype, device=mesh.device)
            for slot, size in bucket_plan.gradient_slot_numel().items()
        }
        self._unsharded = {
            b: self._slots[bucket_plan.gradient_slots[b]][: bucket_plan.buckets[b].numel]
            for b in self.trainable
        }
        self._views = {
            p.spec.name: whole[p.start : p.stop].view(p.spec.shape)
            for b, whole in self._unsharded.items()
            for p in bucket_plan.buckets[b].placements
        }
        """The views that the layers write, by parameter."""
        self._padding = {
            b: _padding(bucket_plan.buckets[b].placements, whole)
            for b, whole in self._unsharded.items()
        }
        axes = {b: mesh.data_axes(bucket_plan.buckets[b].kind) for b in self.trainable}
        self._parts = {
            b: whole[bucket_plan.shard(b, axes[b].shard.rank)]
            for b, whole in self._unsharded.items()
        }
        """This rank's part of each whole bucket, in the slot."""
        self.shards = {
            b: torch.zeros_like(shard) if reduce_every_microbatch else shard
            for b, shard in self._parts.items()
        }
        """Reduced gradients of this rank by bucket, valid after ``finish_all``."""
        slots = {bucket: bucket_plan.gradient_slots[bucket] for bucket in self.trainable}
        self._exchanges = BucketExchanges(
            self._unsharded,
            self._parts,
            self.shards,
            slots,
            axes,
            wire,
            chunk_bytes,
            own_wires(bucket_plan),
            sums_wide,
        )
        self._state = dict.fromkeys(self.trainable, State.IDLE)
        self._slot_user: dict[Slot, int] = {}
        self._reductions: dict[int, Future] = {}
        self._reduced_rounds = dict.fromkeys(self.trainable, 0)
        """Rounds of this step that have been reduced, by bucket."""
        self.reduced = 0
        """Rounds that have been reduced, or are being reduced, of all steps and buckets."""
        self._names = {
            b: tuple(p.spec.name for p in bucket_plan.buckets[b].placements) for b in self.trainable
        }
        """The parameters of each bucket."""
        self._unwritten: dict[int, set[str]] = {b: set() for b in self.trainable}
        """By bucket, parameters without a contribution in this round."""
        self._wgrad_key: Hashable | None = None
        self._wgrads: dict[Hashable, list[Callable[[], object]]] = {}
        self._delayed: list[Callable[[], None]] = []
        self._counting: Counting
        """The contributions of this step."""
        self.begin_step(1)

    @property
    def memory(self) -> list[Tensor]:
        """All tensors that are kept here: the slots, and the shards that have their own memory.
        Buffers of messages are not among them."""
        return [
            *self._slots.values(),
            *(self.shards.values() if self.reduce_every_microbatch else ()),
        ]

    @property
    def staging(self) -> list[Tensor]:
        """The buffers in which a device casts gradients to the dtype in which they travel."""
        return self._exchanges.staging

    def begin_step(self, microbatches: int) -> None:
        """Start a step of so many microbatches, each with the contributions that the plan names."""
        rounds = planned_rounds(
            (self.bucket_plan.buckets[bucket] for bucket in self.trainable),
            microbatches,
            reduce_every_microbatch=self.reduce_every_microbatch,
        )
        counting = PlannedCounting(rounds, self.bucket_plan.label)
        self.begin_rounds(counting)

    def begin_rounds(self, counting: Counting) -> None:
        """Start a step with this count of contributions."""
        self._counting = counting
        for bucket in self.trainable:
            self._reduced_rounds[bucket] = 0
            self._begin_round(bucket)

    def _begin_round(self, bucket: int) -> None:
        has_round = self._counting.begin_round(bucket, self._reduced_rounds[bucket])
        self._unwritten[bucket] = set(self._names[bucket]) if has_round else set()

    def postpone_wgrads(self, key: Hashable | None) -> None:
        """Keep weight gradients under ``key`` from now on; None: compute them at once again."""
        self._wgrad_key = key

    def keep_wgrad(self, work: Callable[[], object]) -> bool:
        """Keep the closure that computes a weight gradient, if this pass is split. Returns whether
        it was kept."""
        if self._wgrad_key is None:
            return False
        self._wgrads.setdefault(self._wgrad_key, []).append(work)
        return True

    def run_wgrads(self, key: Hashable) -> None:
        """Compute the weight gradients that were kept under ``key``, in the order of the pass."""
        with torch.no_grad():
            # A sum of floats depends on its order, and a split pass has the bits of a whole one.
            for work in self._wgrads.pop(key, ()):
                work()

    def grad_view(self, bucket: int, placement: PlacedParam) -> tuple[Tensor, float]:
        """Return (view, beta): a layer makes ``view = beta * view + contribution``. The first
        contribution of a round has beta 0, so nothing is ever zeroed."""
        if self._state[bucket] is not State.OPEN:
            self._open(bucket, placement.spec.name)
        name = placement.spec.name
        unwritten = self._unwritten[bucket]
        # Zeroing every slot would be one more pass over the memory of all gradients.
        beta = 0.0 if name in unwritten else 1.0
        unwritten.discard(name)
        return self._views[name], beta

    def _open(self, bucket: int, name: str) -> None:
        """Take the slot, and wait for the bucket that is still being reduced from it."""
        slot = self.bucket_plan.gradient_slots[bucket]
        user = self._slot_user.get(slot)
        if user is not None and self._state[user] is State.OPEN:
            self._counting.make_way(user, slot, bucket=bucket, name=name)
            self._close(user)
        if user is not None and self._state[user] is State.REDUCING:
            self.finish(user)
        if user is not None and user != bucket:
            # Values of another bucket in the padding would count in the gradient norm.
            for gap in self._padding[bucket]:
                gap.zero_()
        # The shard of the last step may be this memory, and its copy to the host under way.
        self._before_reuse(bucket)
        self._slot_user[slot] = bucket
        self._state[bucket] = State.OPEN

    def grad_written(self, bucket: int, placement: PlacedParam) -> None:
        """Count one contribution that a layer has written. Reduce the bucket if it is complete."""
        if self._counting.count(bucket, placement.spec.name):
            self._close(bucket)

    def _close(self, bucket: int) -> None:
        """End the round of a bucket with the contributions so far, and reduce it."""
        self._recorder.event(f"complete {bucket}")
        self._reduce(bucket)

    def end_backward(self) -> None:
        """End a backward pass, and with it the rounds that no contribution ends.

        Raises RuntimeError, with the names, if parameters have had other contributions than those
        that were planned."""
        for bucket in self._counting.end_pass(self._views):
            self._close(bucket)

    @property
    def reduced_rounds(self) -> tuple[int, ...]:
        """Rounds of this step that have been reduced, or are being reduced, by bucket."""
        return tuple(self._reduced_rounds.values())

    def discard(self) -> None:
        """Throw away the gradients of the step under way: its reductions end, and no buffer is
        written any more. Ranks must have begun the same reductions."""
        # A reduction that peers have begun cannot be taken back: their messages are on the way.
        self.send_delayed()
        for bucket in self.trainable:
            if self._state[bucket] is State.REDUCING:
                self.finish(bucket)
            self._state[bucket] = State.IDLE
        self._wgrads.clear()

    def without_gradient(self) -> tuple[str, ...]:
        """Return the trainable parameters without a contribution so far in this step, in the order
        of the plan."""
        written = self._counting.written
        return tuple(name for name in self._views if name not in written)

    def _reduce(self, bucket: int) -> None:
        first = self._reduced_rounds[bucket] == 0
        self._reduced_rounds[bucket] += 1
        self.reduced += 1
        final = self._counting.is_last(bucket, self._reduced_rounds[bucket])
        # The slot still holds values of an earlier round, or of another bucket.
        for name in self._unwritten[bucket]:
            self._views[name].zero_()
        self._state[bucket] = State.REDUCING
        # Receive buffers are fewer than buckets: wait for the bucket that still receives into ours.
        if (user := self._exchanges.buffer_user(bucket)) is not None:
            self._wait(user)
        exchange = self._exchanges.take(bucket, first=first)
        self._delayed.append(partial(self._send, bucket, exchange, first=first, final=final))
        self._begin_round(bucket)
        # Messages of one connection go out in the order of issue. Where the gather of the next
        # unit is needed sooner than this slot, it has to be issued first.
        if not (self.bucket_plan.gathers_first and self._gathers_to_come()):
            self.send_delayed()

    def send_delayed(self) -> None:
        """Send the delayed reductions: the gathers that go first have been launched."""
        delayed = self._delayed
        self._delayed = []
        for send in delayed:
            send()

    def _send(self, bucket: int, exchange: Exchange, *, first: bool, final: bool) -> None:
        self._recorder.event(f"reduce {bucket}")
        # Issuing never blocks, and the wait for the result runs elsewhere: the next reduction does
        # not wait until this one has been added up.
        started = self._stream.issue(exchange.start)
        self._reductions[bucket] = self._stream.run(
            partial(self._follow_up, bucket, exchange, started, first=first, final=final)
        )

    def _follow_up(
        self, bucket: int, exchange: Exchange, started: Future, *, first: bool, final: bool
    ) -> None:
        """Add up a reduction, in the order of reductions, on the stream ``follow_up``."""
        started.wait()
        exchange.wait()
        self._exchanges.release(bucket)
        # The first round was received into the shard itself, later ones into the slot.
        if self.reduce_every_microbatch and not first:
            self.shards[bucket].add_(self._parts[bucket])
        if final:
            self._finalize(bucket)

    def _finalize(self, bucket: int) -> None:
        """Finish a bucket, whose rounds are all in the shard, on the stream ``follow_up``."""
        self._exchanges.sum_over_replicas(bucket)
        self._reduced(bucket)

    def finish(self, bucket: int) -> None:
        """Wait for a bucket's reduction. Raises RuntimeError if there is none, as after another
        wait."""
        if self._state[bucket] is not State.REDUCING:
            raise RuntimeError(
                f"{self.bucket_plan.label(bucket)}: a reduction is waited for, "
                f"but the bucket is {self._state[bucket].value}"
            )
        self._wait(bucket)
        self._state[bucket] = State.IDLE

    def _wait(self, bucket: int) -> None:
        self.send_delayed()  # it may be among them, and would never end
        with self._recorder.exposed("gradients"):
            self._reductions[bucket].wait()

    def finish_all(self) -> None:
        """End the step: reduce what only its end completes, and wait for every reduction still in
        flight.

        Raises RuntimeError for a parameter without a gradient: it would be trained with an old
        one."""
        missing = [
            f"{', '.join(names)} in {self.bucket_plan.label(bucket)}"
            for bucket, names in self._counting.lacking(self._names).items()
            if names
        ]
        # Before any other message: peers without the error would wait for the messages that follow.
        if missing:
            raise RuntimeError(
                f"parameters without gradient at the end of the step: {'; '.join(missing)}"
            )
        if self._wgrads:
            kept = ", ".join(map(str, self._wgrads))
            raise RuntimeError(f"weight gradients that were postponed and never run: {kept}")
        for bucket in self._counting.end_step(self._views):
            if self._state[bucket] is not State.OPEN:
                self._open(bucket, self.bucket_plan.label(bucket))  # a gradient of zero
            self._close(bucket)
        for bucket in self.trainable:
            if self._state[bucket] is State.REDUCING:
                self.finish(bucket)
        # In one order on all ranks, because replicas exchange their shards here.
        completed = [
            self._stream.run(partial(self._finalize, bucket))
            for bucket in self._counting.ended_by_step
        ]
        for future in completed:
            future.wait()


def _padding(placements: Sequence[PlacedParam], unsharded: Tensor) -> list[Tensor]:
    """Return the padding behind every parameter of a bucket, up to the next one."""
    edges = [placed.start for placed in placements[1:]] + [unsharded.numel()]
    return [
        unsharded[placed.stop : edge]
        for placed, edge in zip(placements, edges, strict=True)
        if placed.stop < edge
    ]
