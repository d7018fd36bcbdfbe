"""Gradient buckets: who overwrites, who accumulates, when a reduction starts, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.engine.comm.streams import open_stream
from megatron_llama.engine.gradients import GradientBuckets
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.plan.buckets import (
    BucketPlan,
    PlacedParam,
    Slots,
    bucket_plan_by_size,
    bucket_plan_by_unit,
    strategy_named,
)
from megatron_llama.engine.plan.specs import UnitSpec
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.plan.params import stage_units, whole_model
from torch import Tensor

from tests.harness import Cluster
from tests.parallel.cases import MODEL, STRATEGIES

TIED = replace(MODEL, tie_word_embeddings=True, num_hidden_layers=2)


@dataclass(frozen=True)
class Handle:
    """What the handle of one parameter does with gradients."""

    buckets: GradientBuckets
    bucket: int
    placement: PlacedParam

    def grad_view(self) -> tuple[Tensor, float]:
        return self.buckets.grad_view(self.bucket, self.placement)

    def grad_written(self) -> None:
        self.buckets.grad_written(self.bucket, self.placement)

    def keep_wgrad(self, work: Callable[[], object]) -> bool:
        return self.buckets.keep_wgrad(work)


class Backward:
    """Writes made-up gradients in the order in which the model's backward pass would."""

    def __init__(self, mesh: Mesh, strategy: str, *, cap: int = 20_000, wire: torch.dtype | None = None, rough: bool = False) -> None:
        plan, self.mesh, self.rough = strategy_named(strategy), mesh, rough
        self.units: tuple[UnitSpec, ...] = stage_units(TIED, whole_model(TIED), 0)
        shards, slots = (mesh.dp_shard.size, Slots(2 if plan.by_unit else None, 2 if plan.reduce_every_microbatch else None))
        self.bucket_plan: BucketPlan = (
            bucket_plan_by_unit(self.units, shards=shards, slots=slots)
            if plan.by_unit
            else bucket_plan_by_size(self.units, shards=shards, cap=cap, slots=slots)
        )
        self.reduced: list[int] = []
        self.buckets = GradientBuckets(
            self.bucket_plan,
            mesh,
            reduce_every_microbatch=plan.reduce_every_microbatch,
            dtype=torch.float32,
            wire=wire,
            stream=open_stream(torch.device("cpu"), inline=mesh.dp.size == 1),
            chunk_bytes=10_000,
            reduced=self.reduced.append,
            before_reuse=lambda bucket: None,
            gathers_to_come=lambda: True,
        )
        placements = [(bucket.index, placed) for bucket in self.bucket_plan.buckets for placed in bucket.placements]
        self.handles = {placed.spec.name: Handle(self.buckets, index, placed) for index, placed in placements}
        specs = [spec for unit in reversed(self.units) for spec in reversed(unit.params)]
        self.order = [spec.name for spec in specs if spec.contributions == 2] + [spec.name for spec in specs]

    def write(self, name: str, value: Tensor) -> None:
        """One contribution, as a layer makes it."""
        view, beta = self.handles[name].grad_view()
        view.copy_(value if beta == 0.0 else view + value)
        self.handles[name].grad_written()

    def gradient(self, name: str, turn: int, microbatch: int) -> Tensor:
        """What this rank contributes: whole numbers, or (``rough``) some that bfloat16 cannot hold."""
        seed = hash((self.order.index(name), turn, microbatch, self.mesh.dp.rank)) % 2**31
        shape = self.handles[name].placement.spec.shape
        whole = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()
        return whole / 3 + 2**-10 if self.rough else whole

    def run(self, step: int, microbatches: int) -> dict[str, list[Tensor]]:
        """One step's backward passes; returns this rank's own gradient of every parameter, microbatch by microbatch."""
        totals = {name: [torch.zeros(handle.placement.spec.shape) for _ in range(microbatches)] for name, handle in self.handles.items()}
        self.buckets.begin_step(microbatches)
        for microbatch in range(microbatches):
            for turn, name in enumerate(self.order):
                value = self.gradient(name, turn + 1000 * step, microbatch)
                totals[name][microbatch] += value
                self.write(name, value)
        return totals

    def zeros(self, name: str) -> None:
        """A contribution of nothing."""
        self.write(name, torch.zeros(self.handles[name].placement.spec.shape))


def data_mesh(place: Place, strategy: str) -> Mesh:
    """All ranks are data-parallel."""
    config = Config(parallel=ParallelConfig(data_parallel_sharding_strategy=strategy))
    return build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))


def over_ranks(own: Tensor) -> list[Tensor]:
    """A tensor of every rank."""
    if not dist.is_initialized():
        return [own]
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return found


