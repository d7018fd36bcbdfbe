"""Schedules are complete and cannot hang, and the proof refuses those that are not or could."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from megatron_llama.schedule import (
    Action,
    Op,
    Schedule,
    ScheduleError,
    connection_order,
    forward_only,
    placement_of,
    prove_first_uses,
    schedule_named,
    validate,
)

from tests.over_cases import over_cases

NAMES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]


def gpipe(ranks: int, microbatches: int) -> Schedule:
    return schedule_named("gpipe", ranks=ranks, microbatches=microbatches)


def eager(ranks: int, microbatches: int) -> Schedule:
    return schedule_named("1f1b", ranks=ranks, microbatches=microbatches)


def counts(name: str, ranks: int) -> list[int]:
    return [ranks, 2 * ranks, 5 * ranks] if name == "interleaved" else [1, 2, 3, ranks, 2 * ranks - 1, 2 * ranks, 3 * ranks + 1]


def passes(actions: tuple[Action, ...], *ops: Op) -> list[tuple[int, int]]:
    return [(action.stage, action.microbatch) for action in actions if action.op in ops]


@pytest.mark.parametrize(("name", "virtual"), NAMES)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_schedules_are_valid(name: str, virtual: int, ranks: int) -> None:
    placement = placement_of(name, ranks, virtual)
    assert [placement.count(rank) for rank in range(ranks)] == [virtual] * ranks
    for microbatches in counts(name, ranks):
        schedule = schedule_named(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
        assert (schedule.placement, schedule.stages, schedule.virtual) == (placement, ranks * virtual, virtual)
        for evaluated in (schedule, forward_only(placement, microbatches)):
            found = [a for actions in evaluated.ranks for a in actions if a.op in evaluated.passes]
            expected = itertools.product(evaluated.passes, range(ranks * virtual), range(microbatches))
            assert sorted((a.op.value, a.stage, a.microbatch) for a in found) == sorted((op.value, s, m) for op, s, m in expected)
            assert all(placement[a.stage] == rank for rank, actions in enumerate(evaluated.ranks) for a in actions)


@over_cases
@pytest.mark.parametrize("microbatches", [1, 3, 5, 8, 9])
@pytest.mark.parametrize("placement", [(0, 0), (0, 1, 2, 0, 1, 2), (0, 1, 2, 3) * 3, (0, 1, 1, 0), (1, 0), (0, 0, 1, 1)])
def test_evaluation_needs_no_multiple(placement: tuple[int, ...], microbatches: int) -> None:
    validate(forward_only(placement, microbatches))


@pytest.mark.parametrize(("name", "virtual"), NAMES)
def test_gradients_add_up_in_order_of_microbatches(name: str, virtual: int) -> None:
    """On every stage of every schedule, so that the sums are the same whatever the schedule."""
    for actions in schedule_named(name, ranks=4, microbatches=8, virtual=virtual).ranks:
        order = passes(actions, Op.BACKWARD, Op.BACKWARD_WEIGHT)
        for stage in {stage for stage, _ in order}:
            assert [microbatch for at, microbatch in order if at == stage] == list(range(8))


def test_the_bottom_of_a_v_needs_no_transfer() -> None:
    schedule = schedule_named("zb-v", ranks=2, microbatches=3)
    transfers = {(a.op, a.stage) for a in schedule.ranks[1] if a.op not in schedule.passes}
    assert transfers == {(Op.RECV_FORWARD, 1), (Op.SEND_BACKWARD, 1), (Op.SEND_FORWARD, 2), (Op.RECV_BACKWARD, 2)}
    assert all(a.op in schedule.passes for a in schedule_named("zb-v", ranks=1, microbatches=3).ranks[0])


def test_the_published_order_of_interleaved_1f1b() -> None:
    """Narayanan et al., 2021, figure 4, first and last of four devices, two chunks, eight microbatches: the start."""
    schedule = schedule_named("interleaved", ranks=4, microbatches=8, virtual=2)
    warm_up = [(0, 0), (0, 1), (0, 2), (0, 3), (4, 0), (4, 1), (4, 2), (4, 3), (0, 4), (0, 5)]
    assert passes(schedule.ranks[0], Op.FORWARD, Op.BACKWARD)[:15] == [*warm_up, (0, 6), (4, 0), (0, 7), (4, 1), (4, 4)]
    last = passes(schedule.ranks[3], Op.FORWARD, Op.BACKWARD)[:8]
    assert last == [(3, 0), (3, 1), (3, 2), (3, 3), (7, 0), (7, 0), (7, 1), (7, 1)]


def test_receives_are_posted_before_the_pass_that_hides_them() -> None:
    """In the steady state of 1F1B a stage waits for a message only after the pass before has been computed."""
    text = [f"{action.op.value} {action.microbatch}" for action in eager(2, 4).ranks[1]]
    assert text.index("recv_forward 1") < text.index("backward 0") < text.index("forward 1")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"name": "zigzag"}, ["--pipeline-schedule: got zigzag, expected one of gpipe, 1f1b, interleaved, zb-h1, zb-v"]),
        ({"ranks": 0}, ["--pipeline-model-parallel-size: got 0, expected 1 or more"]),
        ({"microbatches": 0}, ["number of microbatches", "global_batch_size / (micro_batch_size x dp)", "got 0, expected 1 or more"]),
        ({"virtual": 2}, ["--virtual-pipeline-model-parallel-size: got 2, expected 1 chunk per rank with --pipeline-schedule 1f1b"]),
        ({"name": "interleaved"}, ["--virtual-pipeline-model-parallel-size: got 1, expected 2 or more", "give 2"]),
        ({"name": "interleaved", "virtual": 2, "microbatches": 6}, ["got 6, expected a multiple of --pipeline-model-parallel-size 4", "4 or 8"]),
        ({"name": "interleaved", "virtual": 2, "microbatches": 3}, ["got 3, expected a multiple", "choose 4 ("]),
        ({"name": "zb-v", "virtual": 3}, ["--virtual-pipeline-model-parallel-size: got 3, expected 2 chunks per rank"]),
        ({"name": "zb-h1", "virtual": 2, "microbatches": 0}, ["--virtual-pipeline-model-parallel-size: got 2", "got 0, expected 1 or more"]),
        ({"name": "interleaved", "ranks": 0, "virtual": 2}, ["--pipeline-model-parallel-size: got 0"]),
    ],
)
def test_wrong_combinations_name_the_flag_and_the_remedy(options: dict[str, object], names: list[str]) -> None:
    given: dict[str, object] = {"name": "1f1b", "ranks": 4, "microbatches": 8, "virtual": 1} | options
    with pytest.raises(ScheduleError) as error:
        schedule_named(given.pop("name"), **given)  # type: ignore[arg-type]
    assert all(name in str(error.value) for name in names), str(error.value)


def test_a_wrong_placement_is_refused() -> None:
    with pytest.raises(ScheduleError, match="--virtual-pipeline-model-parallel-size: got 2"):
        placement_of("gpipe", 4, 2)
    with pytest.raises(ScheduleError, match="pipeline ranks x chunks: got 800, expected at most 512 stages"):
        placement_of("zb-v", 400, 1)
    with pytest.raises(ScheduleError, match="each rank needs equally many stages"):
        forward_only((0, 1, 1), 2)


def edited(schedule: Schedule, rank: int, edit: Callable[[list[Action]], None]) -> Schedule:
    """The schedule with one rank's list changed in place by ``edit``."""
    actions = list(schedule.ranks[rank])
    edit(actions)
    ranks = [*schedule.ranks]
    ranks[rank] = tuple(actions)
    return replace(schedule, ranks=tuple(ranks))


