"""The plan of optimizer offload: the buckets that are updated on the host, the memory for that, and
the copies of a step. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_llama.engine.offload_options import NONE, ZENFLOW
from megatron_llama.engine.options import EngineOptions
from megatron_llama.engine.plan.buckets import ALIGN, BucketPlan, align_up
from megatron_llama.engine.plan.zenflow import AUTO, hot_column_count, sends_fp32, steps_of

STAGED = 2
"""Buffers for weights in the compute dtype on their way to the device: one is filled while the
other one is copied."""
STATES = 3
"""Values of each element on the host: weight and two moments."""
FACTORS = ALIGN
"""Elements of fp32 that a bucket has for the scale of its gradient and for the skip: two,
padded."""


@dataclass(frozen=True)
class OffloadPlan:
    """The state and copies of one rank's optimizer on the host. All sizes are in bytes."""

    buckets: tuple[int, ...]
    """The buckets that are updated on the host, in the order in which backward completes them."""
    speculated: tuple[int, ...]
    """Those of ``buckets`` that may be updated before the gradient norm is known."""
    state: int
    """Weights and moments in fp32."""
    gradients: int
    """The buffers of arriving gradients."""
    staging: int
    """Weights on their way to the device, if the compute dtype is not fp32, and scales of
    gradients."""
    undo: int
    """The second copies of --offload-speculative."""
    to_host: int
    """Gradients that a step copies."""
    to_device: int
    """Weights that a step copies; with zenflow on average, and at most where its update interval is
    auto."""
    on_device: int = 0
    """Device memory that is needed nevertheless: hot columns, and buffers of copies."""
    column_numbers: int = 0
    """Device memory for the list of hot columns and the counts of their updates, for the norms of
    all columns, and for the numbers that decide when to update."""

    @property
    def held(self) -> int:
        """Bytes of all host memory."""
        return self.state + self.gradients + self.staging + self.undo


def host_buckets(bucket_plan: BucketPlan, fraction: float) -> tuple[int, ...]:
    """Return the buckets that are updated on the host: ``fraction`` of the elements, up to whole
    buckets. Those of the first layers stay on the device, because a forward pass would wait longest
    for them, and so does a tied embedding, unless everything is updated on the host."""
    buckets = bucket_plan.buckets
    trained = [b for b in bucket_plan.forward_order if buckets[b].kind.trainable]
    left_on_device = (1.0 - fraction) * sum(buckets[b].numel for b in trained)
    if fraction < 1.0:
        # Both ends of the pipeline hold the tied embedding and must update it in the same way
        # (ZenFlow's choice of columns is a collective of the two). It is the first bucket of one
        # end and the last of the other, which knows nothing of the first one's sizes.
        left_on_device -= sum(buckets[b].numel for b in trained if buckets[b].kind.tied)
        trained = [b for b in trained if not buckets[b].kind.tied]
    chosen = []
    for bucket in trained:
        left_on_device -= buckets[bucket].numel
        if left_on_device < 0:
            chosen.append(bucket)
    return tuple(sorted(chosen))


def speculated_buckets(
    bucket_plan: BucketPlan, buckets: Sequence[int], budget: int, master_itemsize: int
) -> tuple[int, ...]:
    """Return as many buckets, in the order in which their gradients arrive, as second copies of
    ``budget`` bytes allow. Gradients that arrive too late to gain time are left out: those that are
    summed over copies arrive with the norm, and those of the first two units right before it.
    Trying these would delay the updates that are needed first."""
    chosen = []
    late = {bucket for unit in bucket_plan.unit_buckets[:2] for bucket in unit}
    for bucket in buckets:
        size = STATES * bucket_plan.shard_numel(bucket) * master_itemsize
        kind = bucket_plan.buckets[bucket].kind
        if size <= budget and bucket not in late and not kind.partial_grad and not kind.tied:
            chosen.append(bucket)
            budget -= size
    return tuple(chosen)


def offload_plan(
    options: EngineOptions, bucket_plan: BucketPlan, *, shard_rank: int = 0
) -> OffloadPlan | None:
    """Return the plan of one rank; None if nothing is offloaded.

    ``shard_rank`` says which shard of each bucket the rank has. Under ZenFlow shards that begin in
    the middle of a row need a little more than others."""
    offload = options.offload
    if offload.optimizer_offload == NONE:
        return None
    weight_itemsize = options.itemsize
    master_itemsize = options.master_itemsize
    if offload.optimizer_offload == ZENFLOW:
        return _zenflow_plan(
            options,
            bucket_plan,
            master_itemsize=master_itemsize,
            weight_itemsize=weight_itemsize,
            shard_rank=shard_rank,
        )
    buckets = host_buckets(bucket_plan, offload.optimizer_offload_fraction)
    sizes = {bucket: bucket_plan.shard_numel(bucket) for bucket in buckets}
    total = sum(sizes.values())
    speculative = offload.offload_speculative and options.clip > 0 and options.loss_scaling is None
    speculated = (
        speculated_buckets(bucket_plan, buckets, offload.speculation_bytes, master_itemsize)
        if speculative
        else ()
    )
    staging = (
        STAGED * max(sizes.values(), default=0) * weight_itemsize
        if weight_itemsize < master_itemsize
        else 0
    )
    return OffloadPlan(
        buckets=buckets,
        speculated=speculated,
        state=STATES * total * master_itemsize,
        gradients=total * master_itemsize,
        staging=staging + FACTORS * 4 * len(buckets),
        undo=STATES * sum(sizes[bucket] for bucket in speculated) * master_itemsize,
        to_host=total * master_itemsize,
        to_device=total * weight_itemsize,
    )


