"""Compares two runs of the same steps: do their curves differ by rounding, or do the runs train
different things?

A bound on the difference cannot decide. Two right runs begin with rounding differences, and
training amplifies them: the losses of one model in two layouts may differ by 1e-8 in step 1 and by
1e-2 after ten thousand steps. The growth of the difference decides. Rounding grows in proportion to
its size, and a few steps add little to it. A fault adds a difference of its own size at the step in
which it acts: from then on, or in this step alone, the curves are further apart by a factor.

**The statistic.** Let d(t) be the relative difference of a step, of losses or of gradient norms.
The size of 1, 4 or 16 steps in a row is the median of their |d|, less what the printed digits hide.
The level before them is the largest size of as many steps anywhere before, but at least the size
with which right runs begin in their dtype (``FLOORS``). The rise is the size divided by the level.
The median is taken because gradient norms of some steps are fifty times as sensitive as of others.
``TAILS`` has the distribution of the largest rise in pairs of right runs, as measured by
``python tools/drift_rates.py``: in its upper quarter the logarithm has an exponential tail. A rise
is called a drift if its probability, times six for two quantities and three lengths, is below
``ALARM``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from megatron_llama.errors import DataError, counted
from megatron_llama.prove.logs import LoggedStep, Number, RunLog, read_log

Dtype = Literal["fp32", "tf32", "fp16", "bf16"]
Quantity = Literal["loss", "gradient norm"]
Verdict = Literal["rounding", "drift", "cannot say"]

FLOORS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "fp32": MappingProxyType({"loss": 3e-8, "gradient norm": 5e-7}),
        "tf32": MappingProxyType({"loss": 4e-6, "gradient norm": 1.3e-4}),
        "fp16": MappingProxyType({"loss": 4e-6, "gradient norm": 1.3e-4}),
        "bf16": MappingProxyType({"loss": 3e-5, "gradient norm": 1e-3}),
    }
)
"""Relative difference with which two right runs begin, by the type of their matrix products. tf32
has the mantissa of fp16."""


@dataclass(frozen=True)
class Tail:
    """Distribution of the largest rise of a pair of right runs: a quarter of the pairs has more
    than ``upper``, and beyond it the logarithm falls off with ``scale``."""

    upper: float
    scale: float

    def probability(self, rise: float) -> float:
        """Return the share of pairs of right runs with such a rise or a larger one; 1 for a rise up
        to ``upper``."""
        if rise <= self.upper:
            return 1.0
        return 0.25 * math.exp(-math.log(rise / self.upper) / self.scale)

    def rise(self, probability: float) -> float:
        """Return the rise that pairs of right runs have with ``probability``, at most 0.25."""
        return self.upper * math.exp(self.scale * math.log(0.25 / probability))


LENGTHS = (1, 4, 16)
"""Numbers of steps in a row that are taken together."""
TAILS: Mapping[Quantity, tuple[Tail, ...]] = MappingProxyType(
    {
        "loss": (Tail(4.5, 0.43), Tail(3.2, 0.36), Tail(4.0, 0.42)),
        "gradient norm": (Tail(7.0, 0.37), Tail(4.0, 0.60), Tail(2.8, 0.45)),
    }
)
"""Tails for each of ``LENGTHS``."""
_MEASURED_STEPS = 160
"""Steps of each measured pair. A longer run has proportionally more chances of a large rise."""
ALARM = 0.01
"""Share of pairs of right runs in which a drift may be reported wrongly."""
_TESTS = 2 * len(LENGTHS)
_BEGIN = 10
"""Curves whose first common step is later have grown apart already. As many of their steps show how
far."""
_FEWEST = 3
_COARSE = 1e-3
"""Relative size. Digits that hide more than this of a loss hide most faults."""
_SHOWN = 3
_RAREST = 1e-6


@dataclass(frozen=True)
class Difference:
    """The difference of two curves in one step."""

    iteration: int
    loss: float | None
    """Relative difference, second run less first. None if one has no finite loss."""
    loss_hidden: float
    """Relative difference that the digits of the logs can hide or feign."""
    grad_norm: float | None
    norm_hidden: float
    only_one: str = ""
    """The run without a finite loss in this step, if the other has one."""
    only_one_norm: str = ""
    """The run without a finite gradient norm in this step, if the other has one."""
    skipped: str = ""
    """The run that has skipped more steps since the last line."""


@dataclass(frozen=True)
class Rise:
    """A row of steps in which the curves are further apart than before."""

    quantity: Quantity
    iteration: int
    """First step of the row that is as far apart as the row."""
    steps: int
    """Length of the row: 1, 4 or 16. A longer row has a less sharp beginning."""
    size: float
    """Median of the row. Infinite if one run has no finite number."""
    before: float
    """Level before the row."""
    probability: float
    """Share of pairs of right runs with such a rise in any quantity."""

    @property
    def factor(self) -> float:
        """Distance of the curves relative to the largest distance before."""
        return self.size / self.before


@dataclass(frozen=True)
class Drift:
    """The result of comparing two curves."""

    verdict: Verdict
    rises: tuple[Rise, ...]
    """Drifts, earliest first; empty without a drift."""
    why: str
    """Explanation in one or two sentences."""
    differences: tuple[Difference, ...]
    seen_from: Mapping[str, float]
    """Smallest relative difference in the first common step that would count as a drift, by
    quantity."""
    dtype: Dtype
    notes: tuple[str, ...]


def compare(one: RunLog, other: RunLog, *, dtype: Dtype) -> Drift:
    """Return the comparison of two runs of the same steps. ``dtype`` is the type of their matrix
    products, or the coarser of two types. Raises DataError if they have no step in common."""
    notes = [f"{run.path}: {note}" for run in (one, other) for note in run.notes]
    steps = differences(one, other, notes)
    return judge(steps, dtype=dtype, notes=notes)


def compare_logs(one: Path, other: Path, *, dtype: Dtype) -> Drift:
    """Return the comparison of two logs, as ``read_log`` and ``compare`` do. Raises DataError, also
    if both are the same file."""
    runs = (read_log(one), read_log(other))
    if one.samefile(other):
        do = "name the log of the other run"
        raise DataError(other, got="the same log twice", expected="the logs of two runs", do=do)
    return compare(*runs, dtype=dtype)


def differences(one: RunLog, other: RunLog, notes: list[str]) -> tuple[Difference, ...]:
    """Return the differences in the steps that both logs have, first to last. If one log has the
    mean of an interval, the losses of the other are averaged. ``notes`` gets the problems."""
    common = sorted(one.steps.keys() & other.steps.keys())
    if not common:
        ranges = (f"iterations {min(run.steps)} to {max(run.steps)}" for run in (one, other))
        raise DataError(
            f"{one.path} and {other.path}",
            got=" and ".join(ranges),
            expected="logs that have iterations in common",
            do="start both from the same iteration, and log the same ones",
        )
    names = [str(run.path) for run in (one, other)]
    for run, name in zip((one, other), names, strict=True):
        others = other if run is one else one
        lost = [i for i in others.steps if common[0] < i < common[-1] and i not in run.steps]
        # If most are missing, the log has a line only every few steps.
        if 0 < len(lost) < len(common) / 2:
            some = ", ".join(map(str, lost[:5])) + (" ..." if len(lost) > 5 else "")
            notes.append(f"{name} has no line for {counted(len(lost), 'iteration')}: {some}")
    left_out = 0
    # One log alone may have lines before the first common line.
    befores = {max((i for i in run.steps if i < common[0]), default=0) for run in (one, other)}
    before = befores.pop() if len(befores) == 1 else common[0]
    compared: list[Difference] = []
    for iteration in common:
        losses = _comparable(one.steps, other.steps, iteration)
        left_out += losses is None
        loss, loss_hidden, without = _relative(*(losses or (None, None)))
        steps = (one.steps[iteration], other.steps[iteration])
        norm, norm_hidden, without_norm = _relative(*(step.grad_norm for step in steps))
        skipped = [_skipped(run.steps, before, iteration) for run in (one, other)]
        before = iteration
        compared.append(
            Difference(
                iteration,
                loss,
                loss_hidden,
                norm,
                norm_hidden,
                "" if without is None else names[without],
                "" if without_norm is None else names[without_norm],
                "" if skipped[0] == skipped[1] else names[skipped[0] < skipped[1]],
            )
        )
    if left_out:
        notes.append(
            f"the losses of {counted(left_out, 'iteration')} are left out: means over different "
            "or unknown steps"
        )
    return tuple(compared)


def _skipped(run: Mapping[int, LoggedStep], before: int, iteration: int) -> int:
    """Return the number of steps that a run has skipped between two lines that both logs have."""
    return sum(step.skipped for i, step in run.items() if before < i <= iteration)


def _comparable(
    one: Mapping[int, LoggedStep], other: Mapping[int, LoggedStep], iteration: int
) -> tuple[Number | None, Number | None] | None:
    """Return the losses of both runs at an iteration, as means over the same steps; None if that is
    not possible."""
    lengths = (one[iteration].mean_of, other[iteration].mean_of)
    if lengths == (0, 0):
        # The logs do not say over which steps the means are, but equal lines have equal steps.
        before = [max((i for i in run if i < iteration), default=0) for run in (one, other)]
        if before[0] != before[1]:
            return None
    if lengths[0] == lengths[1]:
        return one[iteration].loss, other[iteration].loss
    length = max(lengths)
    means = [_mean(run, iteration, length) for run in (one, other)]
    if any(mean is None for mean in means):
        return None
    return means[0], means[1]


def _mean(run: Mapping[int, LoggedStep], iteration: int, length: int) -> Number | None:
    """Return the mean loss of ``length`` steps up to ``iteration``; None if the log lacks one."""
    if run[iteration].mean_of == length:
        return run[iteration].loss
    parts = [run.get(step) for step in range(iteration - length + 1, iteration + 1)]
    losses = [step.loss for step in parts if step is not None and step.mean_of == 1 and step.loss]
    if len(losses) < length:
        return None
    return Number(
        statistics.fmean(loss.value for loss in losses),
        statistics.fmean(loss.rounding for loss in losses),
    )


def _relative(one: Number | None, other: Number | None) -> tuple[float | None, float, int | None]:
    """Return the relative difference, the part that digits can hide, and the index of the number
    that alone is not finite. Numbers that a log does not have are not compared."""
    if one is None or other is None:
        return None, 0.0, None
    finite = [math.isfinite(number.value) for number in (one, other)]
    if not all(finite):
        return None, 0.0, finite.index(False) if any(finite) else None
    scale = max(abs(one.value), abs(other.value))
    if scale == 0.0:
        return 0.0, 0.0, None
    return (other.value - one.value) / scale, (one.rounding + other.rounding) / scale, None


@dataclass(frozen=True)
class _Point:
    iteration: int
    difference: float
    hidden: float

    @property
    def at_most(self) -> float:
        """Largest possible distance of the runs."""
        return max(abs(self.difference), self.hidden)

    @property
    def at_least(self) -> float:
        """Least possible distance of the runs, whatever the digits hide."""
        return max(abs(self.difference) - self.hidden, 0.0)


def _curve(quantity: Quantity, steps: Sequence[Difference]) -> list[_Point]:
    """Return the steps for which both logs have the quantity."""
    if quantity == "loss":
        return [_Point(d.iteration, d.loss, d.loss_hidden) for d in steps if d.loss is not None]
    return [
        _Point(d.iteration, d.grad_norm, d.norm_hidden) for d in steps if d.grad_norm is not None
    ]


def judge(found: Sequence[Difference], *, dtype: Dtype, notes: Sequence[str] = ()) -> Drift:
    """Return the verdict on the differences of steps, in their order. After a step that only one
    run has skipped the runs train different steps, which are not judged."""
    alike = list(takewhile(lambda difference: not difference.skipped, found))
    parted = found[len(alike)] if len(alike) < len(found) else None
    rises: list[Rise] = []
    seen_from: dict[str, float] = {}
    for quantity, tails in TAILS.items():
        floor = FLOORS[dtype][quantity]
        rises += [
            Rise(quantity, difference.iteration, 1, math.inf, floor, 0.0)
            for difference in alike
            if (difference.only_one if quantity == "loss" else difference.only_one_norm)
        ][:1]
        curve = _curve(quantity, alike)
        rises += _rises(quantity, curve, floor)
        if curve:
            hidden = curve[0].hidden
            seen_from[quantity] = tails[0].rise(ALARM / _TESTS) * max(floor, hidden) + hidden
    if parted is not None and parted.only_one:
        floor = FLOORS[dtype]["loss"]
        rises.append(Rise("loss", parted.iteration, 1, math.inf, floor, 0.0))
    rises.sort(key=lambda rise: (rise.iteration, rise.quantity != "loss"))
    verdict, why = _verdict(alike, parted, rises, dtype)
    return Drift(verdict, tuple(rises), why, tuple(found), seen_from, dtype, tuple(notes))


def _rises(quantity: Quantity, curve: Sequence[_Point], floor: float) -> list[Rise]:
    """Return the rises of a curve that right runs do not have, those of single steps first. After a
    rise the level is higher, so each rise is a new one."""
    # Curves that begin late have grown apart by an unknown amount, which their first steps show.
    begin = _BEGIN if curve and curve[0].iteration > _BEGIN else 0
    tests = _TESTS * max(1.0, len(curve) / _MEASURED_STEPS)
    rises: list[Rise] = []
    for steps, tail in zip(LENGTHS, TAILS[quantity], strict=True):
        level = floor
        passed = begin
        for place in range(len(curve) - steps + 1):
            level = max(level, _size_at_most(curve[max(0, place - steps) : place]))
            if place < passed:
                continue
            row = curve[place : place + steps]
            size = _size_at_least(row)
            if tests * tail.probability(size / level) >= ALARM:
                continue
            passed = place + steps
            if any(row[0].iteration <= rise.iteration <= row[-1].iteration for rise in rises):
                continue  # a shorter row has it, and locates the step more sharply
            # A step that proves nothing alone is the beginning if the next few prove the rise. In a
            # long row such a step is more likely to come by chance, before the rise.
            alone = TAILS[quantity][0].upper * level if steps < LENGTHS[-1] else size
            begins = min(size, alone)
            first = next(point.iteration for point in row if point.at_least >= begins)
            # The first row that is too far apart has only some of the steps of the rise.
            starts = range(place, min(place + steps, len(curve) - steps) + 1)
            most = max(_size_at_least(curve[start : start + steps]) for start in starts)
            probability = min(1.0, tests * tail.probability(most / level))
            rises.append(Rise(quantity, first, steps, most, level, probability))
    return rises


def _size_at_most(row: Sequence[_Point]) -> float:
    return statistics.median(point.at_most for point in row) if row else 0.0


def _size_at_least(row: Sequence[_Point]) -> float:
    return statistics.median(point.at_least for point in row)


def largest_rises(quantity: Quantity, found: Sequence[Difference], floor: float) -> list[float]:
    """Return the largest rise of a curve for each of ``LENGTHS``, whose distribution is ``TAILS``.
    0 if the curve is too short."""
    curve = _curve(quantity, found)
    largest: list[float] = []
    for steps in LENGTHS:
        level = floor
        rise = 0.0
        for place in range(len(curve) - steps + 1):
            level = max(level, _size_at_most(curve[max(0, place - steps) : place]))
            rise = max(rise, _size_at_least(curve[place : place + steps]) / level)
        largest.append(rise)
    return largest


def _verdict(
    steps: Sequence[Difference], parted: Difference | None, rises: Sequence[Rise], dtype: Dtype
) -> tuple[Verdict, str]:
    """Return verdict and reason. Only one run has skipped ``parted``, the step after ``steps``."""
    losses = _curve("loss", steps)
    if rises:
        return "drift", _drift([*steps, *([parted] if parted else [])], losses, rises)
    if parted is not None:
        return "cannot say", (
            f"{parted.skipped} has skipped a step at iteration {parted.iteration} that the other "
            "run has not: from there on they train different steps. Up to there they do not drift; "
            "with --fp16 right runs, too, may overflow in different steps"
        )
    if len(losses) < _FEWEST:
        return "cannot say", (
            f"{counted(len(losses), 'step')} can be compared; it takes {_FEWEST} at least"
        )
    hidden = statistics.median(point.hidden for point in losses)
    if hidden > _COARSE:
        return "cannot say", (
            f"the digits of the logs hide differences up to {hidden:.0e}, and most faults with "
            "them: compare log.jsonl or TensorBoard's events"
        )
    largest = max(losses, key=lambda point: point.at_most)
    first = losses[0]
    if all(not step.loss and not step.grad_norm for step in steps):
        return "rounding", "every loss and every gradient norm is the same in both, in all digits"
    apart = f"the losses are at most {largest.at_most:.0e} apart (step {largest.iteration})"
    if first.iteration > _BEGIN:
        begun = max(point.at_most for point in losses[:_BEGIN])
        if begun > TAILS["loss"][0].rise(ALARM / _TESTS) * FLOORS[dtype]["loss"]:
            return "cannot say", (
                f"the first common step is {first.iteration}, where the curves are {begun:.0e} "
                "apart already: rounding may have grown to it, and a fault may have made it. "
                f"They do not drift from there on. Compare from step 1"
            )
        return "rounding", f"{apart}, which is no more than right runs have in their first steps"
    return "rounding", (f"{apart}, and nowhere do they part faster than rounding grows")


def _drift(steps: Sequence[Difference], losses: Sequence[_Point], rises: Sequence[Rise]) -> str:
    """Return words on the step at which the drift begins, and on what acts there."""
    first = rises[0]
    at = first.iteration
    if math.isinf(first.size):
        step = next(difference for difference in steps if difference.iteration == at)
        only = step.only_one if first.quantity == "loss" else step.only_one_norm
        return f"{only} has no finite {first.quantity} in step {at}, where the other run has one"
    alike = [point.iteration for point in losses if point.iteration < at]
    if first.steps == LENGTHS[-1]:
        # The beginning of a long row does not show which part of a step differs first.
        return (
            f"from about step {at} on the curves part faster than rounding grows; the update, the "
            "gradients or the data differ there, if not by much"
        )
    if first.quantity == "gradient norm":
        return (
            "the losses of this step agree, its gradients do not: the backward pass, the reduction "
            "of gradients, or the norm itself"
        )
    if at == 1:
        return "from the first step on: the weights at the start, the data, or the forward pass"
    if not alike:
        return f"{at} is the first step that both logs have, so what differs may have begun before"
    return (
        f"up to step {alike[-1]} the losses agree: the update behind it differs, or the data or "
        "the forward pass of this step"
    )


def lines(drift: Drift) -> Iterator[str]:
    """Yield lines for a terminal: the verdict, the steps, the certainty, and notes."""
    first = drift.rises[0] if drift.rises else None
    title = drift.verdict if first is None else f"drift from step {first.iteration}"
    steps = [difference.iteration for difference in drift.differences]
    compared = (
        f"{counted(len(steps), 'step')} compared, {steps[0]} to {steps[-1]}"
        if steps
        else ("no step compared")
    )
    yield f"{title}: {drift.why} ({compared}, {drift.dtype})"
    for rise in drift.rises[:_SHOWN]:
        row = f"for {rise.steps} steps in a row " if rise.steps > 1 else ""
        yield (
            f"  step {rise.iteration}: {rise.quantity} {rise.size:.1e} apart {row}"
            f"({rise.before:.1e} at most before, {rise.factor:.0f} times); "
            f"{_rarity(rise.probability)}"
        )
    if len(drift.rises) > _SHOWN:
        yield f"  and {counted(len(drift.rises) - _SHOWN, 'later rise')}"
    if drift.seen_from:
        seen = ", ".join(f"{quantity} {size:.0e}" for quantity, size in drift.seen_from.items())
        yield f"  in the first of these steps a drift is seen from: {seen}"
    yield from (f"  {note}" for note in drift.notes)


def _rarity(probability: float) -> str:
    """Return the frequency in pairs of right runs; the tail is not trusted beyond a million."""
    if probability < _RAREST:
        return f"fewer than 1 in {1 / _RAREST:,.0f} pairs of right runs has this"
    return f"1 in {1 / probability:,.0f} pairs of right runs has this"


def as_json(drift: Drift) -> dict[str, Any]:
    """Return the comparison for programs: ``verdict``, ``why``, ``dtype``, ``from_step`` (or null),
    ``rises`` (``quantity``, ``iteration``, ``steps``, ``size``, ``before``, ``factor``,
    ``probability``; null where infinite), ``seen_from`` by quantity, ``compared`` (``iteration``,
    ``loss``, ``loss_hidden``, ``grad_norm``, ``norm_hidden``) and ``notes``."""
    return {
        "version": 1,
        "verdict": drift.verdict,
        "why": drift.why,
        "dtype": drift.dtype,
        "from_step": drift.rises[0].iteration if drift.rises else None,
        "rises": [
            {
                "quantity": rise.quantity,
                "iteration": rise.iteration,
                "steps": rise.steps,
                "size": rise.size if math.isfinite(rise.size) else None,
                "before": rise.before,
                "factor": rise.factor if math.isfinite(rise.factor) else None,
                "probability": rise.probability,
            }
            for rise in drift.rises
        ],
        "seen_from": dict(drift.seen_from),
        "compared": [
            {
                "iteration": difference.iteration,
                "loss": difference.loss,
                "loss_hidden": difference.loss_hidden,
                "grad_norm": difference.grad_norm,
                "norm_hidden": difference.norm_hidden,
            }
            for difference in drift.differences
        ],
        "notes": list(drift.notes),
    }
