"""Gathers: counted by formula, ahead by exact bytes. ``test_residency_model`` shows that they are safe."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from types import FrameType
from typing import Any

import pytest
from megatron_llama.engine.plan.buckets import Slot
from megatron_llama.engine.plan.prefetch import PrefetchPlan
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.model.plan.params import Partition, split_layers, stage_units
from megatron_llama.pipeline.plan.stage_accesses import unit_weight_accesses, weight_accesses_of
from megatron_llama.pipeline.plan.traffic import count_gathers
from megatron_llama.schedule import placement_of, schedule_named

from tests.over_cases import over_cases
from tests.pipeline.test_weight_access import MODEL

NAMES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]


def parse(text: str) -> tuple[WeightAccess, ...]:
    return tuple(WeightAccess(int(word[1:]), backward=word[0] == "B") for word in text.split())


def blocks(count: int, slots: int, *, limit: int | None = None) -> PrefetchPlan:
    """As many blocks of 10 bytes, one bucket each, in turn in so many slots."""
    places = [(0, block % slots) for block in range(count)]
    return PrefetchPlan(slots=places, sizes=[10] * count, unit_buckets=[(block,) for block in range(count)], prefetch_bytes=limit)


def plain(count: int, microbatches: int) -> tuple[WeightAccess, ...]:
    """Forward and backward of one microbatch after the other."""
    once = [
        *(WeightAccess(block, backward=False) for block in range(count)),
        *(WeightAccess(block, backward=True) for block in reversed(range(count))),
    ]
    return tuple(once * microbatches)


def walk(prefetch: PrefetchPlan, accesses: Sequence[WeightAccess]) -> list[tuple[int, ...]]:
    """What is gathered at the beginning and at each use."""
    return [prefetch.begin(accesses), *(prefetch.advance(access) for access in accesses)]


def changes(slots: Sequence[Slot], needs: Iterable[int]) -> int:
    """The fewest gathers of a list of needs, from empty slots."""
    held: dict[Slot, int] = {}
    count = 0
    for bucket in needs:
        count += held.get(slots[bucket]) != bucket
        held[slots[bucket]] = bucket
    return count


# Counts


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("limit", [None, 0, 10, 25])
def test_gathers_of_equal_blocks(microbatches: int, limit: int | None) -> None:
    """Each pass needs L blocks. N of them are left over wherever the walk turns: at the end of each forward pass, and at the
    end of each backward pass but the last, after which the weights change."""
    for count in range(1, 9):
        for slots in range(1, count + 1):
            turns = 2 * microbatches - 1
            found = count_gathers(blocks(count, slots, limit=limit), plain(count, microbatches))
            assert sum(found.values()) == 2 * count * microbatches - slots * turns


@pytest.mark.parametrize("steps", [2, 3, 10])
def test_steps_repeat_from_the_second(steps: int) -> None:
    assert count_gathers(blocks(5, 2), plain(5, 3), steps=steps) == count_gathers(blocks(5, 2), plain(5, 3))


def rank_case(name: str, virtual: int, rank: int, *, slots: int) -> tuple[PrefetchPlan, tuple[WeightAccess, ...]]:
    """A rank of a real pipeline: blocks share ``slots`` slots, embedding and head one; all norms are one bucket that stays unsharded."""
    ranks = 3
    partition = Partition(split_layers(12, ranks * virtual), placement_of(name, ranks, virtual))
    units = [stage_units(MODEL, partition, stage) for stage in partition.stages_of(rank)]
    names = [unit.name for stage in units for unit in stage]
    turns = {True: 0, False: 0}
    places: list[Slot] = [(9, 0)]
    for unit in names:
        block = unit.startswith("layers")
        places.append((int(block), turns[block] % (slots if block else 1)))
        turns[block] += 1
    buckets = [(bucket,) if unit == "embed_tokens" else (0, bucket) for bucket, unit in enumerate(names, start=1)]
    prefetch = PrefetchPlan(slots=places, sizes=[3] + [10] * len(names), unit_buckets=buckets, prefetch_bytes=None)
    actions = schedule_named(name, ranks=ranks, microbatches=6, virtual=virtual).ranks[rank]
    return prefetch, weight_accesses_of(actions, *unit_weight_accesses(units, partition, rank=rank))


@over_cases
@pytest.mark.parametrize("slots", [1, 2, 3, 12])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("name", "virtual"), NAMES)
def test_gathers_of_real_schedules(name: str, virtual: int, rank: int, slots: int) -> None:
    """As few as a fixed slot allows: one each time that the bucket changes. With all slots: one per bucket and step."""
    prefetch, accesses = rank_case(name, virtual, rank, slots=slots)
    needs = [bucket for access in accesses for bucket in prefetch.unit_buckets[access.unit]]
    found = count_gathers(prefetch, accesses)
    assert found.total() == changes(prefetch.slots, needs)
    assert found[0] == 1 and set(found) == set(needs)
    if slots == 12:
        assert {found[bucket] for bucket in found if prefetch.slots[bucket][0] == 1} == {1}


# Look-ahead


def test_looking_ahead_in_both_directions() -> None:
    """Four blocks in two slots. When a block is done its slot is filled again: while 1 runs forward, 2 takes the slot of 0."""
    prefetch = blocks(4, 2)
    assert walk(prefetch, plain(4, 1)) == [(0, 1), (), (2,), (3,), (), (), (1,), (0,), ()]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, [(0, 1, 2), (), (3,), (4,), (5,), (), ()]),
        (30, [(0, 1, 2), (), (3,), (4,), (5,), (), ()]),
        (29, [(0, 1), (2,), (3,), (4,), (5,), (), ()]),
        (20, [(0, 1), (2,), (3,), (4,), (5,), (), ()]),
        (19, [(0,), (1,), (2,), (3,), (4,), (5,), ()]),
        (10, [(0,), (1,), (2,), (3,), (4,), (5,), ()]),
        (1, [(0,), (1,), (2,), (3,), (4,), (5,), ()]),
        (0, [(), (0,), (1,), (2,), (3,), (4,), (5,)]),
    ],
)
def test_how_far_a_limit_lets_it_look(limit: int | None, expected: list[tuple[int, ...]]) -> None:
    """Six blocks of 10 bytes, three slots, forward only. A block larger than the limit goes when nothing else is ahead."""
    assert walk(blocks(6, 3, limit=limit), plain(6, 1)[:6]) == expected


# Lists, offers, refusals


def forget_all(prefetch: PrefetchPlan) -> None:
    """An update of everything."""
    for bucket in range(len(prefetch.slots)):
        prefetch.invalidate(bucket)


def test_frozen_buckets_are_gathered_once_where_they_may_stay() -> None:
    assert count_gathers(blocks(3, 3), plain(3, 2), frozen={0, 2}) == {1: 1}
    assert count_gathers(blocks(3, 1), plain(3, 1), frozen={0, 1, 2}) == {1: 2, 2: 1, 0: 1}


def test_slots_stay_filled_between_lists() -> None:
    prefetch = blocks(3, 3)
    evaluation = parse("F0 F1 F2")
    assert walk(prefetch, evaluation) == [(0, 1, 2), (), (), ()]
    assert walk(prefetch, plain(3, 1)) == [()] * 7
    forget_all(prefetch)
    assert [prefetch.occupant((0, slot)) for slot in range(3)] == [None] * 3
    assert walk(prefetch, evaluation) == [(0, 1, 2), (), (), ()]


def early_offers(prefetch: PrefetchPlan, accesses: Sequence[WeightAccess], alone: Sequence[int], due: Callable[[], bool]) -> list[object]:
    """Everything that is gathered in two steps in which ``alone`` are offered after their last use, in that order, each when it is
    ``due``; by who asked for it, since the two do not wait for each other."""
    needs = [(index, bucket) for index, access in enumerate(accesses) for bucket in prefetch.unit_buckets[access.unit]]
    last = {bucket: index for index, bucket in needs}
    gathered, answers = list[object](), list[object]()
    for _ in range(2):
        gathered.append(prefetch.begin(accesses))
        waiting = list[int]()
        for index, access in enumerate(accesses):
            gathered.append(prefetch.advance(access))
            waiting += [bucket for bucket in alone if last[bucket] == index]
            while waiting and (due() or index + 1 == len(accesses)):
                prefetch.invalidate(waiting[0])
                answers.append((waiting[0], prefetch.try_gather(waiting.pop(0))))
    return [gathered, answers]


@pytest.mark.parametrize(("name", "virtual"), NAMES)
def test_with_a_slot_of_its_own_a_bucket_may_be_offered_any_time_after_its_last_use(name: str, virtual: int) -> None:
    """In backward: so ranks may do it when a reduction is complete, each at another moment, also when other buckets share slots. (The
    embedding, bucket 1, is not read in backward.)"""
    draw, accepted = random.Random(name), 0
    for rank, slots, limit in product((0, 1, 2), (1, 2, 3), (None, 10, 30, 60)):
        shared, accesses = rank_case(name, virtual, rank, slots=slots)
        sizes = [draw.choice([3, 5, 10, 20]) for _ in shared.slots]
        alone = [bucket for bucket in range(2, len(sizes)) if draw.random() < 0.4]
        places = [(10, bucket) if bucket in alone else slot for bucket, slot in enumerate(shared.slots)]
        found = []
        for due in (lambda: True, lambda: draw.random() < 0.5, lambda: draw.random() < 0.2, lambda: False):
            prefetch = PrefetchPlan(slots=places, sizes=sizes, unit_buckets=shared.unit_buckets, prefetch_bytes=limit)
            found.append(early_offers(prefetch, accesses, alone, due))
        assert all(other == found[0] for other in found), (rank, slots, limit)
        accepted += str(found[0]).count("True")
    assert accepted > 20


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"unit 1: buckets \(1, 2\) meet in slots \[\(0, 1\)\]"):
        PrefetchPlan(slots=[(0, 0), (0, 1), (0, 1)], sizes=[1] * 3, unit_buckets=[(0, 1), (1, 2)], prefetch_bytes=None)
    prefetch, accesses = blocks(3, 3), plain(3, 1)
    with pytest.raises(RuntimeError, match="access 0 of 0: got F0, expected the end of the list"):
        prefetch.advance(accesses[0])
    prefetch.begin(accesses)
    prefetch.advance(accesses[0])
    with pytest.raises(RuntimeError, match="access 1 of 6: got B1, expected F1"):
        prefetch.advance(WeightAccess(1, backward=True))
    with pytest.raises(RuntimeError, match="a new list of accesses begins after 1 of 6 accesses: F1 is still to come"):
        prefetch.begin(accesses)
    with pytest.raises(RuntimeError, match="bucket 0 changes after 1 of 6 accesses: a later one still reads it"):
        prefetch.invalidate(0)
    for access in accesses[1:]:
        prefetch.advance(access)
    with pytest.raises(RuntimeError, match="access 6 of 6: got F0, expected the end of the list"):
        prefetch.advance(accesses[0])
    with pytest.raises(RuntimeError, match=r"bucket 2 is to be gathered while slot \(0, 2\) holds it"):
        prefetch.try_gather(2)
    prefetch.invalidate(2)
    assert prefetch.try_gather(2)


@pytest.mark.parametrize("slots", [2, 7, 20])
@pytest.mark.parametrize("limit", [None, 35])
def test_a_walk_takes_time_in_proportion_to_its_length(slots: int, limit: int | None) -> None:
    """Executed lines, not seconds: twice the microbatches, at most twice the lines."""

    def lines(microbatches: int) -> int:
        prefetch, accesses, count = blocks(20, slots, limit=limit), plain(20, microbatches), 0

        def trace(frame: FrameType, event: str, argument: object) -> Callable[[FrameType, str, object], Any]:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            walk(prefetch, accesses)
        finally:
            sys.settrace(before)
        return count

    assert lines(40) <= 2 * lines(20) <= 4 * lines(10)


# Accesses in no list


def test_a_walk_gathers_again_what_another_access_evicted() -> None:
    """Between forward and backward somebody evaluates: blocks 0 and 1 go where 2 and 3 were kept. Two gathers more, no other."""
    plain_walk = walk(blocks(4, 2), plain(4, 1))
    prefetch, accesses = blocks(4, 2), plain(4, 1)
    found = [prefetch.begin(accesses), *(prefetch.advance(access) for access in accesses[:4])]
    assert found == plain_walk[:5]
    assert [prefetch.access_unplanned(0, 1), prefetch.access_unplanned(1)] == [(0, 1), ()]
    rest = [prefetch.advance(access) for access in accesses[4:]]
    assert rest == [(3, 2), (1,), (0,), ()] and plain_walk[5:] == [(), (1,), (0,), ()]


def test_early_offers() -> None:
    """During backward, once everything that the rest needs is in place and the slot has been read for the last time."""
    prefetch, accesses = blocks(4, 2), plain(4, 1)
    walked = [prefetch.begin(accesses)]
    offers = {}
    for access in accesses:
        walked.append(prefetch.advance(access))
        if access.backward:
            prefetch.invalidate(access.unit)
            offers[access.unit] = prefetch.try_gather(access.unit)
    assert walked == [(0, 1), (), (2,), (3,), (), (), (1,), (0,), ()]
    assert offers == {3: False, 2: False, 1: True, 0: True}
    assert prefetch.begin(accesses) == ()
    everything = blocks(4, 4)
    everything.begin(accesses)
    for access in accesses:
        everything.advance(access)
        if access.backward:
            everything.invalidate(access.unit)
            assert everything.try_gather(access.unit), "it has its slot to itself: nothing is in its way"


def test_an_announced_unit_waits_for_the_slot_that_is_read() -> None:
    """One slot; and of two buckets the second is not gathered before the first, which has to wait."""
    assert blocks(2, 1).access_unplanned(0, 1) == (0,)
    places = [(0, 0), (0, 0), (1, 0)]
    prefetch = PrefetchPlan(slots=places, sizes=[1] * 3, unit_buckets=[(0,), (1, 2)], prefetch_bytes=None)
    assert prefetch.access_unplanned(0, 1) == (0,)
    assert prefetch.access_unplanned(1) == (1, 2)
