"""OverlappedDistributedOptimizer: THE engine.

    forward     each unit waits for the gathers of its own buckets only: they were launched, in this order, after the
                previous update, and travel under the forward passes of the units before it
    backward    layers write gradients into slots; a complete bucket is reduced at once, under the rest of backward
    step        global norm, clip factor (on the device), then bucket by bucket: update the shard, launch its gather

Parameters and gradients live in contiguous buffers allocated once; the modules' parameters are views that never move.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_llama.comm.collectives import Pending, all_gather, all_reduce
from megatron_llama.layout import Kind, ShardLayout
from megatron_llama.mesh import Axis, Mesh
from megatron_llama.nn.functional import at_least_fp32
from megatron_llama.nn.sink import attach_sink
from megatron_llama.optim.gradients import GradientBuckets
from megatron_llama.optim.loss_scale import LossScale
from megatron_llama.optim.update import ShardUpdate
from megatron_llama.params import Rectangle

WeightSource = Callable[[Rectangle, Tensor], None]
"""Writes the values of a HuggingFace rectangle into a tensor of the rectangle's size (any float dtype)."""


@dataclass(frozen=True)
class StepResult:
    """0-dim tensors on the device; reading them is the caller's synchronisation."""

    grad_norm: Tensor
    """Global L2 norm before clipping."""
    skipped: Tensor
    """1 if the gradient was not finite and nothing was changed, else 0."""
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


