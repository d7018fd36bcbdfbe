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
    forward_only,
    gpipe,
    one_forward_one_backward,
    schedule_named,
    validate,
)

Builder = Callable[[int, int], Schedule]
BUILDERS: list[Builder] = [forward_only, gpipe, one_forward_one_backward]


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("stages", range(1, 9))
def test_schedules_are_valid(build: Builder, stages: int) -> None:
    for microbatches in range(1, 17):
        schedule = build(stages, microbatches)
        validate(schedule)
        passes = [action for rank in schedule.ranks for action in rank if action.op in schedule.passes]
        expected = itertools.product(schedule.passes, range(stages), range(microbatches))
        assert sorted((a.op.value, a.stage, a.microbatch) for a in passes) == sorted((op.value, s, m) for op, s, m in expected)


def in_flight(actions: tuple[Action, ...]) -> int:
    """Most microbatches whose forward is done and whose backward is not."""
    live = most = 0
    for action in actions:
        live += {Op.FORWARD: 1, Op.BACKWARD: -1}.get(action.op, 0)
        most = max(most, live)
    return most


@pytest.mark.parametrize("stages", range(1, 9))
def test_activations_in_flight(stages: int) -> None:
    for microbatches, stage in itertools.product(range(1, 17), range(stages)):
        assert in_flight(one_forward_one_backward(stages, microbatches).ranks[stage]) == min(stages - stage, microbatches)
        assert in_flight(gpipe(stages, microbatches).ranks[stage]) == microbatches


@pytest.mark.parametrize("build", [gpipe, one_forward_one_backward])
def test_backward_passes_run_in_order_of_microbatches(build: Builder) -> None:
    """The engine reduces at the last backward pass, and gradients add up in one order on every stage."""
    for actions in build(4, 6).ranks:
        assert [action.microbatch for action in actions if action.op is Op.BACKWARD] == list(range(6))


def test_receives_are_posted_before_the_pass_that_hides_them() -> None:
    """In the steady state of 1F1B a stage waits for a message only after the pass before has been computed."""
    actions = one_forward_one_backward(2, 4).ranks[1]
    text = [f"{action.op.value} {action.microbatch}" for action in actions]
    assert text.index("recv_forward 1") < text.index("backward 0") < text.index("forward 1")


def test_schedule_named_validates_what_it_builds() -> None:
    assert schedule_named("gpipe", 2, 3) == gpipe(2, 3)
    assert schedule_named("1f1b", 2, 3) == one_forward_one_backward(2, 3)
    with pytest.raises(KeyError):
        schedule_named("zigzag", 2, 3)


def edited(schedule: Schedule, rank: int, edit: Callable[[list[Action]], None]) -> Schedule:
    """The schedule with one rank's list changed in place by ``edit``."""
    actions = list(schedule.ranks[rank])
    edit(actions)
    ranks = [*schedule.ranks]
    ranks[rank] = tuple(actions)
    return replace(schedule, ranks=tuple(ranks))


def refused(schedule: Schedule, *names: str) -> None:
    """The schedule is refused by a message that names all of ``names``."""
    with pytest.raises(ScheduleError) as error:
        validate(schedule)
    assert all(name in str(error.value) for name in names), str(error.value)


def test_swapped_sends_are_refused() -> None:
    """Stage 0 of GPipe computes microbatch 1 first and sends it first; stage 1 expects 0."""
    base = gpipe(2, 2)

    def edit(actions: list[Action]) -> None:
        def place(action: Action) -> int:
            forward = action.op in (Op.FORWARD, Op.SEND_FORWARD)
            return (1 - action.microbatch) * 2 + (action.op is Op.SEND_FORWARD) if forward else 10 + base.ranks[0].index(action)

        actions.sort(key=place)

    refused(edited(base, 0, edit), "send_forward(stage 0, microbatch 1)", "recv_forward(stage 1, microbatch 0)")


def test_swapped_receives_are_refused() -> None:
    one, other = Action(Op.RECV_FORWARD, 1, 0), Action(Op.RECV_FORWARD, 1, 1)

    def edit(actions: list[Action]) -> None:
        actions.remove(other)
        actions.insert(actions.index(one), other)

    refused(
        edited(one_forward_one_backward(2, 2), 1, edit),
        "send_forward(stage 0, microbatch 0)",
        "recv_forward(stage 1, microbatch 1)",
        "one order",
    )


