"""Checks that a resumed run goes on where it was: in its own layout to the bit, in another layout
and in one process up to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megatron_llama.config.schema import Config
from megatron_llama.errors import UserError
from megatron_llama.prove.case import STEPS, Case
from megatron_llama.prove.compare import (
    IN_FP32,
    History,
    Row,
    distance,
    gradients_of,
    relative,
    rows_of_histories,
)
from megatron_llama.prove.materials import parsed_options
from megatron_llama.prove.reference import NotComparedError, in_fp32, one_process
from megatron_llama.prove.run import LENGTHS, Tensors, Trained
from megatron_llama.prove.runs import Runs
from megatron_llama.train.setup.resolve import assemble, check

RESUME, RESHARD = "resume", "reshard"
LAYOUTS: tuple[Mapping[str, object], ...] = (
    {"expert_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim_grads"},
    {
        "pipeline_model_parallel_size": 2,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "reduce_bucket_size": 3000,
    },
    {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "data_parallel_sharding_strategy": "optim_grads",
    },
    {"data_parallel_sharding_strategy": "optim_grads_params", "reduce_bucket_size": 3000},
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
)
"""Layouts for resuming a run. The first valid one that divides the model differently is taken."""
RANKS = (4, 2)


def middle(trained: Trained) -> int:
    """Return the step after which a run is interrupted. Raises NotComparedError for one step."""
    if trained.iterations[-1] < 2:
        raise NotComparedError("the run has one step")
    return trained.iterations[-1] // 2


def rows_of_resume(runs: Runs, case: Case, until: int) -> Iterator[Row]:
    """Yield the comparison, to the bit, of a run resumed from its middle, in its own layout and
    precision, with the uninterrupted run. The run has at least its first ``until`` steps; 0 for
    all. Raises RunError and NotComparedError."""
    trained = runs.trained(case, until)
    at = middle(trained)
    again = runs.gone_on(case, trained, at)
    whole = {step.iteration: step for step in trained.ranks[0].steps}
    for step in again.ranks[0].steps:
        here, there = step.iteration, whole[step.iteration]
        for what, found, expected in (
            ("loss", step.loss, there.loss),
            ("gradient norm", step.grad_norm, there.grad_norm),
            ("learning rate", step.lr, there.lr),
        ):
            yield Row(RESUME, what, _apart(found, expected), 0.0, here)
    evaluated, before = again.validation_losses, trained.validation_losses
    for here in sorted(evaluated.keys() | before.keys()):
        if at < here <= again.iterations[-1]:
            if here in evaluated and here in before:
                yield Row(
                    RESUME, "validation loss", _apart(evaluated[here], before[here]), 0.0, here
                )
            else:
                note = "only one of the runs has it"
                yield Row(RESUME, "validation loss", math.inf, 0.0, here, note=note)
    expected_states = dict(zip(trained.iterations, runs.states(trained), strict=True))
    for here, found_state in zip(again.iterations, runs.states(again), strict=True):
        yield from _same_bits(here, found_state, expected_states[here])


def _apart(found: float, expected: float) -> float:
    """Return the distance of two numbers that have to be equal. It is 0 for two NaNs: a step of
    fp16 that overflows has no norm in either run."""
    if math.isnan(found) and math.isnan(expected):
        return 0.0
    return relative(found, expected)


def _same_bits(step: int, found: Tensors, expected: Tensors) -> Iterator[Row]:
    for what, ours, theirs in (
        ("weight", found.master, expected.master),
        ("first moment", found.exp_avg, expected.exp_avg),
        ("second moment", found.exp_avg_sq, expected.exp_avg_sq),
        ("optimizer's state", found.other, expected.other),
    ):
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in ours or name not in theirs:
                yield Row(RESUME, what, math.inf, 0.0, step, name, "only one of the runs has it")
            else:
                yield Row(RESUME, what, _unequal(ours[name], theirs[name]), 0.0, step, name)


def _unequal(found: Tensor, expected: Tensor) -> float:
    """Return 0 for equal bits, else the distance of the tensors."""
    if found.dtype == expected.dtype and torch.equal(found, expected):
        return 0.0
    return distance(found, expected) or math.inf


def other_layout(case: Case) -> Case | None:
    """Return the case in another layout of at most four processes; None if it can have no other."""
    single = one_process(case)
    training = _resolved(case).training
    for ranks in RANKS:
        for layout in LAYOUTS:
            axes = {name for name in layout if name.endswith("_parallel_size")}
            if any(case.options.get(name, 1) == layout[name] for name in axes):
                continue
            options = {
                **single.options,
                **layout,
                "micro_batch_size": 1,
                "global_batch_size": training.global_batch_size,
            }
            candidate = replace(
                case, name=f"{case.name}, in another layout", options=options, world_size=ranks
            )
            try:
                _resolved(candidate)
            except UserError:
                continue
            return candidate
    return None


def _resolved(case: Case) -> Config:
    """Return the configuration of a case, with data that is not opened. Raises ConfigError."""
    more: dict[str, object] = {"train_data" if case.sft else "data_path": ("text",)}
    # Every step of a run is saved, as --on-bad-step rollback needs.
    more |= {"save": "checkpoints", "save_interval": 1}
    if not any(case.options.get(name) for name in LENGTHS):
        more["train_iters"] = STEPS
    return check(assemble(parsed_options(case, **more)), case.world_size).config


def rows_of_reshard(runs: Runs, case: Case, until: int) -> Iterator[Row]:
    """Yield the comparison of a run in fp32, resumed from its middle in one process and in another
    layout, with the uninterrupted run, within the rounding that one process in fp64 measures. The
    run has at least its first ``until`` steps; 0 for all. Raises RunError."""
    plain = in_fp32(case)
    trained = runs.trained(plain, until)
    single = runs.trained(one_process(plain), until)
    exact = runs.trained(one_process(plain, fp64=True), until)
    last = trained.iterations[-1]
    at = middle(trained)
    expected, alone, true = (
        _after(at, run, dict(zip(run.iterations, runs.states(run), strict=True)), last)
        for run in (trained, single, exact)
    )
    new_layout = other_layout(plain)
    for layout in (one_process(plain), *([new_layout] if new_layout else [])):
        again = runs.gone_on(layout, trained, at)
        states = dict(zip(again.iterations, runs.states(again), strict=True))
        states[at] = runs.states(trained)[trained.iterations.index(at)]
        resumed = _after(at, again, states, last)
        for row in rows_of_histories(RESHARD, resumed, expected, (alone, true), IN_FP32):
            # Steps of histories count from 1; those of evaluations are iterations already.
            step = row.step
            if step is not None and row.what != "validation loss":
                step += at
            note = f"going on in {_named(layout)}{': ' if row.note else ''}{row.note}"
            yield replace(row, step=step, note=note)


def _named(case: Case) -> str:
    if case.world_size == 1:
        return "one process"
    axes = {"tensor_model": "tp", "pipeline_model": "pp", "context": "cp", "expert_model": "ep"}
    sizes = [
        f"{short}{case.options[f'{axis}_parallel_size']}"
        for axis, short in axes.items()
        if case.options.get(f"{axis}_parallel_size", 1) != 1
    ]
    strategy = case.options.get("data_parallel_sharding_strategy", "optim")
    return f"{case.world_size} processes ({' '.join([*sizes, str(strategy)])})"


def _after(at: int, trained: Trained, saved: Mapping[int, Tensors], last: int) -> History:
    """Return the numbers of a run's steps after ``at`` and up to ``last``, which have left the
    states ``saved``."""
    steps = [step for step in trained.ranks[0].steps if at < step.iteration <= last]
    norms = [step.grad_norm for step in steps]
    states = [saved[at], *(saved[step.iteration] for step in steps)]
    # The first gradient would be that of all steps before, so it belongs to no step.
    gradients = gradients_of(states, trained.config.optimizer, [0.0, *norms])[1:]
    return History(
        tuple(step.loss for step in steps),
        tuple(norms),
        gradients,
        {step: loss for step, loss in trained.validation_losses.items() if at < step <= last},
    )
