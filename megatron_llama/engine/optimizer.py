"""OverlappedDistributedOptimizer: the engine that holds parameters, gradients and optimizer state.

    forward     A unit that is about to run launches the gathers of what comes next. Each layer
                waits for the gather of its own bucket only.
    backward    Layers write weight gradients into slots. A complete bucket is reduced while the
                rest of backward computes, and its part of the norm is taken. Without clipping it is
                also updated then, and some buckets are gathered.
    step        One all-reduce of two numbers gives the norm. Then, bucket by bucket in forward
                order: update the shard, launch its gather.

Parameters and gradients live in slots that are allocated once; the parameters of the modules are
views that never move. The update rule decides where the masters live, and where and when they are
updated. docs/engine.md follows a weight and a gradient through a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_llama.engine.comm.collectives import all_reduce
from megatron_llama.engine.comm.exchange import all_reduce_exchange
from megatron_llama.engine.comm.queues import CommQueue, open_comm_queue
from megatron_llama.engine.comm.registered import RegisteredMemory
from megatron_llama.engine.comm.streams import Future, Stream, open_stream
from megatron_llama.engine.counting import Counting
from megatron_llama.engine.evaluation_weights import EvaluationWeights
from megatron_llama.engine.gradients import GradientBuckets
from megatron_llama.engine.handle import BucketParamHandle
from megatron_llama.engine.loss_scale import LossScale
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.options import BF16, FP16, FP32, FP64, EngineOptions, UpdateOptions
from megatron_llama.engine.parameters import ParameterBuckets
from megatron_llama.engine.plan.buckets import (
    ALIGN,
    BucketPlan,
    PlacedParam,
    reduces_every_microbatch,
)
from megatron_llama.engine.plan.overlap import gathered_during_backward, updated_during_backward
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.engine.rules.update_rule import Shard, UpdateRules
from megatron_llama.engine.squares import squares
from megatron_llama.engine.tensors import at_least_fp32

DTYPES = MappingProxyType(
    {FP32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16, FP64: torch.float64}
)
"""The dtypes of ``EngineOptions``."""
CLOSE_TIMEOUT_SECONDS = 5.0
"""The longest wait of ``close`` for each thread, which may itself wait for a peer that is gone."""
Attach = Callable[[PlacedParam, Tensor, BucketParamHandle], None]
"""Gives a module one of its parameters: its place in its bucket, the view of its slot, and the
engine's side of it. The view never moves, and holds the values only after a wait."""
LearningRate = float | Sequence[float]
"""One rate for all parameters, or one for each group."""
WeightSource = Callable[[Rectangle, Tensor], None]
"""Writes the values of a HuggingFace rectangle into a tensor of the rectangle's size (any float
dtype)."""


@dataclass(frozen=True)
class StepResult:
    """The results of a step, 0-dim tensors on the device. Reading one waits for the device."""

    grad_norm: Tensor
    """Global L2 norm before clipping, of the mean over the ranks where the engine takes a mean."""
    skipped: Tensor
    """1 if the gradient was not finite or some rank asked to skip the update, else 0. Then nothing
    was changed (with updates during backward: no shard whose gradient was not finite)."""
    loss_scale: Tensor
    """The factor of the loss in this step; 1 without --fp16."""