def matrix_buckets(bucket_plan: BucketPlan, fraction: float) -> tuple[int, ...]:
    """Return those of the host's buckets in which ZenFlow selects columns. Norms, biases and
    low-rank additions are left out: they are small, and AdamW updates them on the device."""
    kinds = [bucket.kind for bucket in bucket_plan.buckets]
    return tuple(
        bucket
        for bucket in host_buckets(bucket_plan, fraction)
        if not kinds[bucket].resident and not kinds[bucket].adapter
    )


def _zenflow_plan(
    options: EngineOptions,
    bucket_plan: BucketPlan,
    *,
    master_itemsize: int,
    weight_itemsize: int,
    shard_rank: int,
) -> OffloadPlan:
    """Return the plan under ZenFlow. Columns are selected over all ranks, so the number of hot
    columns in a shard is an expected value where it has parts of rows, or tensor parallelism cuts
    them; elsewhere it is exact."""
    zenflow = options.zenflow
    buckets = matrix_buckets(bucket_plan, options.offload.optimizer_offload_fraction)
    wire = master_itemsize if sends_fp32(zenflow) else weight_itemsize
    windows = 1 + zenflow.zenflow_overlap_step
    sizes = [bucket_plan.shard_numel(bucket) for bucket in buckets]
    total = sum(sizes)
    largest = max(sizes, default=0)
    hot = elements = 0
    for spec in (
        placed.spec for bucket in buckets for placed in bucket_plan.buckets[bucket].placements
    ):
        columns = spec.slices[0].width
        elements += spec.numel // bucket_plan.shards
        hot += (
            spec.numel
            // bucket_plan.shards
            * hot_column_count(zenflow.zenflow_topk_ratio, columns)
            // columns
        )
    hot_state, numbers = _columns_on_device(options, bucket_plan, buckets, shard_rank)
    return OffloadPlan(
        buckets=buckets,
        speculated=(),
        state=STATES * total * master_itemsize,
        gradients=windows * total * master_itemsize + total * wire + largest * master_itemsize,
        staging=total * weight_itemsize + FACTORS * 4 * len(buckets),
        undo=0,
        to_host=(elements - hot) * wire,
        to_device=(elements - hot)
        * weight_itemsize
        // (steps_of(zenflow.zenflow_update_interval) or 1),
        on_device=STATES * hot_state * master_itemsize
        + largest * (master_itemsize + 2 * wire + weight_itemsize),
        column_numbers=numbers,
    )


def _columns_on_device(
    options: EngineOptions, bucket_plan: BucketPlan, buckets: Sequence[int], shard_rank: int
) -> tuple[int, int]:
    """Return the elements of all hot columns of a rank, those of each bucket padded, and the bytes
    of ``OffloadPlan.column_numbers``."""
    zenflow = options.zenflow
    is_auto = zenflow.zenflow_update_interval == AUTO
    elements = numbers = 0
    for bucket in buckets:
        in_bucket = 0
        for segment in bucket_plan.segments(bucket, shard_rank):
            total = segment.spec.slices[0].width
            hot = hot_column_count(zenflow.zenflow_topk_ratio, total)
            for _, rows, _, cols in segment.blocks():
                in_bucket += rows * (cols * hot // total)
                # Each column of a block has its number in the list of the hot or of the cold ones,
                # in int64; a hot one also has its count, in fp64.
                numbers += 8 * cols + 8 * (cols * hot // total)
        elements += align_up(in_bucket, ALIGN)
        # Updates since columns were selected; scale and skip of the last step. All are fp32.
        numbers += 4 + 2 * 4
        for placed in bucket_plan.buckets[bucket].placements:
            # A norm in fp32; under auto also whether the column is hot.
            numbers += placed.spec.width * (4 + is_auto)
    if is_auto:
        # Queries, keys and values are one matrix, even if our own model stores them as two. Each
        # has two numbers of columns, and hot and cold magnitudes of a step and of a window; the
        # steps of the window and two counts of votes are those of all.
        names = {
            placed.spec.name.replace(".kv_proj.", ".q_proj.")
            if len(placed.spec.slices) > 1
            else placed.spec.name
            for bucket in buckets
            for placed in bucket_plan.buckets[bucket].placements
        }
        numbers += 6 * 4 * len(names) + 3 * 4
    return elements, numbers
