"""The place of every parameter element: buckets, shards, segments, slots. Integers only.

The engine moves data with this table, checkpoints reshard with it, the planner reads it. It is the
only copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_llama.engine.options import EngineOptions
from megatron_llama.engine.plan.specs import ParamSpec, Rectangle, UnitSpec, rectangles

Slot = tuple[int, int]
"""(pool, number in the pool)."""
AUTO = "auto"
"""Stands for a strategy that ``train/setup/auto.py`` chooses before buckets are planned."""
MAX_PIECES = 1 << 15
"""The most pieces of one message over gloo: each needs a tag."""
NO_SHARD = "no_shard"
OWN_SLOT_POOL = 0
"""The pool of slots that have one user each."""
ALIGN = 64
"""Parameters and shards start at multiples of this many elements. That keeps 128-byte alignment in
bf16, and makes torch's fused CPU AdamW bit-equal however the elements are cut into calls: its SIMD
tail rounds differently, and this way there is no tail."""


@dataclass(frozen=True)
class BucketKind:
    """The common properties of all parameters of one bucket: one update call and one message serve
    the bucket. The fields are those of ``ParamSpec``."""

    decay: bool
    copies: int
    partial_grad: bool
    tied: bool
    stage: int
    """Stages finish their microbatches at different times, so a bucket belongs to one of them."""
    contributions: int
    trainable: bool
    adapter: bool
    group: int = 0
    resident: bool = False
    muon: bool = False
    ep: int = 1
    dtype: str = ""
    reduces_in: str = ""

    @staticmethod
    def of(spec: ParamSpec) -> BucketKind:
        """Return the kind of bucket that a parameter belongs to."""
        return BucketKind(*(getattr(spec, name) for name in BucketKind.__dataclass_fields__))

    @property
    def needs_own_slot(self) -> bool:
        """Whether a bucket of this kind must not share a slot: it is read or written all through a
        pass (norms of all layers, an embedding that is also the head), or too small to be gathered
        again and again (low-rank additions)."""
        return self.resident or self.tied or self.contributions > 1 or self.adapter

    def shards(self, ranks: int) -> int:
        """Return the shards of a bucket of this kind where others have ``ranks``: only every
        ``ep``-th rank holds the same experts."""
        return max(1, ranks // self.ep)


@dataclass(frozen=True)
class PlacedParam:
    """One parameter inside its bucket: the elements ``[start, stop)`` of the bucket."""

    spec: ParamSpec
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """One message of the data-parallel collectives: whole parameters, contiguous, padded to equal
    shards."""

    index: int
    kind: BucketKind
    numel: int
    placements: tuple[PlacedParam, ...]


@dataclass(frozen=True)
class Segment:
    """The part of one parameter inside one shard: ``length`` elements from each of the three
    starts."""

    spec: ParamSpec
    in_param: int
    in_bucket: int
    in_shard: int
    length: int

    def blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the rectangles of the parameter, seen as a matrix, that the segment consists of: at
        most the tail of a row, whole rows, and the head of a row. Each is (start in the shard,
        rows, first column, columns)."""
        width = self.spec.width
        low = self.in_param
        stop = self.in_param + self.length
        while low < stop:
            col = low % width
            # At the start of a row all whole rows that are left; else the rest of this row.
            whole = (stop - low) // width if col == 0 else 0
            cols = width if whole else min(width - col, stop - low)
            rows = max(whole, 1)
            yield self.in_shard + low - self.in_param, rows, col, cols
            low += rows * cols


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in the order in which backward completes them, each cut into equal shards."""

    buckets: tuple[Bucket, ...]
    shards: int
    """Shards of a bucket; of experts there may be fewer (``shard_count``)."""
    forward_order: tuple[int, ...]
    """Bucket indices by first use in the forward pass: the order of updates and gathers."""
    unit_names: tuple[str, ...]
    unit_buckets: tuple[tuple[int, ...], ...]
    """For each unit, the buckets that it needs: those of the units around it, and those that hold
    its own parameters."""
    parameter_slots: tuple[Slot, ...]
    """For each bucket, the slot of its whole parameters."""
    gradient_slots: tuple[Slot, ...]
    """For each bucket, the slot of its whole gradients. That of a frozen bucket is never
    allocated."""
    gathers_first: bool
    """Whether gathers are issued before reductions (``gathers_before_reductions``)."""

    def shard_count(self, bucket: int) -> int:
        """Return the shards of a bucket."""
        return self.buckets[bucket].kind.shards(self.shards)

    def shard_numel(self, bucket: int) -> int:
        """Return the elements of one shard of a bucket."""
        return self.buckets[bucket].numel // self.shard_count(bucket)

    def shard(self, bucket: int, rank: int) -> slice:
        """Return the elements of a bucket that a rank owns."""
        size = self.shard_numel(bucket)
        return slice(rank * size, (rank + 1) * size)

    def segments(self, bucket: int, rank: int) -> Iterator[Segment]:
        """Yield the parts of parameters inside one shard, in order. Padding lies between them."""
        shard = self.shard(bucket, rank)
        for placed in self.buckets[bucket].placements:
            low = max(placed.start, shard.start)
            high = min(placed.stop, shard.stop)
            if low < high:
                yield Segment(placed.spec, low - placed.start, low, low - shard.start, high - low)

    def rectangles(self, bucket: int, rank: int) -> Iterator[tuple[Rectangle, slice]]:
        """Yield the shard as rectangles of HuggingFace tensors, each with its place in the
        shard."""
        for segment in self.segments(bucket, rank):
            for piece in rectangles(
                segment.spec, segment.in_param, segment.in_param + segment.length
            ):
                start = segment.in_shard + piece.start - segment.in_param
                yield piece, slice(start, start + piece.numel)

    def parameter_slot_numel(self) -> dict[Slot, int]:
        """Return the elements of every parameter slot: those of the largest bucket that uses it."""
        return _largest(zip(self.parameter_slots, self.buckets, strict=True))

    def gradient_slot_numel(self) -> dict[Slot, int]:
        """Return the elements of every gradient slot: those of the largest trainable bucket that
        uses it."""
        pairs = zip(self.gradient_slots, self.buckets, strict=True)
        return _largest((slot, bucket) for slot, bucket in pairs if bucket.kind.trainable)

    def has_own_slot(self, bucket: int) -> bool:
        """Whether a bucket has its parameter slot to itself, so that one gather serves until its
        next update."""
        return bucket in self._alone_in_slot

    @cached_property
    def _alone_in_slot(self) -> frozenset[int]:
        users = Counter(self.parameter_slots)
        return frozenset(
            bucket for bucket, slot in enumerate(self.parameter_slots) if users[slot] == 1
        )

    def label(self, bucket: int) -> str:
        """Return a bucket's name for messages: its number, its units and its parameters."""
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
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Strategy:
    """The meaning of a ``--data-parallel-sharding-strategy`` for the engine."""

    sharded: bool
    """Whether each data-parallel rank owns 1/dp of every bucket; otherwise it owns all of it."""
    reduce_every_microbatch: bool
    by_unit: bool = False
    """Whether there is one bucket for each unit, gathered before it is accessed; otherwise buckets
    are filled by size and gathered once in a step."""


