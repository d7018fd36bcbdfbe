"""The buckets of a user's model, and the pools of slots that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace

from megatron_llama.engine.options import EngineOptions
from megatron_llama.engine.plan.buckets import (
    OWN_SLOT_POOL,
    Bucket,
    BucketKind,
    BucketPlan,
    Slot,
    assemble_bucket_plan,
    fill_buckets,
    in_backward_order,
    shared_slots,
    strategy_named,
)
from megatron_llama.engine.plan.specs import ParamSpec, UnitSpec


def module_bucket_plan(
    units: Sequence[UnitSpec],
    options: EngineOptions,
    *,
    shards: int,
    kept: Collection[str] = (),
    alternatives: Collection[str] = (),
) -> BucketPlan:
    """Return the bucket plan of a user's model. ``units`` are in the order in which its modules
    are registered.

    Where parameters are gathered before each access there is one bucket for each unit and kind, and
    units share slots with their like (``_pools``). Elsewhere buckets are filled by size, and only
    gradient slots are shared. These always have slots of their own: resident parameters, and those
    that several units share, because their gradient is complete only when the last unit has
    written. Parameters in no unit (``is_root_part``) have their own parameter slots, because it is
    unknown when they are read; their gradients share slots among themselves (``_root_pools``).
    ``kept`` are parameters in units that stay whole until their update: they have their own
    parameter slots, too. ``alternatives`` are parameters in units whose gradients are complete when
    the backward pass of the unit ends: where gradients share slots those of a unit have one
    bucket."""
    slots = shared_slots(options)
    gathers_units = strategy_named(options.strategy).by_unit
    # With buckets by size a unit may have more of them than there are slots.
    end_with_unit = () if gathers_units or slots.gradients is None else frozenset(alternatives)
    users: dict[str, tuple[int, ...]] = {}
    for index, unit in enumerate(units):
        for spec in unit.params:
            users[spec.name] = (*users.get(spec.name, ()), index)
    # A shared parameter stands where forward first reads it: there backward completes it.
    reverse = [
        spec
        for index, unit in reversed(list(enumerate(units)))
        for spec in reversed(unit.params)
        if users[spec.name][0] == index
    ]
    apart: set[str] = set()
    """Parameters in buckets that share no parameter slot."""
    at_root: set[str] = set()
    """Those of them that are in no unit, and in a bucket that shares a gradient slot."""
    together: dict[tuple[BucketKind, tuple[int, ...]], list[ParamSpec]] = {}
    """Parameters that may be in one bucket, by kind and the units that read them."""
    for spec in reverse:
        kind = BucketKind.of(spec)
        numbers = users[spec.name]
        shared = len(numbers) > 1
        if shared or kind.needs_own_slot or units[numbers[0]].is_root_part:
            apart.add(spec.name)
            if not shared and not kind.needs_own_slot:
                at_root.add(spec.name)
        by_unit = gathers_units or (
            slots.gradients is not None and (spec.name in apart or spec.name in end_with_unit)
        )
        if not shared and (kind.needs_own_slot or not by_unit):
            numbers = ()
        together.setdefault((kind, numbers), []).append(spec)
    largest = options.largest_message(shards)
    closed = in_backward_order(
        [
            specs
            for (_, numbers), all_specs in together.items()
            for specs in ([all_specs] if numbers else fill_buckets(all_specs, largest))
        ],
        reverse,
        shards,
    )
    pools = _pools(
        units,
        [None if b.placements[0].spec.name in apart else b for b in closed],
        users,
        end_with_unit,
    )
    parameters = _slots_in_pools(
        [
            OWN_SLOT_POOL if bucket.placements[0].spec.name in kept else pool
            for bucket, pool in zip(closed, pools, strict=True)
        ],
        slots.parameters,
    )
    roots = _root_pools(
        [b.kind if b.placements[0].spec.name in at_root else None for b in closed],
        1 + max(pools, default=OWN_SLOT_POOL),
    )
    # As the trainer's embedding and head: the head is reduced long before the embedding is written.
    # A model without units needs as many slots for its parts as units do.
    few = {pool for pool in roots if roots.count(pool) <= 2}
    gradients = _slots_in_pools(
        [root or pool for root, pool in zip(roots, pools, strict=True)], slots.gradients, few
    )
    # A unit waits for its vectors when it begins; its linear layers wait for their matrices when
    # they are called. Many modules register norms last: gathered in that order, they would keep
    # the first unit waiting for all of its matrices.
    in_order = [
        replace(unit, params=tuple(sorted(unit.params, key=lambda spec: not spec.resident)))
        for unit in units
    ]
    return assemble_bucket_plan(in_order, closed, shards, slots, parameters, gradients)


def _root_pools(kinds: Sequence[BucketKind | None], first: int) -> list[int]:
    """Return the pool of gradient slots of each bucket of what is in no unit, one for each kind;
    OWN_SLOT_POOL for other buckets, whose kind is None. ``first`` is the number of the first."""
    pools: dict[BucketKind, int] = {}
    for kind in kinds:
        if kind is not None:
            pools.setdefault(kind, first + len(pools))
    return [OWN_SLOT_POOL if kind is None else pools[kind] for kind in kinds]


def _pools(
    units: Sequence[UnitSpec],
    buckets: Sequence[Bucket | None],
    users: Mapping[str, Sequence[int]],
    end_with_unit: Container[str],
) -> list[int]:
    """Return the pool of slots of each bucket of a user's model; OWN_SLOT_POOL for None. ``users``
    has the units of each parameter; ``end_with_unit`` names those whose buckets are complete at the
    end of their unit, among others that are complete when they are full.

    A pool is for units of similar size: the largest unit of a class is at least half as large as
    the largest one of the pool, because slots as large as an encoder's layer would be wasted on a
    small decoder. It is for one depth of nesting, because a unit is read again after those inside
    it, and for one kind and one moment of completion, because a unit may have a bucket of each."""
    largest: dict[tuple[BucketKind, int, bool, str], int] = {}
    keys: list[tuple[BucketKind, int, bool, str] | None] = []
    for bucket in buckets:
        if bucket is None:
            keys.append(None)
            continue
        name = bucket.placements[0].spec.name
        unit = units[users[name][0]]
        key = bucket.kind, len(unit.inside), name in end_with_unit, unit.module_class
        largest[key] = max(largest.get(key, 0), bucket.numel)
        keys.append(key)
    pools: dict[tuple[BucketKind, int, bool, str], int] = {}
    heads: list[tuple[BucketKind, int, bool, int]] = []
    """Kind, depth, moment and largest bucket of each pool so far."""
    # The largest first: it makes the pool, and the others see whether they are like it.
    for key in sorted(largest, key=lambda key: -largest[key]):
        size = largest[key]
        for number, (*alike, pool_size) in enumerate(heads):
            if [*key[:3]] == alike and 2 * size >= pool_size:
                pools[key] = OWN_SLOT_POOL + 1 + number
                break
        else:
            heads.append((*key[:3], size))
            pools[key] = OWN_SLOT_POOL + len(heads)
    return [OWN_SLOT_POOL if key is None else pools[key] for key in keys]


def _slots_in_pools(
    pools: Sequence[int], count: int | None, few: Container[int] = ()
) -> tuple[Slot, ...]:
    """Return the slot of each bucket, given its pool. The buckets of a pool take its ``count``
    slots in turn, one slot fewer in the pools ``few``; None: each bucket has its own."""
    users = Counter[int]()
    slots = []
    for bucket, pool in enumerate(pools):
        if count is None or pool == OWN_SLOT_POOL:
            slots.append((OWN_SLOT_POOL, bucket))
        else:
            slots.append((pool, users[pool] % max(1, count - (pool in few))))
            users[pool] += 1
    return tuple(slots)
