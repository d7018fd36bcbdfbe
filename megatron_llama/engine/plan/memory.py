"""Bytes that the engine of one process holds, from its options and its bucket plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_llama.engine.offload_options import ZENFLOW
from megatron_llama.engine.options import (
    BF16,
    EIGHT_BIT,
    MUON,
    SCHEDULE_FREE,
    TORCH,
    EngineOptions,
    TorchGroup,
)
from megatron_llama.engine.plan.buckets import (
    ALIGN,
    Bucket,
    BucketKind,
    BucketPlan,
    align_up,
    reduces_every_microbatch,
)
from megatron_llama.engine.plan.limits import REDUCTIONS_IN_FLIGHT, STAGED_REDUCTIONS, keeps_fp32
from megatron_llama.engine.plan.muon import MuonPlan, muon_plan
from megatron_llama.engine.plan.offload import offload_plan

SCALARS = 8 * 2 + 4 + 4 * 3
"""Bytes of the numbers that an engine has once: the squared norm of all gradients and how many
ranks ask to skip a step, both in fp64, a scale of 1, and the loss scale with its two counters."""
SCALARS_OF_A_BUCKET = 8
"""Bytes of a bucket's squared norm, in fp64."""
STEP_COUNT = 4
"""Bytes of the count of a bucket's updates, in fp32. A bucket of which steps have left out parts
has one for each part; they are not counted here."""
SCALE = 4
"""Bytes of the scale of a block of a moment in 8 bits, in fp32."""
TABLES = 2 * (256 * 4 + 2**16) + ALIGN * 8
"""Bytes of the tables that all moments in 8 bits share."""
WEIGHT_SUM = 8
"""Bytes of the sum of weights of schedule-free AdamW's average, in fp64."""


def state_bytes(
    options: EngineOptions, bucket_plan: BucketPlan, *, shard_rank: int = 0, tp: int = 1
) -> dict[str, int]:
    """Return the bytes that one process holds on the device throughout a run, by component, as the
    engine allocates them. They do not include offloaded state, nor the buffers of messages
    (``staging_bytes``, ``host_buffer_bytes``). ``shard_rank``: see ``offload_plan``; ``tp``:
    tensor-parallel ranks."""
    buckets = bucket_plan.buckets
    itemsizes = [options.itemsize_of(bucket.kind.dtype) for bucket in buckets]
    of_slot = dict(zip(bucket_plan.parameter_slots, itemsizes, strict=True))
    fp32 = options.master_itemsize
    trainable = [bucket.index for bucket in bucket_plan.buckets if bucket.kind.trainable]
    trained = sum(map(bucket_plan.shard_numel, trainable))
    offload = offload_plan(options, bucket_plan, shard_rank=shard_rank)
    offloaded = offload.buckets if offload is not None else ()
    updated = [bucket for bucket in trainable if bucket not in offloaded]
    # ZenFlow also counts the updates of the host's buckets on the device.
    counted = len(trainable)
    muon = planned_muon(options, bucket_plan, tp=tp)
    averages = options.rule == SCHEDULE_FREE
    is_zenflow = options.offload.optimizer_offload == ZENFLOW
    if not is_zenflow:
        counted -= len(offloaded)
    apart = sum(
        bucket_plan.shard_numel(bucket.index) * itemsizes[bucket.index]
        for bucket in buckets
        if not bucket_plan.has_own_slot(bucket.index)
    )
    slots = sum(bucket_plan.gradient_slot_numel().values())
    has_tables = EIGHT_BIT in moment_names(options) and any(
        not buckets[bucket].kind.muon for bucket in trainable
    )
    buffers = TABLES * has_tables + (0 if muon is None else muon.buffer_bytes)
    return {
        "parameters": sum(
            numel * of_slot[slot] for slot, numel in bucket_plan.parameter_slot_numel().items()
        ),
        "parameter shards": apart,
        # Reduced gradients have their own memory if microbatches accumulate in it; else they are a
        # part of the slot.
        "gradients": (slots + (trained if reduces_every_microbatch(options) else 0)) * fp32,
        # In fp32 the shard itself is the master copy, unless training uses others.
        "master weights": fp32
        * sum(
            bucket_plan.shard_numel(bucket)
            for bucket in updated
            if itemsizes[bucket] != fp32 or averages
        ),
        "moments": sum(
            bucket_plan.shard_numel(bucket)
            // ALIGN
            * _moment_bytes(options, bucket_plan.buckets[bucket].kind)
            for bucket in updated
        ),
        "scalars": SCALARS
        + SCALARS_OF_A_BUCKET * len(bucket_plan.buckets)
        + (
            sum(_torch_numbers(options, bucket_plan.buckets[bucket].kind) for bucket in trainable)
            if options.rule == TORCH
            else (STEP_COUNT + averages * WEIGHT_SUM) * counted
        ),
        **(
            {"hot columns": offload.on_device, "column numbers": offload.column_numbers}
            if offload is not None and is_zenflow
            else {}
        ),
        **({"update buffers": buffers} if buffers else {}),
    }


def _moment_bytes(options: EngineOptions, kind: BucketKind) -> int:
    """Return the bytes that the optimizer keeps of ALIGN elements beside their masters."""
    if kind.muon:
        return ALIGN * options.master_itemsize
    if options.rule == SCHEDULE_FREE:
        return 2 * ALIGN * options.master_itemsize
    if options.rule == TORCH:
        return ALIGN * sum(
            options.master_itemsize if tensor.itemsize is None else tensor.itemsize
            for tensor in _torch_group(options, kind).state
            if tensor.per_element
        )
    return sum(_kept_bytes(options, name, kind) for name in moment_names(options))