def before(moved: Action, place: Action) -> Callable[[list[Action]], None]:
    """An edit that puts one action right before another."""

    def edit(actions: list[Action]) -> None:
        actions.remove(moved)
        actions.insert(actions.index(place), moved)

    return edit


def refused(schedule: Schedule, *names: str) -> None:
    """The schedule is refused by a message that names all of ``names``."""
    with pytest.raises(ScheduleError) as error:
        validate(schedule)
    assert all(name in str(error.value) for name in names), str(error.value)


def behind(moved: Action, place: Action) -> Callable[[list[Action]], None]:
    """An edit that puts one action right behind another."""

    def edit(actions: list[Action]) -> None:
        actions.remove(moved)
        actions.insert(actions.index(place) + 1, moved)

    return edit


def instead(gone: Action, other: Action) -> Callable[[list[Action]], None]:
    """An edit that puts one action in the place of another."""
    return lambda actions: actions.__setitem__(actions.index(gone), other)


ZB_H1 = schedule_named("zb-h1", ranks=2, microbatches=4)
ZB_V = schedule_named("zb-v", ranks=2, microbatches=2)
TWO_CHUNKS = schedule_named("interleaved", ranks=2, microbatches=2, virtual=2)
EDITED = {
    "sends in another order": (
        gpipe(2, 3), 0, before(Action(Op.SEND_FORWARD, 0, 0), Action(Op.FORWARD, 0, 2)),
        ("send_forward(stage 0, microbatch 1)", "recv_forward(stage 1, microbatch 0)", "one order"),
    ),
    "receives in another order": (
        eager(2, 2), 1, before(Action(Op.RECV_FORWARD, 1, 1), Action(Op.RECV_FORWARD, 1, 0)),
        ("send_forward(stage 0, microbatch 0)", "recv_forward(stage 1, microbatch 1)", "one order"),
    ),
    "stages that share a link": (
        TWO_CHUNKS, 1, before(Action(Op.RECV_FORWARD, 3, 0), Action(Op.RECV_FORWARD, 1, 1)),
        ("send_forward(stage 0, microbatch 1)", "recv_forward(stage 3, microbatch 0)", "on one link"),
    ),
    "one action more": (gpipe(2, 2), 0, lambda actions: actions.append(Action(Op.BACKWARD, 0, 1)), ("rank 0", "unexpected backward(stage 0")),
    "another rank's": (gpipe(2, 2), 0, lambda actions: actions.append(Action(Op.FORWARD, 1, 0)), ("rank 0", "unexpected forward(stage 1")),
    "one instead of another": (
        gpipe(2, 2), 0, instead(Action(Op.BACKWARD, 0, 1), Action(Op.BACKWARD, 0, 0)),
        ("rank 0", "missing backward(stage 0, microbatch 1)", "unexpected backward(stage 0, microbatch 0)"),
    ),
    "weight before input gradient": (
        ZB_H1, 1, before(Action(Op.BACKWARD_WEIGHT, 1, 2), Action(Op.BACKWARD_INPUT, 1, 2)),
        ("rank 1", "backward_weight(stage 1, microbatch 2) comes before backward_input(stage 1, microbatch 2), which it needs"),
    ),
    "weight gradients in another order": (
        ZB_H1, 0, behind(Action(Op.BACKWARD_WEIGHT, 0, 0), Action(Op.BACKWARD_WEIGHT, 0, 1)),
        ("backward_weight(stage 0, microbatch 1) comes before backward_weight(stage 0, microbatch 0)", "gradients add up"),
    ),
    "forward at the bottom of a V": (
        ZB_V, 1, before(Action(Op.FORWARD, 2, 1), Action(Op.FORWARD, 1, 1)), ("forward(stage 2, microbatch 1) comes before forward(stage 1",),
    ),
    "backward at the bottom of a V": (
        ZB_V, 1, before(Action(Op.BACKWARD_INPUT, 1, 0), Action(Op.BACKWARD_INPUT, 2, 0)),
        ("backward_input(stage 1, microbatch 0) comes before backward_input(stage 2",),
    ),
}
for needed, early, moved in (
    (Op.FORWARD, Op.BACKWARD, Op.BACKWARD),
    (Op.RECV_FORWARD, Op.FORWARD, Op.RECV_FORWARD),
    (Op.FORWARD, Op.SEND_FORWARD, Op.SEND_FORWARD),
    (Op.RECV_BACKWARD, Op.BACKWARD, Op.RECV_BACKWARD),
    (Op.BACKWARD, Op.SEND_BACKWARD, Op.SEND_BACKWARD),
):
    first, second = Action(needed, 1, 0), Action(early, 1, 0)
    edit = before(second, first) if moved is early else behind(first, second)
    EDITED[f"{early.value} before {needed.value}"] = (gpipe(3, 1), 1, edit, ("rank 1", f"{second} comes before {first}"))


