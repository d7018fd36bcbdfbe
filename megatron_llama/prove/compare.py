"""Compares a run with its twin: losses, gradient norms, and the gradient and the update of every
tensor, each with a bound that follows from rounding.

Gradients are computed from the moments in the checkpoints of two steps, so the comparison uses only
files of the run. Updates are compared with AdamW, written out in fp64, on the run's own moments and
weights. Updates of two runs cannot be compared with each other: Adam makes a full step for an
element whose gradient is all rounding. If the gradients equal those of one process, the moments
follow from the gradients, and the updates from the moments, then every update equals that of one
process up to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.prove.run import Tensors

UPDATE_ROUNDINGS = 4.0
"""Allowed distance of moments and updates from AdamW in fp64, in units of the last bits of the
numbers that they are computed from."""
CHANGE_BOUND = 1e-3
"""Bound of the difference of two updates. An element whose gradient is all rounding makes a full
step in either direction."""
LATER = 5.0
"""Factor on bounds after the first step. Weights then differ by rounding, too, and at large rates
gradients differ by more than one pair of runs shows. A wrong gradient is wrong in the first step,
or by more."""
RATE_BOUND = 1e-12
"""Bound of learning rates, which are computed in fp64."""
EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny
LIMIT = 0.45
"""Upper limit of all bounds, whatever rounding was measured. A missing gradient or update deviates
by 1, one of twice or half the right size by at least 0.5."""


@dataclass(frozen=True)
class Row:
    """One comparison."""

    check: str
    what: str
    """``loss``, ``gradient norm``, ``gradient``, ``update``, ..., or ``the run``, which ended with
    an error."""
    got: float
    """Relative deviation; 0 or 1 if the values have to be equal to the bit."""
    bound: float
    step: int | None = None
    """Step from 1; None for a comparison that belongs to no step."""
    tensor: str | None = None
    """HuggingFace's name of the tensor."""
    note: str = ""
    """Explanation in one sentence."""

    @property
    def holds(self) -> bool:
        """Whether the deviation is within its bound. False for NaN."""
        return self.got <= self.bound


@dataclass(frozen=True)
class Allowed:
    """Relative deviations within which a run counts as equal."""

    loss: float
    """Allowed deviation of the loss, whatever rounding was measured."""
    norm: float
    gradient: float
    """Allowed L2 norm of the difference of one tensor's gradient."""
    roundings: float
    """Factor: losses and norms may deviate by this many times the measured rounding, too."""
    gradient_roundings: float
    """The same factor for gradients of single tensors, some of which have only a few elements."""
    limit: float
    """Upper limit of the deviation of losses, norms and the gradient of all tensors together,
    whatever rounding was measured."""
    last_bit: float
    """Share of the gradient of all tensors together below which a gradient may be all rounding. The
    gradient of a tensor counts as at least this large in its relative deviation."""
    cancelled: float = 0.0
    """Share of the gradient of all tensors together below which a gradient is a sum whose terms may
    cancel and leave little but rounding. Such a tensor's gradient may only not be missing, nor have
    half or twice its size, by fp32 or by one process in the same precision."""
    single: float = LIMIT
    """Upper limit of the deviation of a single tensor's gradient."""
    size: float | None = None
    """Upper limit of the deviation of a gradient along that of fp32, if it is compared too. Half of
    the bound of its whole deviation is allowed."""
    later: float = LATER
    """Factor on ``gradient`` after the first step."""


@dataclass(frozen=True)
class History:
    """The numbers of a run's steps, in the order of steps."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    """Norms before clipping."""
    gradients: tuple[Mapping[str, Tensor], ...]
    """Gradients of every trained tensor before clipping, fp64."""
    validation_losses: Mapping[int, float] | None
    """Losses by step; None for a training without evaluations."""


Rounding = tuple[History, History]
"""Two runs that differ only by rounding, and so measure it."""
IN_FP32 = Allowed(
    loss=1e-6,
    norm=2e-5,
    gradient=2e-5,
    roundings=2.0,
    gradient_roundings=8.0,
    limit=0.01,
    last_bit=16 * EPS,
)
"""The gradients of 3,000 tensors in fp32 were at most 1.8 times as far from one process as one
process is from fp64."""


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
IN_FP8 = Allowed(
    loss=16e-3,
    norm=5e-2,
    gradient=1e-1,
    roundings=2.0,
    gradient_roundings=2.0,
    limit=0.4,
    last_bit=2.0**-12,
    cancelled=2.0**-9,
)
"""From one process in FP8. Codes have four bits less than bf16, and where an input differs in its
last bit, one code in 32 is another one."""
IN_TENSORWISE = replace(IN_FP8, loss=8e-3, gradient_roundings=2.5, single=0.6, size=0.25, later=1.0)
"""From one process in FP8 with one scale a tensor, in the same microbatches. Sums over tp and cp
may change the last bit of a largest magnitude, hence the scale, hence the rounding of every number:
the roundings of two right runs may have nothing in common.

