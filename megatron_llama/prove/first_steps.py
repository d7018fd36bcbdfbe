"""The first steps of a user's own run, trained again by one process of this machine if possible.
The run's log is compared with this curve."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import torch

from megatron_llama.config.parse import Parsed, options_of
from megatron_llama.config.schema import CheckpointConfig, Config, DataConfig
from megatron_llama.engine.comm.host_memory import free_bytes
from megatron_llama.engine.plan.memory import sized
from megatron_llama.errors import UserError, counted
from megatron_llama.launch.launcher import Place
from megatron_llama.metrics.flops import flops_per_token
from megatron_llama.model.plan.params import hf_shapes
from megatron_llama.prove.case import Case
from megatron_llama.prove.drift import Drift, Dtype, compare
from megatron_llama.prove.given import SECTIONS, read_given
from megatron_llama.prove.logs import FP32_ROUNDING, OURS, LoggedStep, Number, RunLog
from megatron_llama.prove.materials import parsed_options
from megatron_llama.prove.pool import WorkerError, WorkerPool
from megatron_llama.prove.reference import one_process
from megatron_llama.train.api.train import run_training
from megatron_llama.train.run.callbacks import Callback, Run, Step
from megatron_llama.train.setup.deciders import TEXT
from megatron_llama.train.setup.start import AUTO, begins_anew, named_start
from megatron_llama.tune.sft.inputs import EXAMPLES

MOST_LINES, FEWEST_LINES = 16, 3
"""Most and fewest lines of the log that are compared."""
BYTES_OF_PARAMETER = 20
"""Bytes of master, two moments, gradient and compute copy of a parameter."""
SHARE_OF_PEAK = 0.25
"""Speed of a step here relative to a large product. It is low since bf16 is slow on CPUs."""
LEFT_OUT = frozenset(
    name
    for name, option in options_of(SECTIONS).items()
    if option.rules.changes == "nothing" and option.section is not DataConfig
)
"""Options that change no training step, except for those of data: the run's data may lie in its
cache."""


def first_steps(
    pool: WorkerPool, parsed: Parsed, world_size: int, log: RunLog, *, seconds: float
) -> Drift:
    """Train the first steps of a configuration in one process, with its own data and weights, and
    return their comparison with the ``log`` of its run on ``world_size`` processes.

    Steps that need more than ``seconds``, more memory than this machine has, or files that are not
    here, are not tried. The verdict is then "cannot say", with the reason. Raises UserError for a
    wrong configuration."""
    given = read_given(parsed, world_size)
    config = given.resolved
    dtype: Dtype = "fp16" if config.training.fp16 else "bf16" if config.training.bf16 else "fp32"
    if reason := _too_large(config):
        return _not_run(dtype, reason)
    options = {name: value for name, value in parsed.differences().items() if name not in LEFT_OUT}
    begin = 0
    if "load" in options:
        start = _start(parsed.get(CheckpointConfig), log)
        if isinstance(start, str):
            return _not_run(dtype, start)
        folder, begin = start
        options = {**options, "load": folder}
    lines = list(log.steps)
    if len(lines) < FEWEST_LINES:
        return _not_run(
            dtype, f"the log has {counted(len(lines), 'step')}; it takes {FEWEST_LINES}"
        )
    step_seconds = _step_seconds(config)
    affordable = [i for i in lines if (i - begin) * step_seconds <= seconds][:MOST_LINES]
    if len(affordable) < FEWEST_LINES:
        needed = lines[FEWEST_LINES - 1] - begin
        return _not_run(
            dtype,
            f"{counted(needed, 'step')} of this model take about "
            f"{_duration(needed * step_seconds)} in one process here, and --budget is "
            f"{_duration(seconds)}",
        )
    last = affordable[-1]
    case = Case("the first steps", options, world_size, given.sft)
    alone = {
        **one_process(case).options,
        "micro_batch_size": config.training.micro_batch_size,
        "global_batch_size": config.training.global_batch_size,
        "exit_interval": last,
        "log_interval": last,
        "progress_bar": False,
    }
    case = Case("the first steps", alone, 1, given.sft)
    try:
        curve = pool.run(1, _train, case, timeout=max(60.0, 4 * seconds))[0]
    except WorkerError as error:
        return _not_run(dtype, f"one process did not come to step {last}: {error}")
    if isinstance(curve, str):
        return _not_run(dtype, f"one process cannot start here: {curve}")
    steps = {step.iteration: step for step in curve}
    here = RunLog(Path("one process here"), OURS, MappingProxyType(steps), ())
    shown = replace(log, steps=MappingProxyType({i: log.steps[i] for i in affordable}))
    drift = compare(here, shown, dtype=dtype)
    weights = {name for name in ("load", "init_from_hf") if options.get(name)}
    drawn = not weights or "lora_rank" in options
    if drawn and drift.rises and drift.rises[0].iteration == affordable[0]:
        why = (
            "the curves differ from the first step on, but weights drawn from --seed on a GPU are "
            "others than on a CPU: compare a run that begins with --init-from-hf or --load"
        )
        return replace(drift, verdict="cannot say", why=why, rises=())
    return drift


def _start(options: CheckpointConfig, log: RunLog) -> tuple[str | None, int] | str:
    """Return the checkpoint of --load from which the log's run began and its number of steps, or
    the reason why they are not known."""
    first = min(log.steps)
    own = options.load == AUTO or options.load == options.save
    if own and first <= _between(log):
        # The run was to go on from its own folder if it had to, and the log begins with the first
        # step. The checkpoints that are there now belong to later steps.
        return None, 0
    try:
        start = named_start(options)
        anew = start is None or begins_anew(options, start)
        begin = 0 if start is None or anew else start.state().iteration
    except UserError as error:
        return f"one process cannot start here: {error}"
    if start is None:
        return f"--load {options.load} has no weights"
    if begin >= first:
        return (
            f"--load {options.load} has done {counted(begin, 'step')}, and the log begins with "
            f"step {first}: name with --load the checkpoint from which that step was trained"
        )
    return str(start.path), begin


def _between(log: RunLog) -> int:
    """Return the number of steps between two lines of a log."""
    return min((b - a for a, b in pairwise(log.steps)), default=1)


class _Curve(Callback):
    """Records the loss and the gradient norm of every step."""

    def __init__(self) -> None:
        self.steps: list[LoggedStep] = []

    def on_step(self, run: Run, step: Step) -> None:
        loss, norm = (_number(float(value)) for value in (step.loss, step.grad_norm))
        self.steps.append(LoggedStep(step.iteration, loss, norm, 1, "here"))


def _train(place: Place, case: Case) -> list[LoggedStep] | str:
    """Train as the one process. Returns its steps, or the message of a UserError."""
    curve = _Curve()
    try:
        run_training(
            parsed_options(case),
            EXAMPLES if case.sft else TEXT,
            callbacks=[curve],
            needs_data=not case.sft,
            place=place,
        )
    except UserError as error:
        return str(error)
    return curve.steps


def _number(value: float) -> Number:
    return Number(value, abs(value) * FP32_ROUNDING)


def _not_run(dtype: Dtype, reason: str) -> Drift:
    return Drift("cannot say", (), reason, (), MappingProxyType({}), dtype, ())


def _parameters(config: Config) -> int:
    return sum(math.prod(shape) for shape in hf_shapes(config.model).values())


def _too_large(config: Config) -> str:
    """Return the reason why one process cannot hold the training state; empty if it can."""
    needed = BYTES_OF_PARAMETER * _parameters(config)
    free = free_bytes()
    if needed <= free:
        return ""
    return (
        f"one process needs {sized(needed)} for {_parameters(config) / 1e9:,.1f} billion "
        f"parameters, and this machine has {sized(free)} free. prove --config shows the same "
        "structure on a small model"
    )


def _step_seconds(config: Config) -> float:
    """Estimate the seconds of a step in one process with one thread by timing a product."""
    training = config.training
    tokens = training.global_batch_size * training.seq_length
    flops = flops_per_token(config.model, training.seq_length, causal=True, lora=config.lora)
    size = 512
    matrix = torch.ones(size, size)
    began = time.perf_counter()
    for _ in range(4):
        matrix @ matrix
    rate = 4 * 2 * size**3 / (time.perf_counter() - began) / torch.get_num_threads()
    return tokens * flops / (SHARE_OF_PEAK * rate)


def _duration(seconds: float) -> str:
    """Return seconds in the unit that suits their size."""
    for unit, size in (("years", 31_557_600), ("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} seconds"
