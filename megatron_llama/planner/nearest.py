"""Published runs that are like a plan, to hold it against."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Citation:
    """A published run in one line."""

    source: str
    model: str
    gpu: str
    known: str
    """The GPU as ``hardware.py`` calls it."""
    gpus: int
    numel: int
    """Of matrices."""
    seq: int
    layout: str
    speed: float
    """Tokens per second and GPU."""

    def __str__(self) -> str:
        return f"{self.source}: {self.model}, {self.gpus} x {self.gpu}, sequence {self.seq}, {self.layout}: {self.speed:,.0f} tokens/s/GPU"


def read_table(text: str) -> list[Citation]:
    """The lines of ``citations.TABLE``."""
    rows = (line.split(" | ") for line in text.strip().splitlines())
    return [
        Citation(source, model, gpu, known, int(gpus), int(numel), int(seq), layout, float(speed))
        for source, model, gpu, known, gpus, numel, seq, layout, speed in rows
    ]


def nearest(
    citations: Iterable[Citation], *, known: str, gpus: int, numel: int, seq: int, count: int = 3
) -> list[Citation]:
    """The runs of nearest size, GPU, sequence and number of GPUs, in this order of importance."""

    def distance(run: Citation) -> float:
        near = (
            2 * abs(math.log(run.numel / numel))
            + 0.5 * abs(math.log(run.seq / seq))
            + 0.25 * abs(math.log(run.gpus / gpus))
        )
        return near + (0 if run.known == known else 1 if run.known[:2] == known[:2] else 2)

    return sorted(citations, key=distance)[:count]