def strategy_named(name: str) -> Strategy:
    """Return the meaning of a strategy. Only this function knows strategies by name."""
    return {
        NO_SHARD: Strategy(sharded=False, reduce_every_microbatch=False),
        "optim": Strategy(sharded=True, reduce_every_microbatch=False),
        "optim_grads": Strategy(sharded=True, reduce_every_microbatch=True),
        "optim_grads_params": Strategy(sharded=True, reduce_every_microbatch=True, by_unit=True),
    }[name]


BY_TRAFFIC = ("optim", "optim_grads", "optim_grads_params")
"""Sharding strategies by their messages in a step: parameters and gradients once; gradients once
per microbatch; both."""


@dataclass(frozen=True)
class Slots:
    """The number of slots that buckets of matrices share; None: every bucket has its own."""

    parameters: int | None = None
    gradients: int | None = None


def bucket_plan_by_size(
    units: Sequence[UnitSpec], *, shards: int, cap: int, slots: Slots
) -> BucketPlan:
    """Fill buckets of at most ``cap`` elements from the last layer to the first, one open bucket
    for each kind.

    Backward completes buckets in this order, and the small remainder of a kind is the last message
    and not the first. A bucket may hold parameters of several units, so parameter slots cannot be
    shared."""
    assert slots.parameters is None
    reverse = [spec for unit in reversed(units) for spec in reversed(unit.params)]
    closed = in_backward_order(fill_buckets(reverse, cap), reverse, shards)
    parameters, gradients = (
        _assign_slots(closed, count, ends=None) for count in (slots.parameters, slots.gradients)
    )
    return assemble_bucket_plan(units, closed, shards, slots, parameters, gradients)


