"""Gradients of a model whose backward pass nobody has planned: counted openly in a first step, then as recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from megatron_llama.engine.comm.streams import Future, InlineStream, Stream, open_stream
from megatron_llama.engine.comm.worker import Task, Work
from megatron_llama.engine.counting import Counting, GradientRounds, PlannedCounting
from megatron_llama.engine.gradients import GradientBuckets
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.options import EngineOptions
from megatron_llama.engine.plan.buckets import PlacedParam, strategy_named
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec, UnitSpec
from megatron_llama.engine.shard.module_buckets import module_bucket_plan
from megatron_llama.engine.shard.open_counting import OpenCounting, UnusedCounting
from megatron_llama.launch.launcher import Place

from tests.engine.shard.meshes import sharded_mesh
from tests.harness import Cluster

CPU = torch.device("cpu")
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
LAYERS = 5
Program = Sequence[Sequence[str]]
"""The parameters that each backward pass of a step writes, in order."""


def units() -> list[UnitSpec]:
    """A root part, and layers of two matrices and a vector."""

    def param(name: str, *shape: int) -> ParamSpec:
        return ParamSpec(name, shape, (HFSlice(name, shape, 0, shape[0]),), decay=len(shape) > 1, resident=len(shape) < 2)

    layers = [UnitSpec(f"{n}", (param(f"{n}.a", 7, 9), param(f"{n}.b", 3, 5, 2), param(f"{n}.v", 11))) for n in range(LAYERS)]
    return [UnitSpec("root", (param("root", 13, 3),), is_root_part=True), *layers]


NAMES = [spec.name for unit in units() for spec in unit.params]
BACKWARD = NAMES[::-1]
# Layer 4 comes again after layer 2 has taken its slot, and brings one of its matrices late; layer 1 comes twice in a row.
WINDING = [name for unit in ("4.a", "3", "2", "4", "1", "1", "0", "root") for name in BACKWARD if name.startswith(unit)]


class Late(InlineStream):
    """What follows a reduction is done when somebody waits for it, as late as a slow thread may do it."""

    def run(self, work: Work) -> Future:
        return Deferred(work)


class Deferred(Task):
    """Is performed at the first wait."""

    def wait(self) -> None:
        if not self._finished.is_set():
            self.perform()
        super().wait()


class Bench:
    """The gradient buckets of one rank, written with made-up gradients: whole numbers, whose sums are exact."""

    def __init__(self, mesh: Mesh, strategy: str, *, find_unused: bool = False, stream: Stream | None = None) -> None:
        self.mesh = mesh
        found = strategy_named(strategy)
        options = EngineOptions(strategy=strategy, bucket_size=100, find_unused=find_unused)
        self.plan = module_bucket_plan(units(), options, shards=mesh.dp_shard.size)
        self.final: list[int] = []
        self.buckets = GradientBuckets(
            self.plan,
            mesh,
            reduce_every_microbatch=found.reduce_every_microbatch and not find_unused,
            dtype=torch.float32,
            wire=None,
            stream=stream or open_stream(CPU, inline=mesh.dp.size == 1),
            chunk_bytes=100,
            reduced=self.final.append,
            before_reuse=lambda bucket: None,
            gathers_to_come=lambda: False,
        )
        self.find_unused = find_unused
        self.counting: Counting
        self.where: dict[str, tuple[int, PlacedParam]] = {
            placed.spec.name: (bucket.index, placed) for bucket in self.plan.buckets for placed in bucket.placements
        }
        self.own = {name: torch.zeros(placed.spec.shape) for name, (_, placed) in self.where.items()}
        """What this rank has written in this step."""
        self.drawn = 0

    def write(self, name: str) -> None:
        bucket, placed = self.where[name]
        seed = self.drawn * 100 + self.mesh.rank
        value = torch.randint(-9, 10, placed.spec.shape, generator=torch.Generator().manual_seed(seed)).float()
        self.drawn += 1
        view, beta = self.buckets.grad_view(bucket, placed)
        if beta == 0.0:
            view.fill_(torch.nan)  # with beta 0 it may hold anything
            view.copy_(value)
        else:
            view += value
        self.own[name] += value
        self.buckets.grad_written(bucket, placed)

    def begin(self, rounds: GradientRounds | None) -> None:
        """A step with these rounds, or one in which they are found out."""
        if rounds is None:
            make = UnusedCounting if self.find_unused else OpenCounting
            self.counting = make(self.buckets, lambda bucket: None)
        else:
            self.counting = PlannedCounting(rounds, self.plan.label)
        self.buckets.begin_rounds(self.counting)

    def run(self, program: Program, rounds: GradientRounds | None) -> list[str]:
        """One step. Returns what happened, in order."""
        events = self.mesh.recorder.events = []
        self.final.clear()
        for own in self.own.values():
            own.zero_()
        self.begin(rounds)
        for names in program:
            for name in names:
                self.write(name)
            events.append("end of backward")
            self.buckets.end_backward()
        events.append("end of step")
        self.buckets.finish_all()
        self.mesh.recorder.events = None
        return events

    def check_sums(self) -> None:
        """The shards hold the sums over ranks and contributions, and nothing between them."""
        totals = {name: own.clone() for name, own in self.own.items()}
        for total in totals.values():
            if self.mesh.dp.group is not None:
                dist.all_reduce(total, group=self.mesh.dp.group)
        for bucket in self.plan.buckets:
            shard = self.buckets.shards[bucket.index].clone()
            for segment in self.plan.segments(bucket.index, self.mesh.dp_shard.rank):
                own = slice(segment.in_shard, segment.in_shard + segment.length)
                expected = totals[segment.spec.name].flatten()[segment.in_param : segment.in_param + segment.length]
                assert torch.equal(shard[own], expected), segment.spec.name
                shard[own] = 0.0
            assert not bool(shard.any()), f"bucket {bucket.index}: something between the parameters would count in the norm"


def order(events: Sequence[str]) -> list[str]:
    return [event for event in events if event.startswith("reduce")]


def check_recorded(place: Place, strategy: str, shard_size: int, program: Program) -> tuple[list[str], list[str]]:
    """An open step, then two as it was recorded: exact sums in all, and each bucket complete once."""
    shards = shard_size if strategy_named(strategy).sharded else 1
    bench = Bench(sharded_mesh(None, shards, CPU) if place.world_size > 1 else Mesh.single(), strategy)
    trained = sorted(bench.plan.buckets, key=lambda bucket: bucket.index)
    open_events = bench.run(program, None)
    bench.check_sums()
    assert bench.final == [bucket.index for bucket in trained], "in the order of the plan"
    rounds = bench.counting.rounds()
    assert [dict(one) for one in rounds.passes] == [dict(Counter(names)) for names in program]
    for bucket, found in rounds.by_bucket.items():
        total = sum((Counter(one) for one in found), Counter[str]())
        assert total == Counter(name for names in program for name in names if bench.where[name][0] == bucket)
    planned = bench.run(program, rounds)
    bench.check_sums()
    assert sorted(bench.final) == [bucket.index for bucket in trained], "once each"
    first = list(bench.final)
    assert bench.run(program, rounds) == planned and bench.final == first
    bench.check_sums()
    assert Counter(order(planned)) == Counter(order(open_events)) == Counter({f"reduce {b}": len(r) for b, r in rounds.by_bucket.items()})
    for event, following in pairwise(planned):
        if event.startswith("complete"):
            assert following == event.replace("complete", "reduce"), "at its last contribution, not later"
    if program[-1][-1] == "root":
        assert planned[-3].startswith("reduce"), "the last contribution is the last thing that happens in backward"
    assert bench.run(program, None) == open_events, "openly once more"
    bench.check_sums()
    return open_events, planned


PROGRAMS = {
    "in order": [BACKWARD] * 2,
    "winding": [WINDING] * 2,
    "two ways": [BACKWARD, WINDING, NAMES],
    "parts": [[name for name in BACKWARD if not name.endswith("a")], [name for name in NAMES if not name.endswith("b")]],
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_alone(strategy: str, program: Program) -> None:
    check_recorded(Place(0, 1, 0), strategy, 0, program)


def check_all(place: Place, shard_size: int) -> list[object]:
    """With shards over some of the ranks one program is enough."""
    programs = [PROGRAMS["two ways"]] if shard_size else PROGRAMS.values()
    return [check_recorded(place, strategy, shard_size, program) for strategy in STRATEGIES for program in programs]


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "shard_size"), [(2, 0), (4, 2)])
def test_all_ranks_do_the_same(cluster: Cluster, world_size: int, shard_size: int) -> None:
    first, *others = cluster.run(world_size, check_all, shard_size)
    assert all(other == first for other in others)


def test_rounds_of_a_winding_backward() -> None:
    """Five layers in two slots: 4 and 2 share one. ``4.a`` goes out when 2 comes, 2 when the rest of 4 comes."""
    bench = Bench(Mesh.single(), "optim_grads_params")
    bench.run([WINDING], None)
    rounds = bench.counting.rounds().by_bucket
    of = {name: [dict(one) for one in rounds[bucket]] for name, (bucket, _) in bench.where.items()}
    assert of["4.a"] == of["4.b"] == [{"4.a": 1}, {"4.a": 1, "4.b": 1}]
    assert of["1.a"] == [{"1.a": 2, "1.b": 2}]
    assert of["2.a"] == [{"2.a": 1, "2.b": 1}] and of["root"] == [{"root": 1}]
    assert of["0.v"] == [Counter(name for name in WINDING if name.endswith("v"))], "vectors have a slot of their own"


def test_openly_what_shares_no_slot_waits_for_the_end_of_backward() -> None:
    """Then it goes in the order of the plan. Where slots accumulate, everything waits for the end of the step."""
    events = Bench(Mesh.single(), "optim_grads_params").run([BACKWARD, BACKWARD], None)
    first = events.index("end of backward")
    at_once = ["reduce 0", "reduce 1", "reduce 2"]  # layers 4, 3, 2, when 2, 1, 0 come
    assert order(events[:first]) == at_once
    assert order(events) == [*at_once, "reduce 3", "reduce 4", "reduce 5", "reduce 6"] * 2
    events = Bench(Mesh.single(), "optim").run([BACKWARD, BACKWARD], None)
    assert order(events[: events.index("end of step")]) == [] and len(order(events)) > 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_at_the_end_of_a_step_nothing_is_left_to_follow(strategy: str) -> None:
    """Recorded or not: sums over replicas and norms are there, however late they are made."""
    bench = Bench(Mesh.single(), strategy, stream=Late())
    bench.run([WINDING, BACKWARD], None)
    everything = [bucket.index for bucket in bench.plan.buckets]
    assert bench.final == everything
    bench.check_sums()
    bench.run([WINDING, BACKWARD], bench.counting.rounds())
    assert sorted(bench.final) == everything
    bench.check_sums()


def wrong(change: Callable[[list[str]], list[str]], *, rounds: GradientRounds, bench: Bench) -> str:
    with pytest.raises(RuntimeError) as error:
        bench.run([BACKWARD, change(BACKWARD)], rounds)
    return str(error.value)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_another_way_than_recorded_is_refused_by_name(strategy: str) -> None:
    def recorded() -> dict[str, object]:
        bench = Bench(Mesh.single(), strategy)
        bench.run([BACKWARD, BACKWARD], None)
        return {"bench": bench, "rounds": bench.counting.rounds()}

    def left_out(names: list[str]) -> list[str]:
        return [name for name in names if name not in ("0.b", "root")]

    assert wrong(left_out, **recorded()) == (  # type: ignore[arg-type]
        "backward pass 2 of 2 ended with other gradients than planned: 0.b (0 instead of 1), root (0 instead of 1)"
    )
    found = wrong(lambda names: [*names, "root"], **recorded())  # type: ignore[arg-type]
    assert found.startswith("root: more gradients than the 1 planned for each microbatch, in bucket ")
    state = recorded()
    bench, rounds = state["bench"], state["rounds"]
    assert isinstance(bench, Bench) and isinstance(rounds, GradientRounds)
    bench.run([BACKWARD, BACKWARD], rounds)
    with pytest.raises(RuntimeError, match="backward pass 3 of a step: got one more, expected 2"):
        bench.buckets.end_backward()


def test_the_error_says_how_many_gradients_the_pass_had_when_it_was_recorded() -> None:
    bench = Bench(Mesh.single(), "optim_grads_params")
    twice = [*BACKWARD, "root", "root"]
    bench.run([BACKWARD, twice], None)
    with pytest.raises(RuntimeError, match="root: more gradients than the 3 planned for each microbatch"):
        bench.run([BACKWARD, [*twice, "root"]], bench.counting.rounds())


def test_a_parameter_that_nobody_uses_is_named_before_anything_is_sent() -> None:
    bench = Bench(Mesh.single(), "optim")
    events = bench.mesh.recorder.events = []
    bench.begin(None)
    for name in BACKWARD:
        if name not in ("3.a", "3.v"):
            bench.write(name)
    bench.buckets.end_backward()
    assert set(bench.buckets.without_gradient()) == {"3.a", "3.v"}
    with pytest.raises(RuntimeError) as error:
        bench.buckets.finish_all()
    assert str(error.value).startswith("parameters without gradient at the end of the step: ")
    assert "3.a in bucket" in str(error.value) and "3.v in bucket" in str(error.value) and "3.b in" not in str(error.value)
    assert order(events) == []


def check_find_unused(place: Place, strategy: str) -> list[str]:
    """Every rank leaves out other layers, in another order; one layer is left out by all of them, and in the second step by none."""
    shards = 0 if strategy_named(strategy).sharded else 1
    bench = Bench(sharded_mesh(None, shards, CPU) if place.world_size > 1 else Mesh.single(), strategy, find_unused=True)
    mine = [name for name in (NAMES if place.rank else BACKWARD) if name[0] not in ("1", str(2 + place.rank))]
    found: list[str] = []
    for program in ([mine, mine], [BACKWARD, mine], [[], mine], [mine, BACKWARD]):
        events = bench.run(program, None)
        bench.check_sums()
        assert order(events[: events.index("end of step")]) == [], "nothing goes out before the last pass"
        assert order(events) == [f"reduce {bucket.index}" for bucket in bench.plan.buckets]
        assert bench.final == [bucket.index for bucket in bench.plan.buckets]
        found += order(events)
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_that_leave_out_different_parameters(cluster: Cluster, world_size: int, strategy: str) -> None:
    found = cluster.run(world_size, check_find_unused, strategy)
    assert all(other == found[0] for other in found)


def test_unused_parameters_need_a_slot_for_each_bucket() -> None:
    shared = Bench(Mesh.single(), "optim_grads_params").buckets
    with pytest.raises(ValueError, match="unused parameters need a gradient slot for each bucket"):
        UnusedCounting(shared, lambda bucket: None)


def test_gradients_of_our_own_model_are_checked_too() -> None:
    """Contributions that the plan knows: the end of a backward pass may be announced, and then nothing may be missing."""
    bench = Bench(Mesh.single(), "optim")
    bench.buckets.begin_step(2)
    for number in range(2):
        for name in BACKWARD[: -1 if number else None]:
            bench.write(name)
        if number == 0:
            bench.buckets.end_backward()
    with pytest.raises(RuntimeError, match=r"backward pass 2 of 2 ended with other gradients than planned: root \(0 instead of 1\)"):
        bench.buckets.end_backward()