def found_and_expected(backward: Backward, sums: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """This rank's reduced segments beside their part of the sums. Asserts that there is nothing between them."""
    rank = backward.mesh.dp_shard.rank
    for bucket in backward.bucket_plan.buckets:
        shard = backward.buckets.shards[bucket.index]
        rest = shard.clone()
        for segment in backward.bucket_plan.segments(bucket.index, rank):
            own = slice(segment.in_shard, segment.in_shard + segment.length)
            rest[own] = 0.0
            yield (segment.spec.name, shard[own], sums[segment.spec.name].flatten()[segment.in_param : segment.in_param + segment.length])
        assert not bool(rest.any()), f"bucket {bucket.index}: the padding would count in the gradient norm"


def check_sums(place: Place, strategy: str, microbatches: int) -> None:
    """Over two steps, the reduced shards hold the sums over ranks, microbatches and contributions: integers, so exactly."""
    backward = Backward(data_mesh(place, strategy), strategy)
    for step in range(2):
        totals = backward.run(step, microbatches)
        backward.buckets.finish_all()
        sums = {name: torch.stack(over_ranks(sum(parts))).sum(0) for name, parts in totals.items()}
        for name, found, expected in found_and_expected(backward, sums):
            assert torch.equal(found, expected), (step, name)


@pytest.mark.few(4)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_shards_hold_exact_sums(cluster: Cluster, world_size: int, strategy: str, microbatches: int) -> None:
    cluster.run(world_size, check_sums, strategy, microbatches)


def check_bf16_on_the_wire(place: Place, strategy: str) -> dict[str, tuple[int, int]]:
    """Sent in bfloat16, accumulated in fp32. Returns bytes by operation: as sent in fp32, and in bfloat16."""
    sent, microbatches = [], 4
    for wire in (None, torch.bfloat16):
        backward = Backward(data_mesh(place, strategy), strategy, wire=wire, rough=True)
        totals = backward.run(0, microbatches)
        backward.buckets.finish_all()
        traffic = backward.mesh.recorder.traffic
        sent.append({operation: traffic["dp", operation].bytes for _, operation in traffic})
        each = totals if strategy_named(strategy).reduce_every_microbatch else {name: [sum(parts)] for name, parts in totals.items()}
        exact = {name: sum(torch.stack(over_ranks(part)).double().sum(0) for part in parts) for name, parts in each.items()}
        rounded = {name: sum(_in_rank_order(part) for part in parts) for name, parts in each.items()}
        for name, found, expected in found_and_expected(backward, exact):
            assert found.dtype is torch.float32
            largest = max(float(part.abs().max()) for part in each[name]) * len(each[name])
            bound = (2**-22 if wire is None else 2**-7) * place.world_size * largest
            torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=bound)
            assert wire is None or not torch.equal(found, expected.float()), (name, "was never rounded")
        if wire is not None and strategy != "no_shard":
            for name, found, expected in found_and_expected(backward, rounded):
                # The embedding's two contributions a microbatch are added one by one, which rounds otherwise.
                assert torch.equal(found, expected) or "embed" in name, name
    return {operation: (sent[0][operation], sent[1][operation]) for operation in sent[0]}


def _in_rank_order(own: Tensor) -> Tensor:
    """What arrives of a gradient that all ranks send in bfloat16, summed in fp32."""
    total = torch.zeros_like(own)
    for part in over_ranks(own):
        total += part.bfloat16()
    return total


@pytest.mark.few(3)
@pytest.mark.parametrize(("strategy", "operation"), [(s, "all_reduce" if s == "no_shard" else "reduce_scatter") for s in STRATEGIES])
def test_bf16_on_the_wire_halves_the_bytes_and_sums_in_fp32(cluster: Cluster, strategy: str, operation: str) -> None:
    for found in cluster.run(2, check_bf16_on_the_wire, strategy):
        assert found.keys() == {operation}
        assert found[operation][0] == 2 * found[operation][1] > 0


def test_alone_nothing_is_rounded() -> None:
    """There is no wire."""
    one, other = (Backward(Mesh.single(), "optim", wire=wire, rough=True) for wire in (None, torch.bfloat16))
    for backward in (one, other):
        backward.run(0, 2)
        backward.buckets.finish_all()
    assert all(torch.equal(a, b) for a, b in zip(one.buckets.shards.values(), other.buckets.shards.values(), strict=True))