class OverlappedDistributedOptimizer:
    """Owns the parameters, gradients and optimizer state of one rank's pipeline stages."""

    def __init__(
        self,
        bucket_plan: BucketPlan,
        rules: UpdateRules,
        mesh: Mesh,
        options: EngineOptions,
        *,
        attach: Attach,
        inline: bool = False,
    ) -> None:
        """``attach`` is called for every parameter. With ``inline`` messages take no time, as in a
        trace: the work after a message is done where it is issued, and not by threads."""
        self.bucket_plan = bucket_plan
        self.rules = rules
        self.mesh = mesh
        self.dtype = dtype = DTYPES[options.dtype]
        self.loss_scale = LossScale(options.loss_scaling, mesh.device)
        self._grad_divisor = options.grad_divisor
        master_dtype = at_least_fp32(dtype)
        inline = inline or mesh.dp_shard.size == 1 == mesh.dp_replica.size
        self._stream = stream = open_stream(mesh.device, inline=inline)
        trained = [bucket.index for bucket in bucket_plan.buckets if bucket.kind.trainable]
        # An update on the host takes long. The paced queue waits for it in a thread of its own, so
        # that a reduction never stands behind an update.
        comm_queue = open_comm_queue(
            mesh.device,
            stream,
            inline=inline,
            paced=any(rules.by_bucket[bucket].is_async for bucket in trained),
        )
        self._queues = (comm_queue, stream)
        # The threads do not end by themselves, and a script may forget ``close``. The finalizer
        # knows the queues and not the engine, which it would keep alive.
        self._closing = weakref.finalize(self, _close, self._queues, rules)
        self._registered = RegisteredMemory(mesh, wanted=options.registers_buffers)
        with self._registered.making():
            self.parameters = ParameterBuckets(
                bucket_plan,
                mesh,
                dtypes=[DTYPES[b.kind.dtype or options.dtype] for b in bucket_plan.buckets],
                comm_queue=comm_queue,
                prefetch_bytes=options.prefetch_bytes,
                chunk_bytes=options.chunk_bytes,
            )
            self.gradients = GradientBuckets(
                bucket_plan,
                mesh,
                reduce_every_microbatch=reduces_every_microbatch(options),
                dtype=master_dtype,
                wire=torch.bfloat16 if options.reduces_in_bf16 else None,
                sums_wide=options.sums_wide,
                stream=stream,
                chunk_bytes=options.chunk_bytes,
                reduced=_weak_on_reduced(self),
                before_reuse=lambda bucket: rules.by_bucket[bucket].before_grad_reuse(bucket),
                gathers_to_come=self.parameters.gathers_to_come,
            )
        self.masters = [
            self._master(bucket, master_dtype) for bucket in range(len(bucket_plan.buckets))
        ]
        self._squared_norms = torch.zeros(
            len(bucket_plan.buckets), dtype=torch.float64, device=mesh.device
        )
        self._total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        """Squared norm of the whole gradient, and the number of ranks that ask to skip."""
        self._sum_total = all_reduce_exchange(self._total, mesh.world, index=0, wire=None)
        # Exchanges sum in rank order. A backend's own sum of more than two ranks depends on where
        # in the bucket an element stands, so its bits would depend on the bucket size.
        self._copy_sums = [
            all_reduce_exchange(
                shard, mesh.copies_axis(bucket_plan.buckets[b].kind), index=b, wire=None
            )
            for b, shard in self.gradients.shards.items()
            if bucket_plan.buckets[b].kind.partial_grad
        ]
        self._unclipped_scale = torch.full((), options.grad_divisor, device=mesh.device)
        """The scale of a gradient that is not clipped: the divisor of the mean alone."""
        self.numbers = (self._squared_norms, self._total, self._unclipped_scale)
        """The memory of norms and scales."""
        self._announced: tuple[LearningRate, float] | None = None
        self.frozen: frozenset[int] = frozenset()
        """Trainable buckets that the steps leave as they are, with their state."""
        self._updated: dict[int, Future | None] = {}
        """Buckets that have been updated during this step's backward, and the end of the update if
        threads make it."""
        # No bucket that the host updates is gathered during backward. All ranks start gathers in
        # one order, and the host first updates the buckets of the first layers: the gather of
        # another bucket, submitted before theirs, would hold theirs up.
        self._gathered_during_backward = frozenset(
            bucket
            for bucket in gathered_during_backward(bucket_plan)
            if not rules.by_bucket[bucket].is_async
        )
        self.evaluation_weights = EvaluationWeights(
            self.parameters,
            rules,
            [bucket for bucket in bucket_plan.forward_order if bucket in trained],
        )
        self._attach(attach)

    def _master(self, bucket: int, dtype: torch.dtype) -> Tensor:
        """Return the master shard: the rule's, or for frozen buckets the shard itself."""
        param_shard = self.parameters.shards[bucket]
        kind = self.bucket_plan.buckets[bucket].kind
        if not kind.trainable:
            return param_shard
        segments = tuple(self.bucket_plan.segments(bucket, self.shard_rank(bucket)))
        position = self.bucket_plan.forward_order.index(bucket)
        return self.rules.by_bucket[bucket].attach(
            Shard(bucket, position, param_shard, dtype, kind, segments)
        )

    def _attach(self, attach: Attach) -> None:
        for bucket, whole in zip(self.bucket_plan.buckets, self.parameters.unsharded, strict=True):
            for placed in bucket.placements:
                # .data has a version counter of its own. A gather writes the slot in place, and
                # autograd must not take that for a change of its saved tensors.
                view = whole.data[placed.start : placed.stop].view(placed.spec.shape)
                handle = BucketParamHandle(self.parameters, self.gradients, bucket.index, placed)
                attach(placed, view, handle)

    def load_weights(self, source: WeightSource) -> None:
        """Fill this rank's master shards from a source of HuggingFace rectangles, and gather the
        parameters."""
        with torch.no_grad():
            for bucket, master in enumerate(self.masters):
                for rectangle, place in self.bucket_plan.rectangles(
                    bucket, self.shard_rank(bucket)
                ):
                    source(rectangle, master[place].view(rectangle.size))
        self.publish()

    def reset(self) -> None:
        """Return optimizer state and loss scale to those of the first step. The weights stay."""
        self.settle()
        for rule in self.rules.distinct:
            rule.reset()
        self.loss_scale.reset()

    def publish(self) -> None:
        """Gather the parameters, whose masters were written, in the order of the next forward
        pass."""
        self.evaluation_weights.reset()
        self.parameters.invalidate(self.bucket_plan.forward_order)
        for bucket in self.bucket_plan.forward_order:
            if self.bucket_plan.buckets[bucket].kind.trainable:
                self.rules.by_bucket[bucket].refresh(bucket)
            self.parameters.publish(bucket)

    # During forward and backward

    def announce_step(self, lr: LearningRate, *, clip: float) -> None:
        """Announce, before a step's first backward pass, the arguments of the ``step`` that will
        follow. Calling this is optional.

        Without clipping every bucket is then updated as soon as it is reduced."""
        # A scheduler may go on to change its list before the step.
        self._announced = _fixed(lr), clip

    def begin_step(
        self, microbatches: int, accesses: Sequence[WeightAccess], counting: Counting | None = None
    ) -> Tensor:
        """Start a step of so many microbatches. Returns the factor for the loss, 0-dim.

        ``accesses`` are all weight accesses of the step, in order; those that are not among them
        come through ``access_unplanned``. ``counting`` decides which contributions complete a
        bucket; None: each microbatch has those of the bucket plan."""
        self._updated = {}
        self.evaluation_weights.show(average=False)
        if counting is None:
            self.gradients.begin_step(microbatches)
        else:
            self.gradients.begin_rounds(counting)
        self.parameters.begin(accesses)
        return self.loss_scale.value

    def freeze(self, buckets: frozenset[int]) -> None:
        """Leave these buckets alone in the coming steps, whose ``counting`` expects none of their
        gradients. Called between steps, alike by all ranks."""
        self.frozen = buckets
        for bucket in buckets:
            self._squared_norms[bucket].zero_()  # that of the last gradient

    def begin_evaluation(self, accesses: Sequence[WeightAccess]) -> None:
        """Start forward passes that no update follows."""
        self._apply_pending()
        self.evaluation_weights.show(average=True)
        self.parameters.begin(accesses)

    def begin_preliminary(self, accesses: Sequence[WeightAccess]) -> None:
        """Start forward passes that belong to the step that follows, with its weights: updates that
        are put off stay so, and those under way are not waited for."""
        self.evaluation_weights.show(average=False)
        self.parameters.begin(accesses)

    def access(self, unit: int, backward: bool) -> None:
        """Begin a unit's pass: gather the buckets of it and of the next units, then send the
        reductions that were delayed until these gathers are under way."""
        self.mesh.recorder.progress += 1
        self.parameters.access(WeightAccess(unit, backward))
        self.gradients.send_delayed()

    def access_unplanned(self, unit: int, following: int | None = None) -> None:
        """Begin a unit's pass, forward or backward, in an order that is not planned: gather the
        buckets that it lacks, then those of the unit ``following``, which is expected next. All
        ranks make the same calls in the same order."""
        self.mesh.recorder.progress += 1
        self.parameters.access_unplanned(unit, following)
        self.gradients.send_delayed()

    def end_backward(self) -> None:
        """End a backward pass. Calling this is optional if its contributions are planned: it raises
        RuntimeError, with the names, if the pass had others."""
        self.gradients.end_backward()

    def discard_step(self) -> None:
        """End the step under way without an update: throw away its gradients. Messages under way
        end first. All ranks call this after the same accesses and reductions.

        Raises RuntimeError after ``announce_step``: its updates may have begun."""
        if self._announced is not None:
            raise RuntimeError("discard_step: a step that was announced cannot be taken back")
        self.gradients.discard()
        self.parameters.abandon()
        for rule in self.rules.distinct:
            rule.discard()

    def postpone_wgrads(self, key: Hashable | None) -> None:
        """Keep the weight gradients of the coming backward pass under ``key``; None: compute them
        at once again."""
        self.gradients.postpone_wgrads(key)

    def run_wgrads(self, key: Hashable) -> None:
        """Compute the weight gradients kept under ``key``."""
        self.gradients.run_wgrads(key)

    def _on_reduced(self, bucket: int) -> None:
        """Handle the final gradient of a bucket in the step, on the stream ``follow_up``, in the
        order of the reductions."""
        kind = self.bucket_plan.buckets[bucket].kind
        if kind.partial_grad or kind.tied:
            return  # copies have to be summed first, in ``step``
        squared_norm = self._take_squared_norm(bucket)
        self._announce_gradient(bucket)
        lr, clip = self._announced_for(bucket)
        # With a loss scale that may overflow, a step can still be skipped at its end.
        if lr is None or clip or self.loss_scale.dynamic:
            return
        rule = self.rules.by_bucket[bucket]
        is_async = rule.is_async
        if rule.needs_whole_step or not updated_during_backward(
            self.bucket_plan, bucket, is_async=is_async
        ):
            return
        skip = squared_norm.isfinite().logical_not().to(torch.float32)
        done = self._update(bucket, self._unclipped_scale, skip, lr)
        # Without threads of the rule a gather that is submitted from here comes after the update.
        end = done if is_async else None
        self._updated[bucket] = end
        # Every gradient of the bucket is there, so these weights are not read before the next step.
        # A bucket that shares its slot is invalidated by ``step``: a fixed point of the program,
        # the same on all ranks, which prefetching needs.
        if self.bucket_plan.has_own_slot(bucket):
            self.parameters.invalidate((bucket,))
        if bucket in self._gathered_during_backward:
            self.parameters.publish(bucket, end)

    def _announce_gradient(self, bucket: int) -> None:
        """Tell the rule of a bucket that the bucket's gradient is final."""
        lr, clip = self._announced_for(bucket)
        # Without clipping nothing is unknown, so nothing is speculative; with a dynamic loss scale
        # the whole step may still be skipped.
        self.rules.by_bucket[bucket].on_reduced(
            bucket,
            self.gradients.shards[bucket],
            speculative_lr=lr if clip and not self.loss_scale.dynamic else None,
        )

    def _announced_for(self, bucket: int) -> tuple[float | None, float]:
        if self._announced is None:
            return None, 0.0
        lr, clip = self._announced
        return self._lr_of(bucket, lr), clip

    def _lr_of(self, bucket: int, lr: LearningRate) -> float:
        if isinstance(lr, Sequence):
            return lr[self.bucket_plan.buckets[bucket].kind.group]
        return lr

    def _take_squared_norm(self, bucket: int) -> Tensor:
        """Return the squared norm of a gradient shard, and note it if this rank counts it."""
        # Summed in blocks of ALIGN (64) elements, which no boundary of a bucket or shard cuts, and
        # then in fp64: so the norm does not depend on how the model is cut. The largest temporary
        # is one number for each block, which engine/plan/memory.py counts.
        sums = squares(self.gradients.shards[bucket].view(-1, ALIGN))
        squared_norm = sums.sum(dtype=torch.float64)
        if self.is_primary(bucket):
            self._squared_norms[bucket] = squared_norm
        return squared_norm

    # The step

    def step(
        self, lr: LearningRate, *, clip: float, skip_update: Tensor | None = None
    ) -> StepResult:
        """Update every shard with the gradient scaled to a norm of at most ``clip`` (0: as it is),
        and launch the gathers.

        A gradient that is not finite changes nothing, and neither does a step for which some rank
        sets ``skip_update`` (0-dim fp64 on the device: 1 or 0). The host does not wait for the
        device. Raises RuntimeError if ``announce_step`` announced other arguments."""
        lr = _fixed(lr)
        if self._announced is not None and self._announced != (lr, clip):
            raise RuntimeError(
                f"step got (lr, clip) {(lr, clip)}, announce_step announced {self._announced}"
            )
        self.mesh.recorder.enter("the update", part="the update")
        with torch.no_grad():
            loss_scale = self.loss_scale.value
            divisor = loss_scale * self._grad_divisor
            self.gradients.finish_all()
            updated = self._updated
            remaining = set(self.gradients.trainable) - updated.keys() - self.frozen
            not_yet_invalidated = {b for b in updated if not self.bucket_plan.has_own_slot(b)}
            self.parameters.invalidate(sorted(remaining | not_yet_invalidated))
            total, skip_updates = self._grad_norm(skip_update)
            norm = total / divisor
            # Scale and skip stay on the device: nothing here asks the host for a number.
            overflow = norm.isfinite().logical_not()
            skip = (overflow | (skip_updates > 0)).to(torch.float32)
            # As torch.nn.utils.clip_grad_norm_: the gradient is multiplied by clip / (norm + 1e-6).
            scale = ((norm + 1e-6) / clip).clamp(min=1.0) if clip else torch.ones_like(norm)
            # The mean is taken where the gradient is read anyway, not in a separate pass.
            scale = (scale * divisor).to(torch.float32)
            # In forward order: buckets that the next forward pass reads first are updated and
            # gathered first. On the host a thread updates, and the next forward pass begins when
            # its first gathers have arrived, not when the last bucket has been updated (0.6 % of a
            # step).
            for bucket in self.bucket_plan.forward_order:
                if bucket in remaining:
                    update = partial(self._update, bucket, scale, skip, self._lr_of(bucket, lr))
                    is_async = self.rules.by_bucket[bucket].is_async
                    self.parameters.publish(
                        bucket, update() if is_async else self._stream.run_update(update)
                    )
                elif bucket in updated and bucket not in self._gathered_during_backward:
                    self.parameters.publish(bucket, updated[bucket])
            # The stream runs in order, so this empty task ends after all updates.
            steps = self._stream.run_update(_no_work)
            for rule in self.rules.distinct:
                rule.end_step(steps, scale=scale, skip=skip)
            self.loss_scale.update(overflow)
        self._announced = None
        return StepResult(norm, skip, loss_scale)

    def change_options(self, groups: Sequence[UpdateOptions]) -> None:
        """Update with other numbers for the groups from the next step on, which every rule takes
        (``takes_options``). Called alike by all ranks, before that step."""
        self._stream.run_update(_no_work).wait()  # those of the last step may be under way
        for rule in self.rules.distinct:
            rule.change_options(groups)

    def _grad_norm(self, skip_update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the global L2 norm of the step's gradient (times the loss scale), in which no
        copied or tied parameter counts twice, and how many ranks ask to skip the update."""
        self._sum_copies()
        # One message for both numbers: its time is the latency.
        self._total[0] = self._squared_norms.sum()
        self._total[1].zero_()  # a number of the host would be waited for
        if skip_update is not None:
            self._total[1] = skip_update
        self._sum_total.start()
        with self.mesh.recorder.exposed("the gradient norm"):
            self._sum_total.wait()
        return self._total[0].sqrt().to(at_least_fp32(self.dtype)), self._total[1]

    def _sum_copies(self) -> None:
        """Sum the gradients of copies that each saw a part: norms under sequence parallelism,
        shared key/value heads, tied embeddings. These are reduced shards, 1/dp of the bytes of
        whole gradients."""
        kinds = {bucket.index: bucket.kind for bucket in self.bucket_plan.buckets}
        shards = self.gradients.shards
        # All are under way before the first is waited for: they are small, and latency adds up.
        for copy_sum in self._copy_sums:
            copy_sum.start()
        for copy_sum in self._copy_sums:
            with self.mesh.recorder.exposed(copy_sum):
                copy_sum.wait()
        # A shard may be both partial and tied: its sum over copies has to be there first.
        tied = [
            all_reduce(shard, self.mesh.embedding) for b, shard in shards.items() if kinds[b].tied
        ]
        for pending in tied:
            pending.wait()
        for bucket in shards:
            if kinds[bucket].partial_grad or kinds[bucket].tied:
                self._take_squared_norm(bucket)
                self._announce_gradient(bucket)

    def is_primary(self, bucket: int) -> bool:
        """Whether this rank counts the shard of a bucket (``Mesh.is_primary``)."""
        return self.mesh.is_primary(self.bucket_plan.buckets[bucket].kind)

    def shard_rank(self, bucket: int) -> int:
        """Return the number of this rank's shard of a bucket."""
        return self.mesh.data_axes(self.bucket_plan.buckets[bucket].kind).shard.rank

    def _update(self, bucket: int, scale: Tensor, skip: Tensor, lr: float) -> Future:
        note = self.mesh.recorder.begin("update", bucket)
        done = self.rules.by_bucket[bucket].step(
            bucket, self.gradients.shards[bucket], scale=scale, skip=skip, lr=lr
        )
        if note is not None:
            note.end()
        return done

    # Between steps: checkpoints, comparisons, the end

    def settle(self) -> None:
        """Wait until nothing is in flight and no update is put off. Call this before saving, and
        before any reader but a layer reads the buffers."""
        self._apply_pending()
        self.parameters.settle()

    def _apply_pending(self) -> None:
        """Let the rules apply the updates that they put off, and gather the changed buckets."""
        self.parameters.settle()  # a shard that is being gathered must not change
        changed: dict[int, Future] = {}
        for rule in self.rules.distinct:
            changed |= rule.settle()
        self.parameters.invalidate(sorted(changed))
        for bucket in self.bucket_plan.forward_order:
            if bucket in changed:
                self.parameters.publish(bucket, changed[bucket])

    def fail(self, error: BaseException) -> None:
        """Let all waits for messages raise ``error``, those under way as well. Called by any
        thread, when training cannot go on."""
        for queue in self._queues:
            queue.fail(error)

    def close(self) -> None:
        """End the engine's threads and wait for them: a thread that is inside an operator when the
        interpreter ends aborts the process. Without this call they end with the engine, without a
        wait."""
        self._closing()
        for queue in self._queues:
            queue.join(CLOSE_TIMEOUT_SECONDS)
        for rule in self.rules.distinct:
            rule.close(CLOSE_TIMEOUT_SECONDS)
        self._registered.close()


def _fixed(lr: LearningRate) -> LearningRate:
    """Return learning rates that the caller cannot change any more."""
    return tuple(lr) if isinstance(lr, Sequence) else lr


def _no_work() -> None:
    """Do nothing: only the end of this task matters."""


def _close(queues: Iterable[CommQueue | Stream], rules: UpdateRules) -> None:
    for queue in queues:
        queue.close()
    for rule in rules.distinct:
        rule.close()


def _weak_on_reduced(engine: OverlappedDistributedOptimizer) -> Callable[[int], None]:
    """Return ``_on_reduced`` for a thread that must not keep the engine alive."""
    reference = weakref.ref(engine)

    def reduced(bucket: int) -> None:
        owner = reference()
        if owner is not None:
            owner._on_reduced(bucket)

    return reduced
