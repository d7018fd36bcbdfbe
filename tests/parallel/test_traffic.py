"""Every collective of a step, counted call by call and byte by byte, beside the plan and the trace of it; what a step holds; and the order in
which reductions are issued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine.plan.buckets import Bucket, BucketPlan
from megatron_llama.engine.plan.overlap import gathered_during_backward, updated_during_backward
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.moe.block import Gate
from megatron_llama.model.plan.dispatch import Load, dispatch_messages
from megatron_llama.model.plan.experts import is_sparse
from megatron_llama.model.plan.router_losses import count_messages
from megatron_llama.pipeline.plan.run_engine import rank_bucket_plan
from megatron_llama.planner.context_traffic import context_traffic
from megatron_llama.planner.trace.run import trace_run
from megatron_llama.train.setup.memory import MemoryPlan, peak_of
from torch import Tensor

from tests.harness import Cluster
from tests.model.test_activation_memory import EXPERTS, Live, Run, Saved, storage
from tests.oracle.messages import Messages, step_messages
from tests.parallel.cases import GLOBAL_BATCH_SIZE, STRATEGIES, Layout, Trainer, trainer


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
    """What the second step does: the first one also publishes the initial weights."""
    run = trainer(place, layout)
    run.step(0)
    return counted(run, 1)[1]


def counted(run: Trainer, index: int) -> tuple[tuple[Tensor, Tensor], Counted]:
    """Take one step of a run: its loss and norm, and what it did."""
    run.optimizer.settle()
    recorder = run.mesh.recorder
    recorder.traffic.clear()
    recorder.events = []
    live = Kept({storage(parameter) for stage in run.stages.values() for parameter in stage.parameters()})
    with torch.autograd.graph.saved_tensors_hooks(live.pack, lambda saved: saved.tensor):
        result = run.step(index)
    run.optimizer.settle()
    assert live.now == 0
    events = [event for event in recorder.events if event.startswith(("complete", "reduce"))]
    traffic = {key: astuple(value) for key, value in recorder.traffic.items()}
    return result, Counted(traffic, events, run.mesh.tp.rank, run.mesh.pp.rank, live.peak)


def planned_saved(plan: MemoryPlan, rank: int) -> int:
    """Of the planned bytes those that autograd holds: not the logits' gradient, nor what a split pass puts off, nor the rotary table of
    blocks that are computed again, which they hold themselves."""
    granularity, last = plan.config.parallel.recompute_granularity, plan.partition.stages - 1
    stages = range(plan.partition.stages)
    held = [plan.shape.logits * (stage == last) + plan.shape.rotary * (granularity == "full" and bool(plan.partition.layers[stage])) for stage in stages]
    each = [plan.kept(stage, granularity, plan.recompute_layers()) - held[stage] for stage in stages]
    return peak_of(plan.schedule.ranks[rank], each, [0 for _ in stages])


def _buckets(layout: Layout, rank: Counted) -> BucketPlan:
    return rank_bucket_plan(layout.config(), dp=layout.dp * layout.cp, tp_rank=rank.tp_rank, rank=rank.pp_rank)


SHARDED = Layout(dp=2, strategy="optim_grads_params", microbatches=3, layers=6)
SLOTS = [replace(SHARDED, slots=slots) for slots in ("1", "2", "3", "5", "6", "all")]
SLOTS += [
    replace(SHARDED, slots="3", recompute="full"),
    replace(SHARDED, grad_slots=1),
    replace(SHARDED, tied=True),
    replace(SHARDED, prefetch=1),
]
NARROW = [Layout(dp=2, strategy=s, microbatches=2, reduce_bf16=True) for s in STRATEGIES]
FULL = Layout(tp=2, pp=2, dp=2, sp=True, microbatches=2, tied=True, strategy="optim_grads")
INTERLEAVED = Layout(pp=2, virtual=2, dp=2, microbatches=2, schedule="interleaved", tied=True, strategy="optim_grads")
SPLIT_PASSES = Layout(tp=2, sp=True, pp=2, dp=2, microbatches=4, schedule="zb-h1", strategy="optim_grads")
HYBRID = [Layout(dp=4, shard_size=2, strategy=s, microbatches=2) for s in STRATEGIES[1:]]


@pytest.mark.few(1, all=9)
@pytest.mark.parametrize("layout", HYBRID + SLOTS + NARROW, ids=lambda layout: layout.name)
def test_step_sends_and_holds_exactly_what_is_planned_and_traced(cluster: Cluster, layout: Layout) -> None:
    """Where parity says nothing. Of all other layouts: test_parity.py."""
    assert_as_planned(layout, cluster.run(layout.world_size, count, layout))


def assert_as_planned(layout: Layout, ranks: Sequence[Counted]) -> None:
    """Messages and bytes of each rank, to the byte: counted on the way, planned, and traced in one process. What autograd holds: within a
    hundredth."""
    config, world = layout.sized(), layout.world_size
    plan, trace = MemoryPlan(config, world), trace_run(config, world)
    for rank, counted in enumerate(ranks):
        assert counted.traffic == step_messages(config, world, counted.pp_rank), f"rank {rank}"
        assert counted.traffic == trace.traffic(trace.stage_of(counted.pp_rank)), f"rank {rank}"
        if not layout.documents:  # masks and positions of samples are not planned
            # A stage that only embeds keeps so little that single numbers count.
            least = 64 if 0 in layout.split else 0
            assert planned_saved(plan, counted.pp_rank) == pytest.approx(counted.saved, rel=0.01, abs=least), f"rank {rank}"


SPARSE = tuple((EXPERTS | {"decoder_sparse_step": 2}).items())
DIVIDED = [
    Run(dp=4, ep=2, strategy="optim_grads_params", microbatches=2, bf16=True, fields=SPARSE),
    Run(dp=2, ep=2, strategy="optim", recompute="selective", fields=SPARSE),
    Run(dp=4, ep=2, strategy="no_shard", microbatches=2, fields=SPARSE),
    Run(tp=2, sp=True, dp=2, ep=2, strategy="optim_grads", recompute="full", recompute_layers="3", fields=SPARSE),
    Run(pp=2, dp=2, ep=2, strategy="optim_grads", microbatches=2, schedule="zb-h1", fields=SPARSE),
    Run(dp=2, cp=2, ep=2, strategy="optim_grads_params", fields=SPARSE),
    Run(dp=4, cp=2, ep=2, shard_size=4, strategy="optim_grads", microbatches=2, fields=SPARSE),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", DIVIDED, ids=lambda layout: layout.name)
def test_ranks_that_divide_experts_send_what_is_planned(cluster: Cluster, layout: Run) -> None:
    """Tokens to their experts and back, gradients and weights of experts among those that hold them, and all else as ever."""
    ranks = cluster.run(layout.world_size, count, layout)
    assert_as_planned(layout, ranks)
    config = layout.sized()
    blocks = [is_sparse(config.model, layer) for layer in range(layout.layers)]
    planned = dispatch_messages(config)
    if layout.recompute != "full":
        passes = sum(blocks) * layout.microbatches
        stages = ranks[:: layout.world_size // layout.pp]
        found = [sum(pair[place] for one in stages for (axis, _), pair in one.traffic.items() if axis == "ep") for place in (0, 1)]
        assert found == [passes * (planned.forward + planned.backward), passes * (planned.forward_bytes + planned.backward_bytes)]


@dataclass(frozen=True)
class Balanced(Run):
    """The experts of each sequence are balanced."""

    def config(self) -> Config:
        """See Layout."""
        config = super().config()
        balance = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01}
        return replace(config, training=replace(config.training, **balance))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layout",
    [
        Balanced(cp=2, tp=2, sp=True, microbatches=2, recompute="full", recompute_layers="3", fields=SPARSE),
        Balanced(cp=2, dp=2, ep=2, recompute="selective", fields=SPARSE),
        Balanced(cp=2, pp=2, microbatches=2, cp_comm="ring", fields=SPARSE),
    ],
    ids=lambda layout: layout.name,
)
def test_ranks_that_split_sequences_send_the_counts_that_are_planned(cluster: Cluster, layout: Balanced) -> None:
    """Beside keys and values, and the messages of attention: one in each forward pass of a router."""
    ranks = cluster.run(layout.world_size, count, layout)
    assert_as_planned(layout, ranks)
    planned = count_messages(layout.sized())
    samples = GLOBAL_BATCH_SIZE // (layout.dp * layout.microbatches)
    assert planned == dict.fromkeys(["tp", "cp"] if layout.tp > 1 else ["cp"], samples * EXPERTS["num_experts"] * 4)
    # Of four blocks two have experts, the second and the last; the first three of a stage are computed again.
    passes = (3 if layout.recompute == "full" else 2) * layout.microbatches // layout.pp
    assert all(one.traffic["cp", "all_reduce"] == (passes, passes * planned["cp"]) for one in ranks)


EXCHANGED = [
    Run(dp=4, ep=2, exchange=True, strategy="optim_grads_params", microbatches=2, bf16=True, fields=SPARSE),
    Run(dp=3, ep=3, exchange=True, strategy="optim", recompute="selective", recompute_layers="2", fields=SPARSE),
    Run(tp=2, sp=True, dp=2, ep=2, exchange=True, strategy="optim_grads", recompute="full", fields=SPARSE),
    Run(pp=2, dp=2, ep=2, exchange=True, strategy="optim_grads", microbatches=2, schedule="zb-h1", fields=SPARSE),
]


def count_choices(place: Place, layout: Layout) -> tuple[Counted, list[Tensor], tuple[int, ...]]:
    """``count``, the experts of the tokens of each block in the order in which their routers chose, and the ranks of ep."""
    run = trainer(place, layout)
    run.step(0)
    chosen: list[Tensor] = []
    for stage in run.stages.values():
        for gate in stage.modules():
            if isinstance(gate, Gate):
                gate.register_forward_hook(lambda module, given, routing: chosen.append(routing.experts.clone()))
    assert run.mesh.ep is not None
    return counted(run, 1)[1], chosen, run.mesh.ep.ranks


def loads(tables: Sequence[Tensor], here: int) -> list[Load]:
    """What each rank exchanges, by what its tokens and those of the others have chosen. ``here``: experts of a rank."""
    ranks = range(len(tables))
    places = [[{expert // here for expert in token} for token in table.tolist()] for table in tables]
    return [
        Load(
            sum(len(found) for found in places[rank]),
            sum(rank in found for table in places for found in table),
            sum(int((table // here == rank).sum()) for table in tables),
        )
        for rank in ranks
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", EXCHANGED, ids=lambda layout: layout.name)
def test_ranks_that_exchange_tokens_send_what_their_choices_say(cluster: Cluster, layout: Run) -> None:
    """To the byte given these; as many messages and all other bytes whatever they are. The trace has equal loads, and the memory plan
    the largest."""
    config, world = layout.sized(), layout.world_size
    ranks, trace, plan = cluster.run(world, count_choices, layout), trace_run(config, world), MemoryPlan(config, world)
    for number, (found, chosen, group) in enumerate(ranks):
        expected = step_messages(config, world, found.pp_rank)
        assert trace.traffic(trace.stage_of(found.pp_rank)) == expected
        exchanged = found.traffic["ep", "all_to_all"]
        assert exchanged[0] == expected["ep", "all_to_all"][0]
        assert {**found.traffic, ("ep", "all_to_all"): 0} == {**expected, ("ep", "all_to_all"): 0}
        again = 2 if layout.recompute == "full" else 1
        size = 0
        for call in range(len(chosen)):
            load = loads([ranks[rank][1][call] for rank in group], config.model.num_experts // layout.ep)[group.index(number)]
            # Of four blocks two have experts, the second and the last.
            recomputed = layout.recompute == "selective" and not call % 2
            messages = dispatch_messages(config, load, recomputed=recomputed)
            size += messages.forward_bytes * again + messages.backward_bytes
        assert exchanged[1] * again == size
        assert found.saved <= planned_saved(plan, found.pp_rank)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "layout",
    [
        Run(cp=2, microbatches=2, windows=True),
        Run(cp=4, cp_comm="ring", windows=True, recompute="full"),
        Run(cp=2, tp=2, bf16=True, windows=True),
        Run(cp=2, pp=2, microbatches=2),
        Run(cp=4, cp_comm="a2a", windows=True, recompute="full"),
        Run(cp=2, tp=2, cp_comm="a2a", kv_heads=4, bf16=True, microbatches=2),
        Run(cp=4, cp_comm="a2a+p2p", windows=True, recompute="full"),
        Run(cp=4, pp=2, kv_heads=1, cp_comm="a2a+p2p", bf16=True, microbatches=2),
    ],
    ids=lambda layout: f"{layout.name} {layout.windows}",
)
def test_context_parallel_ranks_send_what_is_planned(cluster: Cluster, layout: Run) -> None:
    """To the byte, in layers with a window and without; of a collective its least."""
    config = layout.sized()
    passes = 3 if layout.recompute == "full" else 2
    ranks = {"cp": layout.cp, "cp_heads": 2}
    for number, counted in enumerate(cluster.run(layout.world_size, count, layout)):
        rank = number // layout.tp % layout.cp
        layers = MemoryPlan(config, layout.world_size).partition.layers[counted.pp_rank]
        planned = context_traffic(config, layers, rank=rank)
        sent = sum(
            size if operation == "send" else size * (ranks[axis] - 1) // ranks[axis]
            for (axis, operation), (_, size) in counted.traffic.items()
            if axis.startswith("cp") and operation != "receive"
        )
        assert sent == layout.microbatches * (passes * planned.passes + planned.gradients) > 0


def _order(layout: Layout, buckets: BucketPlan, stage: int) -> list[str]:
    """Events of one stage over a step of one-forward-one-backward: complete buckets in backward order, in every round."""
    rounds = layout.microbatches if layout.strategy in ("optim_grads", "optim_grads_params") else 1
    own: list[Bucket] = [bucket for bucket in buckets.buckets if bucket.kind.stage == stage]
    return [f"{what} {bucket.index}" for _ in range(rounds) for bucket in own for what in ("complete", "reduce")]


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(dp=2, bucket=1), Layout(dp=2, bucket=10**9)], ids=lambda layout: layout.name)
def test_reduction_starts_as_soon_as_its_bucket_is_complete(cluster: Cluster, layout: Layout) -> None:
    """With a bucket for each parameter and with one for all. Of other layouts: test_parity.py."""
    assert_reduced_when_complete(layout, cluster.run(layout.world_size, count, layout))


def assert_reduced_when_complete(layout: Layout, ranks: Sequence[Counted]) -> None:
    """So a reduction travels under the backward passes of all later buckets."""
    for rank, counted in enumerate(ranks):
        buckets = _buckets(layout, counted)
        some = len(buckets.buckets) > 1 or 0 in layout.split
        assert some and (len(buckets.buckets) > 8 or layout.bucket != 1), "the order of one bucket says nothing"
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


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", [INTERLEAVED, SPLIT_PASSES, FULL], ids=lambda layout: layout.name)
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
        early = sorted(gathered_during_backward(layout))
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
    early = set(gathered_during_backward(buckets))
    updated = [bucket for bucket in buckets.buckets if updated_during_backward(buckets, bucket.index, is_async=False)]
    assert all(bucket.kind.trainable and not bucket.kind.partial_grad and not bucket.kind.needs_own_slot for bucket in updated)
    assert 0 < len(updated) < len(buckets.buckets) and early < {bucket.index for bucket in updated}
    share = sum(bucket.numel for bucket in updated if bucket.index in early) / sum(bucket.numel for bucket in updated)
    assert 0.25 < share <= 1 / 3
