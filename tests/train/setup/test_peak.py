"""The plan of memory against what a step really takes beside its state: every allocation, as torch's profiler counts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine.comm import device as devices
from megatron_llama.launch.launcher import Place
from megatron_llama.train.setup.memory import MemoryPlan
from torch.profiler import ProfilerActivity, profile

from tests.harness import Cluster
from tests.parallel.cases import GLOBAL_BATCH_SIZE, SEQ_LENGTH, Layout, Trainer, trainer

VOCABULARY, CHUNK = 8192, 24 * 8192
"""Of all scores, the model's largest tensor by far, a chunk has at most a fifth."""


@dataclass(frozen=True)
class Wide(Layout):
    """A model of which most is the head. ``chunk``: scores at once."""

    vocabulary: int = VOCABULARY
    chunk: int = CHUNK

    def config(self) -> Config:
        """See Layout."""
        config = super().config()
        sizes = {"micro_batch_size": GLOBAL_BATCH_SIZE // (self.dp * self.microbatches), "seq_length": SEQ_LENGTH}
        training = replace(config.training, global_batch_size=GLOBAL_BATCH_SIZE, **sizes)
        return replace(config, model=replace(config.model, vocab_size=self.vocabulary), training=training)

    def plan(self) -> MemoryPlan:
        """Of the whole run."""
        return MemoryPlan(self.config(), self.world_size, head_chunk=self.chunk)


def built(place: Place, layout: Wide) -> Trainer:
    """After two steps: what stays is there."""
    run = trainer(place, layout)
    for stage in run.stages.values():
        stage.options = replace(stage.options, head_chunk=layout.chunk)
    for index in range(2):
        run.step(index)
    run.optimizer.settle()
    return run


def most_allocated(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes: the most that there were at once beside those before, and what is left."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        work()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    totals = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    return max(totals), totals[-1]


def of_a_step(place: Place, layout: Wide) -> tuple[int, int, int]:
    """The most that a step allocates, what it leaves, and the most of an evaluation."""
    # oneDNN would copy parts of a gradient, large for so narrow a model, and on processors without bf16 products are made in fp32.
    with pytest.MonkeyPatch.context() as patch, torch.backends.mkldnn.flags(enabled=False):
        patch.setattr(devices, "prefers_onednn", lambda: False)
        patch.setattr(devices, "multiplies_bf16", lambda: True)
        run = built(place, layout)

        def step() -> None:
            run.step(2)
            run.optimizer.settle()

        most_allocated(step)  # the profiler knows the size of what a step frees only where it has seen it made
        most, left = most_allocated(step)
        evaluated, _ = most_allocated(lambda: run.runtime.evaluate(run.batches(3)))
    return most, left, evaluated


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("layout", "in_chunks"),
    [
        (Wide(), True),
        (Wide(chunk=10**9), False),
        (Wide(recompute="full"), True),
        (Wide(recompute="full", chunk=10**9), False),
        (Wide(recompute="selective", vocabulary=300), False),
        (Wide(bf16=True, chunk=10**9), False),
    ],
    ids=lambda case: f"{case.name} {case.vocabulary} {case.chunk}" if isinstance(case, Wide) else "",
)
def test_one_process(layout: Wide, in_chunks: bool) -> None:
    """An evaluation takes less than a step."""
    plan = layout.plan()
    most, left, evaluated = of_a_step(Place(0, 1, 0), layout)
    assert plan.in_chunks is in_chunks and left == 0
    assert near(most, plan.activations(0, layout.recompute, plan.recompute_layers()))
    assert evaluated < most and (evaluated < plan.shape.logits) is (layout.chunk == CHUNK and layout.vocabulary == VOCABULARY)


@dataclass(frozen=True)
class WithExperts(Wide):
    """Most of a token's inner activations are its experts'. ``step``: 2 for dense blocks between them."""

    experts: int = 8
    step: int = 2
    shared: int = 0

    def config(self) -> Config:
        """See Layout."""
        config = super().config()
        sizes = {"num_experts": self.experts, "num_experts_per_tok": 4, "moe_intermediate_size": 192, "intermediate_size": 64}
        sizes |= {"moe_shared_expert_intermediate_size": self.shared}
        return replace(config, model=replace(config.model, **sizes, decoder_sparse_step=self.step))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layout",
    [
        WithExperts(vocabulary=300),
        WithExperts(vocabulary=300, recompute="selective"),
        WithExperts(vocabulary=300, recompute="full", step=1),
        WithExperts(vocabulary=300, shared=512, step=1),
        WithExperts(vocabulary=300, bf16=True),
        WithExperts(vocabulary=300, bf16=True, recompute="selective", step=1),
    ],
    ids=lambda case: f"{case.name} {case.step}",
)
def test_with_experts(layout: WithExperts) -> None:
    plan = layout.plan()
    most, left, evaluated = of_a_step(Place(0, 1, 0), layout)
    assert left == 0 and evaluated < most
    assert near(most, plan.activations(0, layout.recompute, plan.recompute_layers()))


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("exchange", [False, True])
def test_where_ranks_divide_experts(cluster: Cluster, exchange: bool, recompute: Literal["none", "selective"]) -> None:
    """Each has the tokens of all, and rows for the most uneven choice. With four experts for four of a token no choice is more uneven."""
    layout = WithExperts(vocabulary=300, dp=2, ep=2, recompute=recompute, exchange=exchange, experts=4 if exchange else 8)
    plan, whole = (run.plan().activations(0, recompute, 4) for run in (layout, replace(layout, ep=1)))
    assert plan > (1.0 if exchange else 1.5) * whole
    for most, _, evaluated in cluster.run(2, of_a_step, layout):
        assert near(most, plan) and evaluated < most


