"""Ranks that do not do the same: all of them say which rank does what, and nobody waits for long."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron_llama.engine.comm import exchange as exchange_module
from megatron_llama.engine.comm import object_collectives as objects
from megatron_llama.engine.comm.collectives import all_gather, all_reduce, reduce_scatter
from megatron_llama.engine.comm.exchange import gather
from megatron_llama.engine.comm.host import gloo
from megatron_llama.engine.shard import peers
from megatron_llama.engine.shard.accesses import PassError
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.engine.shard.peers import OrderError
from megatron_llama.engine.shard.positions import Counts, Meeting, Position, differs, never_comes
from megatron_llama.launch.launcher import Place

from tests.engine.shard.models import loss_of, net, part, sharded, train
from tests.harness import Cluster

SECONDS = 20.0
"""Far below the timeout of the job."""
STRATEGIES = ("optim", "optim_grads_params")


def error_of(engine: ModuleEngine, place: Place, step: int) -> str:
    """What a rank says of a step."""
    begin = time.monotonic()
    with pytest.raises((OrderError, PassError)) as error:
        for _ in range(2):
            loss_of(engine.model, part(step, 0, place.rank)).backward()
            engine.step()
    assert time.monotonic() - begin < SECONDS
    # Whoever calls again hears it again.
    with pytest.raises((OrderError, PassError)):
        engine.model(part(step, 0, place.rank))
        engine.step()
    return str(error.value)


def skip_a_unit(place: Place, strategy: str, recorded: int, options: dict[str, object]) -> str:
    model = net()
    engine = sharded(model, strategy=strategy, **options)
    train(place, engine, microbatches=1, steps=recorded)
    if place.rank == 1:
        model.way = "without the last"
    said = error_of(engine, place, recorded)
    engine.close()
    return said


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_skips_a_unit_in_the_first_step_is_named_by_all(cluster: Cluster, strategy: str, world: int) -> None:
    for said in cluster.run(world, skip_a_unit, strategy, 0, {}):
        assert "rank 1: forward of head" in said and "0" in said.partition("rank 1")[0] and ": forward of blocks.3" in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "strategy", "options"),
    [
        (2, "optim", {}),
        (4, "optim", {}),
        (2, "optim_grads_params", {}),
        (4, "optim_grads_params", {}),
        (2, "optim_grads_params", {"param_slots": 1, "grad_slots": 1}),
        (2, "optim_grads_params", {"param_slots": "all"}),
    ],
)
def test_a_rank_that_skips_a_unit_later_is_named_by_all(cluster: Cluster, strategy: str, world: int, options: dict[str, object]) -> None:
    for said in cluster.run(world, skip_a_unit, strategy, 2, options):
        assert "rank 1, access 5 of the step: got forward of head, expected forward of blocks.3" in said


def fail_alone(place: Place, strategy: str) -> str:
    engine = sharded(net(), strategy=strategy)
    train(place, engine, microbatches=1, steps=2)
    if place.rank == 1:
        with pytest.raises(ValueError, match="no such word"):
            engine.model.blocks[2].register_forward_pre_hook(refuse)
            engine.model(part(2, 0, 1))
        # A program that ends here closes its connections, as this does.
        engine.close()
        with pytest.raises(PassError, match="ended with ValueError"):
            engine.model(part(2, 0, 1))
        return "no such word"
    said = error_of(engine, place, 2)
    engine.close()
    return said


def refuse(module: torch.nn.Module, args: object) -> None:
    raise ValueError("no such word")


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peers_of_a_rank_that_failed_say_why(cluster: Cluster, strategy: str) -> None:
    for said in cluster.run(2, fail_alone, strategy):
        assert "no such word" in said


@pytest.mark.long
def test_the_groups_of_the_user_live_on(cluster: Cluster) -> None:
    assert cluster.run(2, leave_and_go_on) == [2.0, 2.0]


def leave_and_go_on(place: Place) -> float:
    skip_a_unit(place, "optim_grads_params", 1, {})
    ones = torch.ones(())
    dist.all_reduce(ones)
    with sharded(net()) as engine:
        train(place, engine, microbatches=1, steps=1)
    return float(ones)


def leave_as_on_a_device(place: Place, recorded: int) -> list[str]:
    """Rank 1 leaves. Rank 0 hears of it as on a device, from the thread's function, and then goes on as if it had not."""
    engine = sharded(net())
    train(place, engine, microbatches=1, steps=recorded)
    known = engine._passes._peers
    axis = known.axis
    with patch.object(exchange_module, "carried_by_gloo", lambda axis, device: False):
        exchange = gather(torch.zeros(2), torch.zeros(1), axis, index=0)  # as a device makes it
    if place.rank == 1:
        engine._passes.tell_peers(ValueError("no such word"))
        return []
    # The wait for a gather ends while the thread lets go.
    with pytest.raises(OrderError, match="rank 1: got ValueError"), known.explained():
        assert known._store is not None
        peers._look(known._store, weakref.ref(known), threading.Event())
    calls: dict[str, Callable[[], object]] = {
        "all_gather_float": lambda: objects.all_gather_float(7.0, axis),
        "all_gather_object": lambda: objects.all_gather_object("mine", axis),
        "gather_object": lambda: objects.gather_object("mine", axis),
        "broadcast_object": lambda: objects.broadcast_object("mine", axis),
        "raise_error_on_all_ranks": lambda: objects.raise_error_on_all_ranks(None, axis),
        "all_reduce_max": lambda: objects.all_reduce_max(1, axis),
        "all_reduce": lambda: all_reduce(torch.zeros(2), axis),
        "all_gather": lambda: all_gather(torch.zeros(2), torch.zeros(1), axis),
        "reduce_scatter": lambda: reduce_scatter(torch.zeros(1), torch.zeros(2), axis),
        "start": exchange.start,
        "wait": exchange.wait,
        "forward": lambda: engine.model(part(2, 0, 0)),
        "step": engine.step,
        "state_dict": engine.state_dict,
    }
    if not recorded:
        calls["agree"] = lambda: engine._passes._order.agree(5)
    said = []
    for name, call in calls.items():
        with pytest.raises(RuntimeError) as error:
            call()
        said.append(f"{name}: {error.value}")
    engine.close()
    return said