@pytest.mark.parametrize("op", list(Op))
def test_a_missing_action_is_named(op: Op) -> None:
    action = Action(op, 1, 2)
    for build in (gpipe, one_forward_one_backward):
        refused(edited(build(3, 4), 1, lambda actions: actions.remove(action)), "rank 1", "missing", str(action))


def test_a_repeated_or_foreign_action_is_named() -> None:
    repeated, foreign = Action(Op.BACKWARD, 0, 1), Action(Op.FORWARD, 1, 0)
    for action in (repeated, foreign):
        refused(edited(gpipe(2, 2), 0, lambda actions, extra=action: actions.append(extra)), "rank 0", "unexpected", str(action))


@pytest.mark.parametrize(
    ("needed", "early", "moved"),
    [
        (Op.FORWARD, Op.BACKWARD, Op.BACKWARD),
        (Op.RECV_FORWARD, Op.FORWARD, Op.RECV_FORWARD),
        (Op.FORWARD, Op.SEND_FORWARD, Op.SEND_FORWARD),
        (Op.RECV_BACKWARD, Op.BACKWARD, Op.RECV_BACKWARD),
        (Op.BACKWARD, Op.SEND_BACKWARD, Op.SEND_BACKWARD),
    ],
)
def test_wrong_order_within_a_microbatch_is_refused(needed: Op, early: Op, moved: Op) -> None:
    """One of the two is moved to the wrong side of the other."""
    before, after, mover = (Action(op, 1, 0) for op in (needed, early, moved))

    def edit(actions: list[Action]) -> None:
        actions.remove(mover)
        actions.insert(actions.index(before) if mover == after else actions.index(after) + 1, mover)

    refused(edited(gpipe(3, 1), 1, edit), "rank 1", f"{after} comes before {before}")


def test_a_cyclic_wait_is_refused_with_both_waiters() -> None:
    """Stage 0 wants the gradient of microbatch 0 before it sends microbatch 1; stage 1 wants microbatch 1 first."""
    forwards_first = gpipe(2, 2)
    eager = one_forward_one_backward(2, 2)

    def edit(actions: list[Action]) -> None:
        late = [Action(Op.FORWARD, 0, 1), Action(Op.SEND_FORWARD, 0, 1)]
        for action in late:
            actions.remove(action)
        at = actions.index(Action(Op.BACKWARD, 0, 0)) + 1
        actions[at:at] = late

    mixed = replace(edited(eager, 0, edit), ranks=(edited(eager, 0, edit).ranks[0], forwards_first.ranks[1]))
    refused(mixed, "deadlock", "backward(stage 0, microbatch 0)", "forward(stage 1, microbatch 1)")


def test_a_backward_pass_before_the_forward_send_is_refused() -> None:
    def edit(actions: list[Action]) -> None:
        early = [Action(Op.RECV_BACKWARD, 0, 0), Action(Op.BACKWARD, 0, 0)]
        actions[:] = [action for action in actions if action not in early]
        at = actions.index(Action(Op.SEND_FORWARD, 0, 0))
        actions[at:at] = early

    refused(edited(gpipe(2, 2), 0, edit), "deadlock", "backward(stage 0, microbatch 0)", "forward(stage 1, microbatch 0)")


def test_a_deadlock_of_full_links_is_refused() -> None:
    """Without the rule that one message waits on a link, this would pass: GPipe's sends against 1F1B, receives posted late."""

    def late(op: Op) -> Callable[[list[Action]], None]:
        def edit(actions: list[Action]) -> None:
            for receive in [action for action in actions if action.op.value == f"recv_{op.value}"]:
                actions.remove(receive)
                actions.insert(actions.index(Action(op, receive.stage, receive.microbatch)), receive)

        return edit

    first = edited(gpipe(2, 4), 0, late(Op.BACKWARD)).ranks[0]
    second = edited(one_forward_one_backward(2, 4), 1, late(Op.FORWARD)).ranks[1]
    mixed = replace(gpipe(2, 4), ranks=(first, second))
    refused(mixed, "deadlock", "send_forward(stage 0, microbatch 3)", "send_backward(stage 1, microbatch 1)")


def test_wrong_number_of_ranks_is_refused() -> None:
    schedule = gpipe(3, 2)
    refused(replace(schedule, ranks=schedule.ranks[:2]), "2 action lists for 3 stages")
