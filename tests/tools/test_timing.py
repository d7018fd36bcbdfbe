"""Bubbles and memory of the schedules are those of the papers, and the clock keeps the rules of the runtime."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from megatron_llama.schedule import Action, Costs, Op, Report, Schedule, forward_only, placement_of, schedule_named, simulate, validate

RANKS = range(1, 9)


def report(name: str, ranks: int, microbatches: int, virtual: int = 1) -> Report:
    return validate(schedule_named(name, ranks=ranks, microbatches=microbatches, virtual=virtual))


def near(value: Fraction) -> object:
    return pytest.approx(float(value), rel=1e-12)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_without_virtual_stages(name: str, p: int) -> None:
    for m in range(1, 17):
        found = report(name, p, m)
        assert found.bubble_fraction == near(Fraction(p - 1, m + p - 1))
        assert found.bubble_per_rank == pytest.approx([found.bubble_fraction] * p)
        assert found.makespan == 3 * (m + p - 1)
        held = [m] * p if name == "gpipe" else [min(p - rank, m) for rank in range(p)]
        assert list(found.peak_in_flight) == held


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(v: int, p: int) -> None:
    for m in range(p, 5 * p, p):
        found = report("interleaved", p, m, v)
        assert found.bubble_fraction == near(Fraction(p - 1, v * m + p - 1))
        held = [Fraction(min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v), v) for rank in range(p)]
        assert found.peak_in_flight == pytest.approx([float(value) for value in held])


@pytest.mark.few(4)
@pytest.mark.parametrize("p", RANKS)
def test_zb_h1_has_a_third_of_the_bubble_in_the_memory_of_1f1b(p: int) -> None:
    for m in range(1, 3 * p + 3):
        found = report("zb-h1", p, m)
        if m >= p:
            assert found.makespan == 3 * m + p - 1
            assert found.bubble_fraction == near(Fraction(p - 1, 3 * m + p - 1))
        assert found.makespan <= report("1f1b", p, m).makespan
        assert max(found.peak_in_flight) <= max(report("1f1b", p, m).peak_in_flight)


@pytest.mark.few(4)
@pytest.mark.parametrize("p", RANKS)
def test_zb_v_never_waits_once_begun_in_the_memory_of_1f1b(p: int) -> None:
    for m in range(1, 4 * p + 3):
        found = report("zb-v", p, m)
        if m >= 2 * p - 1:
            assert found.stalled_per_rank == (0,) * p
            assert found.makespan == 3 * m + (p - 1) / 2
            assert found.bubble_fraction == near(Fraction(p - 1, 6 * m + p - 1))
        assert found.makespan <= report("1f1b", p, m).makespan
        assert max(found.peak_in_flight) <= max(report("1f1b", p, m).peak_in_flight)


def test_the_numbers_of_four_ranks_and_eight_microbatches() -> None:
    assert [report(name, 4, 8).makespan for name in ("1f1b", "zb-h1", "zb-v")] == [33, 27, 25.5]
    assert report("interleaved", 4, 8, 2).makespan == 28.5


@pytest.mark.parametrize("p", RANKS)
def test_evaluation_streams(p: int) -> None:
    for m in range(1, 3 * p + 1):
        assert validate(forward_only(tuple(range(p)), m)).makespan == m + p - 1
        assert validate(forward_only(placement_of("zb-v", p, 2), m)).makespan == m + p - 1
    for m in range(p, 4 * p, p):
        assert validate(forward_only(placement_of("interleaved", p, 3), m)).makespan == near(m + Fraction(p - 1, 3))
    assert validate(forward_only(tuple(range(p)), 4)).peak_in_flight == (0,) * p


def times(schedule: Schedule, costs: Costs, rank: int) -> list[tuple[str, float, float]]:
    return [(f"{one.action.op.value} {one.action.microbatch}", one.start, one.end) for one in simulate(schedule, costs).ranks[rank]]


def test_the_clock_by_hand() -> None:
    """Two ranks, two microbatches, a forward of 2, an input gradient of 3, a weight gradient of 5."""
    schedule = schedule_named("1f1b", ranks=2, microbatches=2)
    costs = Costs(forward=2, backward_input=3, backward_weight=5)
    assert times(schedule, costs, 1) == [("forward 0", 2, 4), ("backward 0", 4, 12), ("forward 1", 12, 14), ("backward 1", 14, 22)]
    assert times(schedule, costs, 0) == [("forward 0", 0, 2), ("forward 1", 2, 4), ("backward 0", 12, 20), ("backward 1", 22, 30)]
    timeline = simulate(schedule, costs)
    assert (timeline.makespan, timeline.busy(0), timeline.stalled(0), timeline.stalled(1)) == (30, 20, 10, 0)


def test_a_split_backward_sends_before_its_weight_gradient() -> None:
    schedule = schedule_named("zb-h1", ranks=2, microbatches=1)
    costs = Costs(forward=2, backward_input=3, backward_weight=5)
    assert times(schedule, costs, 1) == [("forward 0", 2, 4), ("backward_input 0", 4, 7), ("backward_weight 0", 7, 12)]
    assert times(schedule, costs, 0) == [("forward 0", 0, 2), ("backward_input 0", 7, 10), ("backward_weight 0", 10, 15)]


def test_a_send_waits_until_the_previous_message_is_taken() -> None:
    """Rank 1 posts the receive of microbatch 1 only after its first backward pass: rank 0 cannot send microbatch 2 before."""
    base = schedule_named("gpipe", ranks=2, microbatches=4)
    receiver = list(schedule_named("1f1b", ranks=2, microbatches=4).ranks[1])
    late = Action(Op.RECV_FORWARD, 1, 1)
    receiver.remove(late)
    receiver.insert(receiver.index(Action(Op.FORWARD, 1, 1)), late)
    schedule = replace(base, ranks=(base.ranks[0], tuple(receiver)))
    assert [start for _, start, _ in times(schedule, Costs(), 0)[:4]] == [0, 1, 2, 4]
