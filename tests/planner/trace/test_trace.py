"""The trace against a real run of the same code, and against the plans; what it leaves out against the whole of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import ConfigError
from megatron_llama.model.llama import build_stages
from megatron_llama.pipeline.build import build_optimizer, compute_dtype
from megatron_llama.pipeline.plan.stage_accesses import rank_weight_accesses
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.planner.trace.op_recorder import OpRecorder, Tables
from megatron_llama.planner.trace.rank import settle_in, state_of, step, trace_rank
from megatron_llama.planner.trace.run import RunTracer, trace_run
from megatron_llama.planner.traced import StageTrace, Trace
from megatron_llama.schedule import schedule_named
from megatron_llama.train.setup.memory import MemoryPlan
from megatron_llama.train.setup.resolve import resolve

from tests.model.test_activation_memory import EXPERTS, Run
from tests.oracle.flops import step_flops
from tests.oracle.messages import step_messages
from tests.parallel.cases import Layout, batch

SEQ_LENGTH = 16


def small(layout: Layout) -> Config:
    """Samples of SEQ_LENGTH tokens, one in a microbatch."""
    config = layout.config()
    training = replace(config.training, seq_length=SEQ_LENGTH, micro_batch_size=1, global_batch_size=layout.microbatches * layout.dp)
    return replace(config, training=training)


def described(trace: Trace, stage: StageTrace) -> list[object]:
    """Everything about every action, free of the numbers in tables."""
    found: list[object] = []
    for done in stage.actions:
        segment = trace.segments[done.segment]
        calls = [trace.operators[call] if call >= 0 else trace.messages[-1 - call] for call in segment.calls]
        found.append((done.action, done.live, segment.allocated, segment.freed, segment.peak, calls))
    return found


def whole(config: Config, world_size: int) -> Trace:
    """Every rank and every microbatch traced."""
    run = RunTracer.of(config, world_size)
    stages = [trace_rank(config, world_size, rank, run.whole, run.tables) for rank in range(len(run.whole.ranks))]
    return run.trace(stages)


WHOLE = [
    Layout(pp=4, microbatches=7, tied=True),
    Layout(pp=2, microbatches=6, layers=2, schedule="zb-h1", recompute="full", tp=2, sp=True),
    Layout(dp=2, microbatches=7, layers=2, strategy="optim_grads_params", slots="1"),
    Layout(pp=2, dp=2, microbatches=12, virtual=2, schedule="interleaved", strategy="optim_grads"),
]


@pytest.mark.long
@pytest.mark.parametrize("layout", WHOLE, ids=lambda layout: layout.name)
def test_what_is_left_out_repeats_what_was_traced(layout: Layout) -> None:
    """Every operator, message and byte of every action of every rank."""
    config = small(layout)
    short, full = trace_run(config, layout.world_size), whole(config, layout.world_size)
    for one, other in zip(short.stages, full.stages, strict=True):
        assert described(short, one) == described(full, other)
        assert (one.ranks, one.state, one.groups, one.layers) == (other.ranks, other.state, other.groups, other.layers)
    assert sum(len(stage.traced) for stage in short.stages) < sum(len(stage.traced) for stage in full.stages)


def test_blocks_with_and_without_a_window_are_not_taken_for_each_other() -> None:
    """Of four ranks of a block each the third sees all."""
    config = small(Layout(pp=4, layers=4, microbatches=8))
    types = ("sliding_attention", "sliding_attention", "full_attention", "sliding_attention")
    config = resolve(replace(config, model=replace(config.model, sliding_window=4, layer_types=types)), 4)
    short, full = trace_run(config, 4), whole(config, 4)
    for stage, other in zip(short.stages, full.stages, strict=True):
        assert described(short, stage) == described(full, other)


@pytest.mark.long
def test_blocks_with_and_without_experts_are_not_taken_for_each_other() -> None:
    """Of four ranks of a block each the second and the fourth have experts, which two data-parallel ranks divide: messages as they are
    counted beside real runs, of a loss of routers too."""
    config = small(Run(pp=4, dp=2, ep=2, layers=4, microbatches=8, fields=tuple((EXPERTS | {"decoder_sparse_step": 2}).items())))
    short, full = trace_run(config, 8), whole(config, 8)
    for stage, other in zip(short.stages, full.stages, strict=True):
        assert described(short, stage) == described(full, other)
        assert short.traffic(stage) == step_messages(config, 8, stage.ranks[0])
    training = replace(config.training, moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.01)
    routed = replace(config, training=training)
    trace = trace_run(routed, 8)
    assert all(trace.traffic(stage) == step_messages(routed, 8, stage.ranks[0]) for stage in trace.stages)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layout",
    [Layout(microbatches=2), Layout(microbatches=2, recompute="selective", tied=True), Layout(microbatches=2, recompute="full")],
    ids=lambda layout: layout.name,
)
def test_the_trace_is_what_a_real_step_does(layout: Layout) -> None:
    """The same recorder over tensors with memory: operators, shapes, storages and their lifetimes."""
    config = small(layout)
    traced = trace_run(config, 1)
    mesh, tables = Mesh.single(), Tables()
    op_recorder, stages = OpRecorder(tables, mesh.recorder), build_stages(config, mesh)
    with op_recorder:
        optimizer = build_optimizer(config, stages.values(), mesh)
        runtime = PipelineRuntime(stages, optimizer, mesh, config, dtype=compute_dtype(config))
        schedule = schedule_named("1f1b", ranks=1, microbatches=layout.microbatches)
        settle_in(optimizer, rank_weight_accesses(config, schedule.ranks[0], rank=0))
        batches = [batch(range(number, number + 1)) for number in range(layout.microbatches)]
        batches = [replace(one, tokens=one.tokens[:SEQ_LENGTH].clone(), labels=one.labels[:SEQ_LENGTH].clone()) for one in batches]
        state = state_of(optimizer, batches, op_recorder.storages)
        step(runtime, optimizer, batches, config, op_recorder)
    assert torch.stack([shard.abs().sum() for shard in optimizer.gradients.shards.values()]).isfinite().all()
    one = traced.stages[0]
    real = replace(one, state=state, actions=op_recorder.actions, lifetimes=op_recorder.storages.lifetimes())
    found = replace(traced, operators=tuple(tables.operators), messages=tuple(tables.messages), segments=tuple(tables.segments))
    assert described(traced, one) == described(found, real)
    assert one.lifetimes == real.lifetimes and one.state == real.state
    assert traced.peak(one) == found.peak(real) and traced.peak(one).working > 0


PLANNED = [
    Layout(microbatches=3),
    Layout(tp=2, sp=True, microbatches=2, recompute="full", dp=2, strategy="optim_grads", bf16=True),
    Layout(tp=4, sp=True, dp=2, microbatches=2, recompute="selective", bf16=True),
    Layout(cp=2, tp=2, sp=True, microbatches=2, recompute="selective", bf16=True),
    Layout(cp=4, cp_comm="ring", microbatches=2, bf16=True),
    Layout(pp=2, tp=2, microbatches=4, schedule="zb-h1", bf16=True),
    Layout(pp=2, microbatches=4, virtual=2, schedule="interleaved", dp=4, shard_size=2, strategy="optim_grads_params", bf16=True),
    Layout(dp=4, shard_size=2, strategy="optim_grads", microbatches=2, bf16=True, reduce_bf16=True),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", PLANNED, ids=lambda layout: layout.name)
def test_plans_are_what_is_traced(layout: Layout) -> None:
    """Messages, state and FLOPs exactly; what is kept between actions within a hundredth."""
    config, world = small(layout), layout.world_size
    trace, plan = trace_run(config, world), MemoryPlan(config, world)
    for rank in range(layout.pp):
        stage = trace.stage_of(rank)
        assert trace.traffic(stage) == step_messages(config, world, rank)
        expected = plan.state_by_component(rank)
        assert {name: stage.state[name] for name in expected} == expected
        assert trace.flops(stage) == step_flops(config, world, rank)
        assert stage.state["staging"] == plan.staging(rank) and (plan.staging(rank) > 0) is layout.reduce_bf16
        assert plan.between(rank, layout.recompute, plan.recompute_layers()) == pytest.approx(trace.kept(stage), rel=0.01)


def test_a_trace_is_written_and_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    words = "plan trace --gpus 8 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 160 --vocab-size 300"
    words += " --seq-length 32 --global-batch-size 64 --micro-batch-size 1 --tensor-model-parallel-size 2"
    words += f" --pipeline-model-parallel-size 2 --json {file}"
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    trace = Trace.from_json(file.read_text())
    assert trace.microbatches == 32 and [stage.ranks for stage in trace.stages] == [(0,), (1,)]
    assert trace.stages[1].groups["tp"] == (4, 5) and trace.stages[1].layers == ((2, 2),)
    assert "pp rank 1: layers 2-3 with the head" in text and "tp           all_reduce" in text
    assert Trace.from_json(trace.to_json()) == trace
    assert main([*words.split(), "--optimizer", "muon"]) == 2 and "--optimizer: got muon, expected adam" in capsys.readouterr().err
    for broken in ("", "{}", json.dumps({"format": 0}), '{"format": 1}'):
        with pytest.raises(ConfigError, match="what plan trace --json wrote"):
            Trace.from_json(broken)