The 2 bits of a code in e5m2 are wrong by up to 1/8, and by 0.053 in the mean square; the 3 bits of
e4m3 by half as much. Together a product adds 0.06. Eight products, those of two blocks, come to
0.17, where the median of small models was 0.12 from fp32. Two runs without common roundings differ
by 1.41 times as much. So did 6,650 gradients in 53 drawn layouts: by 0.7 times in the median, by
1.25 in 99 % of them, by 1.76 at most; 2.5 are allowed.

A norm of 16 numbers may be 0.45 from one process, and right. By that distance it cannot be told
from one of half the size. But along the gradient of fp32 none was more than 0.16 from one process,
and none more than 0.94 times the rounding of one, where half of the other bound is allowed: errors
of rounding go into all directions, and a missing term or a wrong scale goes into this one."""
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
"""Floors are needed because one number may by chance be near that of fp32, and because one process
cannot measure the rounding of gradients that travel in bf16. Gradients of single tensors were at
most 1.5 times as far from fp32 as those of one process in the same precision."""


def gradients_of(
    states: Sequence[Tensors], optimizer: OptimizerConfig, grad_norms: Sequence[float]
) -> tuple[Mapping[str, Tensor], ...]:
    """Return the gradients of the steps that have left these states, for each step, in fp64.

    They are the gradients before clipping, computed with the norm by which the run has clipped. A
    wrong norm is found by itself, and does not make every gradient wrong."""
    beta = optimizer.adam_beta1
    of_steps = []
    before: Mapping[str, Tensor] = {}
    for state, norm in zip(states, grad_norms, strict=True):
        clipped_by = max(1.0, (norm + 1e-6) / optimizer.clip_grad) if optimizer.clip_grad else 1.0
        gradients = {}
        for name, moment in state.exp_avg.items():
            gradient = moment.double()
            if name in before:
                gradient = gradient - beta * before[name].double()
            gradients[name] = gradient * (clipped_by / (1 - beta))
        of_steps.append(gradients)
        before = state.exp_avg
    return tuple(of_steps)


def relative(found: float, expected: float) -> float:
    """Return the relative deviation of ``found``; NaN if one of the numbers is NaN."""
    if found == expected:
        return 0.0
    return abs(found - expected) / abs(expected) if expected else math.inf


def distance(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the L2 norm of the difference, divided by that of ``expected`` but at least by
    ``least``."""
    difference = norm_of(found.double() - expected.double())
    return _ratio(difference, max(norm_of(expected.double()), least))


def _along(difference: Tensor, exact: Tensor, least: float) -> float:
    """Return the part of a difference along ``exact``, relative to its length but at least to
    ``least``."""
    part = abs(float((difference.double() * exact.double()).sum()))
    return _ratio(part, max(norm_of(exact.double()), least) ** 2)


def _ratio(difference: float, whole: float) -> float:
    """Return a quotient of norms; 0 / 0 is 0."""
    if difference == 0.0:
        return 0.0
    return difference / whole if whole else math.inf


def norm_of(tensor: Tensor) -> float:
    """Return the L2 norm of a tensor."""
    norm: float = torch.linalg.vector_norm(tensor).item()
    return norm


def rows_of_histories(
    check: str, found: History, expected: History, rounded: Rounding, allowed: Allowed
) -> Iterator[Row]:
    """Yield the comparison of a run with the run that it has to equal up to rounding."""
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
    found, expected, single, exact = of_runs
    bound = max(floor, allowed.roundings * relative(single, exact))
    return Row(check, what, relative(found, expected), min(bound, allowed.limit), step)