@pytest.mark.parametrize("what", EDITED)
def test_an_edited_schedule_is_refused(what: str) -> None:
    base, rank, edit, names = EDITED[what]
    refused(edited(base, rank, edit), *names)


@pytest.mark.parametrize(("name", "ops"), [("gpipe", set(Op) - {Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}), ("zb-v", set(Op) - {Op.BACKWARD})])
def test_a_missing_action_is_named(name: str, ops: set[Op]) -> None:
    base = schedule_named(name, ranks=3, microbatches=4)
    for gone in (Action(op, 1, 2) for op in ops):
        refused(edited(base, 1, lambda actions, gone=gone: actions.remove(gone)), "rank 1", f"missing {gone}")


def test_both_directions_between_two_ranks_are_links_of_their_own() -> None:
    """In a V both ranks send forward to each other: moving a receive across the other direction's messages is fine."""
    validate(edited(ZB_V, 0, before(Action(Op.RECV_FORWARD, 3, 0), ZB_V.ranks[0][0])))


def test_a_cyclic_wait_is_refused_with_both_waiters() -> None:
    """Stage 0 wants the gradient of microbatch 0 before it sends microbatch 1; stage 1 wants microbatch 1 first."""

    def edit(actions: list[Action]) -> None:
        behind(Action(Op.SEND_FORWARD, 0, 1), Action(Op.BACKWARD, 0, 0))(actions)
        behind(Action(Op.FORWARD, 0, 1), Action(Op.BACKWARD, 0, 0))(actions)

    mixed = replace(eager(2, 2), ranks=(edited(eager(2, 2), 0, edit).ranks[0], gpipe(2, 2).ranks[1]))
    refused(
        mixed,
        "deadlock",
        "rank 0 at backward(stage 0, microbatch 0) waits for send_backward(stage 1, microbatch 0)",
        "rank 1 at forward(stage 1, microbatch 1) waits for send_forward(stage 0, microbatch 1)",
    )