@pytest.mark.long
@pytest.mark.parametrize("recorded", [0, 2])
def test_communicators_that_have_ended_send_nothing_and_say_so(cluster: Cluster, recorded: int) -> None:
    reason = "rank 1: got ValueError (no such word), expected no error; see there"
    expected = {**dict.fromkeys(["start", "wait"], ""), **dict.fromkeys(["agree", "forward", "step", "state_dict"], reason)}
    for line in cluster.run(2, leave_as_on_a_device, recorded)[0]:
        name, said = line.split(": ", 1)
        assert expected.get(name, "the communicator of world has ended") in said, line


def wait_without_end(place: Place) -> str:
    """Rank 1 leaves, and the threads of rank 0 wait on: as gloo has them do where a part of a message has gone over the connection."""
    engine = sharded(net())
    train(place, engine, microbatches=1, steps=2)
    if place.rank == 1:
        engine._passes.tell_peers(ValueError("no such word"))
        return ""
    released = threading.Event()
    with patch.object(gloo._Transfers, "wait_received", lambda transfers: released.wait()):
        said = error_of(engine, place, 2)
        released.set()
        engine.close()
    assert "peers" not in [thread.name for thread in threading.enumerate()]
    return said


@pytest.mark.long
def test_who_waits_without_end_hears_it_too(cluster: Cluster) -> None:
    assert "rank 1: got ValueError (no such word)" in cluster.run(2, wait_without_end, timeout=30.0)[0]


def too_few(engine: ModuleEngine) -> None:
    """engine.step() after one of two passes."""
    engine.step()


def from_before(engine: ModuleEngine) -> None:
    """Backward of a forward pass that a step has followed."""
    OLD[0].backward()


def sparse(engine: ModuleEngine) -> None:
    """An embedding whose gradient has another layout all of a sudden."""
    engine.model.embed.sparse = True
    loss_of(engine.model, part(9, 1, 1)).backward()


def freeze(module: torch.nn.Module, args: object) -> None:
    module.mix.requires_grad_(False)


def frozen(engine: ModuleEngine) -> None:
    """A parameter that is frozen inside of its unit."""
    engine.model.blocks[1].register_forward_pre_hook(freeze)
    loss_of(engine.model, part(9, 1, 1)).backward()


REASONS = {
    too_few: "1 backward passes",
    from_before: "before the parameters changed",
    sparse: "sparse gradient",
    frozen: "requires_grad=False",
}
OLD: list[torch.Tensor] = []


