"""The buckets that the engine updates and gathers while backward still computes: policies over a
``BucketPlan``, integers only."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.engine.plan.buckets import BucketPlan


def updated_during_backward(bucket_plan: BucketPlan, bucket: int, *, is_async: bool) -> bool:
    """Whether a bucket may be updated during backward, in a step without clipping.

    Its own reduction has to complete its gradient (copies over tensor-parallel ranks are summed
    after backward), and no access may read it, or take its slot, before the next step. With
    ``is_async`` the update rule works in threads of its own: then other users of the slot do not
    matter, because the shard is not in the slot, and the engine announces the new values at the end
    of the step."""
    kind = bucket_plan.buckets[bucket].kind
    return (
        kind.trainable
        and not kind.partial_grad
        and not kind.needs_own_slot
        and (is_async or bucket_plan.has_own_slot(bucket))
    )


def gathered_during_backward(bucket_plan: BucketPlan) -> Iterator[int]:
    """Return the buckets that are gathered during backward, of those that are updated then: a third
    of all elements, evenly spread over the layers.

    A third, because backward is two thirds of a step: where communication takes as long as
    computing, it has room for all reductions and for that many gathers. Evenly spread, so that no
    layer of the next forward pass lacks more than another: the first third at once cost 7 % of a
    step, a third spread over the layers saves 7 %. The buckets of the first two units are never
    among them: these are reduced last, right before ``step`` gathers them, and no other message may
    delay them then."""
    first_units = {bucket for unit in bucket_plan.unit_buckets[:2] for bucket in unit}
    updated = gathered = 0
    for bucket in bucket_plan.buckets:
        if not updated_during_backward(bucket_plan, bucket.index, is_async=False):
            continue
        updated += bucket.numel
        if bucket.index not in first_units and 3 * (gathered + bucket.numel) <= updated:
            gathered += bucket.numel
            yield bucket.index
