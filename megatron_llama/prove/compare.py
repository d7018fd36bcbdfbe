"""Compares a run with its twin: losses, gradient norms, and the gradient and the update of every
tensor, each with a bound that is made of rounding.

Gradients are read from the moments in the checkpoints of two steps, so what is compared is what the
run has written, and nothing inside of it is touched. Updates are compared with AdamW, written out
in fp64, on the run's own moments and weights: two runs whose gradients differ by rounding cannot
be compared by their updates, because Adam makes a full step of an element whose gradient is all
rounding. Where gradients are one process's, moments follow from gradients, and updates from
moments, every update is one process's up to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.prove.run import Tensors

UPDATE_ROUNDINGS = 4.0
"""Moments and updates may be so many times as far from AdamW in fp64 as the last bits of the
numbers that they are computed from."""
CHANGE_BOUND = 1e-3
"""Of the difference of two updates: an element whose gradient is all rounding makes a full step
either way."""
LATER = 5.0
"""Behind the first step weights differ by rounding, too, and at large learning rates gradients
follow them further than one pair of runs shows. A wrong gradient is wrong in the first step, or by
more."""
RATE_BOUND = 1e-12
"""Rates are computed in fp64."""
EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny
LIMIT = 0.45
"""No bound is above it, whatever rounding was measured to change: a gradient or an update that is
missing deviates by 1, one that is twice or half of what it should be by 0.5 at least."""


@dataclass(frozen=True)
class Row:
    """One number that was compared."""

    check: str
    what: str
    """``loss``, ``gradient norm``, ``gradient``, ``update``, ..., or ``the run``, which ended with
    an error."""
    got: float
    """The relative deviation; where something has to be equal to the bit, 0 or 1."""
    bound: float
    step: int | None = None
    """From 1; None for what belongs to no step."""
    tensor: str | None = None
    """HuggingFace's name."""
    note: str = ""
    """A sentence that says more than the numbers."""

    @property
    def holds(self) -> bool:
        """Whether the deviation is within its bound. False for NaN."""
        return self.got <= self.bound


@dataclass(frozen=True)
class Allowed:
    """Relative deviations within which a run counts as equal."""

    loss: float
    """Of the loss, whatever is measured."""
    norm: float
    gradient: float
    """Of the gradient of one tensor: the L2 norm of its difference."""
    roundings: float
    """Losses and norms may also deviate by so many times what rounding was measured to change."""
    gradient_roundings: float
    """So may gradients of single tensors, some of which have a few elements."""
    limit: float
    """Whatever rounding was measured to change: losses, norms and the gradient of all tensors
    together may not deviate by more."""
    last_bit: float
    """Of the gradient of all tensors together: what is smaller may be rounding alone. The gradient
    of a tensor counts as so large at least when its deviation is made relative."""
    cancelled: float = 0.0
    """Of the gradient of all tensors together: what is smaller is a sum whose terms may cancel, of
    which rounding leaves little. Of such a tensor no more is asked than that it is neither missing
    nor half or twice of what it should be, by fp32 or by one process in the same precision."""


