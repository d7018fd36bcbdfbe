"""What optimizer offload takes: which buckets are updated on the host, its memory, and what a step
copies. Integers only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_llama.config.schema import Config
from megatron_llama.errors import describe
from megatron_llama.plans.buckets import ALIGN, BucketPlan
from megatron_llama.plans.checks.zenflow import hot_column_count, sends_fp32, steps_of
from megatron_llama.plans.itemsize import compute_itemsize

NONE = "none"
EXACT = "exact"
ZENFLOW = "zenflow"
MODES = (NONE, EXACT, ZENFLOW)
"""Values of --optimizer-offload that can run."""
STAGED = 2
"""Buffers for weights in the compute dtype on their way to the device: one is filled while the
other one is copied."""
STATES = 3
"""Of an element on the host: weight and two moments."""
FACTORS = ALIGN
"""Elements of fp32 that a bucket keeps for the scale of its gradient and for whether to skip it:
two, padded."""
DIGITS = 6
"""No machine has more processors than numbers of so many."""


@dataclass(frozen=True)
class OffloadPlan:
    """What one rank's optimizer on the host holds and moves. All sizes in bytes."""

    buckets: tuple[int, ...]
    """Those that are updated on the host, in the order in which backward completes them."""
    speculated: tuple[int, ...]
    """Those of them that may be updated before the gradient norm is known."""
    state: int
    """Weights and moments in fp32."""
    gradients: int
    """Where gradients arrive."""
    staging: int
    """Weights on their way to the device, where they are narrower there; scales of gradients."""
    undo: int
    """What --offload-speculative may have to take back."""
    to_host: int
    """Gradients, in a step."""
    to_device: int
    """Weights, in a step: of zenflow on average, at most where its windows close when they ask."""
    on_device: int = 0
    """Held on the device nevertheless: hot columns, and room for what crosses."""

    @property
    def held(self) -> int:
        """All host memory."""
        return self.state + self.gradients + self.staging + self.undo


def host_buckets(bucket_plan: BucketPlan, fraction: float) -> tuple[int, ...]:
    """The buckets that are updated on the host. Those of the first layers stay on the device, as
    far as ``fraction`` leaves room: a forward pass waits longest for them."""
    trained = [
        bucket for bucket in bucket_plan.forward_order if bucket_plan.buckets[bucket].kind.trainable
    ]
    room = (1.0 - fraction) * sum(bucket_plan.buckets[bucket].numel for bucket in trained)
    chosen = []
    for bucket in trained:
        room -= bucket_plan.buckets[bucket].numel
        if room < 0:
            chosen.append(bucket)
    return tuple(sorted(chosen))


def speculated_buckets(
    bucket_plan: BucketPlan, buckets: Sequence[int], budget: int, wide: int
) -> tuple[int, ...]:
    """As many buckets, in the order in which their gradients arrive, as ``budget`` bytes can take
    back. A gradient that is summed over copies arrives with the norm, and what the first units read
    right before it: to try that would hold up what is needed first."""
    chosen = []
    late = {bucket for unit in bucket_plan.unit_buckets[:2] for bucket in unit}
    for bucket in buckets:
        size = STATES * bucket_plan.shard_numel(bucket) * wide
        kind = bucket_plan.buckets[bucket].kind
        if size <= budget and bucket not in late and not kind.partial and not kind.tied:
            chosen.append(bucket)
            budget -= size
    return tuple(chosen)


def offload_plan(config: Config, bucket_plan: BucketPlan) -> OffloadPlan | None:
    """Of one rank of a resolved configuration; None where nothing is offloaded."""
    options = config.offload
    narrow = compute_itemsize(config)
    if options.optimizer_offload == NONE:
        return None
    wide = max(narrow, 4)
    if options.optimizer_offload == ZENFLOW:
        return _zenflow_plan(config, bucket_plan, wide=wide, narrow=narrow)
    buckets = host_buckets(bucket_plan, options.optimizer_offload_fraction)
    sizes = {bucket: bucket_plan.shard_numel(bucket) for bucket in buckets}
    total = sum(sizes.values())
    speculative = (
        options.offload_speculative and config.optimizer.clip_grad > 0 and not config.training.fp16
    )
    speculated = (
        speculated_buckets(bucket_plan, buckets, options.speculation_bytes, wide)
        if speculative
        else ()
    )
    staging = STAGED * max(sizes.values(), default=0) * narrow if narrow < wide else 0
    return OffloadPlan(
        buckets=buckets,
        speculated=speculated,
        state=STATES * total * wide,
        gradients=total * wide,
        staging=staging + FACTORS * 4 * len(buckets),
        undo=STATES * sum(sizes[bucket] for bucket in speculated) * wide,
        to_host=total * wide,
        to_device=total * narrow,
    )