def _evaluation(check: str, of_runs: Sequence[float], allowed: Allowed, step: int) -> Row:
    """Return the comparison of a validation loss, which is NaN for a run without one."""
    what = "validation loss"
    missing = [math.isnan(loss) for loss in of_runs]
    if missing[0] != missing[1]:
        note = "it is not there" if missing[0] else "it must not be there"
        return Row(check, what, math.inf, allowed.loss, step, note=note)
    return _number(check, what, allowed.loss, of_runs, allowed, step)


def _gradients(
    check: str, step: int, of_runs: Sequence[Mapping[str, Tensor]], allowed: Allowed
) -> Iterator[Row]:
    found, expected, single, exact = of_runs
    names = sorted(found.keys() & expected.keys())
    wholes = [torch.cat([run[name].flatten() for name in names]) for run in of_runs]
    floor = allowed.gradient if step == 1 else allowed.later * allowed.gradient
    rounding = distance(wholes[2], wholes[3])
    bound = max(floor, allowed.gradient_roundings * rounding)
    got = distance(wholes[0], wholes[1])
    yield Row(check, "whole gradient", got, min(bound, allowed.limit), step)
    # A tensor whose gradient is below the last bit of the whole gradient may have only rounding.
    least = allowed.last_bit * norm_of(wholes[1])
    cancelled = allowed.cancelled * norm_of(wholes[1])
    for name in sorted(found.keys() | expected.keys()):
        if name not in names:
            note = "it is not trained" if name in expected else "it is trained, and must not be"
            yield Row(check, "gradient", math.inf, allowed.gradient, step, name, note)
            continue
        rounding = distance(single[name], exact[name], least)
        bound = max(floor, allowed.gradient_roundings * rounding)
        got = distance(found[name], expected[name], least)
        if norm_of(expected[name].double()) < cancelled:
            # The rounding of one run does not predict that of the next: with low-rank additions of
            # rank 1 in bf16, one process was 82 % from fp32, and a right layout 65 %, and 25 % from
            # that process. For another tensor these were 4 %, 32 % and 31 %.
            got = min(got, distance(found[name], single[name], least))
            bound = allowed.single
        yield Row(check, "gradient", got, min(bound, allowed.single), step, name)
        if allowed.size is not None:
            got = _along(found[name] - expected[name], exact[name], least)
            yield Row(check, "gradient's size", got, min(bound / 2, allowed.size), step, name)


def rows_of_updates(
    check: str,
    states: Sequence[Tensors],
    start: Mapping[str, Tensor],
    optimizer: OptimizerConfig,
    rates: Sequence[float],
    changed: Sequence[bool],
) -> Iterator[Row]:
    """Yield the comparison of each update with AdamW's, computed in fp64 from the moments and
    weights that the run itself has written.

    ``start`` has the weights before the first step; weights that are not in it (low-rank additions)
    are compared from the second step on. ``rates`` are the learning rates of the steps. ``changed``
    says in which steps weights change: with fp16 not in all."""
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
    """Return the comparison of the second moment with the moment that follows from the gradient.
    The gradient follows from the first moment."""
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
    change = new.master[name].double() - weight
    allowed = EPS * (weight.abs() + rate * (direction.abs() + decay * weight.abs()))
    # At a rate of 0 nothing may change.
    rounding = UPDATE_ROUNDINGS * norm_of(allowed) if rate else 0.0
    return _of_rounding(check, "update", change, expected, rounding, step, name)


def _of_rounding(
    check: str, what: str, found: Tensor, expected: Tensor, rounding: float, step: int, name: str
) -> Row:
    """Return the row of a tensor and ``expected`` up to a difference of L2 norm ``rounding``.

    The deviation of a tensor that is hardly larger than that, such as an update at a rate of 1e-9,
    is relative to ``rounding / LIMIT``. Its bound stays below 1, and the row has a note."""
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
    """Yield the comparison of each step's changes of weights with those of one process, for an
    update rule that is not AdamW."""
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
    """Yield the comparison of learning rates."""
    for step, (here, there) in enumerate(zip(found, expected, strict=True), 1):
        yield Row(check, "learning rate", relative(here, there), RATE_BOUND, step)