def _torch_numbers(options: EngineOptions, kind: BucketKind) -> int:
    """Return the bytes of the numbers that an optimizer of torch keeps of a bucket."""
    group = _torch_group(options, kind)
    return sum(tensor.itemsize or 0 for tensor in group.state if not tensor.per_element)


def _torch_group(options: EngineOptions, kind: BucketKind) -> TorchGroup:
    group = options.groups[kind.group]
    assert isinstance(group, TorchGroup), group
    return group


def moment_names(options: EngineOptions) -> tuple[str, str]:
    """Return the dtypes of both moments. They are the same in all groups."""
    return options.groups[0].exp_avg_dtype, options.groups[0].exp_avg_sq_dtype


def _kept_bytes(options: EngineOptions, name: str, kind: BucketKind) -> int:
    """Return the bytes of ALIGN elements of a moment."""
    if name == BF16:
        return 2 * ALIGN
    if name == EIGHT_BIT and not keeps_fp32(kind):
        return ALIGN + SCALE
    return options.master_itemsize * ALIGN


def planned_muon(options: EngineOptions, bucket_plan: BucketPlan, *, tp: int) -> MuonPlan | None:
    """Return the plan of Muon's matrices; None without Muon."""
    if options.rule != MUON:
        return None
    return muon_plan(bucket_plan, tp=tp)


def staging_bytes(options: EngineOptions, bucket_plan: BucketPlan, *, dp: int) -> int:
    """Return the bytes of the buffers in which a device casts gradients to the dtype in which they
    travel, if that is another one, and receives them to add them up itself; they come on top of
    ``state_bytes``. ``dp``: data-parallel ranks, context-parallel ones included."""
    total = 0
    for wire, ep, buckets in _by_way(options, bucket_plan):
        if wire == options.master_itemsize:
            continue
        shards = bucket_plan.shard_count(buckets[0].index)
        replicas = dp // ep // shards
        buffers = min(STAGED_REDUCTIONS, _slots(bucket_plan, buckets))
        largest = max(bucket.numel for bucket in buckets)
        repeated = largest // shards
        if options.sums_wide:
            repeated = 2 * replicas * align_up(-(-repeated // replicas), ALIGN)
        if shards == 1 and not reduces_every_microbatch(options):
            total += buffers * repeated * wire if replicas > 1 else 0
        else:
            total += buffers * (1 + options.sums_wide) * largest * wire if shards > 1 else 0
            total += repeated * wire if replicas > 1 else 0
    return total


def _by_way(
    options: EngineOptions, bucket_plan: BucketPlan
) -> Iterator[tuple[int, int, list[Bucket]]]:
    """Yield the trained buckets whose gradients travel in one dtype along the same axes, which
    share the buffers of messages: the bytes of an element there, the ranks that divide experts, and
    the buckets."""
    by_way: dict[tuple[int, int], list[Bucket]] = {}
    for bucket in bucket_plan.buckets:
        if bucket.kind.trainable:
            way = options.wire_itemsize(bucket.kind.reduces_in), bucket.kind.ep
            by_way.setdefault(way, []).append(bucket)
    for (wire, ep), buckets in by_way.items():
        yield wire, ep, buckets


def _slots(bucket_plan: BucketPlan, buckets: Iterable[Bucket]) -> int:
    """Return the number of gradient slots of some buckets."""
    return len({bucket_plan.gradient_slots[bucket.index] for bucket in buckets})


def host_buffer_bytes(options: EngineOptions, bucket_plan: BucketPlan, *, dp: int) -> int:
    """Return the bytes of the buffers in which gloo receives gradients, and of casts to the dtype
    in which they are sent; they come on top of ``state_bytes``, on a host, where nothing else is
    staged. A GPU's backend has its own buffers. ``dp``: data-parallel ranks, context-parallel ones
    included."""
    fp32 = options.master_itemsize
    total = 0
    for wire, ep, buckets in _by_way(options, bucket_plan):
        shards = bucket_plan.shard_count(buckets[0].index)
        replicas = dp // ep // shards
        cast = wire < fp32
        if shards > 1:
            largest = max(bucket.numel for bucket in buckets)
            share = -(-largest // shards)
            buffer = (shards - 1) * share * wire + cast * (largest * wire + share * fp32)
            total += min(REDUCTIONS_IN_FLIGHT, _slots(bucket_plan, buckets)) * buffer
        if replicas > 1:
            for bucket in buckets:
                share = align_up(-(-bucket.numel // shards // replicas), ALIGN)
                total += (replicas - 1) * share * wire + cast * (
                    bucket.numel // shards * wire + 2 * share * fp32
                )
    return total


def squares_bytes(options: EngineOptions, bucket_plan: BucketPlan) -> int:
    """Return the bytes of the largest tensor that the engine allocates for the gradient's norm: one
    number for every ALIGN elements of a shard."""
    shards = (
        bucket_plan.shard_numel(bucket.index)
        for bucket in bucket_plan.buckets
        if bucket.kind.trainable
    )
    return max(shards, default=0) // ALIGN * options.master_itemsize


def sized(size: int) -> str:
    """Return readable bytes, in the unit that fits."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    if size >= 2**20:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**10:.1f} KiB" if size >= 2**10 else f"{size} B"
