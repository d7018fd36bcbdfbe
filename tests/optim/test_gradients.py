"""Gradient buckets: who overwrites, who accumulates, when a reduction starts, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_llama.config import ParallelConfig
from megatron_llama.layout import ShardLayout, layout_by_size, strategy_named
from megatron_llama.mesh import Mesh, Place, build_mesh
from megatron_llama.optim.gradients import GradientBuckets, ParameterSink
from megatron_llama.params import UnitSpec, stage_units
from tests.harness import Cluster
from tests.parallel.cases import MODEL, STRATEGIES

TIED = replace(MODEL, tie_word_embeddings=True, num_hidden_layers=2)


class Backward:
    """Writes made-up gradients in the order in which the model's backward pass would."""

    def __init__(self, mesh: Mesh, strategy: str, *, cap: int = 20_000) -> None:
        plan, self.mesh = strategy_named(strategy), mesh
        alone = Mesh.single().dp
        self.units: tuple[UnitSpec, ...] = stage_units(TIED)
        self.layout: ShardLayout = layout_by_size(
            self.units, shards=mesh.dp.size if plan.sharded else 1, cap=cap, gradient_slots=plan.gradient_slots
        )
        self.buckets = GradientBuckets(
            self.layout,
            shard_axis=mesh.dp if plan.sharded else alone,
            replica_axis=alone if plan.sharded else mesh.dp,
            reduce_every_microbatch=plan.reduce_every_microbatch,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        placements = [(bucket.index, placed) for bucket in self.layout.buckets for placed in bucket.placements]
        self.sinks: dict[str, ParameterSink] = {placed.spec.name: self.buckets.sink(index, placed) for index, placed in placements}
        specs = [spec for unit in reversed(self.units) for spec in reversed(unit.params)]
        self.order = [spec.name for spec in specs if spec.contributions == 2] + [spec.name for spec in specs]

    def write(self, name: str, value: Tensor) -> None:
        """One contribution, as a layer makes it."""
        view, beta = self.sinks[name].buffer()
        view.copy_(value if beta == 0.0 else view + value)
        self.sinks[name].done()

    def gradient(self, name: str, turn: int, microbatch: int) -> Tensor:
        """What this rank contributes."""
        seed = hash((self.order.index(name), turn, microbatch, self.mesh.dp.rank)) % 2**31
        shape = self.sinks[name].placement.spec.shape
        return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()

    def run(self, step: int, microbatches: int) -> dict[str, Tensor]:
        """One step's backward passes; returns this rank's own total of every parameter."""
        totals = {name: torch.zeros(sink.placement.spec.shape) for name, sink in self.sinks.items()}
        for microbatch in range(microbatches):
            self.buckets.begin_backward(first=microbatch == 0, last=microbatch == microbatches - 1)
            for turn, name in enumerate(self.order):
                value = self.gradient(name, turn + 1000 * step, microbatch)
                totals[name] += value
                self.write(name, value)
            self.buckets.end_backward()
        return totals


def check_sums(place: Place, strategy: str, microbatches: int) -> None:
    """Over two steps, the reduced shards hold the sums over ranks, microbatches and contributions: integers, so exactly."""
    import torch.distributed as dist

    mesh = build_mesh(ParallelConfig(), rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    backward = Backward(mesh, strategy)
    for step in range(2):
        totals = backward.run(step, microbatches)
        backward.buckets.finish_all()
        for total in totals.values():
            if place.world_size > 1:
                dist.all_reduce(total)
        rank = mesh.dp.rank if backward.layout.shards > 1 else 0
        for bucket in backward.layout.buckets:
            for segment in backward.layout.segments(bucket.index, rank):
                found = backward.buckets.shards[bucket.index][segment.in_shard : segment.in_shard + segment.length]
                expected = totals[segment.spec.name].flatten()[segment.in_param : segment.in_param + segment.length]
                assert torch.equal(found, expected), (step, segment.spec.name)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_shards_hold_exact_sums(cluster: Cluster, world_size: int, strategy: str, microbatches: int) -> None:
    cluster.run(world_size, check_sums, strategy, microbatches)


@pytest.mark.parametrize(("strategy", "later"), [("no_shard", 1.0), ("optim", 1.0), ("optim_grads", 0.0)])
def test_beta(strategy: str, later: float) -> None:
    """The first contribution of a step writes. Slots that live through the step accumulate; reused slots start anew."""
    backward = Backward(Mesh.single(), strategy)
    for first, expected in ((True, 0.0), (False, later), (True, 0.0)):
        backward.buckets.begin_backward(first=first, last=False)
        seen: dict[str, list[float]] = {}
        for name in backward.order:
            view, beta = backward.sinks[name].buffer()
            seen.setdefault(name, []).append(beta)
            assert view.shape == backward.sinks[name].placement.spec.shape
            backward.sinks[name].done()
        backward.buckets.end_backward()
        assert seen.pop("model.embed_tokens.weight") == [expected, 1.0]
        assert all(betas == [expected] for betas in seen.values())


def test_reduction_starts_at_the_last_write_of_its_bucket_inside_backward() -> None:
    backward = Backward(Mesh.single(), "optim")
    events = backward.mesh.recorder.events = []
    backward.buckets.begin_backward(first=True, last=True)
    last = {placed.spec.name: bucket.index for bucket in backward.layout.buckets for placed in bucket.placements[-1:]}
    written: set[str] = set()
    for name in backward.order:
        events.clear()
        backward.write(name, torch.zeros(()).expand(backward.sinks[name].placement.spec.shape))
        full_turn = name != "model.embed_tokens.weight" or name in written
        written.add(name)
        assert events == ([f"complete {last[name]}", f"reduce {last[name]}"] if name in last and full_turn else []), name
    assert written == set(backward.sinks)


def test_reductions_keep_bucket_order_when_completion_does_not() -> None:
    """Whatever order layers finish in, all ranks issue the same sequence."""
    backward = Backward(Mesh.single(), "optim")
    events = backward.mesh.recorder.events = []
    backward.buckets.begin_backward(first=True, last=True)
    for name in reversed(backward.order):
        backward.write(name, torch.zeros(()).expand(backward.sinks[name].placement.spec.shape))
    backward.buckets.end_backward()
    count = len(backward.layout.buckets)
    assert [event for event in events if event.startswith("reduce")] == [f"reduce {bucket}" for bucket in range(count)]
    completed = [event for event in events if event.startswith("complete")]
    assert completed != sorted(completed) and events.index("reduce 0") > events.index(completed[4])


@pytest.mark.parametrize("skipped", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_parameter_without_gradient_is_named(skipped: str) -> None:
    backward = Backward(Mesh.single(), "optim")
    backward.buckets.begin_backward(first=True, last=True)
    order = list(backward.order)
    order.remove(skipped)  # of the embedding's two contributions, one is left
    for name in order:
        backward.write(name, torch.zeros(backward.sinks[name].placement.spec.shape))
    with pytest.raises(RuntimeError) as error:
        backward.buckets.end_backward()
    assert str(error.value) == f"parameters without gradient after backward: {skipped}"


@pytest.mark.parametrize(("name", "planned"), [("model.norm.weight", 1), ("model.embed_tokens.weight", 2)])
def test_more_gradients_than_planned_are_refused(name: str, planned: int) -> None:
    backward = Backward(Mesh.single(), "optim")
    backward.buckets.begin_backward(first=True, last=True)
    value = torch.zeros(backward.sinks[name].placement.spec.shape)
    for _ in range(planned):
        backward.write(name, value)
    with pytest.raises(RuntimeError, match=f"{name}: more gradients in one backward pass than the {planned} planned"):
        backward.write(name, value)


def test_two_slots_hold_all_weight_matrices_of_optim_grads() -> None:
    whole, two = (Backward(Mesh.single(), strategy).layout for strategy in ("optim", "optim_grads"))
    assert len(whole.slot_numel()) == len(whole.buckets) > 4
    assert len([slot for slot in two.slot_numel() if slot[0] == 0]) == 2
    assert sum(two.slot_numel().values()) < 0.7 * sum(whole.slot_numel().values())
