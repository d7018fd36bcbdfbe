"""Published runs of other trainers that are similar to a plan, for comparison.

``published_runs.csv`` has the fastest published run of each source, model and GPU; ``python -m
tools.planner_eval fit --write`` writes it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Citation:
    """A published run in one line."""

    source: str
    model: str
    gpu: str
    known: str
    """Name of the GPU in ``hardware.py``."""
    gpus: int
    numel: int
    """Elements of all weight matrices."""
    seq: int
    layout: str
    speed: float
    """Tokens per second and GPU."""

    def __str__(self) -> str:
        machine = f"{self.gpus} x {self.gpu}, sequence {self.seq}, {self.layout}"
        return f"{self.source}: {self.model}, {machine}: {self.speed:,.0f} tokens/s/GPU"


def read_citations() -> list[Citation]:
    """Return the published runs that come with the package."""
    with Path(__file__).with_name("published_runs.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [
        Citation(source, model, gpu, known, int(gpus), int(numel), int(seq), layout, float(speed))
        for source, model, gpu, known, gpus, numel, seq, layout, speed in rows
    ]


def nearest(
    citations: Iterable[Citation], *, known: str, gpus: int, numel: int, seq: int, count: int = 3
) -> list[Citation]:
    """Return the ``count`` runs nearest in size, GPU, sequence length and number of GPUs, in this
    order of importance."""

    def distance(run: Citation) -> float:
        sizes = (
            2 * abs(math.log(run.numel / numel))
            + 0.5 * abs(math.log(run.seq / seq))
            + 0.25 * abs(math.log(run.gpus / gpus))
        )
        return sizes + (0 if run.known == known else 1 if run.known[:2] == known[:2] else 2)

    return sorted(citations, key=distance)[:count]
