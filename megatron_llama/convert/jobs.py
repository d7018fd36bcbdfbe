"""The work of writing a folder in pieces that may run side by side, and how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock
from typing import Any

from torch import Tensor
from tqdm import tqdm

from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.plans.params import Rectangle


@dataclass(frozen=True)
class WriteTask:
    """One file, or what is left to do when all files are there."""

    elements: int
    """Values that it asks of the source."""
    run: Callable[[], None]
    last: bool = False
    """Runs alone, after all others."""


class Watched:
    """A source that shows how many bytes were asked of it: a bar with bytes and remaining time, on
    a terminal only."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._lock = Lock()
        self.bytes = 0
        self._bar: Any = None

    def show(self, total: int) -> None:
        """Start the bar. ``total``: bytes in the whole."""
        self._bar = tqdm(total=total, unit="B", unit_scale=True, disable=not sys.stderr.isatty())

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """See WeightSource."""
        self._source(rectangle, out)
        with self._lock:
            self.bytes += out.nbytes
            if self._bar is not None:
                self._bar.update(out.nbytes)


def run_write_tasks(jobs: Iterable[WriteTask], workers: int) -> None:
    """Run all, ``workers`` at a time. The first error stops what has not begun, and is raised when
    the rest has ended."""
    jobs = list(jobs)
    with ThreadPoolExecutor(workers) as pool:
        waiting = [pool.submit(job.run) for job in jobs if not job.last]
        done, _ = wait(waiting, return_when=FIRST_EXCEPTION)
        pool.shutdown(cancel_futures=True)
    for each in done:
        each.result()
    for job in jobs:
        if job.last:
            job.run()
