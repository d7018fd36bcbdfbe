"""``plan trace``: the real step of a layout, on processes that are not here, operator by operator
and message by message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_llama.commands.common.configs import PlanConfig
from megatron_llama.commands.common.plan_inputs import LLAMA_VOCABULARY, machine_of
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import Config
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.planner.traced import StageTrace, Trace
from megatron_llama.plans.auto import decide
from megatron_llama.plans.memory import gib
from megatron_llama.plans.resolve import assemble, check

UNITS = ((10**15, "PFLOP"), (10**12, "TFLOP"), (10**9, "GFLOP"), (1, "FLOP"))


def trace_layout(parsed: Parsed) -> None:
    """Trace the layout that the options of a run describe, and print what every kind of pipeline
    rank does. Raises ConfigError."""
    config = _config(parsed)
    from megatron_llama.planner.trace.run import trace_run

    trace = trace_run(config, parsed.get(PlanConfig).gpus)
    print("\n".join(_lines(trace, config.model.num_hidden_layers)))
    path = parsed.get(PlanConfig).json
    if path is not None:
        try:
            Path(path).write_text(trace.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                describe(
                    "--json", got=error, expected="a file that can be written", do="check the path"
                )
            ) from None


def _config(parsed: Parsed) -> Config:
    """A run, in bfloat16 unless another precision is asked for, and with LLaMA's vocabulary where
    none is given."""
    config = assemble(parsed)
    world = parsed.get(PlanConfig).gpus
    model = config.model
    training = config.training
    problems = [
        describe(name, got=got, expected=expected, do=do)
        for name, got, wrong, expected, do in (
            (
                "--model",
                "nothing",
                model.num_hidden_layers <= 0,
                "a model",
                "give --model llama2-70b or the model's fields",
            ),
            ("--gpus", world, world <= 0, "the number of processes", "give --gpus 64"),
            (
                "--optimizer-offload",
                config.offload.optimizer_offload,
                config.offload.optimizer_offload != "none",
                "none",
                "leave it out",
            ),
            (
                "--compile",
                "yes",
                training.compile,
                "no compiler",
                "leave it out: operators are traced as they are written",
            ),
        )
        if wrong
    ]
    if problems:
        raise ConfigError(listing("This cannot be traced:", problems))
    training = replace(
        training,
        bf16=training.bf16 or not (training.fp16 or training.fp64),
        train_iters=training.train_iters or 1,
    )
    model = replace(model, vocab_size=model.vocab_size or LLAMA_VOCABULARY)
    resolved = check(
        replace(config, model=model, training=training), world, needs_data=False
    ).config
    return decide(resolved, world, int(machine_of(parsed).gpu.memory))[0]


def _lines(trace: Trace, layers: int) -> Iterator[str]:
    yield f"{trace.label}: {trace.world_size} processes, {trace.microbatches} microbatches"
    for stage in trace.stages:
        yield from _stage(trace, stage, layers)


def _stage(trace: Trace, stage: StageTrace, layers: int) -> Iterator[str]:
    ranks = ", ".join(map(str, stage.ranks))
    yield f"pp rank {ranks}: {', '.join(_blocks(start, count, layers) for start, count in stage.layers)}"
    calls = trace.operator_calls(stage)
    moved = sum(operator.bytes * times for operator, times in calls.items())
    names = len({operator.name for operator in calls})
    yield f"  operators    {sum(calls.values()):,} calls of {names}: {_flops(trace.flops(stage))}, {gib(moved)} read and written"
    for (axis, operation), (count, size) in sorted(trace.traffic(stage).items()):
        yield f"  {axis:<12} {operation} {count:,} times among {len(stage.groups.get(axis, ()))}: {gib(size)}"
    peak = trace.peak(stage)
    parts = {**stage.state, "kept by passes": peak.kept, "working": peak.working}
    sizes = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    yield f"  peak         {gib(peak.bytes)} in {peak.action}: {sizes}"


def _blocks(start: int, count: int, layers: int) -> str:
    found = (
        "no layer"
        if not count
        else f"layer {start}"
        if count == 1
        else f"layers {start}-{start + count - 1}"
    )
    ends = (" with the embedding" * (start == 0)) + (" with the head" * (start + count == layers))
    return found + ends


def _flops(count: int) -> str:
    size, name = next((size, name) for size, name in UNITS if count >= size or size == 1)
    return f"{count / size:,.1f} {name}"
