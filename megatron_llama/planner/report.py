"""A plan in words: a table of layouts, one layout in full, and why the others are slower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from shlex import quote
from types import MappingProxyType
from typing import Any

from megatron_llama.config.parse import differences, flag
from megatron_llama.engine.offload_options import NONE
from megatron_llama.engine.options import MUON
from megatron_llama.engine.plan.memory import sized
from megatron_llama.errors import describe
from megatron_llama.metrics.flops import flops_per_token, run_peak
from megatron_llama.pipeline.plan.traffic import StepTraffic
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.fitted import HIGH, LOW
from megatron_llama.planner.nearest import Citation
from megatron_llama.planner.oom_probability import ALLOCATABLE
from megatron_llama.train.setup.description import describe_config

PARTS = (
    ("compute", "kernels"),
    ("bubble", "pipeline bubble"),
    ("tensor", "exposed tensor-parallel communication"),
    ("context", "exposed context-parallel communication"),
    ("pipeline", "exposed sends between stages"),
    ("data", "exposed data-parallel communication"),
    ("update", "optimizer"),
    ("other", "stragglers and the rest"),
)
"""Fields of a StepTime, with words for them."""
EXPERT = "expert"
EXPERT_PART = (EXPERT, "exposed expert-parallel communication")
"""One more of a layout that divides experts."""
SHARES = ("bubble", "tensor", "context", "pipeline", "data")
"""Fields whose shares of the step are columns of the table."""
SUBJECTS = ("model", "layout", "precision", "batch")
"""Subjects of a run's description that a plan decides."""
HEADS: Mapping[str, str] = MappingProxyType(
    {
        **{"bubble": "bubble", "tensor": "tp", "context": "cp", "pipeline": "pp"},
        **{"data": "dp", EXPERT: "ep"},
    }
)
"""Heads of the columns of shares."""
COMPUTED = (
    "times of experts are computed, not measured: products as those of so many rows, experts "
    "equally loaded; the interval is that of dense models"
)
"""What is to be known of a plan for a model with experts."""

AS_ADAM = "its time is that of AdamW: Muon's iterations and messages are not in the plan"
"""What is to be known of a plan for a run with Muon."""

_ITERATIONS = "N"
"""Placeholder for a number of steps that was not given."""


def duration(seconds: float) -> str:
    """Return seconds as text, with more decimals for short times."""
    return f"{seconds:.{2 if seconds >= 1 else 3 if seconds >= 0.1 else 4}f}"


def interval(candidate: Candidate) -> str:
    """Return the interval of seconds that contains eight of ten runs, as text."""
    return f"{duration(candidate.seconds * LOW)} to {duration(candidate.seconds * HIGH)}"


def mfu(candidate: Candidate) -> float:
    """Return the model FLOPs utilization in torchtitan's convention, of the peak of each product's
    own precision."""
    config = candidate.config
    flops = flops_per_token(config.model, candidate.job.seq, causal=False, lora=config.lora)
    peak = run_peak(config, candidate.machine.gpu.peak)
    assert peak is not None, "the planner knows its GPUs"
    return candidate.speed * flops / peak


def label(candidate: Candidate) -> str:
    """Return a layout in one word, as ``--explain`` takes it."""
    parallel = candidate.config.parallel
    job = candidate.job
    virtual = parallel.virtual_pipeline_model_parallel_size
    offload = candidate.config.offload.optimizer_offload
    parts = [f"tp{job.tp}", f"pp{job.pp}", f"cp{job.cp}", f"dp{job.dp}"]
    parts += [f"ep{job.ep}"] * (job.ep > 1)
    parts += [parallel.moe_token_dispatcher_type] * parallel.exchanges_tokens
    parts += [f"mbs{job.micro_batch}"]
    parts += [parallel.cp_comm_type] * (job.cp > 1 and parallel.cp_comm_type != "all_gather")
    parts += [parallel.pipeline_schedule, *([f"v{virtual}"] if virtual > 1 else [])]
    parts += [parallel.data_parallel_sharding_strategy]
    parts += [f"recompute-{parallel.recompute_granularity}"]
    return "/".join([*parts, *([f"offload-{offload}"] if offload != NONE else [])])


def parts_of(best: Sequence[Candidate]) -> tuple[tuple[str, str], ...]:
    """Return the fields of a StepTime of these layouts, with words for them."""
    return (*PARTS, EXPERT_PART) if any(candidate.job.ep > 1 for candidate in best) else PARTS


