"""Every collective of a step, counted call by call and byte by byte, and the order in which reductions are issued."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass, replace

import pytest

from megatron_llama.layout import ShardLayout
from megatron_llama.mesh import Place
from megatron_llama.optim.build import stage_layout
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
    stage: int


def count(place: Place, layout: Layout) -> Counted:
    """Record the second step: the first one also publishes the initial weights."""
    run = trainer(place, layout)
    run.step(0)
    recorder = run.mesh.recorder
    recorder.traffic.clear()
    recorder.events = []
    run.step(1)
    traffic = {key: astuple(value) for key, value in recorder.traffic.items()}
    return Counted(traffic, recorder.events, run.mesh.tp.rank, run.mesh.pp.rank)


class Expected:
    """Counts of one rank, from the papers' formulas and the layout's integers."""

    def __init__(self, layout: Layout, rank: Counted) -> None:
        self.layout, self.stage, self.counts = layout, rank.stage, Counter[tuple[str, str, str]]()
        self.buckets = _buckets(layout, rank)
        self.first, self.last = rank.stage == 0, rank.stage == layout.pp - 1
        tokens = SEQ_LENGTH * GLOBAL_BATCH_SIZE // (layout.dp * layout.microbatches)
        self.per_token = tokens * FP32
        self.activation = tokens * MODEL.hidden_size * FP32

    def add(self, axis: str, operation: str, size: int, calls: int = 1) -> None:
        """``calls`` messages of ``size`` bytes."""
        self.counts[axis, operation, "calls"] += calls
        self.counts[axis, operation, "bytes"] += calls * size

    def all(self) -> Counts:
        """Everything in one step."""
        for _ in range(self.layout.microbatches):
            if self.layout.tp > 1:
                (self.sequence_parallel if self.layout.sp else self.tensor_parallel)()
            self.pipeline()
        self.data_parallel()
        self.step()
        pairs = {(axis, operation) for axis, operation, _ in self.counts}
        return {pair: (self.counts[*pair, "calls"], self.counts[*pair, "bytes"]) for pair in pairs}

    def tensor_parallel(self) -> None:
        """Two all-reduces a layer forward, two backward (Shoeybi et al., 2019, figure 4); embedding forward; head backward."""
        layers = MODEL.num_hidden_layers // self.layout.pp
        self.add("tp", "all_reduce", self.activation, 4 * layers + self.first + self.last)
        self.cross_entropy()

    def sequence_parallel(self) -> None:
        """Forward a gather before and a scatter after each half layer; backward their conjugates, and the input gathered again
        for the weight gradient (Korthikanti et al., 2022, section 4.2.2)."""
        layers = MODEL.num_hidden_layers // self.layout.pp
        self.add("tp", "all_gather", self.activation, 6 * layers + self.first + 2 * self.last)
        self.add("tp", "reduce_scatter", self.activation, 4 * layers + self.first + self.last)
        self.cross_entropy()

    def cross_entropy(self) -> None:
        """Of every token the maximum, then the sum and the target's score."""
        if self.last:
            self.add("tp", "all_reduce", self.per_token)
            self.add("tp", "all_reduce", 2 * self.per_token)

    def pipeline(self) -> None:
        """One activation and one gradient over every boundary."""
        size = self.activation // (self.layout.tp if self.layout.sp else 1)
        if not self.last:
            self.add("pp", "send", size)
            self.add("pp_backward", "receive", size)
        if not self.first:
            self.add("pp", "receive", size)
            self.add("pp_backward", "send", size)

    def data_parallel(self) -> None:
        """One reduction a bucket (a microbatch, for ``optim_grads``), one gather a bucket."""
        if self.layout.dp == 1:
            return
        for bucket in self.buckets.buckets:
            if self.layout.strategy == "no_shard":
                self.add("dp", "all_reduce", bucket.numel * FP32)
                continue
            times = self.layout.microbatches if self.layout.strategy == "optim_grads" else 1
            self.add("dp", "reduce_scatter", bucket.numel * FP32, times)
            self.add("dp_gather", "all_gather", bucket.numel * FP32)

    def step(self) -> None:
        """Loss and norm over everyone; reduced shards of replicated and tied parameters; the count of unmasked tokens."""
        self.add("world", "all_reduce", FP64)
        self.add("world", "all_reduce", FP32)
        for bucket in self.buckets.buckets:
            shard = self.buckets.shard_numel(bucket.index) * FP32
            if bucket.kind.replicated and self.layout.sp:
                self.add("tp", "all_reduce", shard)
            if bucket.kind.tied and (self.first or self.last):
                self.add("embedding", "all_reduce", shard)
        if self.layout.documents and self.layout.dp > 1:
            self.add("dp", "all_reduce", FP64)


def _buckets(layout: Layout, rank: Counted) -> ShardLayout:
    return stage_layout(layout.config(), dp=layout.dp, tp_rank=rank.tp_rank, stage=rank.stage)


TENSOR = [Layout(tp=2), Layout(tp=2, microbatches=4), Layout(tp=2, sp=True), Layout(tp=2, sp=True, microbatches=4)]
PIPELINE = [Layout(pp=2, microbatches=4), Layout(pp=4, microbatches=4, schedule="gpipe"), Layout(pp=2, microbatches=2, tied=True)]
DATA = [Layout(dp=2, strategy=s, microbatches=m) for s in STRATEGIES for m in (1, 4)] + [Layout(dp=4), Layout(dp=2, documents=True)]
FULL = [Layout(tp=2, pp=2, dp=2, sp=True, microbatches=2, tied=True, strategy=s) for s in STRATEGIES]


@pytest.mark.parametrize("layout", TENSOR + PIPELINE + DATA + FULL, ids=lambda layout: layout.name)
def test_step_issues_exactly_the_planned_collectives(cluster: Cluster, layout: Layout) -> None:
    for rank, counted in enumerate(cluster.run(layout.world_size, count, layout)):
        assert counted.traffic == Expected(layout, counted).all(), f"rank {rank}"


@pytest.mark.parametrize("layout", [*DATA, *FULL, Layout(dp=2, bucket=1), Layout(dp=2, bucket=10**9)], ids=lambda layout: layout.name)
def test_reduction_starts_as_soon_as_its_bucket_is_complete(cluster: Cluster, layout: Layout) -> None:
    """So it travels under the backward passes of all later buckets."""
    for rank, counted in enumerate(cluster.run(layout.world_size, count, layout)):
        buckets = len(_buckets(layout, counted).buckets)
        assert buckets > 1 and (buckets > 8 or layout.bucket != 1), "the order of one bucket says nothing"
        expected = []
        for microbatch in range(layout.microbatches):
            reduces = layout.strategy == "optim_grads" or microbatch == layout.microbatches - 1
            for bucket in range(buckets):
                expected += [f"complete {bucket}"] + [f"reduce {bucket}"] * reduces
        assert counted.events == expected, f"rank {rank}"


def test_volume_of_optim_does_not_grow_with_accumulation(cluster: Cluster) -> None:
    volumes = {}
    for strategy in ("optim", "optim_grads"):
        for microbatches in (1, 4):
            layout = replace(Layout(dp=2), strategy=strategy, microbatches=microbatches)
            volumes[strategy, microbatches] = cluster.run(2, count, layout)[0].traffic["dp", "reduce_scatter"]
    assert volumes["optim", 4] == volumes["optim", 1] == volumes["optim_grads", 1]
    assert volumes["optim_grads", 4] == tuple(4 * value for value in volumes["optim", 1])