def err_alone(place: Place, fault: Callable[[ModuleEngine], None]) -> str:
    """What a rank hears of an error that rank 1 alone has, and catches, without ``with``."""
    engine = sharded(net(), microbatches=2)
    OLD.append(loss_of(engine.model, part(9, 0, place.rank)))
    engine.discard()
    train(place, engine, microbatches=2, steps=2)
    begin = time.monotonic()
    with pytest.raises((OrderError, PassError)) as error:
        for number in range(4):
            if number == 1 and place.rank == 1:
                fault(engine)
            loss_of(engine.model, part(9, number, place.rank)).backward()
            if number % 2:
                engine.step()
    assert time.monotonic() - begin < SECONDS
    # Nobody has heard of it because rank 1 has closed its engine.
    dist.barrier()
    engine.close()
    OLD.clear()
    return str(error.value)


@pytest.mark.long
@pytest.mark.parametrize("fault", REASONS)
def test_an_error_of_one_rank_in_a_planned_step_is_told_to_all(cluster: Cluster, fault: Callable[[ModuleEngine], None]) -> None:
    first, second = cluster.run(2, err_alone, fault)
    assert REASONS[fault] in second
    assert "rank 1" in first and REASONS[fault] in first


def evaluate(engine: ModuleEngine, passes: int) -> list[float]:
    with torch.no_grad():
        return [loss_of(engine.model, part(50, number, 0)).item() for number in range(passes)]


def uneven_evaluation(engine: ModuleEngine, rank: int) -> None:
    evaluate(engine, 3 - rank)


def evaluation_on_rank_0(engine: ModuleEngine, rank: int) -> None:
    evaluate(engine, 1 - rank)


def evaluation_in_another_order(engine: ModuleEngine, rank: int) -> None:
    engine.model.way = "towers" if rank else "plain"
    evaluate(engine, 1)


def evaluation_that_ends_early(engine: ModuleEngine, rank: int) -> None:
    engine.model.way = "without the last" if rank else "plain"
    evaluate(engine, 1)


def evaluation_within_a_step(engine: ModuleEngine, rank: int) -> None:
    loss = loss_of(engine.model, part(9, 0, rank))
    evaluate(engine, rank)
    loss.backward()


def evaluation_before_the_step(engine: ModuleEngine, rank: int) -> None:
    """All accesses of the step have been made."""
    loss_of(engine.model, part(9, 0, rank)).backward()
    evaluate(engine, rank)
    engine.step()


def state_dict_on_rank_0(engine: ModuleEngine, rank: int) -> None:
    if rank == 0:
        engine.model.state_dict()


def half_a_state_dict_on_rank_0(engine: ModuleEngine, rank: int) -> None:
    engine.state_dict() if rank else engine.model.state_dict()


def optimizer_state_on_rank_0(engine: ModuleEngine, rank: int) -> None:
    if rank == 0:
        engine.optimizer.state_dict()


def load_on_rank_0(engine: ModuleEngine, rank: int) -> None:
    state = engine.state_dict()
    if rank == 0:
        engine.load_state_dict(state)


def gathered_on_rank_0(engine: ModuleEngine, rank: int) -> None:
    if rank == 0:
        with engine.gathered():
            pass


def initialize_on_rank_0(engine: ModuleEngine, rank: int) -> None:
    if rank == 0:
        engine.initialize()


def error_in_gathered_on_rank_0(engine: ModuleEngine, rank: int) -> None:
    with suppress(ValueError), engine.gathered():
        if rank == 0:
            raise ValueError("no room on the disk")


def other_microbatches(engine: ModuleEngine, rank: int) -> None:
    engine.microbatches = 1 + rank


def caught_error(engine: ModuleEngine, rank: int) -> None:
    """The others wait for what the rank that has failed sends no more."""
    handle = engine.model.blocks[1].register_forward_pre_hook(refuse) if rank else None
    with suppress(ValueError):
        loss_of(engine.model, part(9, 0, rank)).backward()
    if handle is not None:
        handle.remove()
    engine.discard()