def bucket_plan_by_unit(units: Sequence[UnitSpec], *, shards: int, slots: Slots) -> BucketPlan:
    """Make one bucket for each unit, and one more where the unit has shared key/value heads, both
    frozen and trainable parameters, or several groups. Kinds that need a slot of their own have one
    bucket for all units: they are small, or tied."""
    reverse = [spec for unit in reversed(units) for spec in reversed(unit.params)]
    filled: dict[tuple[BucketKind, int], list[ParamSpec]] = {}
    for index, unit in reversed(list(enumerate(units))):
        for spec in reversed(unit.params):
            kind = BucketKind.of(spec)
            # Norms of all units together: a message of one norm alone would be pure latency.
            filled.setdefault((kind, -1 if kind.needs_own_slot else index), []).append(spec)
    ends = frozenset(spec.name for unit in units if not unit.is_block for spec in unit.params)
    closed = in_backward_order(filled.values(), reverse, shards)
    parameters, gradients = (
        _assign_slots(closed, count, ends) for count in (slots.parameters, slots.gradients)
    )
    return assemble_bucket_plan(units, closed, shards, slots, parameters, gradients)


def stage_bucket_plan(
    units: Sequence[UnitSpec], options: EngineOptions, *, shards: int
) -> BucketPlan:
    """Return the bucket plan of a rank's pipeline stages. ``units`` are in forward order."""
    slots = shared_slots(options)
    if strategy_named(options.strategy).by_unit:
        return bucket_plan_by_unit(units, shards=shards, slots=slots)
    cap = options.largest_message(shards)
    return bucket_plan_by_size(units, shards=shards, cap=cap, slots=slots)


def shared_slots(options: EngineOptions) -> Slots:
    """Return the numbers of slots that buckets share by a strategy."""
    strategy = strategy_named(options.strategy)
    return Slots(
        options.param_slots if strategy.by_unit else None,
        options.grad_slots if reduces_every_microbatch(options) else None,
    )


def reduces_every_microbatch(options: EngineOptions) -> bool:
    """Whether gradients are reduced after every microbatch, and shards accumulate. They are not
    where ranks may leave out different parameters: only the end of a step shows which."""
    strategy = strategy_named(options.strategy)
    return strategy.reduce_every_microbatch and not options.find_unused


def assemble_bucket_plan(
    units: Sequence[UnitSpec],
    closed: tuple[Bucket, ...],
    shards: int,
    slots: Slots,
    parameters: tuple[Slot, ...],
    gradients: tuple[Slot, ...],
) -> BucketPlan:
    """Make the plan of buckets that are ``closed``, in the order of backward, and whose slots are
    chosen. ``units`` are in forward order."""
    bucket_of = {
        placed.spec.name: bucket.index for bucket in closed for placed in bucket.placements
    }
    own = [tuple(dict.fromkeys(bucket_of[spec.name] for spec in unit.params)) for unit in units]
    # The units around a unit read their weights again when it is done. It also needs these buckets,
    # so no other bucket takes their slots meanwhile.
    unit_buckets = tuple(
        tuple(dict.fromkeys(bucket for number in (*unit.inside, index) for bucket in own[number]))
        for index, unit in enumerate(units)
    )
    forward = tuple(dict.fromkeys(bucket for unit in unit_buckets for bucket in unit))
    names = tuple(unit.name for unit in units)
    gathers_first = gathers_before_reductions(slots.parameters, slots.gradients or len(closed))
    return BucketPlan(
        closed, shards, forward, names, unit_buckets, parameters, gradients, gathers_first
    )