def shares_of(best: Sequence[Candidate]) -> tuple[str, ...]:
    """Return the fields of a StepTime that are columns of a table of these layouts."""
    return (*SHARES, EXPERT) if any(candidate.job.ep > 1 for candidate in best) else SHARES


def legend(columns: Sequence[str]) -> str:
    """Return the words below a table with these columns of shares."""
    return (
        f"OOM: how likely the memory is too small; {', '.join(HEADS[name] for name in columns)}: "
        "shares of the step, of the pipeline's bubble and of exposed communication"
    )


def table(best: Sequence[Candidate]) -> Iterator[str]:
    """Yield a line for each layout, fastest first, and a legend."""
    columns = shares_of(best)
    heads = " ".join(f"{HEADS[name]:>5}" for name in columns[1:])
    yield (
        f"{'':>2} {'step (s)':>8} {'80 % between (s)':>16} {'tokens/s/GPU':>12} {'MFU':>5} "
        f"{'memory/GPU':>10} {'OOM':>4} {'bubble':>6} {heads}  layout"
    )
    for place, candidate in enumerate(best, 1):
        step = candidate.step_time
        bubble, *shares = (getattr(step, name) / step.seconds for name in columns)
        yield (
            f"{place:>2} {duration(step.seconds):>8} {interval(candidate):>16} "
            f"{candidate.speed:>12,.0f} {mfu(candidate):>5.0%} {sized(candidate.needed):>10} "
            f"{candidate.oom_probability:>4.0%} {bubble:>6.1%} "
            f"{' '.join(f'{share:>5.1%}' for share in shares)}  {label(candidate)}"
        )
    yield f"   {legend(columns)}"


def near_heading(candidate: Candidate) -> str:
    """Return the words above the published runs that are near a layout."""
    experts = candidate.job.experts is not None
    return "nearest published runs, of other trainers" + (
        " and dense models of as many parameters as a token meets" if experts else ""
    )


def described(candidate: Candidate) -> dict[str, str]:
    """Return the description of a run by subject: model, layout, precision and batch."""
    subjects = describe_config(candidate.config, candidate.machine.gpus)
    return {subject: subjects[subject] for subject in SUBJECTS}


def details(candidate: Candidate) -> Iterator[str]:
    """Yield lines that describe a layout, its time and its memory."""
    step = candidate.step_time
    gpu = candidate.machine.gpu
    yield f"{label(candidate)}: {duration(step.seconds)} s a step"
    yield from (f"  {subject:<9} {words}" for subject, words in described(candidate).items())
    parts = [(words, getattr(step, name)) for name, words in parts_of([candidate])]
    shown = [f"{words} {duration(time)} s" for words, time in parts if time >= 0.002 * step.seconds]
    yield f"  time      {', '.join(shown)}"
    sizes = [f"{name} {sized(size)}" for name, size in candidate.fullest.items() if size]
    reserve = f"context and fragmentation {sized(int((1 - ALLOCATABLE) * gpu.memory))} set aside"
    yield f"  memory    {', '.join(sizes)}; {reserve} of {sized(gpu.memory)}"
    if candidate.host_bytes:
        rank = max(range(candidate.job.pp), key=candidate.host_wait)
        moved = candidate.short.offload(rank)
        assert moved is not None
        yield (
            f"  offload   {sized(candidate.host_bytes)} of the {sized(gpu.host_memory)} of host "
            f"memory for each GPU; a step copies {sized(moved.to_host)} to the host and "
            f"{sized(moved.to_device)} to the device, and waits "
            f"{duration(candidate.host_wait(rank))} s for the host"
        )
    traffic = candidate.traffic[0]
    counted = f"of {candidate.short.schedule.microbatches} microbatches, pp rank 0"
    yield f"  traffic   {counted}, over dp: {_messages(traffic)}"
    if traffic.experts is not None:
        yield f"  traffic   of experts, over dp / ep: {_messages(traffic.experts)}"
    if candidate.job.experts is not None:
        yield f"  experts   {experts_line(candidate)}"
    if candidate.config.optimizer.optimizer == MUON:
        yield f"  update    {AS_ADAM}"


def _messages(traffic: StepTraffic) -> str:
    return (
        f"{traffic.gathers} gathers of {sized(traffic.gather_bytes)}, "
        f"{traffic.reductions} reductions of {sized(traffic.reduction_bytes)}"
    )


