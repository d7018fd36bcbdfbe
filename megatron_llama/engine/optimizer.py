"""OverlappedDistributedOptimizer: THE engine.

    forward     each layer waits for the gather of its own bucket only; a unit's use launches the
                gathers of what comes next
    backward    layers write gradients into slots; a complete bucket is reduced under the rest of
                backward, and its part of the
                norm taken; without clipping it is updated there and then, and some are gathered
                again
    step        one scalar for the norm, clip factor (on the device), then bucket by bucket: update
                the shard, launch its gather

Parameters and gradients live in slots allocated once; the modules' parameters are views that never
move. Where masters live, and who updates them when, is the update rule's affair.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron_llama.distributed.comm import exchange
from megatron_llama.distributed.comm.collectives import all_reduce
from megatron_llama.distributed.comm.queues import CommQueue, open_comm_queue
from megatron_llama.distributed.comm.streams import Future, Stream, open_stream
from megatron_llama.distributed.mesh import Axis, Mesh
from megatron_llama.engine.gradients import GradientBuckets
from megatron_llama.engine.loss_scale import LossScale
from megatron_llama.engine.parameters import Weights
from megatron_llama.engine.update_rule import Shard, ShardUpdate
from megatron_llama.nn.ops import at_least_fp32
from megatron_llama.nn.param_handle import attach_param_handle
from megatron_llama.plans.buckets import ALIGN, BucketPlan, Kind, Placement
from megatron_llama.plans.params import Rectangle
from megatron_llama.plans.weight_access import WeightAccess

PATIENCE_SECONDS = 5.0
"""For threads that wait for peers, which may be gone."""
WeightSource = Callable[[Rectangle, Tensor], None]
"""Writes the values of a HuggingFace rectangle into a tensor of the rectangle's size (any float
dtype)."""


@dataclass(frozen=True)
class StepResult:
    """0-dim tensors on the device; reading them is the caller's synchronisation."""

    grad_norm: Tensor
    """Global L2 norm before clipping."""
    skipped: Tensor
    """1 if the gradient was not finite or a rank had a veto, else 0. Then nothing was changed (with
    early updates: no shard whose gradient was not finite)."""
    loss_scale: Tensor
    """The factor the loss had in this step; 1 without --fp16."""


@dataclass(frozen=True)
class ShardPiece:
    """A rectangle of a HuggingFace tensor that this rank owns, with its live storage."""

    rectangle: Rectangle
    tensors: dict[str, Tensor]
    """``master`` and the update rule's shard-shaped state, as views of the rectangle's size."""
    primary: bool
    """Whether this rank is the one that writes it, when several ranks hold the same values."""


@dataclass(frozen=True)
class Replicated:
    """A part of a parameter, or of its optimizer state, that all ranks of an axis must hold
    alike."""

    axis: Axis
    name: str
    """Of the parameter."""
    what: str
    """``gathered``, ``master``, or the name of the update rule's state."""
    start: int
    """First element of the parameter."""
    tensor: Tensor
    """Flat, live."""


@dataclass(frozen=True)
class DataAxes:
    """Who shares a bucket: ``shard`` splits it, ``replica`` repeats the shards, ``gather`` has the
    ranks of ``shard``, on a device with a communicator of its own."""

    shard: Axis
    replica: Axis
    gather: Axis


@dataclass(frozen=True)
class Transport:
    """How data-parallel messages travel."""

    wire: torch.dtype | None
    """The dtype of gradients on their way; None: that of the slot."""
    chunk_bytes: int
    """Largest piece of a message, where the backend is gloo."""
    prefetch_bytes: int
    """Most bytes gathered ahead of their use; 0: as many as the slots hold."""
    at_once: bool = False
    """Messages take no time, as in a trace: what follows them is done where they are issued, and
    not by threads."""


@dataclass(frozen=True)
class _BucketParamHandle:
    """The engine's side of one parameter; see ``nn.sink.ParamHandle``."""

    weights: Weights
    gradients: GradientBuckets
    bucket: int
    placement: Placement

    def wait_unsharded(self) -> int:
        return self.weights.wait_unsharded(self.bucket, self.placement.spec.name)

    def check(self, version: int) -> None:
        self.weights.check(self.bucket, self.placement.spec.name, version)

    def buffer(self) -> tuple[Tensor, float]:
        return self.gradients.write(self.bucket, self.placement)

    def done(self) -> None:
        self.gradients.written(self.bucket, self.placement)

    def postpone_wgrad(self, work: Callable[[], None]) -> bool:
        return self.gradients.keep(work)