def matrix_buckets(bucket_plan: BucketPlan, fraction: float) -> tuple[int, ...]:
    """Of the buckets that are updated on the host those whose columns differ: norms and low-rank
    additions are small."""
    kinds = [bucket.kind for bucket in bucket_plan.buckets]
    return tuple(
        bucket
        for bucket in host_buckets(bucket_plan, fraction)
        if kinds[bucket].decay and not kinds[bucket].adapter
    )


def _zenflow_plan(
    config: Config, bucket_plan: BucketPlan, *, wide: int, narrow: int
) -> OffloadPlan:
    """Columns are chosen over all ranks: how many of a shard's are hot is what is to be
    expected."""
    options = config.zenflow
    buckets = matrix_buckets(bucket_plan, config.offload.optimizer_offload_fraction)
    wire = wide if sends_fp32(options) else narrow
    windows = 1 + options.zenflow_overlap_step
    sizes = [bucket_plan.shard_numel(bucket) for bucket in buckets]
    total = sum(sizes)
    largest = max(sizes, default=0)
    hot = elements = 0
    for spec in (
        placed.spec for bucket in buckets for placed in bucket_plan.buckets[bucket].placements
    ):
        columns = spec.slices[0].shape[1]
        elements += spec.numel // bucket_plan.shards
        hot += (
            spec.numel
            // bucket_plan.shards
            * hot_column_count(options.zenflow_topk_ratio, columns)
            // columns
        )
    return OffloadPlan(
        buckets=buckets,
        speculated=(),
        state=STATES * total * wide,
        gradients=windows * total * wide + total * wire + largest * wide,
        staging=total * narrow + FACTORS * 4 * len(buckets),
        undo=0,
        to_host=(elements - hot) * wire,
        to_device=(elements - hot) * narrow // (steps_of(options.zenflow_update_interval) or 1),
        on_device=STATES * hot * wide + largest * (wide + 2 * wire + narrow),
    )


def offload_problems(config: Config) -> Iterator[str]:
    """Of the options of offload."""
    options = config.offload
    if options.optimizer_offload not in MODES:
        expected = " or ".join(MODES)
        yield describe(
            "--optimizer-offload",
            got=options.optimizer_offload,
            expected=expected,
            do="exact hides what can be hidden exactly",
        )
    if not 0 <= options.optimizer_offload_fraction <= 1:
        do = "give the share of the optimizer that is to leave the device"
        yield describe(
            "--optimizer-offload-fraction",
            got=options.optimizer_offload_fraction,
            expected="a number from 0 to 1",
            do=do,
        )
    if options.offload_cores != "auto" and not core_list(options.offload_cores):
        yield describe(
            "--offload-cores",
            got=options.offload_cores,
            expected="auto, or numbers and ranges such as 0-15,32-47",
            do="mend it",
        )


def offload_warnings(config: Config) -> Iterator[str]:
    """What of the options has no effect."""
    options = config.offload
    if (
        options.optimizer_offload != NONE
        and options.offload_speculative
        and config.optimizer.clip_grad == 0
    ):
        yield "--offload-speculative has no effect with --clip-grad 0: buckets are updated when their gradients arrive anyway"
    if options.optimizer_offload != NONE and options.offload_speculative and config.training.fp16:
        yield "--offload-speculative has no effect with --fp16: whether a step counts is known at its end"


def core_list(text: str) -> tuple[int, ...]:
    """``0-2,8`` as 0, 1, 2, 8; nothing where it is no such list, or has numbers that no machine
    has."""
    cores: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        first = _number(low)
        last = _number(high if dash else low)
        if first is None or last is None or first > last:
            return ()
        cores += range(first, last + 1)
    return tuple(sorted(set(cores)))


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS else None