def experts_line(candidate: Candidate) -> str:
    """Return what is to be known of the times of experts in a plan."""
    work = candidate.job.experts
    assert work is not None
    rows = f"{work.count} in a rank and block, each with {work.grouped[0].m:,} rows of a microbatch"
    sent = work.messages
    over = ""
    if sent.forward:
        over = (
            f"; over ep {sent.forward + sent.backward} messages of "
            f"{sized(sent.forward_bytes + sent.backward_bytes)}"
        )
        if work.exchanges:
            over += ", and the host's wait for their counts is not in the plan"
    passes = ""
    if candidate.config.training.counts_experts_first:
        passes = ". Not in the plan: the forward pass more with which each step begins"
    return f"{rows}{over}; {COMPUTED}{passes}"


def losses(best: Sequence[Candidate]) -> Iterator[str]:
    """Yield for each layout after the first the part of the step that grew most."""
    parts = parts_of(best)
    for place, candidate in enumerate(best[1:], 2):
        slower = candidate.step_time
        winner = best[0].step_time
        name, words = max(
            parts, key=lambda part: getattr(slower, part[0]) - getattr(winner, part[0])
        )
        yield (
            f"{place:>2} loses {duration(slower.seconds - winner.seconds)} s: {words} "
            f"{duration(getattr(slower, name))} s instead of {duration(getattr(winner, name))} s"
        )


def does_not_fit(smallest: Candidate, enough: Candidate | None) -> str:
    """Return the message that no layout fits, with the number of GPUs that would do."""
    machine = smallest.machine
    do = "take GPUs of more memory, or a shorter --seq-length"
    if enough is not None:
        do = f"--gpus {enough.machine.gpus} would do, with {label(enough)}, or {do}"
    usable = sized(int(ALLOCATABLE * machine.gpu.memory))
    return describe(
        "memory",
        got=f"{sized(smallest.needed)} for each of {machine.gpus} GPUs at least, "
        f"with {label(smallest)}",
        expected=f"at most {usable} usable of a {machine.gpu.name}",
        do=do,
    )


def run_options(candidate: Candidate) -> dict[str, Any]:
    """Return the options of a run that differ from their defaults, except for its inputs and
    outputs, and for its length if that was not given."""
    return {name: value for name, value in _changed(candidate).items() if value != _ITERATIONS}


def _changed(candidate: Candidate) -> dict[str, Any]:
    config = candidate.config
    sections = (config.parallel, config.training, config.offload, config.zenflow, config.lora)
    preset = config.model.preset
    changed: dict[str, Any] = {"model": preset} if preset else differences([config.model])
    changed |= differences(sections)
    training = config.training
    # The end of the learning rate's decay is filled in for every run.
    ends = {"lr_decay_iters": training.train_iters, "lr_decay_samples": training.train_samples}
    of_optimizer = differences([config.optimizer])
    changed |= {name: value for name, value in of_optimizer.items() if value != ends.get(name)}
    if config.training.train_iters <= 1:
        changed["train_iters"] = _ITERATIONS
    return changed


def command(candidate: Candidate) -> str:
    """Return the command line that starts a run with this layout."""
    machine = candidate.machine
    changed = _changed(candidate)
    options = []
    for name, value in changed.items():
        text = " ".join(map(quote, map(str, value))) if isinstance(value, tuple) else value
        options.append(flag(name) if value is True else f"{flag(name)} {text}")
    return (
        f"torchrun --nnodes {-(-machine.gpus // machine.node)} "
        f"--nproc-per-node {min(machine.node, machine.gpus)} -m megatron_llama pretrain "
        f"{' '.join(options)} --data-path PREFIX"
    )


def as_json(best: Sequence[Candidate], near: Sequence[Citation], tried: int) -> dict[str, Any]:
    """Return the contents of the table and the details for programs."""
    return {
        "tried": tried,
        "layouts": [
            {
                "layout": label(candidate),
                "step_seconds": candidate.seconds,
                "step_seconds_low": candidate.seconds * LOW,
                "step_seconds_high": candidate.seconds * HIGH,
                "tokens_per_second_per_gpu": candidate.speed,
                "mfu": mfu(candidate),
                "seconds": asdict(candidate.step_time),
                "memory_bytes": candidate.fullest,
                "host_memory_bytes": candidate.host_bytes,
                "probability_out_of_memory": candidate.oom_probability,
                "command": command(candidate),
            }
            for candidate in best
        ],
        "nearest_published": [asdict(citation) for citation in near],
    }
