"""The simulator behind the bounds of the overlap bench, against cases that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_llama.pipeline.plan.traffic import step_traffic
from megatron_llama.schedule import schedule_named
from tools.overlap.bound import FRAME_FACTOR, Pass, Plan, link_seconds, plan_of, step_seconds
from tools.overlap.catalogue import MODES, Mode, compute_seconds, configuration, half_block_seconds, minimum_bytes, parameters

HOSTS = 4


def plan(passes: list[Pass], *, reduce: list[float], gather: list[float], clip: bool = True) -> Plan:
    """Every bucket has slots of its own."""
    own = tuple((0, bucket) for bucket in range(len(reduce)))
    return Plan(tuple(passes), tuple(reduce), tuple(gather), (0.0,) * len(own), own, own, clip)


def chain(*, forward: list[float], backward: list[float]) -> list[Pass]:
    """Layers that each have a bucket: forward and backward times, first layer first."""
    layers = range(len(forward))
    return [Pass(forward[i], (i,)) for i in layers] + [Pass(backward[i], (i,), (i,)) for i in reversed(layers)]


ONE = plan(chain(forward=[1], backward=[2]), reduce=[5], gather=[7])
TWO = plan(chain(forward=[1, 1], backward=[2, 2]), reduce=[1, 1], gather=[1, 1])
SLOW = plan(chain(forward=[1, 1], backward=[10, 1]), reduce=[3, 3], gather=[3, 3])
REDUCED = plan(chain(forward=[1, 1], backward=[2, 2]), reduce=[5, 5], gather=[0, 0])
SHARED = replace(REDUCED, gradient_slots=((1, 0), (1, 0)))
LATER = replace(SHARED, passes=(*SHARED.passes, Pass(3, (0,))))  # somebody waits for A's write
BY_HAND: dict[str, tuple[Plan, int, float]] = {
    "one bucket hides nothing": (ONE, 1, 7 + 1 + 2 + 5),
    "nor in later steps": (ONE, 6, 15),
    "nor without clipping": (replace(ONE, clip=False), 6, 15),
    # gather A, [forward A | gather B], forward B, backward B, [backward A | reduce B], reduce A
    "two layers hide all but the ends": (TWO, 5, 1 + 1 + 1 + 2 + 2 + 1),
    # gathers 0..3..6, forward B at 6..7, backward B 7..8; reductions 8..11..14
    "a slow link sets the pace": (plan(chain(forward=[1, 1], backward=[1, 1]), reduce=[3, 3], gather=[3, 3]), 3, 14),
    # first step: gathers 0..3..6, forward B ends at 7, backward B at 8, A at 18, reductions 8..11 and 18..21.
    # then: B is gathered at 11..14 already, A at 21..24; forward 24..25..26, backward ..27..37, reduction of A ..40
    "clipping waits for the last reduction": (SLOW, 4, 21),
    "without it a gather goes before": (replace(SLOW, clip=False), 4, (21 + 3 * 19) / 4),
    "but not in the first step": (replace(SLOW, clip=False), 1, 21),
    # gather A 0..1, forward 1..2, gather B 2..3, forward 3..4, backward B 4..6, gather A again 6..7, backward 7..9, reduce A 9..10
    "layers that share a parameter slot are gathered again": (replace(TWO, parameter_slots=((1, 0), (1, 0))), 4, 10),
    # backward B ends at 4; its reduction takes until 9, and only then can A, computed at 6, write; reduce A ..14
    "layers that share a gradient slot wait for the reduction": (SHARED, 2, 4 + 5 + 5),
    "with slots of their own the link is as slow": (REDUCED, 2, 14),
    "slots of their own, and a pass behind": (replace(LATER, gradient_slots=REDUCED.gradient_slots), 1, 14),
    "a quick reduction lets the pass begin": (replace(LATER, reduce_seconds=(1, 5)), 1, 10),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_worked_out_by_hand(name: str) -> None:
    found, steps, seconds = BY_HAND[name]
    assert step_seconds(found, steps) == seconds


def test_the_link_is_busy_with_what_is_sent() -> None:
    assert link_seconds(ONE, 6) == 7 + 5 and link_seconds(replace(TWO, parameter_slots=((1, 0), (1, 0))), 4) == 3 + 2


def test_matrices_go_to_their_owners_in_the_order_in_which_they_are_read() -> None:
    # Buckets have the order of backward: bucket 1 is layer A, the first. Gathers A 0..1, B 1..2; forward A 1..2, B 2..3; backward B 3..5,
    # A 5..7; reductions B 5..6, A 7..8; exchange of A 8..9, its gather 9..10, forward 10..11 beside the exchange of B, gather of B 11..12.
    passes = [Pass(1, (1,)), Pass(1, (0,)), Pass(2, (0,), (0,)), Pass(2, (1,), (1,))]
    two = replace(plan(passes, reduce=[1, 1], gather=[1, 1]), exchange_seconds=(1.0, 1.0))
    assert 1 * step_seconds(two, 1) == 10
    assert 2 * step_seconds(two, 2) == 12 + 1 + 2 + 2 + 1 + 2


def test_a_plan_that_cannot_go_on_says_so() -> None:
    # both layers' weights are needed at once, but they share a slot
    stuck = replace(plan([Pass(1, (0, 1), (0, 1))], reduce=[1, 1], gather=[1, 1]), parameter_slots=((1, 0), (1, 0)))
    with pytest.raises(RuntimeError, match="stands still at pass 0 of 1"):
        step_seconds(stuck, 1)


def layers_of_equal_size(layers: int, *, comm: float, clip: bool) -> Plan:
    """One bucket per layer, compute 1 in all, both directions together ``comm``."""
    each = comm / 2 / layers
    passes = chain(forward=[1 / 3 / layers] * layers, backward=[2 / 3 / layers] * layers)
    return plan(passes, reduce=[each] * layers, gather=[each] * layers, clip=clip)


@pytest.mark.parametrize(("comm", "bound"), [(1.0, 2 / 3 + 1 / 12 + 1 / 2 + 1 / 18), (0.5, 2 / 3 + 1 / 24 + 1 / 24 + 1 / 3)])
def test_one_bucket_per_layer(comm: float, bound: float) -> None:
    # backward, the last bucket's reduction, all gathers (or the first and then forward), the last layer's forward
    assert step_seconds(layers_of_equal_size(6, comm=comm, clip=True), 8) == pytest.approx(bound)
    assert round(bound, 2) == {1.0: 1.31, 0.5: 1.08}[comm]


def test_the_model_has_the_parameters_that_its_buckets_hold() -> None:
    optim = plan_of(configuration(MODES[0], HOSTS), HOSTS, half_block=1.0, bits_per_second=8 * FRAME_FACTOR * (HOSTS - 1) / HOSTS)
    assert sum(optim.gather_seconds) == pytest.approx(4 * parameters())  # nothing of the model is padded
    assert link_seconds(optim, 2) * (HOSTS - 1) / HOSTS == pytest.approx(minimum_bytes(HOSTS))


@pytest.mark.parametrize(("rate", "bf16", "most"), [(400e6, False, 1.25), (800e6, False, 1.06), (400e6, True, 1.06)])
def test_bounds_of_the_real_buckets(rate: float, bf16: bool, most: float) -> None:
    mode = next(mode for mode in MODES if mode.bf16 is bf16 and mode.clip)
    found = plan_of(configuration(mode, HOSTS), HOSTS, half_block=half_block_seconds(HOSTS), bits_per_second=rate)
    ratio = step_seconds(found, 4) / compute_seconds(HOSTS)
    assert 1.0 < ratio <= most


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_simulated_link_carries_what_the_engine_plans_to_send(mode: Mode) -> None:
    config = configuration(mode, HOSTS)
    schedule = schedule_named("1f1b", ranks=1, microbatches=1, virtual=1)
    found = plan_of(config, HOSTS, half_block=half_block_seconds(HOSTS), bits_per_second=8 * FRAME_FACTOR)
    assert link_seconds(found, 4) == pytest.approx(step_traffic(config, schedule, dp=HOSTS).sent)
