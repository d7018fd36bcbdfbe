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

UPDATE_ROUNDINGS = 4.0
"""Moments and updates may be so many times as far from AdamW in fp64 as the last bits of the
numbers that they are computed from."""
EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny

Tensors = Mapping[str, Mapping[str, Tensor]]
"""By HuggingFace's name, then ``master``, ``exp_avg`` and ``exp_avg_sq``; a tensor that is not
trained has its master alone."""


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


@dataclass(frozen=True)
class History:
    """What a run has come to in its steps, in the order of the steps."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    """Before clipping."""
    gradients: tuple[Mapping[str, Tensor], ...]
    """Of every trained tensor, before clipping, fp64."""
    validation_losses: Mapping[int, float]
    """By step."""


Rounding = tuple[History, History]
"""Two runs that differ by rounding alone, which is measured by them."""
IN_FP32 = Allowed(loss=1e-6, norm=2e-5, gradient=2e-5, roundings=2.0, gradient_roundings=8.0)
"""Gradients of 3,000 tensors in fp32 were at most 1.8 times as far from one process as that is
from fp64."""


def gradients_of(
    states: Sequence[Tensors], optimizer: OptimizerConfig, grad_norms: Sequence[float]
) -> tuple[Mapping[str, Tensor], ...]:
    """The gradients of the steps that have left these states, one for each step, in fp64.

    They are those before clipping, as the norm says by which the run has clipped: a wrong norm is
    found by itself, and does not make every gradient wrong."""
    beta = optimizer.adam_beta1
    found = []
    before: Tensors = {}
    for state, norm in zip(states, grad_norms, strict=True):
        clipped_by = max(1.0, (norm + 1e-6) / optimizer.clip_grad) if optimizer.clip_grad else 1.0
        gradients = {}
        for name, tensors in state.items():
            if "exp_avg" in tensors:
                moment = tensors["exp_avg"].double()
                if name in before:
                    moment -= beta * before[name]["exp_avg"].double()
                gradients[name] = moment * (clipped_by / (1 - beta))
        found.append(gradients)
        before = state
    return tuple(found)


def relative(found: float, expected: float) -> float:
    """The deviation of one number from another, NaN if one of them is no number."""
    if found == expected:
        return 0.0
    return abs(found - expected) / abs(expected) if expected else math.inf


def distance(found: Tensor, expected: Tensor) -> float:
    """The L2 norm of the difference, divided by that of ``expected``."""
    return relative_norm(norm_of(found.double() - expected.double()), expected)


def norm_of(tensor: Tensor) -> float:
    """The L2 norm."""
    found: float = torch.linalg.vector_norm(tensor).item()
    return found


def relative_norm(difference: float, expected: Tensor) -> float:
    """A norm, divided by that of a tensor. 0 of 0 is 0."""
    if difference == 0.0:
        return 0.0
    whole = norm_of(expected.double())
    return difference / whole if whole else math.inf


def rows_of_histories(
    check: str, found: History, expected: History, rounded: Rounding, allowed: Allowed
) -> Iterator[Row]:
    """Compare a run with the one that it has to equal up to rounding."""
    one, other = rounded
    for what, floor, numbers in (
        ("loss", allowed.loss, [run.losses for run in (found, expected, one, other)]),
        ("gradient norm", allowed.norm, [run.grad_norms for run in (found, expected, one, other)]),
    ):
        for step, (here, there, left, right) in enumerate(zip(*numbers, strict=True), 1):
            bound = max(floor, allowed.roundings * relative(left, right))
            yield Row(check, what, relative(here, there), bound, step)
    for step in sorted(found.validation_losses):
        here, there, left, right = (
            run.validation_losses[step] for run in (found, expected, one, other)
        )
        bound = max(allowed.loss, allowed.roundings * relative(left, right))
        yield Row(check, "validation loss", relative(here, there), bound, step)
    steps = [run.gradients for run in (found, expected, one, other)]
    for step, gradients in enumerate(zip(*steps, strict=True), 1):
        yield from _gradients(check, step, gradients, allowed)


def _gradients(
    check: str, step: int, of: Sequence[Mapping[str, Tensor]], allowed: Allowed
) -> Iterator[Row]:
    found, expected, one, other = of
    for name in sorted(found.keys() | expected.keys()):
        if name not in found or name not in expected:
            note = "it is not trained" if name in expected else "it is trained, and must not be"
            yield Row(check, "gradient", math.inf, allowed.gradient, step, name, note)
            continue
        rounding = distance(one[name], other[name])
        bound = max(allowed.gradient, allowed.gradient_roundings * rounding)
        yield Row(check, "gradient", distance(found[name], expected[name]), bound, step, name)


def rows_of_updates(
    check: str,
    states: Sequence[Tensors],
    start: Mapping[str, Tensor],
    optimizer: OptimizerConfig,
    rates: Sequence[float],
    updates: Sequence[int],
) -> Iterator[Row]:
    """Compare each update with AdamW's, in fp64, of the moments and weights that the run itself has
    written.

    ``start`` has the weights before the first step; those that are not in it (low-rank additions)
    are compared from the second step on. ``rates`` are the learning rates of the steps,
    ``updates`` how many steps have changed weights by then: with fp16 some change nothing."""
    before: Tensors = {name: {"master": weight} for name, weight in start.items()}
    counted = 0
    for step, (state, rate, count) in enumerate(zip(states, rates, updates, strict=True), 1):
        for name in sorted(state.keys() & before.keys()):
            old, new = before[name], state[name]
            if "exp_avg" not in new or count == counted:
                same = all(torch.equal(old[kind].to(new[kind].dtype), new[kind]) for kind in old)
                note = "" if same else "it has changed in a step that must not change it"
                yield Row(check, "unchanged weight", float(not same), 0.0, step, name, note)
                continue
            yield _second_moment(check, step, name, old, new, optimizer)
            yield _update(check, step, name, old, new, optimizer, rate, count)
        before = state
        counted = count


def _second_moment(
    check: str,
    step: int,
    name: str,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    optimizer: OptimizerConfig,
) -> Row:
    """Compare the second moment with what follows from the gradient, which follows from the first
    moment."""
    moment, square = new["exp_avg"].double(), new["exp_avg_sq"].double()
    old_moment, old_square = (
        old[kind].double() if kind in old else torch.zeros_like(moment)
        for kind in ("exp_avg", "exp_avg_sq")
    )
    beta1, beta2 = optimizer.adam_beta1, optimizer.adam_beta2
    gradient = (moment - beta1 * old_moment) / (1 - beta1)
    expected = beta2 * old_square + (1 - beta2) * gradient.square()
    # Both moments are rounded to fp32, and the difference of two first moments is divided by a
    # small number.
    unsure = EPS * (moment.abs() + beta1 * old_moment.abs()) / (1 - beta1)
    allowed = EPS * (square + beta2 * old_square) + TINY
    allowed += (1 - beta2) * unsure * (2 * gradient.abs() + unsure)
    deviation = norm_of(square - expected)
    bound = relative_norm(UPDATE_ROUNDINGS * norm_of(allowed), expected)
    return Row(check, "second moment", relative_norm(deviation, expected), bound, step, name)


def _update(
    check: str,
    step: int,
    name: str,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    optimizer: OptimizerConfig,
    rate: float,
    count: int,
) -> Row:
    weight = old["master"].double()
    decay = optimizer.weight_decay if weight.dim() > 1 else 0.0
    first = new["exp_avg"].double() / (1 - optimizer.adam_beta1**count)
    second = new["exp_avg_sq"].double() / (1 - optimizer.adam_beta2**count)
    step_of_adam = first / (second.sqrt() + optimizer.adam_eps)
    expected = -rate * (step_of_adam + decay * weight)
    found = new["master"].double() - weight
    allowed = EPS * (weight.abs() + rate * (step_of_adam.abs() + decay * weight.abs()))
    bound = relative_norm(UPDATE_ROUNDINGS * norm_of(allowed), expected)
    deviation = relative_norm(norm_of(found - expected), expected)
    # Where nothing is to change there is nothing to be relative to.
    return Row(check, "update", deviation, bound if rate else 0.0, step, name)
