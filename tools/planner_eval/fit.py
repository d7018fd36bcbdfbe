"""Fit the planner's coefficients to a table of published runs: ``python tools/fit_planner.py
RUNS.csv [--write]``.

Prints what the fit reaches, each source predicted by a fit that has not seen it; with ``--write``
it replaces ``megatron_llama/planner/fitted.py`` and ``citations.py``. Gauss-Newton on logarithms of
step times, with a prior on every coefficient, one offset for each source (of a spread of 8 %, so
that no source with many rows decides the level), and less weight for outliers.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.judge import Guess, lines, step_figures, sweep_figures
from megatron_llama.planner.published import Run, read_rows, runs_of
from megatron_llama.planner.steps import estimate

PACKAGE = Path(__file__).parent.parent / "megatron_llama" / "planner"
NAMES = tuple(item.name for item in fields(Coefficients))
ROW = 0.07
SOURCE = 0.08
OUTLIER = 0.12
"""Standard deviation of a row and of a source, and from where a row's weight falls, in
logarithms."""
STEP = 0.02
ROUNDS = 10
LOOSE = (*("step", "straggle", "launch_old"),)
"""Coefficients nobody knows beforehand: a factor of e either way."""
WIDE = (
    *("launch", "latency_across", "logits", "pressure", "hop", "hop_inside", "broadcast"),
    *("data_exposed", "parameters_exposed", "cp_exposed", "pipeline_exposed"),
)
MATMULS = ("matmul_v100", "matmul_a100", "matmul_h100", "matmul_b200")
Vector = list[float]


def spread(name: str) -> float:
    """Standard deviation of a coefficient's logarithm before any run is seen."""
    if name in MATMULS:
        return 0.12
    if name.startswith("family"):
        return 0.2
    return 1.0 if name in LOOSE else 0.7 if name in WIDE else 0.4


PRIOR = tuple(math.log(getattr(Coefficients(), name)) for name in NAMES)
SPREADS = tuple(spread(name) for name in NAMES)


def coefficients(logs: Sequence[float]) -> Coefficients:
    """Logarithms in the order of the fields."""
    return Coefficients(**{name: math.exp(value) for name, value in zip(NAMES, logs, strict=True)})


def predict(logs: Sequence[float], runs: Sequence[Run]) -> Vector:
    """Logarithms of step times."""
    fit = coefficients(logs)
    return [math.log(estimate(run.job, fit).seconds) for run in runs]


def solve(matrix: list[Vector], right: Vector) -> Vector:
    """The solution of a symmetric positive system, by elimination."""
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
    """Of each run, by coefficient; those that do not matter to it are left out."""


def differentiate(
    runs: Sequence[Run], logs: Vector, relevant: Sequence[Sequence[int]] | None
) -> tuple[Vector, list[dict[int, float]]]:
    """Predictions and their derivatives. ``relevant``: for each coefficient the runs it matters to,
    once that is known."""
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


def improve(runs: Sequence[Run], kept: Sequence[int], fit: Fit) -> tuple[Vector, dict[str, float]]:
    """One Gauss-Newton step on the runs ``kept``: new coefficients and offsets."""
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


def fit_all(runs: Sequence[Run]) -> Fit:
    """The fit to all runs."""
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


def left_out(runs: Sequence[Run], fit: Fit) -> list[Guess]:
    """Every source as predicted by a fit without it: one step away from the fit to all, which is
    almost linear there."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        members[run.source].append(index)
    guesses = []
    for indices in members.values():
        out = set(indices)
        logs, _ = improve(runs, [index for index in range(len(runs)) if index not in out], fit)
        chosen = [runs[index] for index in indices]
        guesses += [
            Guess(run, math.exp(value))
            for run, value in zip(chosen, predict(logs, chosen), strict=True)
        ]
    return guesses


def write_fitted(fit: Fit, guesses: Sequence[Guess], runs: Sequence[Run]) -> None:
    """``fitted.py``: the coefficients, how wrong they are on sources they have not seen, and where
    they come from."""
    values = coefficients(fit.logs)
    ratios = sorted(-guess.error for guess in guesses)
    low, high = (math.exp(ratios[round(share * (len(ratios) - 1))]) for share in (0.1, 0.9))
    names = sorted({run.source for run in runs})
    body = [
        '"""Coefficients fitted to published runs. Written by ``tools/fit_planner.py``; not edited by hand."""',
        "",
        "from __future__ import annotations",
        "",
        "from megatron_llama.planner.coefficients import Coefficients",
        "",
        "FITTED = Coefficients(",
        *(f"    {name}={getattr(values, name):.4g}," for name in NAMES),
        ")",
        f"LOW, HIGH = {low:.3f}, {high:.3f}",
        '"""Measured over predicted: eight of ten runs of a source that the fit has not seen lie between these."""',
        f"RUNS = {len(runs)}",
        "SOURCES = (",
        *(f'    "{name}",' for name in names),
        ")",
    ]
    (PACKAGE / "fitted.py").write_text("\n".join(body) + "\n")


def write_citations(runs: Sequence[Run]) -> None:
    """``citations.py``: of each source, model and GPU the fastest run, for "nearest published
    runs"."""
    best: dict[tuple[str, str, str], Run] = {}
    for run in runs:
        key = run.source, run.cells["model"], run.cells["gpu"]
        if key not in best or _speed(run) > _speed(best[key]):
            best[key] = run
    rows = []
    for (source, model, gpu), run in sorted(best.items()):
        job = run.job
        layout = f"tp{job.tp} pp{job.pp} cp{job.cp} dp{job.dp} mbs{job.micro_batch} {run.cells['precision']}"
        size = (job.block_numel * job.model.num_hidden_layers + job.head.n * job.head.k) * job.tp
        cells = (
            source,
            model,
            gpu,
            job.machine.gpu.name,
            job.machine.gpus,
            size,
            job.seq,
            layout,
            f"{_speed(run):.0f}",
        )
        rows.append(" | ".join(map(str, cells)))
    body = [
        '"""The fastest published run of each source, model and GPU. Written by ``tools/fit_planner.py``; not edited by hand."""',
        "",
        "from __future__ import annotations",
        "",
        'TABLE = """',
        *rows,
        '"""',
        '"""source | model | GPU | its name here | GPUs | elements of matrices | sequence | layout | tokens per second and GPU"""',
    ]
    (PACKAGE / "citations.py").write_text("\n".join(body) + "\n")


def _speed(run: Run) -> float:
    """Tokens per second and GPU."""
    assert run.seconds is not None
    return run.job.total_tokens / run.seconds / run.job.machine.gpus


def main(words: Sequence[str]) -> int:
    """Fit, judge, and write where that is asked for."""
    paths = [word for word in words if not word.startswith("--")]
    if len(paths) != 1:
        print(__doc__)
        return 2
    runs = [run for run in runs_of(read_rows(Path(paths[0]))) if run.seconds is not None]
    fit = fit_all(runs)
    seen = [Guess(run, math.exp(value)) for run, value in zip(runs, fit.predicted, strict=True)]
    guesses = left_out(runs, fit)
    for title, found in (("fitted to all", seen), ("each source left out", guesses)):
        print(f"# {title}", *lines({**step_figures(found), **sweep_figures(found)}), sep="\n")
    if "--write" in words:
        write_fitted(fit, guesses, runs)
        write_citations(runs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