class OverlappedDistributedOptimizer:
    """Owns the parameters, gradients and optimizer state of one rank's pipeline stage."""

    def __init__(
        self,
        stages: Iterable[nn.Module],
        layout: ShardLayout,
        update: ShardUpdate,
        mesh: Mesh,
        *,
        shard_axis: Axis,
        replica_axis: Axis,
        reduce_every_microbatch: bool,
        dtype: torch.dtype,
        loss_scale: LossScale,
        wire: torch.dtype | None = None,
    ) -> None:
        self.layout, self.update, self.mesh, self.dtype = layout, update, mesh, dtype
        self._shard_axis, self._replica_axis = shard_axis, replica_axis
        self.loss_scale = loss_scale
        wide = at_least_fp32(dtype)
        self._weights = [torch.zeros(b.numel, dtype=dtype, device=mesh.device) for b in layout.buckets]
        self._own = [w[layout.shard(b, shard_axis.rank)] for b, w in enumerate(self._weights)]
        # In the master's own dtype the shard of the slot is the master: nothing to copy after an update.
        self.masters = self._own if wide == dtype else [torch.zeros_like(own, dtype=wide) for own in self._own]
        self.gradients = GradientBuckets(
            layout,
            shard_axis=shard_axis,
            replica_axis=replica_axis,
            reduce_every_microbatch=reduce_every_microbatch,
            dtype=wide,
            wire=wire,
            device=mesh.device,
        )
        self._gathers: dict[int, Pending] = {}
        self._attach(stages)
        for bucket, master in zip(layout.buckets, self.masters, strict=True):
            update.attach(bucket.index, master, decay=bucket.kind.decay)

    def _attach(self, stages: Iterable[nn.Module]) -> None:
        """Make every parameter of the stages a view of its bucket, with a sink for its gradient."""
        homes = {name: stage for stage in stages for name, _ in stage.named_parameters()}
        for bucket, weights in zip(self.layout.buckets, self._weights, strict=True):
            for placed in bucket.placements:
                # .data has a version counter of its own: gathers into the slot stay invisible to autograd.
                view = weights.data[placed.start : placed.stop].view(placed.spec.shape)
                parameter = nn.Parameter(view)
                attach_sink(parameter, self.gradients.sink(bucket.index, placed))
                owner, _, leaf = placed.spec.name.rpartition(".")
                setattr(homes[placed.spec.name].get_submodule(owner), leaf, parameter)

    def load_weights(self, source: WeightSource) -> None:
        """Fill this rank's master shards from a source of HuggingFace rectangles, then publish them."""
        with torch.no_grad():
            for bucket, master in enumerate(self.masters):
                for rectangle, place in self.layout.rectangles(bucket, self._shard_axis.rank):
                    source(rectangle, master[place].view(rectangle.size))
        self.publish()

    def publish(self) -> None:
        """Launch the gathers of all parameters, in the order of the next forward pass."""
        for bucket in self.layout.forward_order:
            self._gather(bucket)

    def _gather(self, bucket: int) -> None:
        own, master = self._own[bucket], self.masters[bucket]
        if own is not master:
            own.copy_(master)
        self._gathers[bucket] = all_gather(self._weights[bucket], own, self._shard_axis_for_gathers)

    @property
    def _shard_axis_for_gathers(self) -> Axis:
        return self.mesh.dp_gather if self._shard_axis.size > 1 else self._shard_axis

    def use(self, unit: int) -> None:
        """A unit is about to run forward: its weights must have arrived."""
        for bucket in self.layout.unit_buckets[unit]:
            self._arrive(bucket)

    def settle(self) -> None:
        """Nothing in flight: before saving, and before the buffers are read by anything but ``use``."""
        for bucket in list(self._gathers):
            self._arrive(bucket)

    def _arrive(self, bucket: int) -> None:
        gather = self._gathers.pop(bucket, None)
        if gather is not None:
            gather.wait()

    def begin_step(self, microbatches: int) -> Tensor:
        """A step of so many microbatches starts. Returns the factor for the loss, 0-dim."""
        self.gradients.begin_step(microbatches)
        return self.loss_scale.value

    def defer(self, key: Hashable | None) -> None:
        """Keep the weight gradients of the coming backward pass under ``key``; None: write them at once again."""
        self.gradients.defer(key)

    def run_deferred(self, key: Hashable) -> None:
        """Write the weight gradients kept under ``key``."""
        self.gradients.run_deferred(key)

    def grad_norm(self) -> Tensor:
        """Global L2 norm of the step's gradient (times the loss scale), counting no copied or tied parameter twice."""
        self.gradients.finish_all()
        self._sum_partial_shards()
        squares = [grad.square().sum() for bucket, grad in enumerate(self.gradients.shards) if self._is_primary(bucket)]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=at_least_fp32(self.dtype), device=self.mesh.device)
        all_reduce(total, self.mesh.world).wait()
        return total.sqrt()

    def _sum_partial_shards(self) -> None:
        """Copies that saw a part of the gradient each: norms under sequence parallelism, shared key/value heads, tied
        embeddings. Summing the reduced shards moves 1/dp of what summing whole gradients would."""
        for bucket, grad in zip(self.layout.buckets, self.gradients.shards, strict=True):
            if bucket.kind.partial:
                all_reduce(grad, self._copies_axis(bucket.kind)).wait()
            if bucket.kind.tied:
                all_reduce(grad, self.mesh.embedding).wait()

    def _copies_axis(self, kind: Kind) -> Axis:
        return self.mesh.tp if kind.copies == self.mesh.tp.size else self.mesh.kv

    def _is_primary(self, bucket: int) -> bool:
        kind, mesh = self.layout.buckets[bucket].kind, self.mesh
        copies = [self._replica_axis.rank]
        copies += [mesh.tp.rank % kind.copies]
        copies += [mesh.embedding.rank] if kind.tied else []
        return not any(copies)

    def step(self, lr: float, *, clip: float) -> StepResult:
        """Update every shard with the gradient scaled to a norm of at most ``clip`` (0: as it is), and launch the gathers.

        A gradient that is not finite changes nothing. No host synchronisation."""
        with torch.no_grad():
            loss_scale = self.loss_scale.value
            norm = self.grad_norm() / loss_scale
            skip = norm.isfinite().logical_not().to(torch.float32)
            scale = ((norm + 1e-6) / clip).clamp(min=1.0) if clip else torch.ones_like(norm)
            scale = (scale * loss_scale).to(torch.float32)
            for bucket in self.layout.forward_order:
                self.update.step(bucket, self.gradients.shards[bucket], scale=scale, skip=skip, lr=lr)
                self._gather(bucket)
            self.loss_scale.update(skip)
        return StepResult(norm, skip, loss_scale)

    def pieces(self) -> Iterator[ShardPiece]:
        """Everything a checkpoint holds of this rank, in HuggingFace coordinates. Call ``settle`` first."""
        for bucket, master in enumerate(self.masters):
            state = {"master": master, **self.update.state(bucket)}
            shards = {name: tensor for name, tensor in state.items() if tensor.dim() == 1}
            primary = self._is_primary(bucket)
            for rectangle, place in self.layout.rectangles(bucket, self._shard_axis.rank):
                views = {name: tensor[place].view(rectangle.size) for name, tensor in shards.items()}
                yield ShardPiece(rectangle, views, primary)

    def step_counts(self) -> list[Tensor]:
        """The update rule's step counters (0-dim, live), equal on every rank."""
        return [self.update.state(bucket.index)["step"] for bucket in self.layout.buckets]
