"""Sizes that a running engine goes by: pieces of updates and messages, and buffers in flight."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_llama.engine.options import EngineOptions
from megatron_llama.engine.plan.buckets import ALIGN, MAX_PIECES, BucketKind, BucketPlan, align_up
from megatron_llama.errors import describe

REDUCTIONS_IN_FLIGHT = 8
"""The most reductions that may be in flight at once, where the backend is gloo: each has a receive
buffer. With links that stand still for 100 ms in 470, a step took 60 ms longer with eight and 79 ms
longer with four, because backward waits for a buffer."""
STAGED_REDUCTIONS = 2
"""Buffers of a device in which gradients are cast to the dtype in which they travel, if that is
another one: one is filled while the sum of the other is under way. A communicator makes one sum at
a time, so more buffers would wait full."""
UPDATE_PIECE = 1 << 20
"""Elements that an update takes at a time if it needs more memory, outside kernels. It cuts no SIMD
vector."""


def keeps_fp32(kind: BucketKind) -> bool:
    """Whether moments that are in 8 bits elsewhere are in fp32 in a bucket: norms and biases are
    small together, and have no rows to cut into blocks."""
    return kind.resident


def least_chunk_bytes(options: EngineOptions, bucket_plan: BucketPlan, *, dp: int) -> int:
    """Return the smallest ``--exchange-chunk-bytes`` with which no message is cut into more than
    MAX_PIECES."""
    messages = [(0, 1)]
    for bucket in bucket_plan.buckets:
        shards = bucket_plan.shard_count(bucket.index)
        replicas = dp // bucket.kind.ep // shards
        shard = bucket_plan.shard_numel(bucket.index)
        wire = options.wire_itemsize(bucket.kind.reduces_in)
        if shards > 1:
            itemsize = options.itemsize_of(bucket.kind.dtype)
            messages += [(shard, itemsize), (shard * bucket.kind.trainable, wire)]
        if replicas > 1 and bucket.kind.trainable:
            messages.append((min(shard, align_up(-(-shard // replicas), ALIGN)), wire))
    pieces = [(-(-numel // MAX_PIECES), size) for numel, size in messages]
    # A piece has one element at least, so no limit is too small for messages of MAX_PIECES
    # elements.
    return max(elements * size if elements > 1 else 1 for elements, size in pieces)


def chunk_problem(
    options: EngineOptions, bucket_plans: Iterable[BucketPlan], *, dp: int
) -> str | None:
    """Return the problem of ``--exchange-chunk-bytes`` where the backend is gloo; None if it has
    none. ``bucket_plans``: those of all pipeline ranks."""
    given = options.chunk_bytes
    least = max(least_chunk_bytes(options, bucket_plan, dp=dp) for bucket_plan in bucket_plans)
    if given >= least:
        return None
    expected = f"at least {least}, which cuts the largest message into {MAX_PIECES} pieces"
    return describe(
        "--exchange-chunk-bytes", got=given, expected=expected, do="give more or leave it out"
    )