def gathers_before_reductions(parameter_slots: int | None, gradient_slots: int) -> bool:
    """Whether backward issues the gathers of a unit before the reductions of the unit before it.

    The message that is needed sooner goes first, because messages of one connection go out in the
    order in which they are issued. With p parameter slots, the gather that is launched after a unit
    is needed p - 1 units later; with g gradient slots, its reduction has to end at the end of the
    g-th unit. So gathers go first where p <= g. Without shared parameter slots (None) backward
    launches no gathers."""
    return parameter_slots is not None and parameter_slots <= gradient_slots


def fill_buckets(specs: Iterable[ParamSpec], cap: int) -> list[list[ParamSpec]]:
    """Return the parameters of each bucket. The cap does not hold for norms: all norms of a stage
    are small together, and one message serves them."""
    full: list[list[ParamSpec]] = []
    open_buckets: dict[BucketKind, list[ParamSpec]] = {}
    # Sums are carried along: thousands of norms share one bucket.
    numels: dict[BucketKind, int] = {}
    for spec in specs:
        kind = BucketKind.of(spec)
        bucket = open_buckets.get(kind)
        if bucket is None or (not spec.resident and numels[kind] + spec.numel > cap):
            bucket = open_buckets[kind] = []
            numels[kind] = 0
            full.append(bucket)
        bucket.append(spec)
        numels[kind] += spec.numel
    return full


def in_backward_order(
    filled: Iterable[Sequence[ParamSpec]], reverse: Sequence[ParamSpec], shards: int
) -> tuple[Bucket, ...]:
    """Make buckets, ordered by their last parameter in the order of backward: then each is
    complete."""
    backward_position = {spec.name: position for position, spec in enumerate(reverse)}
    filled = sorted(filled, key=lambda specs: max(backward_position[spec.name] for spec in specs))
    return tuple(_bucket(index, specs, shards) for index, specs in enumerate(filled))


def _bucket(index: int, specs: Sequence[ParamSpec], shards: int) -> Bucket:
    placements = []
    at = 0
    for spec in specs:
        placements.append(PlacedParam(spec, at, at + spec.numel))
        at = align_up(at + spec.numel, ALIGN)
    kind = BucketKind.of(specs[0])
    # A bucket of only empty tensors still has a shard, of padding.
    numel = align_up(max(at, 1), kind.shards(shards) * ALIGN)
    return Bucket(index, kind, numel, tuple(placements))


def _assign_slots(
    buckets: Sequence[Bucket], count: int | None, ends: frozenset[str] | None
) -> tuple[Slot, ...]:
    """Return the slot of each bucket. ``count`` is the number of slots in a pool; ``ends`` names
    the parameters of embedding and head, and is None where buckets are filled by size.

    Buckets of weight matrices share the slots of their pool, in the order of their accesses.
    Embedding and head have a pool of their own, because a common slot size would waste memory in
    one of the two pools, and it has one slot less: the embedding is not read again in backward, so
    the head may follow it. Groups, and experts that ranks divide among them, have pools of their
    own: a unit needs the buckets of all its groups at once. Every other bucket has a slot to
    itself. So do buckets of shared key/value heads if a bucket may hold several layers, because the
    last of them stays open for long."""
    slots = []
    users = Counter[int]()
    pools = dict[tuple[bool | int, ...], int]()
    for bucket in buckets:
        kind = bucket.kind
        end = ends is not None and bucket.placements[0].spec.name in ends
        if count is None or kind.needs_own_slot or (kind.copies > 1 and ends is None):
            slots.append((OWN_SLOT_POOL, bucket.index))
            continue
        pool = pools.setdefault(
            (end, kind.copies > 1, kind.trainable, kind.group, kind.ep),
            OWN_SLOT_POOL + 1 + len(pools),
        )
        slots.append((pool, users[pool] % max(1, count - end)))
        users[pool] += 1
    return tuple(slots)