def test_a_deadlock_of_full_links_is_refused() -> None:
    """Without the rule that one message waits on a link, this would pass: GPipe's sends against 1F1B, receives posted late."""

    def late(op: Op) -> Callable[[list[Action]], None]:
        def edit(actions: list[Action]) -> None:
            for receive in [action for action in actions if action.op.value == f"recv_{op.value}"]:
                before(receive, Action(op, receive.stage, receive.microbatch))(actions)

        return edit

    ranks = (edited(gpipe(2, 4), 0, late(Op.BACKWARD)).ranks[0], edited(eager(2, 4), 1, late(Op.FORWARD)).ranks[1])
    refused(
        replace(gpipe(2, 4), ranks=ranks),
        "rank 0 at send_forward(stage 0, microbatch 3) waits for recv_forward(stage 1, microbatch 2)",
        "rank 1 at send_backward(stage 1, microbatch 1) waits for recv_backward(stage 0, microbatch 0)",
    )


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v"])
def test_one_microbatch_hangs_on_nccl_unless_links_are_connected_first(name: str, ranks: int) -> None:
    """Rank 0 posts the receive of the gradient before it sends the activation; rank 1 first waits for the activation."""
    schedule = schedule_named(name, ranks=ranks, microbatches=1)
    with pytest.raises(ScheduleError) as error:
        prove_first_uses(schedule, ())
    text = str(error.value)
    assert "deadlock in the first uses of communicators" in text and "waits for rank 0 (link for activations, 0 to 1)" in text
    assert text.count("rank 0 at recv_") == 1 and "rank 1 at recv_forward(stage 1, microbatch 0)" in text
    prove_first_uses(schedule, connection_order(schedule.placement))
    prove_first_uses(schedule_named(name, ranks=ranks, microbatches=2), ())


@pytest.mark.parametrize(("name", "virtual"), [("interleaved", 2), ("interleaved", 3), ("zb-v", 2)])
@pytest.mark.parametrize("ranks", [2, 8])
def test_an_evaluation_with_virtual_stages_hangs_on_nccl_unless_links_are_connected_first(name: str, virtual: int, ranks: int) -> None:
    schedule = forward_only(placement_of(name, ranks, virtual), 1)
    with pytest.raises(ScheduleError, match="deadlock in the first uses of communicators"):
        prove_first_uses(schedule, ())
    prove_first_uses(schedule, connection_order(schedule.placement))


@pytest.mark.parametrize("forgotten", [(0, 1), (1, 2)])
def test_links_that_are_forgotten_at_the_start_are_found(forgotten: tuple[int, int]) -> None:
    """zb-v on two ranks uses four links. One that is made late is waited for by both ranks, two of them in two orders."""
    schedule = schedule_named("zb-v", ranks=2, microbatches=1)
    order = connection_order(schedule.placement)
    assert len(order) == 4
    for one in order:
        prove_first_uses(schedule, [link for link in order if link != one])
    with pytest.raises(ScheduleError, match=r"rank 0 at .* waits for rank 1 .*; rank 1 at .* waits for rank 0"):
        prove_first_uses(schedule, [link for index, link in enumerate(order) if index not in forgotten])


def test_a_link_that_one_end_never_uses_is_found() -> None:
    whole = gpipe(2, 2)
    silent = replace(whole, ranks=(whole.ranks[0], tuple(a for a in whole.ranks[1] if a.op is not Op.RECV_FORWARD)))
    with pytest.raises(ScheduleError, match=r"rank 0 at send_forward\(stage 0, microbatch 0\) waits for rank 1"):
        prove_first_uses(silent, ())


def test_links_are_connected_in_three_rounds() -> None:
    """Even pairs, odd pairs, the wrap-around; in a round no rank is in two pairs, so the start takes as long with any number of ranks."""
    placement = placement_of("interleaved", 6, 2)
    pairs = list(dict.fromkeys(tuple(sorted(link[1:])) for link in connection_order(placement)))
    assert pairs == [(0, 1), (2, 3), (4, 5), (1, 2), (3, 4), (0, 5)]
    assert connection_order((0, 0)) == () and connection_order((0, 1)) == ((Op.SEND_FORWARD, 0, 1), (Op.SEND_BACKWARD, 1, 0))


def test_wrong_shapes_are_refused() -> None:
    schedule = gpipe(3, 2)
    refused(replace(schedule, ranks=schedule.ranks[:2]), "2 action lists for stages on ranks (0, 1, 2)")
    refused(replace(schedule, passes=(Op.FORWARD, Op.BACKWARD_INPUT)), "the passes are forward, backward_input, expected")
    refused(replace(schedule, microbatches=0), "0 microbatches, expected 1 or more")