@pytest.mark.parametrize(("strategy", "later"), [("no_shard", 1.0), ("optim", 1.0), ("optim_grads", 0.0)])
def test_beta(strategy: str, later: float) -> None:
    """The first contribution of a step writes. Slots that live through the step accumulate; reused slots start anew."""
    backward = Backward(Mesh.single(), strategy)
    for _ in range(2):
        backward.buckets.begin_step(3)
        for expected in (0.0, later, later):
            seen: dict[str, list[float]] = {}
            for name in backward.order:
                view, beta = backward.handles[name].grad_view()
                seen.setdefault(name, []).append(beta)
                assert view.shape == backward.handles[name].placement.spec.shape
                backward.handles[name].grad_written()
            assert seen.pop("model.embed_tokens.weight") == [expected, 1.0]
            assert all(betas == [expected] for betas in seen.values())
        backward.buckets.finish_all()


@pytest.mark.parametrize(("strategy", "rounds"), [("no_shard", 1), ("optim", 1), ("optim_grads", 3)])
def test_every_bucket_is_reduced_once_a_round(strategy: str, rounds: int) -> None:
    """A round is the step, or one microbatch of it."""
    backward = Backward(Mesh.single(), strategy)
    count = len(backward.bucket_plan.buckets)
    for step in range(2):
        events = backward.mesh.recorder.events = []
        backward.run(step, 3)
        assert Counter(events) == {f"{what} {bucket}": rounds for bucket in range(count) for what in ("complete", "reduce")}
        reduced = [event for event in events if event.startswith("reduce")]
        assert reduced == [f"reduce {bucket}" for bucket in range(count)] * rounds
        backward.buckets.finish_all()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_reduction_starts_at_the_last_write_of_its_bucket_inside_backward(microbatches: int) -> None:
    backward = Backward(Mesh.single(), "optim")
    events = backward.mesh.recorder.events = []
    backward.buckets.begin_step(microbatches)
    last = {placed.spec.name: bucket.index for bucket in backward.bucket_plan.buckets for placed in bucket.placements[-1:]}
    left = Counter(backward.order * microbatches)
    for name in backward.order * microbatches:
        events.clear()
        backward.zeros(name)
        left[name] -= 1
        assert events == ([f"complete {last[name]}", f"reduce {last[name]}"] if name in last and not left[name] else []), name
    assert left.keys() == backward.handles.keys() and not left.total()


def test_microbatches_may_overtake_each_other() -> None:
    """Interleaved stages and split passes finish in an order of their own: what counts is how many contributions there were."""
    straight, mixed = (Backward(Mesh.single(), "optim") for _ in range(2))
    straight.run(0, 2)
    mixed.buckets.begin_step(2)
    for half in (mixed.order[:9], mixed.order[9:]):
        for microbatch in range(2):
            for name in half:
                mixed.write(name, mixed.gradient(name, _turn(mixed, name, half), microbatch))
    for backward in (straight, mixed):
        backward.buckets.finish_all()
    assert all(torch.equal(a, b) for a, b in zip(straight.buckets.shards.values(), mixed.buckets.shards.values(), strict=True))


def _turn(backward: Backward, name: str, half: list[str]) -> int:
    """The embedding contributes twice, first of all and last of all."""
    return len(backward.order) - 1 if half[-1] == backward.order[-1] and name == backward.order[-1] else backward.order.index(name)


def deferred_pass(backward: Backward, key: object, microbatch: int) -> None:
    """The first half of a split pass: norms are written, matrices kept."""
    backward.buckets.postpone_wgrads(key)
    for turn, name in enumerate(backward.order):
        value = backward.gradient(name, turn, microbatch)
        work = partial(backward.write, name, value)
        if "norm" in name or not backward.handles[name].keep_wgrad(work):
            work()
    backward.buckets.postpone_wgrads(None)


def test_deferred_contributions_are_written_when_they_are_run_in_the_order_of_their_pass() -> None:
    straight, split = (Backward(Mesh.single(), "optim") for _ in range(2))
    straight.run(0, 2)
    events = split.mesh.recorder.events = []
    split.buckets.begin_step(2)
    norms = next(bucket.index for bucket in split.bucket_plan.buckets if not bucket.kind.decay)
    for microbatch in range(2):
        deferred_pass(split, ("stage", microbatch), microbatch)
    assert events == [f"complete {norms}", f"reduce {norms}"]
    assert not any(bool(shard.any()) for bucket, shard in split.buckets.shards.items() if bucket != norms)
    with pytest.raises(RuntimeError, match=r"without gradient at the end of the step: .*model\.layers\.1\.mlp\.down_proj\.weight"):
        split.buckets.finish_all()
    split.buckets.run_wgrads(("stage", 0))
    assert len(events) == 2, "half of the contributions completes nothing"
    split.buckets.run_wgrads(("stage", 1))
    matrices = [bucket.index for bucket in split.bucket_plan.buckets if bucket.kind.decay]
    assert events[2:] == [f"{what} {bucket}" for bucket in matrices for what in ("complete", "reduce")]
    for backward in (straight, split):
        backward.buckets.finish_all()
    assert all(torch.equal(a, b) for a, b in zip(straight.buckets.shards.values(), split.buckets.shards.values(), strict=True))


