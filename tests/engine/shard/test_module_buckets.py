"""Bucket plans of any model: what shares a bucket, a slot and a pool, and what never does."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from megatron_llama.engine.options import EngineOptions
from megatron_llama.engine.plan.buckets import ALIGN, OWN_SLOT_POOL, BucketPlan
from megatron_llama.engine.plan.prefetch import PrefetchPlan
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec, UnitSpec
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.engine.shard.module_buckets import module_bucket_plan
from megatron_llama.pipeline.plan.traffic import count_gathers

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def param(name: str, *shape: int, group: int = 0, trainable: bool = True) -> ParamSpec:
    part = HFSlice(name, shape, 0, shape[0] if shape else 1)
    small = len(shape) < 2
    return ParamSpec(name, shape, (part,), decay=not small, group=group, trainable=trainable, resident=small)


def layer(name: str, size: int, module_class: str = "Layer", inside: tuple[int, ...] = ()) -> UnitSpec:
    params = (param(f"{name}.norm", size), param(f"{name}.weight", size, size))
    return UnitSpec(name, params, module_class=module_class, inside=inside)


def root(name: str, *params: ParamSpec) -> UnitSpec:
    return UnitSpec(name, params, is_root_part=True)


def plan(
    units: list[UnitSpec], strategy: str = "optim_grads_params", *, slots: int | None = 2, cap: int = 10**9, shards: int = 2
) -> BucketPlan:
    options = EngineOptions(strategy=strategy, param_slots=slots, grad_slots=slots or 1, bucket_size=cap, find_unused=slots is None)
    return module_bucket_plan(units, options, shards=shards)


def bucket_of(found: BucketPlan, name: str) -> int:
    [bucket] = [bucket.index for bucket in found.buckets if any(placed.spec.name == name for placed in bucket.placements)]
    return bucket


def pools(found: BucketPlan, *names: str) -> list[int]:
    return [found.parameter_slots[bucket_of(found, name)][0] for name in names]


def test_layers_take_turns_and_what_is_in_no_unit_has_its_own_slots() -> None:
    units = [
        root("embed", param("embed", 100, 8)),
        *(layer(f"layers.{number}", 8) for number in range(5)),
        root("norm", param("norm", 8)),
        root("head", param("head", 100, 8)),
    ]
    found = plan(units)
    slots = [found.parameter_slots[bucket_of(found, f"layers.{number}.weight")] for number in reversed(range(5))]
    assert [number for _, number in slots] == [0, 1, 0, 1, 0] and len({pool for pool, _ in slots}) == 1
    assert found.gradient_slots[bucket_of(found, "embed")] == found.gradient_slots[bucket_of(found, "head")]
    ends = {bucket_of(found, "embed"), bucket_of(found, "head")}
    others = [b for b in range(len(found.buckets)) if b not in ends]
    assert all(found.gradient_slots[b] == found.parameter_slots[b] for b in others)
    assert not {found.gradient_slots[b] for b in others} & {found.gradient_slots[b] for b in ends}
    norms = found.buckets[bucket_of(found, "norm")]
    assert [placed.spec.name for placed in norms.placements] == ["norm", *(f"layers.{n}.norm" for n in reversed(range(5)))]
    for name in ("embed", "head", "norm"):
        assert found.has_own_slot(bucket_of(found, name))
    assert found.buckets[bucket_of(found, "head")].index == 0 and bucket_of(found, "embed") == len(found.buckets) - 1
    assert [unit for unit, _ in zip(found.unit_names, found.unit_buckets, strict=True)] == [unit.name for unit in units]


def test_vectors_are_gathered_before_the_matrices_of_the_first_unit_that_reads_them() -> None:
    """A unit begins when its vectors are there, and many modules register their norms last."""
    layers = [UnitSpec(f"{n}", (param(f"{n}.first", 8, 8), param(f"{n}.second", 8, 8), param(f"{n}.norm", 8))) for n in range(2)]
    for strategy in STRATEGIES:
        found = plan([root("embed", param("embed", 100, 8)), *layers], strategy, cap=64)
        names = [[placed.spec.name for placed in found.buckets[bucket].placements] for bucket in found.forward_order]
        assert names[:2] == [["embed"], ["1.norm", "0.norm"]]
        assert all(buckets[0] == bucket_of(found, "0.norm") for buckets in found.unit_buckets[1:])
        if strategy != "optim_grads_params":
            assert names[2:] == [["0.first"], ["0.second"], ["1.first"], ["1.second"]]


def test_a_shared_parameter_is_in_one_bucket_that_all_its_readers_need() -> None:
    """As the embedding that is also the head. It stands where forward first reads it: there backward completes it."""
    shared = param("embed", 100, 8)
    for strategy in STRATEGIES:
        found = plan([root("embed", shared), layer("a", 8), layer("b", 8), root("head", shared)], strategy)
        bucket = bucket_of(found, "embed")
        assert [placed.spec.name for placed in found.buckets[bucket].placements] == ["embed"]
        assert [bucket in buckets for buckets in found.unit_buckets] == [True, False, False, True]
        assert bucket == len(found.buckets) - 1 and found.forward_order[0] == bucket
        assert Counter(found.gradient_slots)[found.gradient_slots[bucket]] == 1 and found.has_own_slot(bucket)


def test_units_of_similar_size_share_a_pool() -> None:
    """The largest unit of a class counts, and half of the largest class is similar."""
    sizes = {"Large": 64, "Half": 46, "Small": 32, "Tiny": 31}  # squared: 4096, 2116, 1024, 961
    units = [layer(f"{name}.{n}", size, name) for name, size in sizes.items() for n in range(2)]
    # A small unit of a large class stays with its class.
    units.append(layer("Large.small", 8, "Large"))
    found = plan(units)
    large, half, small, tiny, odd = pools(found, "Large.0.weight", "Half.0.weight", "Small.1.weight", "Tiny.1.weight", "Large.small.weight")
    assert large == half == odd != small == tiny
    assert OWN_SLOT_POOL not in (large, small)
    sizes_of_slots = found.parameter_slot_numel()
    assert sizes_of_slots[large, 0] == 4096 and sizes_of_slots[small, 0] <= 1024 + 2 * ALIGN


def test_without_units_the_parts_of_a_model_take_turns() -> None:
    """Gradients only: parameters stay. Three parts or more have all the slots, so that a reduction overlaps the next part."""
    found = plan([root(f"{n}", param(f"{n}.weight", 8, 8), param(f"{n}.bias", 8)) for n in range(4)])
    assert all(found.has_own_slot(bucket) for bucket in range(len(found.buckets)))
    slots = [found.gradient_slots[bucket_of(found, f"{n}.weight")] for n in (3, 2, 1, 0)]
    assert slots[0] == slots[2] != slots[1] == slots[3]


def test_nested_units_keep_what_is_around_them() -> None:
    """A block's attention is a unit of its own: while it runs, the block's other weights stay."""
    units = []
    for number in range(3):
        units.append(layer(f"block.{number}", 16, "Block"))
        units.append(layer(f"block.{number}.attn", 16, "Attention", inside=(len(units) - 1,)))
        units.append(layer(f"block.{number}.attn.core", 16, "Core", inside=(len(units) - 2, len(units) - 1)))
    found = plan(units, slots=1)
    depths = [
        pools(found, f"block.{number}.weight", f"block.{number}.attn.weight", f"block.{number}.attn.core.weight") for number in range(3)
    ]
    assert depths[0] == depths[1] == depths[2] and len(set(depths[0])) == 3
    for number in range(3):
        outer, middle, inner = (set(found.unit_buckets[3 * number + depth]) for depth in range(3))
        assert outer < middle < inner
    prefetch = PrefetchPlan(
        slots=found.parameter_slots, sizes=[1] * len(found.buckets), unit_buckets=found.unit_buckets, prefetch_bytes=None
    )
    forward = [WeightAccess(unit, backward=False) for unit in range(9)]
    backward = [WeightAccess(unit, backward=True) for unit in reversed(range(9))]
    counts = count_gathers(prefetch, [*forward, *backward])
    norms = bucket_of(found, "block.0.norm")
    assert counts[norms] == 1
    # With a slot for each depth all but the last block are gathered twice.
    assert all(counts[bucket] == (1 if "block.2" in found.label(bucket) else 2) for bucket in range(len(found.buckets)) if bucket != norms)


def test_kinds_of_one_unit_never_meet_in_a_slot() -> None:
    """Groups, frozen weights and weights without decay each have buckets of their own, in pools of their own."""
    units = [
        UnitSpec(
            f"layers.{n}",
            (param(f"{n}.a", 8, 8), param(f"{n}.b", 8, 8, group=1), param(f"{n}.c", 8, 8, trainable=False), param(f"{n}.d", 2, 2, 2, 2)),
            module_class="Layer",
        )
        for n in range(4)
    ]
    found = plan(units, slots=1)
    assert [len(buckets) for buckets in found.unit_buckets] == [3] * 4
    assert len(set(pools(found, "0.a", "0.b", "0.c"))) == 3 and pools(found, "0.a") == pools(found, "0.d")
    assert {bucket.kind.group for bucket in found.buckets} == {0, 1}
    assert len(found.gradient_slot_numel()) == 2, "what is frozen has no gradient"


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_by_size_up_to_the_cap(strategy: str) -> None:
    """Backward fills a bucket with the head and two layers. Where gradient slots are shared the ends are apart, and layers take turns."""
    units = [root("embed", param("embed", 100, 8)), *(layer(f"{n}", 8) for n in range(6)), root("head", param("head", 100, 8))]
    shared = strategy == "optim_grads"
    found = plan(units, strategy, cap=2 * 64 if shared else 2 * 64 + 800)
    assert len(set(found.parameter_slots)) == len(found.buckets), "only gradients share slots"
    held = [[placed.spec.name.removesuffix(".weight") for placed in bucket.placements] for bucket in found.buckets if bucket.kind.decay]
    if not shared:
        assert held == [["head", "5", "4"], ["3", "2", "1", "0"], ["embed"]]
        assert len(set(found.gradient_slots)) == len(found.buckets)
        return
    assert held == [["head"], ["5", "4"], ["3", "2"], ["1", "0"], ["embed"]]
    users = Counter(found.gradient_slots)
    assert [users[found.gradient_slots[bucket_of(found, name)]] for name in ("head", "5.weight", "3.weight", "embed")] == [2, 2, 1, 2]


def test_random_models_lose_nothing() -> None:
    """Every parameter is in one bucket, every unit's buckets are in slots of their own, and a bucket is what it says."""
    for seed in range(300):
        draw = random.Random(seed)
        units: list[UnitSpec] = []
        pool = [param(f"shared.{n}", *(draw.randint(0, 5) for _ in range(draw.randint(0, 4)))) for n in range(3)]
        for number in range(draw.randint(1, 8)):
            own = tuple(
                param(
                    f"{number}.{n}",
                    *(draw.randint(0, 9) for _ in range(draw.randint(0, 5))),
                    group=draw.randint(0, 2),
                    trainable=draw.random() < 0.8,
                )
                for n in range(draw.randint(0, 5))
            )
            shared = tuple(spec for spec in pool if draw.random() < 0.2)
            around = [n for n, unit in enumerate(units) if not unit.is_root_part]
            outer = draw.choice(around) if around and draw.random() < 0.4 else None
            inside = () if outer is None else (*units[outer].inside, outer)
            units.append(
                UnitSpec(
                    f"unit.{number}",
                    own + shared,
                    is_root_part=not inside and draw.random() < 0.3,
                    inside=inside,
                    module_class=draw.choice("ABC"),
                )
            )
        strategy, slots = draw.choice(STRATEGIES), draw.choice((None, 1, 2, 3))
        shards = draw.choice((1, 2, 4))
        found = plan(units, strategy, slots=slots, cap=draw.choice((1, 50, 10**6)), shards=shards)
        names = Counter(placed.spec.name for bucket in found.buckets for placed in bucket.placements)
        assert names == Counter({spec.name for unit in units for spec in unit.params})
        PrefetchPlan(slots=found.parameter_slots, sizes=[1] * len(found.buckets), unit_buckets=found.unit_buckets, prefetch_bytes=None)
        for unit, buckets in zip(units, found.unit_buckets, strict=True):
            needed = [bucket_of(found, spec.name) for number in unit.inside for spec in units[number].params]
            assert set(buckets) == {*needed, *(bucket_of(found, spec.name) for spec in unit.params)}
            trained = [found.gradient_slots[bucket] for bucket in buckets if found.buckets[bucket].kind.trainable]
            assert len(set(trained)) == len(trained) or strategy == "optim_grads"
        for bucket in found.buckets:
            assert bucket.numel > 0 and bucket.numel % (shards * ALIGN) == 0
            kinds = {(spec.group, spec.trainable, spec.decay, spec.resident) for spec in (placed.spec for placed in bucket.placements)}
            assert len(kinds) == 1
            covered = sum(segment.length for rank in range(shards) for segment in found.segments(bucket.index, rank))
            assert covered == sum(placed.spec.numel for placed in bucket.placements)