@dataclass(frozen=True)
class History:
    """What a run has come to in its steps, in the order of the steps."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    """Before clipping."""
    gradients: tuple[Mapping[str, Tensor], ...]
    """Of every trained tensor, before clipping, fp64."""
    validation_losses: Mapping[int, float] | None
    """By step. None of a training that evaluates nothing."""


Rounding = tuple[History, History]
"""Two runs that differ by rounding alone, which is measured by them."""
IN_FP32 = Allowed(
    loss=1e-6,
    norm=2e-5,
    gradient=2e-5,
    roundings=2.0,
    gradient_roundings=8.0,
    limit=0.01,
    last_bit=16 * EPS,
)
"""Gradients of 3,000 tensors in fp32 were at most 1.8 times as far from one process as that is
from fp64."""


IN_BF16 = Allowed(
    loss=1e-3,
    norm=1e-2,
    gradient=2e-2,
    roundings=4.0,
    gradient_roundings=6.0,
    limit=0.3,
    last_bit=2.0**-16,
    cancelled=2.0**-12,
)
IN_FP16 = Allowed(
    loss=1e-4,
    norm=1e-3,
    gradient=2e-3,
    roundings=4.0,
    gradient_roundings=6.0,
    limit=0.1,
    last_bit=2.0**-16,
    cancelled=2.0**-12,
)
"""One number may by chance be near that of fp32, so there are floors. Gradients of single tensors
were at most 1.5 times as far from fp32 as those of one process in the same precision. That has
nothing to measure the rounding of gradients by that travel in bf16: floors are for that, too."""


def gradients_of(
    states: Sequence[Tensors], optimizer: OptimizerConfig, grad_norms: Sequence[float]
) -> tuple[Mapping[str, Tensor], ...]:
    """The gradients of the steps that have left these states, one for each step, in fp64.

    They are those before clipping, as the norm says by which the run has clipped: a wrong norm is
    found by itself, and does not make every gradient wrong."""
    beta = optimizer.adam_beta1
    found = []
    before: Mapping[str, Tensor] = {}
    for state, norm in zip(states, grad_norms, strict=True):
        clipped_by = max(1.0, (norm + 1e-6) / optimizer.clip_grad) if optimizer.clip_grad else 1.0
        gradients = {}
        for name, moment in state.exp_avg.items():
            gradient = moment.double()
            if name in before:
                gradient = gradient - beta * before[name].double()
            gradients[name] = gradient * (clipped_by / (1 - beta))
        found.append(gradients)
        before = state.exp_avg
    return tuple(found)


def relative(found: float, expected: float) -> float:
    """The deviation of one number from another, NaN if one of them is no number."""
    if found == expected:
        return 0.0
    return abs(found - expected) / abs(expected) if expected else math.inf


def distance(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """The L2 norm of the difference, divided by that of ``expected``, which counts as ``least`` at
    least."""
    difference = norm_of(found.double() - expected.double())
    return _ratio(difference, max(norm_of(expected.double()), least))


def _ratio(difference: float, whole: float) -> float:
    """A quotient of norms; 0 of 0 is 0."""
    if difference == 0.0:
        return 0.0
    return difference / whole if whole else math.inf


def norm_of(tensor: Tensor) -> float:
    """The L2 norm."""
    found: float = torch.linalg.vector_norm(tensor).item()
    return found


def rows_of_histories(
    check: str, found: History, expected: History, rounded: Rounding, allowed: Allowed
) -> Iterator[Row]:
    """Compare a run with the one that it has to equal up to rounding."""
    runs = (found, expected, *rounded)
    losses = zip(*(run.losses for run in runs), strict=True)
    for step, numbers in enumerate(losses, 1):
        yield _number(check, "loss", allowed.loss, numbers, allowed, step)
    norms = zip(*(run.grad_norms for run in runs), strict=True)
    for step, numbers in enumerate(norms, 1):
        yield _number(check, "gradient norm", allowed.norm, numbers, allowed, step)
    if found.validation_losses is not None and expected.validation_losses is not None:
        for step in sorted(found.validation_losses.keys() | expected.validation_losses.keys()):
            evaluated = [(run.validation_losses or {}).get(step, math.nan) for run in runs]
            yield _evaluation(check, evaluated, allowed, step)
    gradients = zip(*(run.gradients for run in runs), strict=True)
    for step, of_runs in enumerate(gradients, 1):
        yield from _gradients(check, step, of_runs, allowed)


def _number(
    check: str, what: str, floor: float, of_runs: Sequence[float], allowed: Allowed, step: int
) -> Row:
    found, expected, one, other = of_runs
    bound = max(floor, allowed.roundings * relative(one, other))
    return Row(check, what, relative(found, expected), min(bound, allowed.limit), step)


def _evaluation(check: str, of_runs: Sequence[float], allowed: Allowed, step: int) -> Row:
    """Compare a validation loss, which is NaN for a run that has none in this step."""
    what = "validation loss"
    missing = [math.isnan(loss) for loss in of_runs]
    if missing[0] != missing[1]:
        note = "it is not there" if missing[0] else "it must not be there"
        return Row(check, what, math.inf, allowed.loss, step, note=note)
    return _number(check, what, allowed.loss, of_runs, allowed, step)


def _gradients(
    check: str, step: int, of_runs: Sequence[Mapping[str, Tensor]], allowed: Allowed
) -> Iterator[Row]:
    found, expected, one, other = of_runs
    names = sorted(found.keys() & expected.keys())
    wholes = [torch.cat([run[name].flatten() for name in names]) for run in of_runs]
    floor = allowed.gradient if step == 1 else LATER * allowed.gradient
    rounding = distance(wholes[2], wholes[3])
    bound = max(floor, allowed.gradient_roundings * rounding)
    got = distance(wholes[0], wholes[1])
    yield Row(check, "whole gradient", got, min(bound, allowed.limit), step)
    # A tensor whose gradient is below the last bit of the whole one's has rounding alone.
    least = allowed.last_bit * norm_of(wholes[1])
    cancelled = allowed.cancelled * norm_of(wholes[1])
    for name in sorted(found.keys() | expected.keys()):
        if name not in names:
            note = "it is not trained" if name in expected else "it is trained, and must not be"
            yield Row(check, "gradient", math.inf, allowed.gradient, step, name, note)
            continue
        rounding = distance(one[name], other[name], least)
        bound = max(floor, allowed.gradient_roundings * rounding)
        got = distance(found[name], expected[name], least)
        if norm_of(expected[name].double()) < cancelled:
            # Seen with low-rank additions of rank 1 in bf16: one process was 82 % from fp32, a
            # right layout 65 %, and 25 % from that process. For another tensor these were 4 %,
            # 32 % and 31 %: the rounding of one run does not tell that of the next.
            got = min(got, distance(found[name], one[name], least))
            bound = LIMIT
        yield Row(check, "gradient", got, min(bound, LIMIT), step, name)


def rows_of_updates(
    check: str,
    states: Sequence[Tensors],
    start: Mapping[str, Tensor],
    optimizer: OptimizerConfig,
    rates: Sequence[float],
    changed: Sequence[bool],
) -> Iterator[Row]:
    """Compare each update with AdamW's, in fp64, of the moments and weights that the run itself has
    written.

    ``start`` has the weights before the first step; those that are not in it (low-rank additions)
    are compared from the second step on. ``rates`` are the learning rates of the steps,
    ``changed`` says in which steps weights change: with fp16 not in all."""
    before = Tensors(start, {}, {}, {})
    updates = 0
    for step, (state, rate, changes) in enumerate(zip(states, rates, changed, strict=True), 1):
        updates += changes
        lacking = {
            *((name, "its weight") for name in before.master.keys() - state.master.keys()),
            *((name, "a moment") for name in state.exp_avg.keys() ^ state.exp_avg_sq.keys()),
        }
        for name, what in sorted(lacking):
            note = f"the checkpoint does not have {what}"
            yield Row(check, "update", math.inf, 0.0, step, name, note)
        for name in sorted(before.master.keys() & state.master.keys()):
            if (name, "a moment") in lacking:
                continue
            if name in state.exp_avg and changes:
                yield _second_moment(check, step, name, before, state, optimizer)
                yield _update(check, step, name, before, state, optimizer, rate, updates)
            else:
                old = before.master[name].to(state.master[name].dtype)
                same = torch.equal(old, state.master[name])
                note = "" if same else "it has changed in a step that must not change it"
                yield Row(check, "unchanged weight", float(not same), 0.0, step, name, note)
        before = state


def _second_moment(
    check: str, step: int, name: str, old: Tensors, new: Tensors, optimizer: OptimizerConfig
) -> Row:
    """Compare the second moment with what follows from the gradient, which follows from the first
    moment."""
    moment = new.exp_avg[name].double()
    square = new.exp_avg_sq[name].double()
    zero = torch.zeros_like(moment)
    old_moment = old.exp_avg.get(name, zero).double()
    old_square = old.exp_avg_sq.get(name, zero).double()
    beta1 = optimizer.adam_beta1
    beta2 = optimizer.adam_beta2
    gradient = (moment - beta1 * old_moment) / (1 - beta1)
    expected = beta2 * old_square + (1 - beta2) * gradient.square()
    # Both moments are rounded to fp32, and the difference of two first moments is divided by a
    # small number.
    unsure = EPS * (moment.abs() + beta1 * old_moment.abs()) / (1 - beta1)
    allowed = EPS * (square + beta2 * old_square) + TINY
    allowed += (1 - beta2) * unsure * (2 * gradient.abs() + unsure)
    rounding = UPDATE_ROUNDINGS * norm_of(allowed)
    return _of_rounding(check, "second moment", square, expected, rounding, step, name)


def _update(
    check: str,
    step: int,
    name: str,
    old: Tensors,
    new: Tensors,
    optimizer: OptimizerConfig,
    rate: float,
    updates: int,
) -> Row:
    weight = old.master[name].double()
    decay = optimizer.weight_decay if weight.dim() > 1 else 0.0
    first = new.exp_avg[name].double() / (1 - optimizer.adam_beta1**updates)
    second = new.exp_avg_sq[name].double() / (1 - optimizer.adam_beta2**updates)
    direction = first / (second.sqrt() + optimizer.adam_eps)
    expected = -rate * (direction + decay * weight)
    found = new.master[name].double() - weight
    allowed = EPS * (weight.abs() + rate * (direction.abs() + decay * weight.abs()))
    # Where the rate is 0 nothing may change.
    rounding = UPDATE_ROUNDINGS * norm_of(allowed) if rate else 0.0
    return _of_rounding(check, "update", found, expected, rounding, step, name)


def _of_rounding(
    check: str, what: str, found: Tensor, expected: Tensor, rounding: float, step: int, name: str
) -> Row:
    """Compare a tensor with what it has to be up to a difference of L2 norm ``rounding``.

    One that is itself hardly larger, such as an update at a rate of 1e-9, is compared with what
    rounding would make of it: so the bound is below 1, and the row says so."""
    whole = norm_of(expected)
    least = rounding / LIMIT
    note = "it is below the last bits of what it is computed from" if whole < least else ""
    bound = _ratio(rounding, max(whole, least))
    return Row(check, what, distance(found, expected, least), bound, step, name, note)


def rows_of_changes(
    check: str,
    start: Mapping[str, Tensor],
    found: Sequence[Tensors],
    single: Sequence[Tensors],
    exact: Sequence[Tensors],
) -> Iterator[Row]:
    """Compare what each step has changed of the weights with what one process has: for an update
    rule that is not AdamW."""
    before: Sequence[Mapping[str, Tensor]] = (start, start, start)
    for step, states in enumerate(zip(found, single, exact, strict=True), 1):
        masters = [state.master for state in states]
        for name in sorted(set.intersection(*map(set, (*masters, *before)))):
            here, there, true = (
                master[name].double() - old[name].double()
                for master, old in zip(masters, before, strict=True)
            )
            bound = max(CHANGE_BOUND, IN_FP32.gradient_roundings * distance(there, true))
            yield Row(check, "update", distance(here, there), min(bound, LIMIT), step, name)
        before = masters


def rows_of_rates(check: str, found: Sequence[float], expected: Sequence[float]) -> Iterator[Row]:
    """Compare the learning rates."""
    for step, (here, there) in enumerate(zip(found, expected, strict=True), 1):
        yield Row(check, "learning rate", relative(here, there), RATE_BOUND, step)
