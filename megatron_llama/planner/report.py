"""What a plan says: a table of layouts, one of them in full, and why the others are slower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import prod
from shlex import quote
from typing import Any

from megatron_llama.config.parse import differences, flag
from megatron_llama.errors import describe
from megatron_llama.planner.candidate import Planned
from megatron_llama.planner.fitted import HIGH, LOW
from megatron_llama.planner.nearest import Citation
from megatron_llama.planner.oom_probability import USABLE
from megatron_llama.planner.steps import Step
from megatron_llama.plans.memory import gib
from megatron_llama.plans.offload import NONE
from megatron_llama.plans.params import adapter_shapes

WORDS = (
    ("compute", "kernels"),
    ("bubble", "pipeline bubble"),
    ("tensor", "exposed tensor-parallel communication"),
    ("context", "exposed context-parallel communication"),
    ("pipeline", "exposed sends between stages"),
    ("data", "exposed data-parallel communication"),
    ("update", "optimizer"),
    ("other", "stragglers and the rest"),
)
"""Parts of a step, in words."""


def duration(seconds: float) -> str:
    """Seconds for people: of short ones more digits."""
    return f"{seconds:.{2 if seconds >= 1 else 3 if seconds >= 0.1 else 4}f}"


def flops_per_token(planned: Planned) -> float:
    """Forward and backward FLOPs of a token, all of the square of scores counted, nothing that is
    computed again (torchtitan's MFU). With low-rank additions the products with frozen weights have
    no third part."""
    job = planned.job
    model = planned.config.model
    products = (
        sum(product.n * product.k for product in job.matmuls) * job.tp * model.num_hidden_layers
    )
    head = model.vocab_size * model.hidden_size
    additions = (
        sum(map(prod, adapter_shapes(model, planned.config.lora).values())) if job.additions else 0
    )
    weights = (4.0 if job.additions else 6.0) * (products + head) + 6.0 * additions
    return (
        weights
        + 12.0 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * job.seq
    )


def mfu(planned: Planned) -> float:
    """Model FLOPs that are used of what the device could do."""
    return planned.speed * flops_per_token(planned) / planned.machine.gpu.peak


def label(planned: Planned) -> str:
    """A layout in one word, as ``--explain`` takes it."""
    parallel = planned.config.parallel
    job = planned.job
    parts = [
        f"tp{job.tp}",
        f"pp{job.pp}",
        f"cp{job.cp}",
        f"dp{job.dp}",
        f"mbs{job.micro_batch}",
        parallel.pipeline_schedule,
    ]
    if parallel.virtual_pipeline_model_parallel_size > 1:
        parts.append(f"v{parallel.virtual_pipeline_model_parallel_size}")
    offload = planned.config.offload.optimizer_offload
    parts += [
        parallel.data_parallel_sharding_strategy,
        f"recompute-{parallel.recompute_granularity}",
    ]
    return "/".join([*parts, *([f"offload-{offload}"] if offload != NONE else [])])


def table(best: Sequence[Planned]) -> Iterator[str]:
    """A line for each layout, fastest first."""
    yield (
        f"{'':>2} {'step s':>8} {'80 % between':>15} {'tok/s/GPU':>9} {'MFU':>5} {'memory':>10} {'OOM':>4} "
        f"{'bubble':>6} {'tp':>5} {'cp':>5} {'pp':>5} {'dp':>5}  layout"
    )
    for place, planned in enumerate(best, 1):
        step = planned.timed
        shares = [
            part / step.seconds
            for part in (step.bubble, step.tensor, step.context, step.pipeline, step.data)
        ]
        between = f"{duration(step.seconds * LOW)} to {duration(step.seconds * HIGH)}"
        yield (
            f"{place:>2} {duration(step.seconds):>8} {between:>15} {planned.speed:>9,.0f} {mfu(planned):>5.0%} "
            f"{gib(sum(planned.fullest.values())):>10} {planned.oom_probability:>4.0%} {shares[0]:>6.1%} "
            + " ".join(f"{share:>5.1%}" for share in shares[1:])
            + f"  {label(planned)}"
        )


def details(planned: Planned) -> Iterator[str]:
    """Where time and memory go."""
    step = planned.timed
    gpu = planned.machine.gpu
    yield f"{label(planned)}: {duration(step.seconds)} s a step, {planned.job.microbatches} microbatches"
    shown = [
        (words, getattr(step, name))
        for name, words in WORDS
        if getattr(step, name) >= 0.002 * step.seconds
    ]
    yield "  time      " + ", ".join(f"{words} {duration(part)} s" for words, part in shown)
    parts = planned.fullest
    reserve = f"context and fragmentation {gib(int((1 - USABLE) * gpu.memory))} set aside"
    yield f"  memory    {', '.join(f'{name} {gib(size)}' for name, size in parts.items() if size)}; {reserve} of {gib(gpu.memory)}"
    if planned.host_bytes:
        rank = max(range(planned.job.pp), key=planned.host_wait)
        moved = planned.short.offload(rank)
        wait = duration(planned.host_wait(rank))
        assert moved is not None
        copies = f"a step copies {gib(moved.to_host)} to the host and {gib(moved.to_device)} to the device, and waits {wait} s for the host"
        yield f"  offload   {gib(planned.host_bytes)} of the {gib(gpu.host_memory)} of host memory for each GPU; {copies}"
    traffic = planned.traffic[0]
    short = f"{traffic.gathers} gathers of {gib(traffic.gather_bytes)}, {traffic.reductions} reductions of {gib(traffic.reduction_bytes)}"
    yield f"  traffic   of {planned.short.schedule.microbatches} microbatches, pp rank 0, over dp: {short}"


def losses(best: Sequence[Planned]) -> Iterator[str]:
    """Why each layout after the first is slower: the part that grew most."""
    if not best:
        return
    winner = best[0].timed
    for place, planned in enumerate(best[1:], 2):
        step = planned.timed
        name, words = max(WORDS, key=lambda part: _growth(step, winner, part[0]))
        more = f"{words} {duration(getattr(step, name))} s instead of {duration(getattr(winner, name))} s"
        yield f"{place:>2} loses {duration(step.seconds - winner.seconds)} s: {more}"


def _growth(step: Step, winner: Step, name: str) -> float:
    return float(getattr(step, name) - getattr(winner, name))


def does_not_fit(smallest: Planned, enough: Planned | None) -> str:
    """What is missing, and the nearest thing that works: more GPUs."""
    machine = smallest.machine
    needed = sum(smallest.fullest.values())
    got = f"{gib(needed)} for each of {machine.gpus} GPUs at least, with {label(smallest)}"
    do = "take GPUs of more memory, or a shorter --seq-length"
    if enough is not None:
        do = f"--gpus {enough.machine.gpus} would do, with {label(enough)}, or {do}"
    return describe(
        "memory",
        got=got,
        expected=f"at most {gib(int(USABLE * machine.gpu.memory))} usable of a {machine.gpu.name}",
        do=do,
    )


def command(planned: Planned) -> str:
    """The line that starts such a run."""
    nodes = -(-planned.machine.gpus // planned.machine.node)
    config = planned.config
    words = [
        f"--nnodes {nodes}",
        f"--nproc-per-node {min(planned.machine.node, planned.machine.gpus)}",
        "-m megatron_llama pretrain",
    ]
    sections = (config.parallel, config.training, config.offload, config.zenflow, config.lora)
    changed = {**_model_options(planned), **differences(sections)}
    if config.optimizer.freeze:
        changed["freeze"] = config.optimizer.freeze
    if config.training.train_iters <= 1:
        changed["train_iters"] = "N"
    for name, value in changed.items():
        text = " ".join(map(quote, map(str, value))) if isinstance(value, tuple) else value
        words.append(flag(name) if value is True else f"{flag(name)} {text}")
    return f"torchrun {' '.join(words)} --data-path PREFIX"


def _model_options(planned: Planned) -> dict[str, Any]:
    model = planned.config.model
    return {"model": model.preset} if model.preset else differences([model])


def as_json(best: Sequence[Planned], near: Sequence[Citation], tried: int) -> dict[str, Any]:
    """Everything that the table and the details say."""
    return {
        "tried": tried,
        "layouts": [
            {
                "layout": label(planned),
                "step_seconds": planned.seconds,
                "step_seconds_low": planned.seconds * LOW,
                "step_seconds_high": planned.seconds * HIGH,
                "tokens_per_second_per_gpu": planned.speed,
                "mfu": mfu(planned),
                "seconds": asdict(planned.timed),
                "memory_bytes": planned.fullest,
                "host_memory_bytes": planned.host_bytes,
                "probability_out_of_memory": planned.oom_probability,
                "command": command(planned),
            }
            for planned in best
        ],
        "nearest_published": [asdict(citation) for citation in near],
    }