APART: dict[Callable[[ModuleEngine, int], None], tuple[str, str]] = {
    uneven_evaluation: ("in evaluation pass 3", "the first forward pass of step 3"),
    evaluation_on_rank_0: ("in evaluation pass 1", "the first forward pass of step 3"),
    evaluation_in_another_order: ("forward of blocks.1 in evaluation pass 1", "forward of blocks.3 in evaluation pass 1"),
    evaluation_that_ends_early: ("forward of blocks.3 in evaluation pass 1", "forward of head in evaluation pass 1"),
    evaluation_within_a_step: ("backward of ", "in evaluation pass 1"),
    evaluation_before_the_step: ("engine.step() of step 3", "in evaluation pass 1"),
    state_dict_on_rank_0: ("the model's state_dict() before step 3", "the first forward pass of step 3"),
    half_a_state_dict_on_rank_0: ("the first forward pass of step 3", "the optimizer's state_dict() before step 3"),
    optimizer_state_on_rank_0: ("the optimizer's state_dict() before step 3", "the first forward pass of step 3"),
    load_on_rank_0: ("engine.load_state_dict() before step 3", "the first forward pass of step 3"),
    gathered_on_rank_0: ("engine.gathered() before step 3", "the first forward pass of step 3"),
    initialize_on_rank_0: ("engine.initialize() before step 3", "the first forward pass of step 3"),
    error_in_gathered_on_rank_0: ("the first forward pass of step 3", "the end of engine.gathered() before step 3"),
    other_microbatches: ("step 3 with microbatches=1", "step 3 with microbatches=2"),
    caught_error: (" in step 3", "engine.discard() in step 3"),
}
"""What one rank does otherwise than the other, and how the error names what ranks 0 and 1 do."""


def go_apart(place: Place, habit: Callable[[ModuleEngine, int], None]) -> str:
    """What a rank hears, outside of ``with engine``."""
    engine = sharded(net())
    train(place, engine, microbatches=1, steps=2)
    begin = time.monotonic()
    with pytest.raises(OrderError) as error:
        habit(engine, place.rank)
        loss_of(engine.model, part(9, 1, place.rank)).backward()
        engine.step()
    assert time.monotonic() - begin < 15.0
    # Nobody has heard of it because the other one has ended.
    dist.barrier()
    engine.close()
    return str(error.value)


@pytest.mark.few(3, all=6)
@pytest.mark.long
@pytest.mark.parametrize("habit", APART)
def test_ranks_that_do_not_meet_are_named_on_all(cluster: Cluster, habit: Callable[[ModuleEngine, int], None]) -> None:
    words = APART[habit]
    for said in cluster.run(2, go_apart, habit):
        of_ranks = said.split("rank 0: ")[1].split("; rank 1: ")
        assert words[0] in of_ranks[0] and words[1] in of_ranks[1].split("), expected")[0], said


def end_early(place: Place, closes: bool) -> str:
    engine = sharded(net())
    train(place, engine, microbatches=1, steps=2)
    evaluate(engine, 2)
    if place.rank == 1:
        # At the end of a process nothing else may be left of an engine.
        engine.close() if closes else engine._passes._peers._ending()
        dist.barrier()
        return ""
    begin = time.monotonic()
    with pytest.raises(OrderError) as error:
        evaluate(engine, 1)
    assert time.monotonic() - begin < 15.0
    dist.barrier()
    engine.close()
    return str(error.value)


@pytest.mark.long
@pytest.mark.parametrize("closes", [True, False])
def test_a_rank_that_ends_before_the_last_evaluation_is_named(cluster: Cluster, closes: bool) -> None:
    said = cluster.run(2, end_early, closes)[0]
    assert "in evaluation pass 3; rank 1: " in said
    assert ("engine.close(), or the end of its process, after " if closes else "let go without engine.close()") in said


