"""How good predictions are: errors of step times, of rankings, of what fits, of bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megatron_llama.planner.training_job import TrainingJob
from tools.planner_eval.published import PublishedRun

CLOSE = 0.1
FEWEST = 10
"""Layouts that make a sweep."""
Figures = dict[str, float]


@dataclass(frozen=True)
class Prediction:
    """A run with its measured and its predicted seconds."""

    run: PublishedRun
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


def by_source(predictions: Iterable[Prediction]) -> dict[str, list[Prediction]]:
    """The guesses of each source."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        groups[prediction.run.source].append(prediction)
    return groups


def calibrated(predictions: Iterable[Prediction]) -> list[tuple[float, float]]:
    """Return the errors if one row of each source scales the others: for every row the mean
    relative error and the share within 10 %, over all rows that could have been that one."""
    found = []
    for group in by_source(predictions).values():
        errors = [prediction.error for prediction in group]
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


def step_figures(predictions: Sequence[Prediction]) -> Figures:
    """Return errors of step times in percent, without any row of a source and with one."""
    plain = [abs(math.expm1(prediction.error)) for prediction in predictions]
    none = [(error, float(error <= CLOSE)) for error in plain]
    figures = {
        "step_rows": float(len(predictions)),
        "step_sources": float(len(by_source(predictions))),
    }
    for name, found in (("none", none), ("one_row", calibrated(predictions))):
        if found:
            figures[f"step_mape_{name}_percent"] = (
                100 * sum(error for error, _ in found) / len(found)
            )
            figures[f"step_within_10_{name}_percent"] = (
                100 * sum(share for _, share in found) / len(found)
            )
    return figures


def sweeps(predictions: Iterable[Prediction]) -> list[list[Prediction]]:
    """Return groups of at least ten runs of one source that differ in their layout alone."""
    groups: dict[tuple[str, ...], list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        cells = prediction.run.cells
        groups[
            prediction.run.source,
            *(cells.get(name, "") for name in ("model", "gpu", "n_gpus", "seq", "gbs")),
        ].append(prediction)
    return [
        group
        for group in groups.values()
        if len(group) >= FEWEST and len({_layout(prediction.run.job) for prediction in group}) > 2
    ]


def _layout(job: TrainingJob) -> tuple[object, ...]:
    """What a user chooses, without the model and the machine."""
    return (
        *(job.tp, job.pp, job.vpp, job.cp, job.dp, job.micro_batch),
        *(job.recomputed, job.sequence_parallel, job.sharding),
    )


def sweep_figures(predictions: Iterable[Prediction]) -> Figures:
    """Return the ranking figures of sweeps over LLaMA models, which this trainer could run, and of
    sweeps over other models."""
    found = sweeps(predictions)
    own = [group for group in found if group[0].run.job.traits.gated]
    others = [group for group in found if not group[0].run.job.traits.gated]
    return {**_ranking("sweep", own), **_ranking("sweep_other_models", others)}


def _ranking(name: str, found: Sequence[Sequence[Prediction]]) -> Figures:
    """Rank correlation within sweeps, and how much slower the layout predicted to be fastest is
    than the fastest."""
    if not found:
        return {}
    ranks = [
        spearman(
            [prediction.predicted for prediction in group],
            [prediction.measured for prediction in group],
        )
        for group in found
    ]
    regrets = [
        min(group, key=lambda prediction: prediction.predicted).measured
        / min(prediction.measured for prediction in group)
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
    """Return the rank correlation; equal values share their mean rank. 0 if one side is
    constant."""
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
    """Return relative errors of bytes in percent; ``close`` is the bound whose share is counted."""
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
    """Return a line ``name value`` for each figure."""
    return [f"{name} {value:.4g}" for name, value in figures.items()]
