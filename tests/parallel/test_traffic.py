"""Every collective of a step, counted call by call and byte by byte, beside the plan and the trace of it; what a step holds; and the order in
which reductions are issued."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import pytest
import torch
from megatron_llama.distributed.mesh import Place
from megatron_llama.engine.optimizer import _early_gathers, _updated_early
from megatron_llama.planner.trace.run import trace_run
from megatron_llama.plans.buckets import Bucket, BucketPlan, rank_bucket_plan
from megatron_llama.plans.memory import MemoryPlan, peak_of
from torch import Tensor

from tests.harness import Cluster
from tests.oracle.messages import Messages, step_messages
from tests.parallel.cases import STRATEGIES, Layout, trainer
from tests.plans.test_activation_memory import Live, Saved, storage


@dataclass(frozen=True)
class Counted:
    """What one rank did in its second step, and where it sits."""

    traffic: Messages
    events: list[str]
    tp_rank: int
    pp_rank: int
    saved: int
    """Most bytes that autograd held for backward."""


class Kept(Live):
    """Bytes that forward passes leave: not those of what backward computes again."""

    def pack(self, tensor: Tensor) -> Saved:
        """See Live."""
        return Saved(tensor) if torch._C._current_graph_task_id() >= 0 else super().pack(tensor)


def count(place: Place, layout: Layout) -> Counted:
    """Record the second step: the first one also publishes the initial weights."""
    run = trainer(place, layout)
    run.step(0)
    run.optimizer.settle()
    recorder = run.mesh.recorder
    recorder.traffic.clear()
    recorder.events = []
    live = Kept({storage(parameter) for stage in run.stages.values() for parameter in stage.parameters()})
    with torch.autograd.graph.saved_tensors_hooks(live.pack, lambda saved: saved.tensor):
        run.step(1)
    run.optimizer.settle()
    assert live.now == 0
    events = [event for event in recorder.events if event.startswith(("complete", "reduce"))]
    traffic = {key: astuple(value) for key, value in recorder.traffic.items()}
    return Counted(traffic, events, run.mesh.tp.rank, run.mesh.pp.rank, live.peak)


def planned_saved(plan: MemoryPlan, rank: int) -> int:
    """Of the planned bytes those that autograd holds: not the logits' gradient, nor what a split pass puts off, nor the rotary table of
    blocks that are computed again, which they hold themselves."""
    granularity, last = plan.config.parallel.recompute_granularity, plan.partition.stages - 1
    stages = range(plan.partition.stages)
    held = [plan.shape.logits * (stage == last) + plan.shape.rotary * (granularity == "full") for stage in stages]
    each = [plan.kept(stage, granularity, plan.chosen()) - held[stage] for stage in stages]
    return peak_of(plan.schedule.ranks[rank], each, [0 for _ in stages])


def _buckets(layout: Layout, rank: Counted) -> BucketPlan:
    return rank_bucket_plan(layout.config(), dp=layout.dp * layout.cp, tp_rank=rank.tp_rank, rank=rank.pp_rank)


TENSOR = [Layout(tp=2), Layout(tp=2, microbatches=4), Layout(tp=2, sp=True), Layout(tp=2, sp=True, microbatches=4)]
PIPELINE = [Layout(pp=2, microbatches=4), Layout(pp=4, microbatches=4, schedule="gpipe"), Layout(pp=2, microbatches=2, tied=True)]
DATA = [Layout(dp=2, strategy=s, microbatches=m) for s in STRATEGIES for m in (1, 4)] + [Layout(dp=4), Layout(dp=2, documents=True)]
FULL = [Layout(tp=2, pp=2, dp=2, sp=True, microbatches=2, tied=True, strategy=s) for s in STRATEGIES]


CONTEXT = [Layout(cp=2), Layout(cp=4, cp_comm="ring", microbatches=2), Layout(cp=2, dp=2, documents=True), Layout(tp=2, cp=2, sp=True)]
SHARED = [Layout(tp=4, microbatches=2), Layout(tp=4, sp=True, dp=2), Layout(tp=4, kv_heads=1, sp=True)]
CHUNKS = [
    Layout(pp=2, virtual=2, microbatches=4, schedule="interleaved"),
    Layout(pp=4, microbatches=4, schedule="zb-h1"),
    Layout(pp=2, virtual=2, microbatches=4, schedule="zb-v", tied=True),
    Layout(pp=2, virtual=2, dp=2, microbatches=2, schedule="interleaved", tied=True, strategy="optim_grads"),
    Layout(tp=2, sp=True, pp=2, dp=2, microbatches=4, schedule="zb-h1", strategy="optim_grads"),
    Layout(pp=2, split=(3, 1), microbatches=2),
]
SHARDED = Layout(dp=2, strategy="optim_grads_params", microbatches=3, layers=6)
SLOTS = [replace(SHARDED, slots=slots) for slots in ("1", "2", "3", "5", "6", "all")]
SLOTS += [
    replace(SHARDED, slots="3", recompute="full"),
    replace(SHARDED, grad_slots=1),
    replace(SHARDED, tied=True),
    replace(SHARDED, prefetch=1),
]
HYBRID = [Layout(dp=4, shard_size=2, strategy=s, microbatches=2) for s in STRATEGIES[1:]] + [
    Layout(dp=2, shard_size=1, strategy=s, microbatches=2) for s in STRATEGIES[1:]
]
NARROW = [Layout(dp=2, strategy=s, microbatches=2, reduce_bf16=True) for s in STRATEGIES]


EXACT = (*TENSOR[1:3], *PIPELINE, *DATA[1:8:2], *FULL[1:], *CONTEXT[1:], *SHARED[1:2], *CHUNKS[:5], SLOTS[1], HYBRID[0])
"""Of these also a trace is taken: all axes, ways to shard and schedules."""


def test_every_axis_is_used_somewhere(cluster: Cluster) -> None:
    """So that no count above is an empty promise."""
    used = {
        axis
        for layout in (SHARED[1], FULL[1], CONTEXT[1], CHUNKS[0])
        for rank in cluster.run(layout.world_size, count, layout)
        for axis, _ in rank.traffic
    }
    assert used == {"world", "tp", "kv", "cp", "dp", "dp_gather", "pp", "pp_backward", "pp_return", "pp_backward_return", "embedding"}


@pytest.mark.parametrize(
    "layout", TENSOR + PIPELINE + DATA + FULL + CONTEXT + SHARED + CHUNKS + NARROW + SLOTS + HYBRID, ids=lambda layout: layout.name
)
def test_step_sends_and_holds_exactly_what_is_planned_and_traced(cluster: Cluster, layout: Layout) -> None:
    """Messages and bytes of each rank, to the byte: counted on the way, planned, and for EXACT traced in one process. What autograd holds:
    within a hundredth."""
    config, world = layout.sized(), layout.world_size
    plan, trace = MemoryPlan(config, world), trace_run(config, world) if layout in EXACT else None
    for rank, counted in enumerate(cluster.run(world, count, layout)):
        assert counted.traffic == step_messages(config, world, counted.pp_rank), f"rank {rank}"
        if trace is not None:
            stage = trace.stage_of(counted.pp_rank)
            assert counted.traffic == trace.traffic(stage), f"rank {rank}"
        if not layout.documents:  # masks and positions of samples are not planned
            assert planned_saved(plan, counted.pp_rank) == pytest.approx(counted.saved, rel=0.01), f"rank {rank}"


def _order(layout: Layout, buckets: BucketPlan, stage: int) -> list[str]:
    """Events of one stage over a step of one-forward-one-backward: complete buckets in backward order, in every round."""
    rounds = layout.microbatches if layout.strategy in ("optim_grads", "optim_grads_params") else 1
    own: list[Bucket] = [bucket for bucket in buckets.buckets if bucket.kind.stage == stage]
    return [f"{what} {bucket.index}" for _ in range(rounds) for bucket in own for what in ("complete", "reduce")]


@pytest.mark.parametrize(
    "layout",
    [
        *DATA,
        *FULL,
        Layout(dp=2, bucket=1),
        Layout(dp=2, bucket=10**9),
        Layout(cp=2, dp=2, strategy="optim_grads", microbatches=2),
        CHUNKS[0],
        CHUNKS[3],
    ],
    ids=lambda layout: layout.name,
)
def test_reduction_starts_as_soon_as_its_bucket_is_complete(cluster: Cluster, layout: Layout) -> None:
    """So it travels under the backward passes of all later buckets."""
    for rank, counted in enumerate(cluster.run(layout.world_size, count, layout)):
        buckets = _buckets(layout, counted)
        assert len(buckets.buckets) > 1 and (len(buckets.buckets) > 8 or layout.bucket != 1), "the order of one bucket says nothing"
        stages = {bucket.kind.stage for bucket in buckets.buckets}
        assert len(counted.events) == sum(len(_order(layout, buckets, stage)) for stage in stages)
        for stage in stages:
            own = {str(bucket.index) for bucket in buckets.buckets if bucket.kind.stage == stage}
            events = [event for event in counted.events if event.split()[1] in own]
            expected = _order(layout, buckets, stage)
            if buckets.gathers_first:
                # Kept back until the next use, before which another bucket may be complete.
                assert all(
                    events.index(event) > events.index(event.replace("reduce", "complete")) for event in events if _what(event) == "reduce"
                )
                events, expected = sorted(events, key=_what), sorted(expected, key=_what)
            assert events == expected, f"rank {rank}, stage {stage}"


def _what(event: str) -> str:
    return event.split()[0]


def ordered(place: Place, layout: Layout) -> list[str]:
    """What a rank reduced in a step, of which bucket, between which passes."""
    run = trainer(place, layout)
    run.mesh.recorder.events = []
    run.step(0)
    return run.mesh.recorder.events


@pytest.mark.parametrize("layout", [CHUNKS[3], CHUNKS[4], FULL[2]], ids=lambda layout: layout.name)
def test_all_ranks_of_a_reduction_issue_the_same_sequence(cluster: Cluster, layout: Layout) -> None:
    """That is the argument against deadlock, also when stages and halves of passes interleave."""
    events = cluster.run(layout.world_size, ordered, layout)
    each = layout.world_size // layout.pp
    for stage in range(layout.pp):
        group = events[stage * each : (stage + 1) * each]
        assert all(found == group[0] for found in group)
        assert sum(event.startswith("reduce") for event in group[0]) > 4


@pytest.mark.parametrize(("slots", "gathered"), [("2", 3), ("3", 4)])
def test_what_backward_waits_for_first_goes_first(slots: str, gathered: int, cluster: Cluster) -> None:
    """After block 5, bucket 1: with two slots the gather of block 3 is wanted before the room for its gradients, with three that
    of block 2 is not."""
    layout = replace(SHARDED, slots=slots, microbatches=1)
    for events in cluster.run(2, ordered, layout):
        backward = [event for event in events[events.index("reduce 0") :] if event in (f"gather {gathered}", "reduce 1")]
        assert backward == sorted(backward, reverse=slots == "3"), events


def test_gathers_in_backward_are_spread_and_leave_the_first_units_alone() -> None:
    for config in (Layout(dp=2, bucket=1, layers=12), Layout(dp=2, bucket=20_000, layers=12), Layout(dp=2, bucket=10**9)):
        layout = rank_bucket_plan(config.config(), dp=2)
        early = sorted(_early_gathers(layout))
        assert not {bucket for unit in layout.unit_buckets[:2] for bucket in unit} & set(early)
        for end in range(len(layout.buckets)):
            gathered = sum(layout.buckets[bucket].numel for bucket in early if bucket <= end)
            reduced = sum(bucket.numel for bucket in layout.buckets[: end + 1])
            assert 3 * gathered <= reduced, "never more than a third of what has been reduced"
        if len(layout.buckets) > 12:
            assert 4 * sum(layout.buckets[bucket].numel for bucket in early) > layout.numel, "about a third"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, bucket=1, freeze=("model.layers.1.*", "model.layers.2.*")),
        Layout(dp=2, tp=4, kv_heads=2, bucket=1),
        Layout(dp=2, tp=2, sp=True, bucket=1),
        Layout(dp=2, bucket=1, tied=True),
    ],
    ids=lambda layout: layout.name,
)
def test_gathers_in_backward_are_of_what_is_updated_there(layout: Layout) -> None:
    """A third of that, however much there is beside it that is frozen, or has to be summed over copies."""
    buckets = rank_bucket_plan(replace(layout, layers=12).config(), dp=2)
    early = set(_early_gathers(buckets))
    updated = [bucket for bucket in buckets.buckets if _updated_early(buckets, bucket.index)]
    assert all(bucket.kind.trainable and not bucket.kind.partial and not bucket.kind.lasting for bucket in updated)
    assert 0 < len(updated) < len(buckets.buckets) and early < {bucket.index for bucket in updated}
    share = sum(bucket.numel for bucket in updated if bucket.index in early) / sum(bucket.numel for bucket in updated)
    assert 0.25 < share <= 1 / 3


def test_volume_of_optim_does_not_grow_with_accumulation(cluster: Cluster) -> None:
    volumes = {}
    for strategy in ("optim", "optim_grads"):
        for microbatches in (1, 4):
            layout = replace(Layout(dp=2), strategy=strategy, microbatches=microbatches)
            volumes[strategy, microbatches] = cluster.run(2, count, layout)[0].traffic["dp", "reduce_scatter"]
    assert volumes["optim", 4] == volumes["optim", 1] == volumes["optim_grads", 1]
    assert volumes["optim_grads", 4] == tuple(4 * value for value in volumes["optim", 1])