@dataclass(frozen=True)
class InCodes(Wide):
    """Its two inner layers multiply in FP8."""

    recipe: Literal["none", "blockwise", "tensorwise"] = "none"
    fp8: bool = True

    def config(self) -> Config:
        """See Layout."""
        config = super().config()
        return replace(config, training=replace(config.training, fp8=self.recipe))


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
@pytest.mark.few(1)
def test_in_fp8(recipe: Literal["blockwise", "tensorwise"]) -> None:
    """What is kept is as in bf16, and the codes of weights, which the step makes again in place of the last ones, are state. The codes of
    inputs are gone again where most is there, and so are the wide numbers that stand for codes on a host."""
    layout = InCodes(chunk=10**9, recipe=recipe)
    plan = layout.plan()
    most, left, evaluated = of_a_step(Place(0, 1, 0), layout)
    assert left == 0 and evaluated < most
    assert near(most, plan.activations(0, "none", 0))


@dataclass(frozen=True)
class ExpertsInCodes(WithExperts):
    """The experts of its two inner layers multiply in FP8."""

    recipe: Literal["blockwise", "tensorwise"] = "blockwise"
    fp8: bool = True
    hidden: int = 128
    inner: int = 384

    def config(self) -> Config:
        """See Layout."""
        config = super().config()
        sizes = {"hidden_size": self.hidden, "moe_intermediate_size": self.inner, "intermediate_size": 128}
        return replace(config, model=replace(config.model, **sizes), training=replace(config.training, fp8=self.recipe))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layout",
    [
        ExpertsInCodes(vocabulary=300, step=1, recompute="selective"),
        ExpertsInCodes(vocabulary=300, step=1, recompute="full", hidden=512, inner=128),
        ExpertsInCodes(vocabulary=300, step=1, recompute="full", shared=1024),
        ExpertsInCodes(vocabulary=300, step=1, recompute="full", recipe="tensorwise"),
    ],
    ids=lambda case: f"{case.recipe} {case.name} {case.hidden} {case.shared}",
)
def test_with_experts_in_fp8(layout: ExpertsInCodes) -> None:
    """Of wide rows and narrow experts most is there while the gradients of outputs become codes; otherwise in a weight gradient, which is in
    bf16."""
    plan = layout.plan()
    most, left, evaluated = of_a_step(Place(0, 1, 0), layout)
    assert left == 0 and evaluated < most
    assert near(most, plan.activations(0, layout.recompute, plan.recompute_layers()))
    in_bf16 = plan.activations(0, layout.recompute, 4) - plan._working(0, layout.recompute, 4) + plan.shape.gradients(layout.recompute)
    assert (in_bf16 < 0.95 * most) is (layout.hidden > layout.inner)


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "in_chunks"),
    [(Wide(pp=2, microbatches=2, tied=True), True), (Wide(pp=2, microbatches=4, schedule="gpipe"), False)],
    ids=lambda case: case.name if isinstance(case, Wide) else "",
)
def test_of_a_pipeline(cluster: Cluster, layout: Wide, in_chunks: bool) -> None:
    """The last rank alone has scores, and of many microbatches where the schedule puts their backward passes off."""
    plan = layout.plan()
    first, last = (most for most, _, _ in cluster.run(layout.world_size, of_a_step, layout))
    assert plan.in_chunks is in_chunks and (first < last) is not in_chunks
    assert near(first, plan.activations(0, "none", 0)) and near(last, plan.activations(1, "none", 0))


def near(found: int, planned: int) -> bool:
    """Within a sixteenth."""
    return abs(found - planned) <= planned / 16


def test_what_is_there_in_chunks_by_hand() -> None:
    """Without: all scores. With: those of one chunk, and under sequence parallelism what the head reads, gathered."""
    parts = Wide(tp=2, sp=True, microbatches=2)
    plan, whole, bf16 = (parts.plan(), replace(parts, chunk=10**9).plan(), replace(parts, bf16=True).plan())
    tokens = GLOBAL_BATCH_SIZE // 2 * SEQ_LENGTH
    assert plan.in_chunks and plan.logits(0) == 0 and whole.logits(0) == whole.shape.logits == tokens * VOCABULARY // 2 * 4
    assert whole.shape.head(in_chunks=False) - plan.shape.head(in_chunks=True) == whole.logits(0)
    assert plan.shape.loss(in_chunks=True) == CHUNK * 4 + tokens * 64 * 4 and whole.shape.loss(in_chunks=False) == 0
    # A host computes at most 2^19 scores in fp32 at once: more than there are.
    assert bf16.shape.loss(in_chunks=False) == tokens * VOCABULARY // 2 * 4
    assert bf16.shape.loss(in_chunks=True) == CHUNK * 4 + (CHUNK + tokens * 64) * 2
