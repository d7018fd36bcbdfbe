"""Every collective of a step, counted call by call and byte by byte, and the order in which reductions are issued."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass, replace

import pytest

from megatron_llama.layout import Bucket, ShardLayout, rank_layout
from megatron_llama.mesh import Place
from megatron_llama.optim.distributed import _early_gathers, _updated_early
from megatron_llama.params import kv_copies, partition_of
from tests.harness import Cluster
from tests.parallel.cases import GLOBAL_BATCH_SIZE, MODEL, SEQ_LENGTH, STRATEGIES, Layout, trainer

FP32, FP64 = 4, 8
Counts = dict[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True)
class Counted:
    """What one rank did in its second step, and where it sits."""

    traffic: Counts
    events: list[str]
    tp_rank: int
    pp_rank: int


def count(place: Place, layout: Layout) -> Counted:
    """Record the second step: the first one also publishes the initial weights."""
    run = trainer(place, layout)
    run.step(0)
    run.optimizer.settle()
    recorder = run.mesh.recorder
    recorder.traffic.clear()
    recorder.events = []
    run.step(1)
    run.optimizer.settle()
    events = [event for event in recorder.events if event.startswith(("complete", "reduce"))]
    traffic = {key: astuple(value) for key, value in recorder.traffic.items()}
    return Counted(traffic, events, run.mesh.tp.rank, run.mesh.pp.rank)


class Expected:
    """Counts of one rank, from the papers' formulas and the layout's integers."""

    def __init__(self, layout: Layout, rank: Counted) -> None:
        self.layout, self.counts = layout, Counter[tuple[str, str, str]]()
        self.buckets, self.pp_rank = _buckets(layout, rank), rank.pp_rank
        self.partition = partition_of(layout.config())
        self.stages = self.partition.stages_of(rank.pp_rank)
        self.layers = sum(len(self.partition.layers[stage]) for stage in self.stages)
        self.first, self.last = 0 in self.stages, self.partition.stages - 1 in self.stages
        self.copies = kv_copies(layout.config().model, layout.tp)
        self.wire = 2 if layout.reduce_bf16 else FP32
        tokens = SEQ_LENGTH * GLOBAL_BATCH_SIZE // (layout.dp * layout.cp * layout.microbatches)
        self.per_token = tokens * FP32
        self.activation = tokens * MODEL.hidden_size * FP32
        self.key_value = 2 * tokens * (layout.kv_heads * self.copies // layout.tp) * MODEL.head_dim * FP32

    def add(self, axis: str, operation: str, size: int, calls: int = 1) -> None:
        """``calls`` messages of ``size`` bytes."""
        self.counts[axis, operation, "calls"] += calls
        self.counts[axis, operation, "bytes"] += calls * size

    def all(self) -> Counts:
        """Everything in one step."""
        for _ in range(self.layout.microbatches):
            if self.layout.tp > 1:
                (self.sequence_parallel if self.layout.sp else self.tensor_parallel)()
            if self.layout.cp > 1:
                self.context_parallel()
            self.pipeline()
        self.data_parallel()
        self.step()
        pairs = {(axis, operation) for axis, operation, _ in self.counts}
        return {pair: (self.counts[*pair, "calls"], self.counts[*pair, "bytes"]) for pair in pairs}

    def tensor_parallel(self) -> None:
        """Two all-reduces a layer forward, two backward (Shoeybi et al., 2019, figure 4), one more where keys and values have
        a weight of their own; embedding forward; head backward."""
        self.add("tp", "all_reduce", self.activation, (4 + (self.copies > 1)) * self.layers + self.first + self.last)
        self.cross_entropy()

    def sequence_parallel(self) -> None:
        """Forward a gather before and a scatter after each half layer; backward their conjugates, and the input gathered again
        for the weight gradient (Korthikanti et al., 2022, section 4.2.2). Keys and values with a weight of their own are one
        more column-parallel layer."""
        extra = self.copies > 1
        self.add("tp", "all_gather", self.activation, (6 + 2 * extra) * self.layers + self.first + 2 * self.last)
        self.add("tp", "reduce_scatter", self.activation, (4 + extra) * self.layers + self.first + self.last)
        self.cross_entropy()

    def cross_entropy(self) -> None:
        """Of every token the maximum, then the sum and the target's score."""
        if self.last:
            self.add("tp", "all_reduce", self.per_token)
            self.add("tp", "all_reduce", 2 * self.per_token)

    def context_parallel(self) -> None:
        """Keys and values travel forward and again backward, then their gradients: in one message each, or around the ring."""
        if self.layout.cp_comm == "all_gather":
            self.add("cp", "all_gather", self.layout.cp * self.key_value, 2 * self.layers)
            self.add("cp", "reduce_scatter", self.layout.cp * self.key_value, self.layers)
            return
        for operation in ("send", "receive"):
            self.add("cp", operation, self.key_value, 3 * (self.layout.cp - 1) * self.layers)

    def pipeline(self) -> None:
        """One activation and one gradient over every boundary between stages of different ranks; apart from the others where
        virtual stages lead from a later rank to an earlier one."""
        size, placement = self.activation // (self.layout.tp if self.layout.sp else 1), self.partition.placement
        for stage in self.stages:
            if stage + 1 < self.partition.stages and placement[stage + 1] != self.pp_rank:
                suffix = "" if placement[stage + 1] > self.pp_rank else "_return"
                self.add(f"pp{suffix}", "send", size)
                self.add(f"pp_backward{suffix}", "receive", size)
            if stage > 0 and placement[stage - 1] != self.pp_rank:
                suffix = "" if placement[stage - 1] < self.pp_rank else "_return"
                self.add(f"pp{suffix}", "receive", size)
                self.add(f"pp_backward{suffix}", "send", size)

    def data_parallel(self) -> None:
        """One reduction a bucket (a microbatch, where slots are shared), one gather a bucket, or as often as its slot lost it."""
        layout, ranks = self.layout, self.layout.dp * self.layout.cp
        if ranks == 1:
            return
        shards = 1 if layout.strategy == "no_shard" else layout.shard_size or ranks
        axis, each = "dp" if shards == ranks else "dp_shard", layout.strategy in ("optim_grads", "optim_grads_params")
        for bucket in self.buckets.buckets:
            if shards == 1:
                self.add("dp", "all_reduce", bucket.numel * self.wire)
                continue
            self.add(axis, "reduce_scatter", bucket.numel * self.wire, layout.microbatches if each else 1)
            if shards < ranks:
                self.add("dp_replica", "all_reduce", bucket.numel // shards * self.wire)
        if shards > 1:
            self.gathers()

    def gathers(self) -> None:
        """With N slots the N blocks that a pass ends with are still there when the next one begins with them. The head is
        used backward right after forward; the embedding forward only, and both fit into all slots but one when that is two."""
        layout = self.layout
        slots = (
            self.layers
            if layout.slots == "all" or (layout.slots == "default" and layout.pp > 1)
            else int(layout.slots.replace("default", "2"))
        )
        slots = min(slots, self.layers) if layout.strategy == "optim_grads_params" else self.layers
        passes = 2 * layout.microbatches
        for bucket in self.buckets.buckets:
            times, (unit, *_) = 1, [u for u, buckets in enumerate(self.buckets.unit_buckets) if bucket.index in buckets]
            if not self.buckets.resident(bucket.index) and unit in (0, self.layers + 1):
                times = layout.microbatches
            elif not self.buckets.resident(bucket.index):
                # The first pass gathers all blocks, every other one those that its predecessor did not end with.
                ends_forward, ends_backward = unit > self.layers - slots, unit <= slots
                times = 1 + (passes // 2) * (not ends_forward) + (passes // 2 - 1) * (not ends_backward)
            self.add("dp_gather", "all_gather", bucket.numel * FP32, times)

    def step(self) -> None:
        """Loss, and norm with vetoes, over everyone; reduced shards of copies that saw a part; the count of unmasked tokens."""
        self.add("world", "all_reduce", FP64)
        self.add("world", "all_reduce", 2 * FP64)
        for bucket in self.buckets.buckets:
            shard = self.buckets.shard_numel(bucket.index) * FP32
            if bucket.kind.partial:
                self.add("tp" if bucket.kind.copies == self.layout.tp else "kv", "all_reduce", shard)
            if bucket.kind.tied:
                self.add("embedding", "all_reduce", shard)
        if self.layout.documents and self.layout.dp * self.layout.cp > 1:
            self.add("dp", "all_reduce", FP64)


def _buckets(layout: Layout, rank: Counted) -> ShardLayout:
    return rank_layout(layout.config(), dp=layout.dp * layout.cp, tp_rank=rank.tp_rank, rank=rank.pp_rank)


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
def test_step_issues_exactly_the_planned_collectives(cluster: Cluster, layout: Layout) -> None:
    for rank, counted in enumerate(cluster.run(layout.world_size, count, layout)):
        assert counted.traffic == Expected(layout, counted).all(), f"rank {rank}"


def _order(layout: Layout, buckets: ShardLayout, stage: int) -> list[str]:
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
        layout = rank_layout(config.config(), dp=2)
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
    buckets = rank_layout(replace(layout, layers=12).config(), dp=2)
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