def test_deferring_ends_and_a_pass_runs_once() -> None:
    backward = Backward(Mesh.single(), "optim")
    assert not backward.buckets.keep_wgrad(lambda: None)
    ran: list[int] = []
    backward.buckets.postpone_wgrads("a")
    assert backward.buckets.keep_wgrad(lambda: ran.append(1))
    backward.buckets.postpone_wgrads("b")
    assert backward.buckets.keep_wgrad(lambda: ran.append(2)) and backward.buckets.keep_wgrad(lambda: ran.append(3))
    backward.buckets.postpone_wgrads(None)
    assert not backward.buckets.keep_wgrad(lambda: ran.append(4))
    for key, expected in (("b", [2, 3]), ("b", [2, 3]), ("a", [2, 3, 1]), ("c", [2, 3, 1])):
        backward.buckets.run_wgrads(key)
        assert ran == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("skipped", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_parameter_without_gradient_is_named(skipped: str, strategy: str) -> None:
    """In the second microbatch alone."""
    backward = Backward(Mesh.single(), strategy)
    backward.buckets.begin_step(2)
    order = backward.order * 2
    del order[len(order) - 1 - order[::-1].index(skipped)]  # of the embedding's two contributions, one is left
    with pytest.raises(RuntimeError) as error:
        for name in order:
            backward.zeros(name)  # refuses already here to overwrite a slot that another bucket waits in
        backward.buckets.finish_all()
    bucket = next(b.index for b in backward.bucket_plan.buckets for placed in b.placements if placed.spec.name == skipped)
    assert skipped in str(error.value) and backward.bucket_plan.label(bucket) in str(error.value)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("name", "planned"), [("model.norm.weight", 1), ("model.embed_tokens.weight", 2)])
def test_more_gradients_than_planned_are_refused(name: str, planned: int, microbatches: int) -> None:
    backward = Backward(Mesh.single(), "optim")
    backward.buckets.begin_step(microbatches)
    for _ in range(planned * microbatches):
        backward.zeros(name)
    with pytest.raises(RuntimeError, match=f"{name}: more gradients than the {planned} planned for each microbatch"):
        backward.zeros(name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_reduction_is_waited_for_once(strategy: str) -> None:
    backward = Backward(Mesh.single(), strategy)
    backward.run(0, 1)
    last = backward.bucket_plan.buckets[-1].index
    backward.buckets.finish(last)
    with pytest.raises(RuntimeError) as error:
        backward.buckets.finish(last)
    assert str(error.value) == f"{backward.bucket_plan.label(last)}: a reduction is waited for, but the bucket is idle"
    assert "model.embed_tokens.weight" in str(error.value)


def test_a_slot_in_use_is_not_taken() -> None:
    """Two buckets of one slot, the first of them half written."""
    backward = Backward(Mesh.single(), "optim_grads")
    slots, buckets = backward.bucket_plan.gradient_slots, backward.bucket_plan.buckets
    pairs = ((one, other) for one in buckets for other in buckets if one is not other and slots[one.index] == slots[other.index])
    first, second = next((one, other) for one, other in pairs if len(one.placements) > 1)
    backward.buckets.begin_step(1)
    written, *missing = [placed.spec.name for placed in first.placements]
    backward.zeros(written)
    with pytest.raises(RuntimeError) as error:
        backward.zeros(second.placements[0].spec.name)
    label = backward.bucket_plan.label
    assert str(error.value) == (
        f"{second.placements[0].spec.name}: {label(second.index)} needs gradient slot {slots[first.index]} "
        f"while {label(first.index)} still misses {', '.join(missing)}"
    )


@pytest.mark.parametrize(("strategy", "microbatches"), [(s, m) for s in STRATEGIES for m in (1, 3)])
def test_the_engine_hears_of_every_bucket_once_in_launch_order(strategy: str, microbatches: int) -> None:
    backward = Backward(Mesh.single(), strategy)
    for step in range(2):
        backward.reduced.clear()
        backward.run(step, microbatches)
        backward.buckets.finish_all()
        assert backward.reduced == [bucket.index for bucket in backward.bucket_plan.buckets]
