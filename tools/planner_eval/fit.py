"""Fit the planner's coefficients to a table of published runs.

Gauss-Newton on logarithms of step times, with a prior on every coefficient, one offset for each
source (with a spread of 8 %, so that a source with many rows does not decide the level), and less
weight for outliers.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.steps import estimate
from tools.planner_eval.judge import Prediction, lines, step_figures, sweep_figures
from tools.planner_eval.published import PublishedRun, read_rows, runs_of

PACKAGE = Path(__file__).parents[2] / "megatron_llama" / "planner"
NAMES = tuple(item.name for item in fields(Coefficients))
ROW = 0.07
SOURCE = 0.08
"""Standard deviation of the logarithm of a row and of a source's offset."""
OUTLIER = 0.12
"""Error of a logarithm from which on a row's weight falls."""
COLUMNS = ("source", "model", "gpu", "known_as", "gpus", "numel", "seq", "layout", "tokens_s_gpu")
"""Columns of ``published_runs.csv``."""
STEP = 0.02
"""Step of the numeric derivatives, in logarithms."""
ROUNDS = 10
LOOSE = ("step", "straggle", "launch_old")
"""Coefficients of which nothing is known beforehand: a factor of e either way."""
WIDE = (
    "launch",
    "latency_across",
    "logits",
    "pressure",
    "hop",
    "hop_inside",
    "broadcast",
    "data_exposed",
    "parameters_exposed",
    "cp_exposed",
    "pipeline_exposed",
)
"""Coefficients of which little is known: a factor of 2 either way."""
MATMULS = ("matmul_v100", "matmul_a100", "matmul_h100", "matmul_b200")
Vector = list[float]


def spread(name: str) -> float:
    """Return the standard deviation of a coefficient's logarithm before any run is seen."""
    if name in MATMULS:
        return 0.12
    if name.startswith("family"):
        return 0.2
    return 1.0 if name in LOOSE else 0.7 if name in WIDE else 0.4


PRIOR = tuple(math.log(getattr(Coefficients(), name)) for name in NAMES)
SPREADS = tuple(spread(name) for name in NAMES)


def coefficients(logs: Sequence[float]) -> Coefficients:
    """Return the coefficients with these logarithms, in the order of the fields."""
    return Coefficients(**{name: math.exp(value) for name, value in zip(NAMES, logs, strict=True)})


def predict(logs: Sequence[float], runs: Sequence[PublishedRun]) -> Vector:
    """Return the logarithms of step times."""
    fit = coefficients(logs)
    return [math.log(estimate(run.job, fit).seconds) for run in runs]


def solve(matrix: list[Vector], right: Vector) -> Vector:
    """Return the solution of a symmetric positive system, by elimination."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        head = rows[pivot]
        for row in rows[pivot + 1 :]:
            factor = row[pivot] / head[pivot]
            if factor:
                for column in range(pivot, size + 1):
                    row[column] -= factor * head[column]
    found = [0.0] * size
    for pivot in reversed(range(size)):
        rest = sum(rows[pivot][column] * found[column] for column in range(pivot + 1, size))
        found[pivot] = (rows[pivot][size] - rest) / rows[pivot][pivot]
    return found


@dataclass
class Fit:
    """Coefficients and offsets of sources, with the derivatives there."""

    logs: Vector
    offsets: dict[str, float]
    predicted: Vector
    slopes: list[dict[int, float]]
    """Derivatives of each run's prediction by coefficient, without those that are 0."""


def differentiate(
    runs: Sequence[PublishedRun], logs: Vector, relevant: Sequence[Sequence[int]] | None
) -> tuple[Vector, list[dict[int, float]]]:
    """Return predictions and their derivatives. ``relevant`` has for each coefficient the runs that
    depend on it, once that is known."""
    predicted = predict(logs, runs)
    slopes: list[dict[int, float]] = [{} for _ in runs]
    for number in range(len(NAMES)):
        moved = [value + STEP * (place == number) for place, value in enumerate(logs)]
        indices = range(len(runs)) if relevant is None else relevant[number]
        for index, value in zip(
            indices, predict(moved, [runs[index] for index in indices]), strict=True
        ):
            if value != predicted[index]:
                slopes[index][number] = (value - predicted[index]) / STEP
    return predicted, slopes


