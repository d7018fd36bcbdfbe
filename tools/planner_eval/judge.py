"""How good predictions are: errors of step times, of rankings, of what fits, of bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megatron_llama.planner.published import Run

CLOSE = 0.1
FEWEST = 10
"""Layouts that make a sweep."""
Figures = dict[str, float]


@dataclass(frozen=True)
class Guess:
    """A run with its measured and its predicted seconds."""

    run: Run
    predicted: float

    @property
    def measured(self) -> float:
        """Seconds."""
        assert self.run.seconds is not None
        return self.run.seconds

    @property
    def error(self) -> float:
        """Logarithm of predicted over measured."""
        return math.log(self.predicted / self.measured)


def by_source(guesses: Iterable[Guess]) -> dict[str, list[Guess]]:
    """The guesses of each source."""
    groups: dict[str, list[Guess]] = defaultdict(list)
    for guess in guesses:
        groups[guess.run.source].append(guess)
    return groups


def calibrated(guesses: Iterable[Guess]) -> list[tuple[float, float]]:
    """When one row of each source scales the others: for every row the mean relative error and the
    share within 10 %, over all rows that could have been the one."""
    found = []
    for group in by_source(guesses).values():
        errors = [guess.error for guess in group]
        for index, error in enumerate(errors):
            others = [
                abs(math.expm1(error - other))
                for place, other in enumerate(errors)
                if place != index
            ]
            if others:
                found.append(
                    (
                        sum(others) / len(others),
                        sum(other <= CLOSE for other in others) / len(others),
                    )
                )
    return found


def step_figures(guesses: Sequence[Guess]) -> Figures:
    """Errors of step times, in percent, without any row of a source and with one."""
    plain = [abs(math.expm1(guess.error)) for guess in guesses]
    none = [(error, float(error <= CLOSE)) for error in plain]
    figures = {"step_rows": float(len(guesses)), "step_sources": float(len(by_source(guesses)))}
    for name, found in (("none", none), ("one_row", calibrated(guesses))):
        if found:
            figures[f"step_mape_{name}_percent"] = (
                100 * sum(error for error, _ in found) / len(found)
            )
            figures[f"step_within_10_{name}_percent"] = (
                100 * sum(share for _, share in found) / len(found)
            )
    return figures


def sweeps(guesses: Iterable[Guess]) -> list[list[Guess]]:
    """Runs of one source that differ in their layout alone, where there are at least ten."""
    groups: dict[tuple[str, ...], list[Guess]] = defaultdict(list)
    for guess in guesses:
        cells = guess.run.cells
        groups[
            guess.run.source,
            *(cells.get(name, "") for name in ("model", "gpu", "n_gpus", "seq", "gbs")),
        ].append(guess)
    return [
        group
        for group in groups.values()
        if len(group) >= FEWEST and len({guess.run.job.layout for guess in group}) > 2
    ]


def sweep_figures(guesses: Iterable[Guess]) -> Figures:
    """Of sweeps over LLaMA models, which this trainer could run, and of those over other models."""
    found = sweeps(guesses)
    own = [group for group in found if group[0].run.job.traits.gated]
    others = [group for group in found if not group[0].run.job.traits.gated]
    return {**_ranking("sweep", own), **_ranking("sweep_other_models", others)}


def _ranking(name: str, found: Sequence[Sequence[Guess]]) -> Figures:
    """Rank correlation within sweeps, and how much slower the layout predicted to be fastest is
    than the fastest."""
    if not found:
        return {}
    ranks = [
        spearman([guess.predicted for guess in group], [guess.measured for guess in group])
        for group in found
    ]
    regrets = [
        min(group, key=lambda guess: guess.predicted).measured
        / min(guess.measured for guess in group)
        - 1
        for group in found
    ]
    return {
        f"{name}_count": float(len(found)),
        f"{name}_spearman_mean": sum(ranks) / len(ranks),
        f"{name}_regret_mean_percent": 100 * sum(regrets) / len(regrets),
        f"{name}_regret_largest_percent": 100 * max(regrets),
    }


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank. 0 where one side is constant."""
    a = _ranks(first)
    b = _ranks(second)
    centre = (len(a) - 1) / 2
    both = sum((x - centre) * (y - centre) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - centre) ** 2 for x in a) * sum((y - centre) ** 2 for y in b))
    return both / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = defaultdict(list)
    for place, value in enumerate(sorted(values)):
        places[value].append(place)
    return [sum(places[value]) / len(places[value]) for value in values]


def byte_figures(name: str, errors: Sequence[float], close: float) -> Figures:
    """Relative errors of bytes, in percent; ``close``: the bound whose share is counted."""
    if not errors:
        return {}
    sizes = [abs(error) for error in errors]
    return {
        f"{name}_rows": float(len(sizes)),
        f"{name}_error_mean_percent": 100 * sum(sizes) / len(sizes),
        f"{name}_error_median_percent": 100 * median(sizes),
        f"{name}_within_{round(100 * close)}_percent": 100
        * sum(size <= close for size in sizes)
        / len(sizes),
    }


def lines(figures: Mapping[str, float]) -> list[str]:
    """One ``name value`` a line."""
    return [f"{name} {value:.4g}" for name, value in figures.items()]