class OverlappedDistributedOptimizer:
    """Owns the parameters, gradients and optimizer state of one rank's pipeline stages."""

    def __init__(
        self,
        stages: Iterable[nn.Module],
        layout: BucketPlan,
        update: ShardUpdate,
        mesh: Mesh,
        *,
        axes: DataAxes,
        reduce_every_microbatch: bool,
        dtype: torch.dtype,
        loss_scale: LossScale,
        transport: Transport,
    ) -> None:
        self.layout = layout
        self.update = update
        self.mesh = mesh
        self.dtype = dtype
        self._axes = axes
        self.loss_scale = loss_scale
        wide = at_least_fp32(dtype)
        inline = transport.at_once or axes.shard.size == 1 == axes.replica.size
        self._stream = stream = open_stream(mesh.device, inline=inline)
        trained = [bucket.index for bucket in layout.buckets if bucket.kind.trainable]
        comm_queue = open_comm_queue(
            mesh.device, stream, inline=inline, paced=any(map(update.beside, trained))
        )
        self._threads = (comm_queue, update, stream)
        self._closing = weakref.finalize(self, _close, self._threads)
        self.weights = Weights(
            layout,
            axes.gather,
            dtype=dtype,
            device=mesh.device,
            comm_queue=comm_queue,
            prefetch_bytes=transport.prefetch_bytes,
            chunk_bytes=transport.chunk_bytes,
        )
        self.gradients = GradientBuckets(
            layout,
            shard_axis=axes.shard,
            replica_axis=axes.replica,
            reduce_every_microbatch=reduce_every_microbatch,
            dtype=wide,
            wire=transport.wire,
            device=mesh.device,
            stream=stream,
            chunk_bytes=transport.chunk_bytes,
            reduced=_weakly(self),
            unread=update.release,
            more_to_come=self.weights.more_to_come,
        )
        self.masters = [self._master(bucket, wide) for bucket in range(len(layout.buckets))]
        self._squares = torch.zeros(len(layout.buckets), dtype=torch.float64, device=mesh.device)
        self._total = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # squares, vetoes
        self._sum_total = exchange.all_reduce(self._total, mesh.world, index=0, wire=None)
        kinds = [bucket.kind for bucket in layout.buckets]
        shards = self.gradients.shards
        # In the order of ranks: the backend's own sums of more than two depend on where in a bucket
        # an element stands.
        partial_sums = (
            (b, shard, self._copies_axis(kinds[b]))
            for b, shard in shards.items()
            if kinds[b].partial
        )
        self._copied = [
            exchange.all_reduce(shard, axis, index=b, wire=None) for b, shard, axis in partial_sums
        ]
        self._unscaled = torch.ones((), device=mesh.device)
        self._announced: tuple[float, float] | None = None
        self._early: dict[int, Future | None] = {}
        """Buckets that are updated during backward, and when they are if that is not over."""
        # Gathers start in one order. One that waited for a host, which does first what the first
        # layers need, would hold these up.
        self._early_gathers = frozenset(
            bucket for bucket in _early_gathers(layout) if not update.beside(bucket)
        )
        self._attach(stages)

    def _master(self, bucket: int, dtype: torch.dtype) -> Tensor:
        """The rule's; of what never changes the shard itself."""
        own = self.weights.own[bucket]
        kind = self.layout.buckets[bucket].kind
        if not kind.trainable:
            return own
        segments = tuple(self.layout.segments(bucket, self._axes.shard.rank))
        return self.update.attach(
            Shard(bucket, self.layout.forward_order.index(bucket), own, dtype, kind, segments)
        )

    def _attach(self, stages: Iterable[nn.Module]) -> None:
        """Make every parameter of the stages a view of its bucket, with a home."""
        homes = {name: stage for stage in stages for name, _ in stage.named_parameters()}
        for bucket, full in zip(self.layout.buckets, self.weights.full, strict=True):
            for placed in bucket.placements:
                # .data has a version counter of its own: gathers into the slot stay invisible to
                # autograd.
                view = full.data[placed.start : placed.stop].view(placed.spec.shape)
                parameter = nn.Parameter(view, requires_grad=bucket.kind.trainable)
                attach_param_handle(
                    parameter,
                    _BucketParamHandle(self.weights, self.gradients, bucket.index, placed),
                )
                owner, _, leaf = placed.spec.name.rpartition(".")
                setattr(homes[placed.spec.name].get_submodule(owner), leaf, parameter)

    def load_weights(self, source: WeightSource) -> None:
        """Fill this rank's master shards from a source of HuggingFace rectangles, then publish
        them."""
        with torch.no_grad():
            for bucket, master in enumerate(self.masters):
                for rectangle, place in self.layout.rectangles(bucket, self._axes.shard.rank):
                    source(rectangle, master[place].view(rectangle.size))
        self.publish()

    def forget(self) -> None:
        """Back to the first step: before other weights are loaded, unless optimizer state comes
        with them."""
        self.settle()
        self.update.forget()
        self.loss_scale.reset()

    def publish(self) -> None:
        """The masters were written: gather the parameters, in the order of the next forward
        pass."""
        self.weights.changed(self.layout.forward_order)
        for bucket in self.layout.forward_order:
            if self.layout.buckets[bucket].kind.trainable:
                self.update.refresh(bucket)
            self.weights.publish(bucket)

    def access(self, unit: int, backward: bool) -> None:
        """A unit is about to run: what it and its successors need is gathered, and what waited for
        that is reduced."""
        self.weights.access(WeightAccess(unit, backward))
        self.gradients.release()

    def settle(self) -> None:
        """Nothing in flight and nothing put off: before saving, and before the buffers are read by
        anything but layers."""
        self._catch_up()
        self.weights.settle()

    def _catch_up(self) -> None:
        """What the rule has put off beyond its step becomes part of the weights."""
        self.weights.settle()  # what is being gathered must not change
        changed = self.update.settle()
        self.weights.changed(sorted(changed))
        for bucket in self.layout.forward_order:
            if bucket in changed:
                self.weights.publish(bucket, changed[bucket])

    def begin_update(self, lr: float, *, clip: float) -> None:
        """Optional, before a step's first backward pass: announces the arguments of the ``step``
        that will follow it.

        Without clipping every bucket is then updated as soon as it is reduced. (With a loss scale
        that may overflow a step can still be called off, so nothing is early.)"""
        self._announced = lr, clip

    def _early_lr(self) -> float | None:
        """The learning rate of updates during backward; None: there are none in this step."""
        lr, clip = self._announced or (None, 0.0)
        return None if clip or self.loss_scale.dynamic else lr

    def begin_step(self, microbatches: int, accesses: Sequence[WeightAccess]) -> Tensor:
        """A step of so many microbatches starts. Returns the factor for the loss, 0-dim."""
        self._early = {}
        self.gradients.begin_step(microbatches)
        self.weights.begin(accesses)
        return self.loss_scale.value

    def begin_evaluation(self, accesses: Sequence[WeightAccess]) -> None:
        """Forward passes that no update follows."""
        self._catch_up()
        self.weights.begin(accesses)

    def postpone_wgrad(self, key: Hashable | None) -> None:
        """Keep the weight gradients of the coming backward pass under ``key``; None: write them at
        once again."""
        self.gradients.postpone_wgrad(key)

    def run_wgrads(self, key: Hashable) -> None:
        """Write the weight gradients kept under ``key``."""
        self.gradients.run_wgrads(key)

    def _on_reduced(self, bucket: int) -> None:
        """On the reductions' stream: a bucket has its final gradient of the step, unless copies
        have to be summed."""
        kind = self.layout.buckets[bucket].kind
        if kind.partial or kind.tied:
            return
        square = self._take_square(bucket)
        self._arrived(bucket)
        lr = self._early_lr()
        if lr is not None and _updated_early(
            self.layout, bucket, beside=self.update.beside(bucket)
        ):
            self._update_early(bucket, square, lr)

    def _arrived(self, bucket: int) -> None:
        """The gradient of the step is there: tell the rule, with the learning rate where only the
        norm is open."""
        lr, clip = self._announced or (None, 0.0)
        ahead = lr if clip and not self.loss_scale.dynamic else None
        self.update.arrived(bucket, self.gradients.shards[bucket], ahead=ahead)

    def _take_square(self, bucket: int) -> Tensor:
        """The squared norm of a shard, which counts if this rank is the one to count it. In blocks
        of ALIGN elements, which no bucket or shard boundary cuts, then in fp64: so that the norm
        does not depend on the layout."""
        square: Tensor = (
            torch.linalg.vector_norm(self.gradients.shards[bucket].view(-1, ALIGN), dim=1)
            .square_()
            .sum(dtype=torch.float64)
        )
        if self._is_primary(bucket):
            self._squares[bucket] = square
        return square

    def _update_early(self, bucket: int, square: Tensor, lr: float) -> None:
        """Nobody reads these weights again before the next step: every gradient of the bucket is
        there."""
        skip = square.isfinite().logical_not().to(torch.float32)
        beside = self.update.beside(bucket)
        done = self._update(bucket, self._unscaled, skip, lr)
        self._early[bucket] = done if beside else None
        if self.layout.resident(bucket):
            self.weights.changed((bucket,))
        if bucket in self._early_gathers:
            self.weights.publish(bucket, self._early[bucket])

    def _grad_norm(self, skip_update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Global L2 norm of the step's gradient (times the loss scale), counting no copied or tied
        parameter twice, and how many ranks have a veto."""
        self._sum_partial_shards()
        self._total[0] = self._squares.sum()
        self._total[1] = 0.0 if skip_update is None else skip_update
        self._sum_total.start()
        with self.mesh.recorder.exposed("the gradient norm"):
            self._sum_total.wait()
        return self._total[0].sqrt().to(at_least_fp32(self.dtype)), self._total[1]

    def _sum_partial_shards(self) -> None:
        """Copies that saw a part of the gradient each: norms under sequence parallelism, shared
        key/value heads, tied embeddings. Summing the reduced shards moves 1/dp of what summing
        whole gradients would."""
        kinds = {bucket.index: bucket.kind for bucket in self.layout.buckets}
        shards = self.gradients.shards
        for exchanged in self._copied:
            exchanged.start()
        for exchanged in self._copied:
            with self.mesh.recorder.exposed(exchanged):
                exchanged.wait()
        # A shard may be both: its sum over copies has to be there first.
        tied = [
            all_reduce(shard, self.mesh.embedding) for b, shard in shards.items() if kinds[b].tied
        ]
        for pending in tied:
            pending.wait()
        for bucket in shards:
            if kinds[bucket].partial or kinds[bucket].tied:
                self._take_square(bucket)
                self._arrived(bucket)

    def _copies_axis(self, kind: Kind) -> Axis:
        return self.mesh.tp if kind.copies == self.mesh.tp.size else self.mesh.kv

    def _is_primary(self, bucket: int) -> bool:
        kind = self.layout.buckets[bucket].kind
        mesh = self.mesh
        copies = [self._axes.replica.rank]
        copies += [mesh.tp.rank % kind.copies]
        copies += [mesh.embedding.rank] if kind.tied else []
        return not any(copies)

    def step(self, lr: float, *, clip: float, skip_update: Tensor | None = None) -> StepResult:
        """Update every shard with the gradient scaled to a norm of at most ``clip`` (0: as it is),
        and launch the gathers.

        A gradient that is not finite changes nothing, nor does a step to which some rank has a
        ``skip_update`` (0-dim fp64 on the device: 1 or 0). No host synchronisation. RuntimeError
        where ``begin_update`` announced others."""
        if self._announced is not None and self._announced != (lr, clip):
            raise RuntimeError(
                f"step got (lr, clip) {(lr, clip)}, begin_update announced {self._announced}"
            )
        self.mesh.recorder.doing = "the update"
        with torch.no_grad():
            loss_scale = self.loss_scale.value
            self.gradients.finish_all()
            early = self._early
            late = set(self.gradients.trainable) - early.keys()
            self.weights.changed(
                sorted(late | {bucket for bucket in early if not self.layout.resident(bucket)})
            )
            total, skip_updates = self._grad_norm(skip_update)
            norm = total / loss_scale
            overflow = norm.isfinite().logical_not()
            skip = (overflow | (skip_updates > 0)).to(torch.float32)
            scale = ((norm + 1e-6) / clip).clamp(min=1.0) if clip else torch.ones_like(norm)
            scale = (scale * loss_scale).to(torch.float32)
            for bucket in self.layout.forward_order:
                if bucket in late:
                    update = partial(self._update, bucket, scale, skip, lr)
                    self.weights.publish(
                        bucket,
                        update()
                        if self.update.beside(bucket)
                        else self._stream.run_in_background(update),
                    )
                elif bucket in early and bucket not in self._early_gathers:
                    self.weights.publish(bucket, early[bucket])
            self.update.finish(self._stream.run_in_background(_nothing), scale=scale, skip=skip)
            self.loss_scale.update(overflow)
        self._announced = None
        return StepResult(norm, skip, loss_scale)

    def _update(self, bucket: int, scale: Tensor, skip: Tensor, lr: float) -> Future:
        note = self.mesh.recorder.begin("update", bucket)
        done = self.update.step(
            bucket, self.gradients.shards[bucket], scale=scale, skip=skip, lr=lr
        )
        if note is not None:
            note.end()
        return done

    def pieces(self) -> Iterator[ShardPiece]:
        """Everything a checkpoint holds of this rank, in HuggingFace coordinates. Call ``settle``
        first."""
        for bucket, master in enumerate(self.masters):
            shards = {
                "master": master,
                **{name: t for name, t in self._state(bucket).items() if t.dim() == 1},
            }
            primary = self._is_primary(bucket)
            for rectangle, place in self.layout.rectangles(bucket, self._axes.shard.rank):
                views = {
                    name: tensor[place].view(rectangle.size) for name, tensor in shards.items()
                }
                yield ShardPiece(rectangle, views, primary)

    def _state(self, bucket: int) -> dict[str, Tensor]:
        return self.update.state(bucket) if self.layout.buckets[bucket].kind.trainable else {}

    def replicated(self) -> Iterator[Replicated]:
        """Everything that this rank holds and others too, in the same order on all of them. Call
        ``settle`` first."""
        for bucket, master in enumerate(self.masters):
            placements = self.layout.buckets[bucket].placements
            kind = self.layout.buckets[bucket].kind
            if self.mesh.dp.size > 1 and self.weights.whole(bucket):
                for placed in placements:
                    yield Replicated(
                        self.mesh.dp,
                        placed.spec.name,
                        "gathered",
                        0,
                        self.weights.full[bucket][placed.start : placed.stop],
                    )
            axes = (
                [self._axes.replica]
                + [self._copies_axis(kind)] * (kind.copies > 1)
                + [self.mesh.embedding] * kind.tied
            )
            shards = {
                "master": master,
                **{name: t for name, t in self._state(bucket).items() if t.dim() == 1},
            }
            for axis in (axis for axis in axes if axis.size > 1):
                for part in self.layout.segments(bucket, self._axes.shard.rank):
                    for what, tensor in shards.items():
                        piece = tensor[part.in_shard : part.in_shard + part.length]
                        yield Replicated(axis, part.spec.name, what, part.in_param, piece)

    def step_counts(self) -> list[Tensor]:
        """The update rule's step counters (0-dim, live), equal on every rank."""
        return [self.update.state(bucket)["step"] for bucket in self.gradients.trainable]

    def close(self) -> None:
        """End the engine's threads and wait for them: one that is inside an operator when the
        interpreter ends aborts the process. Without this they end, unwatched, with the engine."""
        self._closing()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)