def improve(
    runs: Sequence[PublishedRun], kept: Sequence[int], fit: Fit
) -> tuple[Vector, dict[str, float]]:
    """Return new coefficients and offsets by one Gauss-Newton step on the runs ``kept``."""
    sources = sorted({runs[index].source for index in kept})
    place = {source: len(NAMES) + number for number, source in enumerate(sources)}
    size = len(NAMES) + len(sources)
    matrix = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for index in kept:
        source = runs[index].source
        seconds = runs[index].seconds
        assert seconds is not None
        rest = math.log(seconds) - fit.predicted[index] - fit.offsets.get(source, 0.0)
        weight = min(1.0, OUTLIER / max(abs(rest), 1e-9)) / ROW**2
        slope = [*fit.slopes[index].items(), (place[source], 1.0)]
        for first, value in slope:
            right[first] += weight * value * rest
            row = matrix[first]
            for second, other in slope:
                row[second] += weight * value * other
    for number, (prior, width) in enumerate(zip(PRIOR, SPREADS, strict=True)):
        matrix[number][number] += 1 / width**2
        right[number] += (prior - fit.logs[number]) / width**2
    for source, number in place.items():
        matrix[number][number] += 1 / SOURCE**2
        right[number] -= fit.offsets.get(source, 0.0) / SOURCE**2
    change = solve(matrix, right)
    scale = min(1.0, 0.5 / max(abs(value) for value in change))
    logs = [value + scale * step for value, step in zip(fit.logs, change, strict=False)]
    return logs, {
        source: fit.offsets.get(source, 0.0) + scale * change[number]
        for source, number in place.items()
    }


def fit_all(runs: Sequence[PublishedRun]) -> Fit:
    """Return the fit to all runs."""
    logs = list(PRIOR)
    offsets = dict[str, float]()
    predicted, slopes = differentiate(runs, logs, None)
    relevant = [
        [index for index, slope in enumerate(slopes) if number in slope]
        for number in range(len(NAMES))
    ]
    fit = Fit(logs, offsets, predicted, slopes)
    for _ in range(ROUNDS):
        logs, offsets = improve(runs, range(len(runs)), fit)
        fit = Fit(logs, offsets, *differentiate(runs, logs, relevant))
    return fit


def left_out(runs: Sequence[PublishedRun], fit: Fit) -> list[Prediction]:
    """Return every source as predicted by a fit without it: one step away from the fit to all, near
    which predictions are almost linear."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        members[run.source].append(index)
    predictions = []
    for indices in members.values():
        out = set(indices)
        logs, _ = improve(runs, [index for index in range(len(runs)) if index not in out], fit)
        chosen = [runs[index] for index in indices]
        predictions += [
            Prediction(run, math.exp(value))
            for run, value in zip(chosen, predict(logs, chosen), strict=True)
        ]
    return predictions


def write_fitted(fit: Fit, predictions: Sequence[Prediction], runs: Sequence[PublishedRun]) -> None:
    """Write ``fitted.py``: the coefficients, and how wrong they are on sources that a fit has not
    seen."""
    values = coefficients(fit.logs)
    ratios = sorted(-prediction.error for prediction in predictions)
    low, high = (math.exp(ratios[round(share * (len(ratios) - 1))]) for share in (0.1, 0.9))
    sources = len({run.source for run in runs})
    body = [
        f'"""Coefficients fitted to {len(runs)} published runs of {sources} sources, which are in',
        "``published_runs.csv``. Written by ``python -m tools.planner_eval fit``.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from megatron_llama.planner.coefficients import Coefficients",
        "",
        "FITTED = Coefficients(",
        *(f"    {name}={getattr(values, name):.4g}," for name in NAMES),
        ")",
        f"LOW = {low:.3f}",
        f"HIGH = {high:.3f}",
        '"""Measured over predicted: eight of ten runs of a source that the fit has not seen lie',
        'between these."""',
    ]
    (PACKAGE / "fitted.py").write_text("\n".join(body) + "\n")


def write_citations(runs: Sequence[PublishedRun]) -> None:
    """Write ``published_runs.csv``: the fastest run of each source, model and GPU."""
    best: dict[tuple[str, str, str], PublishedRun] = {}
    for run in runs:
        key = run.source, run.cells["model"], run.cells["gpu"]
        if key not in best or _speed(run) > _speed(best[key]):
            best[key] = run
    with (PACKAGE / "published_runs.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for (source, model, gpu), run in sorted(best.items()):
            job = run.job
            layout = f"tp{job.tp} pp{job.pp} cp{job.cp} dp{job.dp} mbs{job.micro_batch}"
            layout = f"{layout} {run.cells['precision']}"
            machine = job.machine
            cells = (source, model, gpu, machine.gpu.name, machine.gpus, job.matrix_numel, job.seq)
            writer.writerow([*cells, layout, f"{_speed(run):.0f}"])


def _speed(run: PublishedRun) -> float:
    """Tokens per second and GPU."""
    assert run.seconds is not None
    return run.job.total_tokens / run.seconds / run.job.machine.gpus


def fit_table(path: Path, *, write: bool) -> None:
    """Fit to the table at ``path`` and print what the fit reaches, on all runs and on each source
    as predicted by a fit that has not seen it. ``write`` replaces what the package has."""
    runs = [run for run in runs_of(read_rows(path)) if run.seconds is not None]
    fit = fit_all(runs)
    seen = [
        Prediction(run, math.exp(value)) for run, value in zip(runs, fit.predicted, strict=True)
    ]
    unseen = left_out(runs, fit)
    for title, found in (("fitted to all", seen), ("each source left out", unseen)):
        print(f"# {title}", *lines({**step_figures(found), **sweep_figures(found)}), sep="\n")
    if write:
        write_fitted(fit, unseen, runs)
        write_citations(runs)
