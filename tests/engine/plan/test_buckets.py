"""Properties of the bucket plan, over random models and layouts."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from megatron_llama.config.schema import ModelConfig, ParallelConfig
from megatron_llama.engine.options import EngineOptions
from megatron_llama.engine.plan.buckets import ALIGN, OWN_SLOT_POOL, BucketKind, BucketPlan, Slots, bucket_plan_by_size, bucket_plan_by_unit
from megatron_llama.engine.plan.specs import UnitSpec
from megatron_llama.model.plan.params import Partition, hf_shapes, split_layers, stage_units
from megatron_llama.pipeline.plan.run_engine import parameter_slots
from torch import Tensor

from tests.model.test_params import even
from tests.over_cases import over_cases


class Case:
    """One random model, spread over a random grid."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.tp, self.pp, self.dp = (draw.choice((1, 2, 3, 4)), draw.choice((1, 2, 3)), draw.choice((1, 2, 3)))
        kv = draw.choice((1, self.tp, self.tp, 2 * self.tp, max(1, self.tp // 2)))
        kv = kv if self.tp % kv == 0 or kv % self.tp == 0 else self.tp
        stages = self.pp * draw.choice((1, 1, 2))
        straight = tuple(stage % self.pp for stage in range(stages))
        there_and_back = (*range(self.pp), *reversed(range(self.pp)))
        placement = there_and_back if stages > self.pp and draw.random() < 0.5 else straight
        self.model = ModelConfig(
            vocab_size=draw.randint(5, 400),
            hidden_size=draw.choice((8, 20, 36, 64)),
            intermediate_size=self.tp * draw.randint(3, 50),
            num_hidden_layers=stages * draw.choice((1, 2, 3)),
            num_attention_heads=max(kv, self.tp) * draw.choice((1, 2)),
            num_key_value_heads=kv,
            head_dim=draw.choice((2, 6, 8)),
            tie_word_embeddings=draw.random() < 0.5,
            make_vocab_size_divisible_by=draw.choice((1, 8, 128)),
        )
        self.partition = Partition(split_layers(self.model.num_hidden_layers, stages), placement)
        self.sequence_parallel = draw.random() < 0.5
        self.cap = draw.choice((1, 500, 5_000, 50_000, 10**9))
        gradients = draw.choice((None, 2, 3))
        self.by_unit = draw.random() < 0.4
        self.slots = Slots(draw.choice((None, 1, 2, 3)) if self.by_unit else None, gradients)

    def units(self, tp_rank: int, rank: int) -> tuple[UnitSpec, ...]:
        options = {"tp": self.tp, "tp_rank": tp_rank, "sequence_parallel": self.sequence_parallel}
        stages = self.partition.stages_of(rank)
        return tuple(unit for stage in stages for unit in stage_units(self.model, self.partition, stage, **options))

    def plan(self, tp_rank: int, rank: int) -> BucketPlan:
        if self.by_unit:
            return bucket_plan_by_unit(self.units(tp_rank, rank), shards=self.dp, slots=self.slots)
        return bucket_plan_by_size(self.units(tp_rank, rank), shards=self.dp, cap=self.cap, slots=self.slots)

    def all(self) -> list[tuple[tuple[UnitSpec, ...], BucketPlan]]:
        places = itertools.product(range(self.tp), range(self.pp))
        return [(self.units(*place), self.plan(*place)) for place in places]


CASES = [Case(seed) for seed in range(60)]
IDS = [str(seed) for seed in range(60)]


def over_all(test: Callable[[Case], None]) -> Callable[[], None]:
    """One test over all cases."""
    return over_cases(pytest.mark.parametrize("case", CASES, ids=IDS)(test))


def test_the_cases_cover_what_they_should() -> None:
    assert {case.dp for case in CASES} == {1, 2, 3} and {case.tp * case.pp for case in CASES} >= {1, 2, 3, 4, 6, 9}
    assert {case.model.tie_word_embeddings for case in CASES if case.pp > 1} == {True, False}
    tied = [case.partition for case in CASES if case.model.tie_word_embeddings and case.pp > 1]
    assert {partition.first_and_last_share_rank for partition in tied} == {True, False}
    assert {case.partition.stages // case.pp for case in CASES} == {1, 2}
    assert {case.tp // case.model.num_key_value_heads for case in CASES} >= {0, 1, 2, 4}
    kinds = {bucket.kind for case in CASES for bucket in case.plan(0, 0).buckets}
    assert {(kind.copies > 1, kind.partial_grad) for kind in kinds} == {(False, False), (True, False), (True, True)}
    assert {len(case.plan(0, 0).buckets) > 5 for case in CASES} == {True, False}


@over_all
def test_every_element_is_in_exactly_one_shard(case: Case) -> None:
    for units, plan in case.all():
        seen = {spec.name: torch.zeros(spec.numel, dtype=torch.int64) for unit in units for spec in unit.params}
        for bucket, rank in itertools.product(plan.buckets, range(plan.shards)):
            own = plan.shard(bucket.index, rank)
            assert own.stop - own.start == plan.shard_numel(bucket.index)
            for segment in plan.segments(bucket.index, rank):
                seen[segment.spec.name][segment.in_param : segment.in_param + segment.length] += 1
                placed = next(p for p in bucket.placements if p.spec is segment.spec)
                assert segment.in_bucket - placed.start == segment.in_param
                assert segment.in_shard + own.start == segment.in_bucket
                assert segment.in_shard + segment.length <= own.stop - own.start
        assert all(bool((count == 1).all()) for count in seen.values())


@over_all
def test_starts_are_aligned_and_padding_is_small(case: Case) -> None:
    for _, plan in case.all():
        assert plan.numel == sum(plan.shard_numel(bucket.index) * plan.shards for bucket in plan.buckets)
        for bucket in plan.buckets:
            assert bucket.numel == plan.shard_numel(bucket.index) * plan.shards
            assert plan.shard_numel(bucket.index) % ALIGN == 0
            assert all(placed.start % ALIGN == 0 for placed in bucket.placements)
            edges = [edge for placed in bucket.placements for edge in (placed.start, placed.stop)]
            assert edges == sorted(edges) and edges[-1] <= bucket.numel
            used = sum(placed.spec.numel for placed in bucket.placements)
            assert bucket.numel - used < ALIGN * (len(bucket.placements) + plan.shards)


@over_all
def test_buckets_are_homogeneous_and_capped(case: Case) -> None:
    for _, plan in case.all():
        for bucket in plan.buckets:
            specs = [placed.spec for placed in bucket.placements]
            assert {BucketKind.of(spec) for spec in specs} == {bucket.kind}
            if bucket.kind.decay and not case.by_unit:
                assert len(specs) == 1 or sum(spec.numel for spec in specs) <= case.cap
        norms = [bucket.kind.stage for bucket in plan.buckets if not bucket.kind.decay]
        assert len(norms) == len(set(norms)), "one message serves all norms of a stage"


@over_all
def test_caps_are_used(case: Case) -> None:
    """Two neighbours of one kind would not have fitted into one bucket."""
    for _, plan in case.all() if not case.by_unit else ():
        for kind in {bucket.kind for bucket in plan.buckets}:
            same = [[placed.spec.numel for placed in bucket.placements] for bucket in plan.buckets if bucket.kind == kind]
            assert all(sum(one) + other[0] > case.cap for one, other in itertools.pairwise(same))


def backward_writes(units: tuple[UnitSpec, ...]) -> list[str]:
    """Parameters in the order in which backward writes them; an embedding that is also the head comes first and last."""
    order = [spec.name for unit in reversed(units) for spec in reversed(unit.params)]
    shared = [spec.name for unit in units for spec in unit.params if spec.contributions == 2]
    return shared + order


@over_all
def test_backward_completes_buckets_in_order_and_never_overwrites_a_slot(case: Case) -> None:
    for units, plan in case.all():
        bucket_of = {placed.spec.name: bucket.index for bucket in plan.buckets for placed in bucket.placements}
        missing = [Counter({placed.spec.name: placed.spec.contributions for placed in b.placements}) for b in plan.buckets]
        completed: list[int] = []
        user: dict[tuple[int, int], int] = {}
        for name in backward_writes(units):
            bucket = bucket_of[name]
            previous = user.setdefault(plan.gradient_slots[bucket], bucket)
            assert previous == bucket or previous in completed, f"bucket {bucket} overwrites {previous}, which is not reduced yet"
            user[plan.gradient_slots[bucket]] = bucket
            missing[bucket][name] -= 1
            if not +missing[bucket]:
                completed.append(bucket)
        assert completed == [bucket.index for bucket in plan.buckets]


@over_all
def test_forward_order_and_unit_buckets(case: Case) -> None:
    for units, plan in case.all():
        bucket_of = {placed.spec.name: bucket.index for bucket in plan.buckets for placed in bucket.placements}
        assert len(plan.unit_buckets) == len(units)
        for unit, buckets in zip(units, plan.unit_buckets, strict=True):
            assert set(buckets) == {bucket_of[spec.name] for spec in unit.params}
        assert list(plan.forward_order) == list(dict.fromkeys(bucket_of[spec.name] for unit in units for spec in unit.params))
        assert sorted(plan.forward_order) == [bucket.index for bucket in plan.buckets]


@over_all
def test_slots_hold_their_largest_bucket(case: Case) -> None:
    for _, plan in case.all():
        accesses = [
            (plan.parameter_slots, plan.parameter_slot_numel(), case.slots.parameters),
            (plan.gradient_slots, plan.gradient_slot_numel(), case.slots.gradients),
        ]
        for slots, sizes, count in accesses:
            users = {slot: [b.numel for b, used in zip(plan.buckets, slots, strict=True) if used == slot] for slot in slots}
            assert sizes == {slot: max(numels) for slot, numels in users.items()}
            pools = Counter(pool for pool, _ in users if pool != OWN_SLOT_POOL)
            assert all(size <= (count or 0) for size in pools.values())
            if count is None:
                assert len(users) == len(plan.buckets)


@over_all
def test_by_unit_every_block_has_a_bucket_and_its_neighbour_another_slot(case: Case) -> None:
    for units, plan in case.all() if case.by_unit else ():
        shared = [[b for b in buckets if not plan.has_own_slot(b)] for buckets in plan.unit_buckets]
        for unit, buckets in zip(units, shared, strict=True):
            slots = [plan.parameter_slots[b] for b in buckets]
            assert len(set(slots)) == len(slots)
            names = {placed.spec.name for b in buckets for placed in plan.buckets[b].placements}
            assert names <= {spec.name for spec in unit.params}, "a bucket that takes turns belongs to one unit"
        blocks = [buckets for unit, buckets in zip(units, shared, strict=True) if unit.is_block]
        if case.slots.parameters not in (None, 1):
            for one, other in itertools.pairwise(blocks):
                assert not {plan.parameter_slots[b] for b in one} & {plan.parameter_slots[b] for b in other}


def test_embedding_and_head_share_a_pool_of_their_own() -> None:
    model = ModelConfig(**(vars(CASES[0].model) | {"tie_word_embeddings": False, "num_hidden_layers": 4}))
    units = stage_units(model, even(4, 1), 0)
    for count, ends in ((1, 1), (2, 1), (3, 2), (8, 2)):
        plan = bucket_plan_by_unit(units, shards=3, slots=Slots(count, count))
        for slots in (plan.parameter_slots, plan.gradient_slots):
            embedding, head = (slots[plan.unit_buckets[unit][-1]] for unit in (0, -1))
            block = slots[plan.unit_buckets[1][-1]]
            assert embedding[0] == head[0] != block[0] and len({embedding, head}) == ends
    sizes = bucket_plan_by_unit(units, shards=3, slots=Slots(2, 2)).parameter_slot_numel()
    assert len([slot for slot in sizes if slot[0] != OWN_SLOT_POOL]) == 3, "two for blocks, one for the ends"


@over_all
def test_rectangles_of_all_ranks_cover_every_huggingface_element_once(case: Case) -> None:
    seen: dict[str, Tensor] = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in hf_shapes(case.model).items()}
    for tp_rank, pp_rank in itertools.product(range(case.tp), range(case.pp)):
        plan = case.plan(tp_rank, pp_rank)
        for bucket, rank in itertools.product(plan.buckets, range(case.dp)):
            duplicate = tp_rank % bucket.kind.copies > 0 or (bucket.kind.tied and pp_rank > 0)
            filled = torch.zeros(plan.shard_numel(bucket.index), dtype=torch.int64)
            for rectangle, place in plan.rectangles(bucket.index, rank):
                filled[place] += 1
                block = tuple(slice(o, o + s) for o, s in zip(rectangle.offset, rectangle.size, strict=True))
                assert seen[rectangle.name][block].shape == rectangle.size
                assert rectangle.shape == tuple(seen[rectangle.name].shape)
                seen[rectangle.name][block] += 0 if duplicate else 1
            assert int(filled.max()) <= 1
            slices = sum(len(segment.spec.slices) for segment in plan.segments(bucket.index, rank))
            assert len(list(plan.rectangles(bucket.index, rank))) <= 3 * slices
    assert all(bool((count == 1).all()) for count in seen.values())


def test_both_copies_of_a_tied_weight_have_one_layout() -> None:
    model = CASES[0].model
    model = ModelConfig(**(vars(model) | {"tie_word_embeddings": True, "num_hidden_layers": 4}))
    ends = [bucket_plan_by_size(stage_units(model, even(4, 2), s), shards=3, cap=5_000, slots=Slots(None, 2)) for s in (0, 1)]
    first, last = ([b for b in plan.buckets if b.kind.tied] for plan in ends)
    assert len(first) == len(last) == 1
    assert [(p.start, p.stop, p.spec.slices) for p in first[0].placements] == [(p.start, p.stop, p.spec.slices) for p in last[0].placements]
    assert first[0].numel == last[0].numel


@pytest.mark.parametrize(
    ("strategy", "slots", "stages", "expected"),
    [
        ("optim", "2", 1, None),
        ("optim_grads", "default", 1, None),
        ("optim_grads_params", "default", 1, 2),
        ("optim_grads_params", "default", 2, None),
        ("optim_grads_params", "2", 2, 2),
        ("optim_grads_params", "5", 1, 5),
        ("optim_grads_params", "all", 1, None),
    ],
)
def test_parameter_slots(strategy: str, slots: str, stages: int, expected: int | None) -> None:
    parallel = ParallelConfig(data_parallel_sharding_strategy=strategy, param_slots=slots, pipeline_model_parallel_size=stages)
    assert parameter_slots(parallel) == expected


@pytest.mark.parametrize(("given", "shards", "largest"), [(0, 8, 40_000_000), (0, 1024, 1_024_000_000), (5000, 1024, 5000)])
def test_the_default_message_grows_with_the_ranks(given: int, shards: int, largest: int) -> None:
    assert EngineOptions(bucket_size=given).largest_message(shards) == largest


def test_labels_name_unit_and_parameters() -> None:
    plan = bucket_plan_by_unit(stage_units(CASES[0].model, even(CASES[0].model.num_hidden_layers, 1), 0), shards=2, slots=Slots(2, 2))
    (bucket,) = [b for b in plan.unit_buckets[1] if not plan.has_own_slot(b)]
    names = "model.layers.0.mlp.down_proj.weight ... model.layers.0.self_attn.qkv_proj.weight"
    assert plan.label(bucket) == f"bucket {bucket} of layers.0 ({names})"