class Warned:
    """A stderr that tells the other rank of a warning."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text
        if "has waited for other ranks" in text:
            dist.distributed_c10d._get_default_store().set(KEY, "yes")

    def flush(self) -> None:
        pass


KEY = "tests/warned"


def wait_for_the_warning(*ignored: object) -> None:
    # A connection of its own: the engine's thread goes on answering over the other one.
    dist.distributed_c10d._get_default_store().clone().wait([KEY])


def slow_evaluation(engine: ModuleEngine, rank: int) -> None:
    wait_for_the_warning() if rank else None
    evaluate(engine, 2)


def slow_step(engine: ModuleEngine, rank: int) -> None:
    wait_for_the_warning() if rank else None
    loss_of(engine.model, part(9, 0, rank)).backward()
    engine.step()


def slow_state_dict(engine: ModuleEngine, rank: int) -> None:
    wait_for_the_warning() if rank else None
    engine.state_dict()


def slow_discard(engine: ModuleEngine, rank: int) -> None:
    """Rank 0 has failed, and rank 1, which has not, is slow on its way to the end of its pass."""
    does = wait_for_the_warning if rank else refuse
    with suppress(ValueError), engine.model.blocks[1].register_forward_pre_hook(does):
        engine.model(part(9, 0, rank))
    engine.discard()


def be_slow(place: Place, habit: Callable[[ModuleEngine, int], None], strategy: str) -> str:
    warned = Warned()
    with patch.object(peers, "LOOK_SECONDS", 0.05), patch.object(peers, "WAIT_SECONDS", 0.1), sharded(net(), strategy=strategy) as engine:
        train(place, engine, microbatches=1, steps=2)
        dist.barrier()
        with patch.object(sys, "stderr", warned):
            habit(engine, place.rank)
            train(place, engine, microbatches=1, steps=1, first=2)
    dist.barrier()
    if place.rank == 0:
        dist.distributed_c10d._get_default_store().delete_key(KEY)
    dist.barrier()
    return warned.text


SLOW = {
    slow_evaluation: ("optim_grads_params", "in evaluation pass 1"),
    slow_step: ("optim_grads_params", "in step 3"),
    slow_state_dict: ("optim_grads_params", "the model's state_dict() before step 3"),
    slow_discard: ("optim", "engine.discard() in step 3"),
}
"""The strategy, and what the warning says of rank 0."""


@pytest.mark.long
@pytest.mark.parametrize("habit", SLOW)
def test_a_slow_rank_is_waited_for_with_a_warning(cluster: Cluster, habit: Callable[[ModuleEngine, int], None]) -> None:
    strategy, words = SLOW[habit]
    first, second = cluster.run(2, be_slow, habit, strategy)
    assert "rank 0 has waited for other ranks" in first and "goes on waiting: rank 0: " in first
    assert words in first.split("; rank 1: ")[0] and "; rank 1: " in first and not second, (first, second)


def act_alone(place: Place, strategy: str) -> list[list[float]]:
    with sharded(net(), strategy=strategy) as engine:
        train(place, engine, microbatches=1, steps=2)
        alone = evaluate(engine, 2) if place.rank == 0 else []
        if place.rank == 0 and strategy == "no_shard":
            engine.model.state_dict()
        train(place, engine, microbatches=1, steps=1, first=2)
        return [alone, evaluate(engine, 1)]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_what_needs_no_other_rank_may_be_done_alone(cluster: Cluster, strategy: str) -> None:
    first, second = cluster.run(2, act_alone, strategy)
    assert len(first[0]) == 2 and not second[0] and first[1] == second[1]


def test_only_a_rank_that_cannot_come_never_comes() -> None:
    waits = Meeting(7, before=Counts(made=3, steps=0, launched=4, reduced=1), waits=True)
    discards = Meeting(7, before=waits.before, waits=True, discards=True)

    def other(meeting: int = 6, awaited: int = 0, closed: bool = False, **counts: int) -> Position:
        return Position(meeting, (-4, 1), Counts(**counts), awaited, True, "somewhere", closed)

    # It has come; it is behind; it stands where this rank stood.
    for position in (other(7, made=9), other(7, closed=True), other(5, made=9), other(made=2), other(made=3, launched=4, reduced=1)):
        assert not never_comes(waits, position) and not never_comes(discards, position), position
    assert not never_comes(Meeting(7, before=waits.before), other(made=9))
    assert never_comes(waits, other(made=4)) and never_comes(waits, other(closed=True)) and never_comes(waits, other(3, closed=True))
    # ``discard`` waits for ranks that run on to the end of their passes, unless they wait for what never comes.
    assert not never_comes(discards, other(made=9, launched=9, awaited=4))
    for position in (other(awaited=5), other(reduced=2), other(steps=1), other(closed=True)):
        assert never_comes(discards, position), position
    assert Position.read(other(3, 5, made=2).text()) == other(3, 5, made=2)
    # In one meeting all say the same.
    assert differs(Meeting(6, said=(-4, 2)), other()) and not differs(Meeting(6, said=(-4, 1)), other())
    assert not differs(Meeting(7, said=(-4, 2)), other())
