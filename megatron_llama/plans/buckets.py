"""Where every parameter element lives: buckets, shards, segments, slots. Integers only.

The runtime moves data with this table, checkpoints reshard with it, the planner reads it: there is
no other copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.plans.params import ParamSpec, Rectangle, UnitSpec, rank_units, rectangles

Slot = tuple[int, int]
"""(pool, number in the pool)."""
AUTO = "auto"
"""The strategy that ``auto.decide`` replaces by a real one."""
REDUCTIONS_IN_FLIGHT = 8
"""Most reductions whose parts may be on their way at once, where the backend is gloo: each has a
receive buffer. Links that stand still for 100 ms in 470 cost a step 60 ms with eight and 79 ms with
four, behind which backward waits."""
PIECES = 1 << 15
"""Into how many pieces a message between two ranks can be cut, where the backend is gloo: each has
a tag."""
NO_SHARD = "no_shard"
UNSHARED = 0
"""The pool of slots with one user each."""
ALIGN = 64
"""Elements: parameters and shards start at multiples of this. Keeps 128-byte alignment in bf16, and
makes a fused CPU AdamW bit-equal for any chunking (its SIMD tail rounds differently)."""


@dataclass(frozen=True)
class Kind:
    """What all parameters of one bucket have in common, so that one update call and one message
    serve the bucket."""

    decay: bool
    copies: int
    partial: bool
    tied: bool
    stage: int
    """Stages finish their microbatches at different times; a bucket belongs to one."""
    contributions: int
    trainable: bool
    adapter: bool

    @staticmethod
    def of(spec: ParamSpec) -> Kind:
        """The kind of bucket that a parameter belongs to."""
        return Kind(
            spec.decay,
            spec.copies,
            spec.partial,
            spec.tied,
            spec.stage,
            spec.contributions,
            spec.trainable,
            spec.adapter,
        )

    @property
    def needs_own_slot(self) -> bool:
        """Read or written all through a pass (norms of all layers, an embedding that is also the
        head), or too small to be gathered again and again (low-rank additions): never shares a
        slot."""
        return not self.decay or self.tied or self.contributions > 1 or self.adapter


@dataclass(frozen=True)
class Placement:
    """One parameter inside its bucket: elements ``[start, stop)`` of the bucket."""

    spec: ParamSpec
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """One message of the data-parallel collectives: whole parameters, contiguous, padded to equal
    shards."""

    index: int
    kind: Kind
    numel: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Segment:
    """The part of one parameter inside one shard: ``length`` elements from each of the three
    starts."""

    spec: ParamSpec
    in_param: int
    in_bucket: int
    in_shard: int
    length: int


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in the order in which backward completes them, each cut into ``shards`` equal
    shards."""

    buckets: tuple[Bucket, ...]
    shards: int
    forward_order: tuple[int, ...]
    """Bucket indices by first use in the forward pass: the order of updates and gathers."""
    unit_names: tuple[str, ...]
    unit_buckets: tuple[tuple[int, ...], ...]
    """For each unit, the buckets that hold its parameters."""
    parameter_slots: tuple[Slot, ...]
    """For each bucket, the buffer of its whole parameters."""
    gradient_slots: tuple[Slot, ...]
    """For each bucket, the buffer of its whole gradients. Frozen buckets have one that nobody
    allocates."""
    gathers_first: bool
    """Whether backward waits for a gather sooner than for room for gradients: with p slots for
    parameters the gather launched after a unit is needed p - 1 units later, and with g for
    gradients its reduction at the end of the g-th."""

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
            low = max(placed.start, own.start)
            high = min(placed.stop, own.stop)
            if low < high:
                yield Segment(placed.spec, low - placed.start, low, low - own.start, high - low)

    def rectangles(self, bucket: int, rank: int) -> Iterator[tuple[Rectangle, slice]]:
        """The shard as rectangles of HuggingFace tensors, each with its place in the shard."""
        for segment in self.segments(bucket, rank):
            for piece in rectangles(
                segment.spec, segment.in_param, segment.in_param + segment.length
            ):
                start = segment.in_shard + piece.start - segment.in_param
                yield piece, slice(start, start + piece.numel)

    def parameter_slot_numel(self) -> dict[Slot, int]:
        """Size of every parameter slot: the largest bucket that uses it."""
        return _largest(zip(self.parameter_slots, self.buckets, strict=True))

    def gradient_slot_numel(self) -> dict[Slot, int]:
        """Size of every gradient slot: the largest trainable bucket that uses it."""
        pairs = zip(self.gradient_slots, self.buckets, strict=True)
        return _largest((slot, bucket) for slot, bucket in pairs if bucket.kind.trainable)

    def stays_unsharded(self, bucket: int) -> bool:
        """Whether a bucket has its parameter slot to itself, so that one gather serves until its
        next update."""
        return bucket in self._stays_unsharded

    @cached_property
    def _stays_unsharded(self) -> frozenset[int]:
        users = Counter(self.parameter_slots)
        return frozenset(
            bucket for bucket, slot in enumerate(self.parameter_slots) if users[slot] == 1
        )

    def label(self, bucket: int) -> str:
        """A bucket for people: its number, its units and its parameters."""
        units = [
            name
            for name, buckets in zip(self.unit_names, self.unit_buckets, strict=True)
            if bucket in buckets
        ]
        names = [placed.spec.name for placed in self.buckets[bucket].placements]
        return f"bucket {bucket} of {_range(units)} ({_range(names)})"

    @property
    def numel(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(bucket.numel for bucket in self.buckets)


def _largest(users: Iterable[tuple[Slot, Bucket]]) -> dict[Slot, int]:
    sizes: dict[Slot, int] = {}
    for slot, bucket in users:
        sizes[slot] = max(sizes.get(slot, 0), bucket.numel)
    return sizes


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"


def align_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Slots:
    """How many buffers buckets that need them one after the other take turns in; None: every bucket
    has its own."""

    parameters: int | None = None
    gradients: int | None = None


def bucket_plan_by_size(
    units: Sequence[UnitSpec], *, shards: int, cap: int, slots: Slots
) -> BucketPlan:
    """Fill buckets of at most ``cap`` elements from the last layer to the first, one open bucket
    per kind.

    Backward completes buckets in this order, and the small remainder of a kind is the last message,
    not the first. A bucket may hold parameters of several units, so parameters cannot take
    turns."""
    assert slots.parameters is None
    reverse = [spec for unit in reversed(units) for spec in reversed(unit.params)]
    return _layout(units, _close(_fill(reverse, cap), reverse, shards), shards, slots, ends=None)


def bucket_plan_by_unit(units: Sequence[UnitSpec], *, shards: int, slots: Slots) -> BucketPlan:
    """One bucket per unit (one more for shared key/value heads, and for frozen beside trainable
    parameters). What lasts through a pass is small, or tied: one bucket per kind for all units."""
    reverse = [spec for unit in reversed(units) for spec in reversed(unit.params)]
    filled: dict[tuple[Kind, int], list[ParamSpec]] = {}
    for index, unit in reversed(list(enumerate(units))):
        for spec in reversed(unit.params):
            kind = Kind.of(spec)
            filled.setdefault((kind, -1 if kind.needs_own_slot else index), []).append(spec)
    ends = frozenset(spec.name for unit in units if not unit.is_block for spec in unit.params)
    return _layout(units, _close(filled.values(), reverse, shards), shards, slots, ends)


def _layout(
    units: Sequence[UnitSpec],
    closed: tuple[Bucket, ...],
    shards: int,
    slots: Slots,
    ends: frozenset[str] | None,
) -> BucketPlan:
    home = {placed.spec.name: bucket.index for bucket in closed for placed in bucket.placements}
    unit_buckets = tuple(
        tuple(dict.fromkeys(home[spec.name] for spec in unit.params)) for unit in units
    )
    forward = tuple(dict.fromkeys(bucket for unit in unit_buckets for bucket in unit))
    names = tuple(unit.name for unit in units)
    parameters, gradients = (
        _assign_slots(closed, count, ends) for count in (slots.parameters, slots.gradients)
    )
    gathers_first = slots.parameters is not None and slots.parameters <= (
        slots.gradients or len(closed)
    )
    return BucketPlan(
        closed, shards, forward, names, unit_buckets, parameters, gradients, gathers_first
    )


def _fill(specs: Iterable[ParamSpec], cap: int) -> list[list[ParamSpec]]:
    """Norms are not bound by the cap: all of a stage together are small, and one message serves
    them."""
    full: list[list[ParamSpec]] = []
    open_buckets: dict[Kind, list[ParamSpec]] = {}
    for spec in specs:
        kind = Kind.of(spec)
        bucket = open_buckets.get(kind)
        if bucket is None or (
            spec.decay and sum(other.numel for other in bucket) + spec.numel > cap
        ):
            bucket = open_buckets[kind] = []
            full.append(bucket)
        bucket.append(spec)
    return full


def _close(
    filled: Iterable[Sequence[ParamSpec]], reverse: Sequence[ParamSpec], shards: int
) -> tuple[Bucket, ...]:
    """Order the buckets by their last parameter in backward order: that is when each is
    complete."""
    rank = {spec.name: position for position, spec in enumerate(reverse)}
    filled = sorted(filled, key=lambda specs: max(rank[spec.name] for spec in specs))
    return tuple(_bucket(index, specs, shards) for index, specs in enumerate(filled))


def _bucket(index: int, specs: Sequence[ParamSpec], shards: int) -> Bucket:
    placements = []
    at = 0
    for spec in specs:
        placements.append(Placement(spec, at, at + spec.numel))
        at = align_up(at + spec.numel, ALIGN)
    return Bucket(index, Kind.of(specs[0]), align_up(at, shards * ALIGN), tuple(placements))


def _assign_slots(
    buckets: Sequence[Bucket], count: int | None, ends: frozenset[str] | None
) -> tuple[Slot, ...]:
    """Buckets of weight matrices take turns in ``count`` slots of their pool, in the order of their
    use. Embedding and head (``ends``) have a pool of their own, since a common size would waste
    memory on one of the two, and one slot less: the embedding is not read again in backward, so the
    head may follow it. Every other bucket has a slot to itself, as have buckets of shared key/value
    heads when a bucket may hold several layers: the last one stays open for long."""
    slots = []
    turns = Counter[int]()
    pools = dict[tuple[bool, ...], int]()
    for bucket in buckets:
        kind = bucket.kind
        end = ends is not None and bucket.placements[0].spec.name in ends
        if count is None or kind.needs_own_slot or (kind.copies > 1 and ends is None):
            slots.append((UNSHARED, bucket.index))
            continue
        pool = pools.setdefault((end, kind.copies > 1, kind.trainable), UNSHARED + 1 + len(pools))
        slots.append((pool, turns[pool] % max(1, count - end)))
        turns[pool] += 1
    return tuple(slots)


@dataclass(frozen=True)
class Strategy:
    """What a ``--data-parallel-sharding-strategy`` means, as the axes of the engine."""

    sharded: bool
    """Each data-parallel rank owns 1/dp of every bucket; otherwise all of it."""
    reduce_every_microbatch: bool
    by_unit: bool = False
    """One bucket per unit, gathered before its uses; otherwise buckets by size, gathered once per
    step."""


def strategy_named(name: str) -> Strategy:
    """The only place that knows the strategies by name."""
    return {
        NO_SHARD: Strategy(sharded=False, reduce_every_microbatch=False),
        "optim": Strategy(sharded=True, reduce_every_microbatch=False),
        "optim_grads": Strategy(sharded=True, reduce_every_microbatch=True),
        "optim_grads_params": Strategy(sharded=True, reduce_every_microbatch=True, by_unit=True),
    }[name]


BY_TRAFFIC = ("optim", "optim_grads", "optim_grads_params")
"""Sharding strategies by what they send in a step: parameters and gradients once; gradients once
per microbatch; both."""


def by_unit(parallel: ParallelConfig) -> bool:
    """Whether parameters are gathered before their uses, or may yet be (``auto``)."""
    name = parallel.data_parallel_sharding_strategy
    return name == AUTO or strategy_named(name).by_unit


def parameter_slots(parallel: ParallelConfig) -> int | None:
    """Block-sized parameter slots of a resolved configuration; None: all.

    With pipeline stages the default is all: each of m microbatches would gather everything twice,
    in a pipeline that waits."""
    chosen = parallel.param_slots
    stages = parallel.pipeline_model_parallel_size
    if (
        not strategy_named(parallel.data_parallel_sharding_strategy).by_unit
        or chosen == "all"
        or (chosen == "default" and stages > 1)
    ):
        return None
    return 2 if chosen == "default" else int(chosen)


def shard_count(parallel: ParallelConfig, dp: int) -> int:
    """Into how many shards a bucket is cut. ``dp``: data-parallel ranks, context-parallel ones
    included."""
    name = parallel.data_parallel_sharding_strategy
    # Process groups are made before ``auto`` is decided, by the memory of all processes; it always
    # shards.
    if name != AUTO and not strategy_named(name).sharded:
        return 1
    return parallel.data_parallel_shard_size or dp


def rank_bucket_plan(config: Config, *, dp: int, tp_rank: int = 0, rank: int = 0) -> BucketPlan:
    """The layout of one pipeline rank (all its stages) on one tensor-parallel rank of a resolved
    configuration.

    ``dp``: data-parallel ranks, context-parallel ones included."""
    parallel = config.parallel
    strategy = strategy_named(parallel.data_parallel_sharding_strategy)
    shards = shard_count(parallel, dp)
    units = [unit for stage in rank_units(config, rank=rank, tp_rank=tp_rank) for unit in stage]
    slots = Slots(
        parameter_slots(parallel), parallel.grad_slots if strategy.reduce_every_microbatch else None
    )
    if strategy.by_unit:
        return bucket_plan_by_unit(units, shards=shards, slots=slots)
    return bucket_plan_by_size(units, shards=shards, cap=parallel.reduce_bucket_size, slots=slots)
