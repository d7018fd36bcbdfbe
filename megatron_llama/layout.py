"""Where every parameter element lives: buckets, shards, segments, slots. Integers only.

The runtime moves data with this table, checkpoints reshard with it, the planner reads it: there is no other copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_llama.config import Config
from megatron_llama.params import ParamSpec, Rectangle, UnitSpec, rank_units, rectangles

ALIGN = 64
"""Elements: parameters and shards start at multiples of this. Keeps 128-byte alignment in bf16, and makes a fused CPU
AdamW bit-equal for any chunking (its SIMD tail rounds differently)."""


@dataclass(frozen=True)
class Kind:
    """What all parameters of one bucket have in common, so that one update call and one message serve the bucket."""

    decay: bool
    copies: int
    partial: bool
    tied: bool
    stage: int
    """Stages finish their microbatches at different times; a bucket belongs to one."""
    contributions: int

    @staticmethod
    def of(spec: ParamSpec) -> Kind:
        """The kind of bucket that a parameter belongs to."""
        return Kind(spec.decay, spec.copies, spec.partial, spec.tied, spec.stage, spec.contributions)


@dataclass(frozen=True)
class Placement:
    """One parameter inside its bucket: elements ``[start, stop)`` of the bucket."""

    spec: ParamSpec
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """One message of the data-parallel collectives: whole parameters, contiguous, padded to equal shards."""

    index: int
    kind: Kind
    numel: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Segment:
    """The part of one parameter inside one shard: ``length`` elements from each of the three starts."""

    spec: ParamSpec
    in_param: int
    in_bucket: int
    in_shard: int
    length: int


@dataclass(frozen=True)
class ShardLayout:
    """Buckets in the order in which backward completes them, each cut into ``shards`` equal shards."""

    buckets: tuple[Bucket, ...]
    shards: int
    forward_order: tuple[int, ...]
    """Bucket indices by first use in the forward pass: the order of updates and gathers."""
    unit_buckets: tuple[tuple[int, ...], ...]
    """For each unit, the buckets that hold its parameters."""
    gradient_slots: tuple[tuple[int, int], ...]
    """For each bucket, (pool, slot) of its gradients."""

    def shard_numel(self, bucket: int) -> int:
        """Elements of one shard of a bucket."""
        return self.buckets[bucket].numel // self.shards

    def shard(self, bucket: int, rank: int) -> slice:
        """The elements of a bucket that a rank owns."""
        size = self.shard_numel(bucket)
        return slice(rank * size, (rank + 1) * size)

    def segments(self, bucket: int, rank: int) -> Iterator[Segment]:
        """The pieces of parameters inside one shard, in order; gaps between them are padding."""
        own = self.shard(bucket, rank)
        for placed in self.buckets[bucket].placements:
            low, high = max(placed.start, own.start), min(placed.stop, own.stop)
            if low < high:
                yield Segment(placed.spec, low - placed.start, low, low - own.start, high - low)

    def rectangles(self, bucket: int, rank: int) -> Iterator[tuple[Rectangle, slice]]:
        """The shard as rectangles of HuggingFace tensors, each with its place in the shard."""
        for segment in self.segments(bucket, rank):
            for piece in rectangles(segment.spec, segment.in_param, segment.in_param + segment.length):
                start = segment.in_shard + piece.start - segment.in_param
                yield piece, slice(start, start + piece.numel)

    def slot_numel(self) -> dict[tuple[int, int], int]:
        """Size of every gradient slot: the largest bucket that uses it."""
        sizes: dict[tuple[int, int], int] = {}
        for bucket, slot in zip(self.buckets, self.gradient_slots, strict=True):
            sizes[slot] = max(sizes.get(slot, 0), bucket.numel)
        return sizes

    @property
    def numel(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(bucket.numel for bucket in self.buckets)


def align_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below ``value``."""
    return -(-value // multiple) * multiple


def layout_by_size(units: Sequence[UnitSpec], *, shards: int, cap: int, gradient_slots: int | None) -> ShardLayout:
    """Fill buckets of at most ``cap`` elements from the last layer to the first, one open bucket per kind.

    Backward completes buckets in this order, and the small remainder of a kind is the last message, not the first.
    ``gradient_slots``: buffers that the weight-matrix buckets take turns in; None gives every bucket its own.
    """
    reverse = [spec for unit in reversed(units) for spec in reversed(unit.params)]
    closed = _close(_fill(reverse, cap), reverse, shards)
    home = {placed.spec.name: bucket.index for bucket in closed for placed in bucket.placements}
    unit_buckets = tuple(tuple(dict.fromkeys(home[spec.name] for spec in unit.params)) for unit in units)
    forward = tuple(dict.fromkeys(bucket for unit in unit_buckets for bucket in unit))
    return ShardLayout(closed, shards, forward, unit_buckets, _assign_slots(closed, gradient_slots))


def _fill(specs: Iterable[ParamSpec], cap: int) -> list[list[ParamSpec]]:
    """Norms are not bound by the cap: all of a stage together are small, and one message serves them."""
    full: list[list[ParamSpec]] = []
    open_buckets: dict[Kind, list[ParamSpec]] = {}
    for spec in specs:
        kind = Kind.of(spec)
        bucket = open_buckets.get(kind)
        if bucket is None or (spec.decay and sum(other.numel for other in bucket) + spec.numel > cap):
            bucket = open_buckets[kind] = []
            full.append(bucket)
        bucket.append(spec)
    return full


def _close(filled: list[list[ParamSpec]], reverse: Sequence[ParamSpec], shards: int) -> tuple[Bucket, ...]:
    """Order the buckets by their last parameter in backward order: that is when each is complete."""
    rank = {spec.name: position for position, spec in enumerate(reverse)}
    filled = sorted(filled, key=lambda specs: max(rank[spec.name] for spec in specs))
    return tuple(_bucket(index, specs, shards) for index, specs in enumerate(filled))


def _bucket(index: int, specs: Sequence[ParamSpec], shards: int) -> Bucket:
    placements, at = [], 0
    for spec in specs:
        placements.append(Placement(spec, at, at + spec.numel))
        at = align_up(at + spec.numel, ALIGN)
    return Bucket(index, Kind.of(specs[0]), align_up(at, shards * ALIGN), tuple(placements))


def _assign_slots(buckets: Sequence[Bucket], count: int | None) -> tuple[tuple[int, int], ...]:
    """Weight-matrix buckets share ``count`` slots in turn. Every other bucket stays open through the whole backward
    pass (norms of all layers, an embedding that is also the head), so it keeps a slot of its own."""
    slots, turn = [], 0
    for bucket in buckets:
        lasting = not bucket.kind.decay or bucket.kind.tied or bucket.kind.contributions > 1 or bucket.kind.copies > 1
        if count is None or lasting:
            slots.append((1, bucket.index))
        else:
            slots.append((0, turn % count))
            turn += 1
    return tuple(slots)


@dataclass(frozen=True)
class Strategy:
    """What a ``--data-parallel-sharding-strategy`` means, as the two axes of the engine."""

    sharded: bool
    """Each data-parallel rank owns 1/dp of every bucket; otherwise all of it."""
    reduce_every_microbatch: bool
    gradient_slots: int | None


def strategy_named(name: str) -> Strategy:
    """The only place that knows the strategies by name."""
    return {
        "no_shard": Strategy(sharded=False, reduce_every_microbatch=False, gradient_slots=None),
        "optim": Strategy(sharded=True, reduce_every_microbatch=False, gradient_slots=None),
        "optim_grads": Strategy(sharded=True, reduce_every_microbatch=True, gradient_slots=2),
    }[name]


def rank_layout(config: Config, *, dp: int, tp_rank: int = 0, rank: int = 0) -> ShardLayout:
    """The layout of one pipeline rank (all its stages) on one tensor-parallel rank of a resolved configuration.

    ``dp``: data-parallel ranks, context-parallel ones included."""
    strategy = strategy_named(config.parallel.data_parallel_sharding_strategy)
    units = [unit for stage in rank_units(config, rank=rank, tp_rank=tp_rank) for unit in stage]
    shards = dp if strategy.sharded else 1
    return layout_by_size(units, shards=shards, cap=config.parallel.reduce_bucket_size, gradient_slots=strategy.gradient_slots)
