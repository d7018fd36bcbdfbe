"""``plan trace``: the step of a layout, operator by operator and message by message, without its
processes."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import Config
from megatron_llama.engine.offload_options import NONE
from megatron_llama.engine.options import MUON
from megatron_llama.engine.plan.memory import sized
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.planner.configs import PlanConfig
from megatron_llama.planner.inputs import MODEL_HINT, machine_of, with_precision
from megatron_llama.planner.outputs import write_text
from megatron_llama.planner.traced import StageTrace, Trace
from megatron_llama.train.setup.auto import decide
from megatron_llama.train.setup.resolve import assemble, check

UNITS = ((10**15, "PFLOP"), (10**12, "TFLOP"), (10**9, "GFLOP"), (1, "FLOP"))


def trace_layout(parsed: Parsed) -> None:
    """Trace the layout in the options of a run, and print the work of each kind of pipeline rank.
    Raises ConfigError."""
    config = _config(parsed)
    from megatron_llama.planner.trace.run import trace_run

    options = parsed.get(PlanConfig)
    trace = trace_run(config, options.gpus)
    print(f"{trace.label}; {trace.microbatches} microbatches")
    for stage in trace.stages:
        print("\n".join(_lines(trace, stage, config.model.num_hidden_layers)))
    if options.json is not None:
        write_text("--json", options.json, trace.to_json() + "\n")


def _config(parsed: Parsed) -> Config:
    """Return the run, in bfloat16 unless another precision is given, and with LLaMA's vocabulary if
    none is given. Raises ConfigError."""
    config = assemble(parsed)
    world = parsed.get(PlanConfig).gpus
    training = config.training
    offload = config.offload.optimizer_offload
    wrong = []
    if config.model.num_hidden_layers <= 0:
        wrong.append(describe("--model", got="nothing", expected="a model", do=MODEL_HINT))
    if world <= 0:
        expected = "the number of processes"
        wrong.append(describe("--gpus", got=world, expected=expected, do="give --gpus 64"))
    if offload != NONE:
        name = "--optimizer-offload"
        wrong.append(describe(name, got=offload, expected=NONE, do="leave it out"))
    if config.optimizer.optimizer == MUON:
        expected = "adam: messages with parts of matrices are not traced"
        wrong.append(describe("--optimizer", got=MUON, expected=expected, do="leave it out"))
    if training.compile:
        do = "leave it out: operators are traced as they are written"
        wrong.append(describe("--compile", got="yes", expected="no compiler", do=do))
    if training.counts_experts_first:
        name = "--moe-router-load-balancing-type"
        kind = training.moe_router_load_balancing_type
        expected = "none or seq_aux_loss: a trace has no forward pass more before a step"
        wrong.append(describe(name, got=kind, expected=expected, do="leave it out"))
    if wrong:
        raise ConfigError(listing("This cannot be traced:", wrong))
    config = with_precision(config, bf16=not (training.fp16 or training.fp64))
    resolved = check(config, world, needs_data=False).config
    return decide(resolved, world, int(machine_of(parsed).gpu.memory))[0]


def _lines(trace: Trace, stage: StageTrace, layers: int) -> Iterator[str]:
    ranks = ", ".join(map(str, stage.ranks))
    blocks = ", ".join(_blocks(start, count, layers) for start, count in stage.layers)
    yield f"pp rank {ranks}: {blocks}"
    calls = trace.operator_calls(stage)
    moved = sum(operator.bytes * times for operator, times in calls.items())
    names = len({operator.name for operator in calls})
    flops = trace.flops(stage)
    size, unit = next((size, unit) for size, unit in UNITS if flops >= size or size == 1)
    yield (
        f"  operators    {sum(calls.values()):,} calls of {names}: {flops / size:,.1f} {unit}, "
        f"{sized(moved)} read and written"
    )
    for (axis, operation), (count, sent) in sorted(trace.traffic(stage).items()):
        among = len(stage.groups.get(axis, ()))
        yield f"  {axis:<12} {operation} {count:,} times among {among}: {sized(sent)}"
    peak = trace.peak(stage)
    parts = {**stage.state, "kept by passes": peak.kept, "working": peak.working}
    sizes = ", ".join(f"{name} {sized(size)}" for name, size in parts.items() if size)
    yield f"  peak         {sized(peak.bytes)} in {peak.action}: {sizes}"


def _blocks(start: int, count: int, layers: int) -> str:
    names = {0: "no layer", 1: f"layer {start}"}
    name = names.get(count, f"layers {start}-{start + count - 1}")
    ends = (" with the embedding" * (start == 0)) + (" with the head" * (start + count == layers))
    return name + ends
