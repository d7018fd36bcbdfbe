"""Ranks that do not do the same: all of them say which rank does what, and nobody waits for long."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron_llama.engine.comm import object_collectives as objects
from megatron_llama.engine.comm.collectives import all_gather, all_reduce, reduce_scatter
from megatron_llama.engine.comm.exchange import gather, gloo
from megatron_llama.engine.shard import peers
from megatron_llama.engine.shard.accesses import PassError
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.engine.shard.peers import OrderError
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


@pytest.mark.parametrize("options", [{}, {"param_slots": 1, "grad_slots": 1}, {"param_slots": "all"}])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 4])
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
    with patch.object(gloo, "carries", lambda axis, device: False):
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


@pytest.mark.parametrize("fault", REASONS)
def test_an_error_of_one_rank_in_a_planned_step_is_told_to_all(cluster: Cluster, fault: Callable[[ModuleEngine], None]) -> None:
    first, second = cluster.run(2, err_alone, fault)
    assert REASONS[fault] in second
    assert "rank 1" in first and REASONS[fault] in first