def _updated_early(layout: BucketPlan, bucket: int, *, beside: bool = False) -> bool:
    """Whether a bucket may be updated during backward: its own reduction completes its gradient,
    and nobody reads it again, or takes its slot, before the next step. ``beside``: threads do so,
    for which a slot with other users is no obstacle: the shard is not in it, and that it has
    changed is announced at the end of the step."""
    kind = layout.buckets[bucket].kind
    return (
        kind.trainable
        and not kind.partial
        and not kind.lasting
        and (beside or layout.resident(bucket))
    )


def _early_gathers(layout: BucketPlan) -> Iterator[int]:
    """The buckets that are gathered during backward, of those that are updated there: evenly
    spread, so that no layer of the next forward pass lacks more than another, and a third of all
    elements. Where communication takes as long as computing, backward, two thirds of a step, has
    room for the reductions and for that. What the first units read is reduced last, right before
    ``step`` gathers: nothing may be in its way."""
    first = {bucket for unit in layout.unit_buckets[:2] for bucket in unit}
    reduced = gathered = 0
    for bucket in layout.buckets:
        if not _updated_early(layout, bucket.index):
            continue
        reduced += bucket.numel
        if bucket.index not in first and 3 * (gathered + bucket.numel) <= reduced:
            gathered += bucket.numel
            yield bucket.index


def _nothing() -> None:
    """Future when everything before it is."""


def _close(threads: Iterable[CommQueue | ShardUpdate | Stream]) -> None:
    for thread in threads:
        thread.close()


def _weakly(engine: OverlappedDistributedOptimizer) -> Callable[[int], None]:
    """A thread must not keep the engine alive that it works for."""
    reference = weakref.ref(engine)

    def reduced(bucket: int) -> None:
        owner = reference()
        if owner is not None:
            owner._on_reduced(bucket)

    return reduced
