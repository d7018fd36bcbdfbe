"""The work of writing a folder, cut into tasks that may run side by side, and its progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from threading import Lock
from typing import Any

from torch import Tensor
from tqdm import tqdm

from megatron_llama.engine.comm.device import thread_pool
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.specs import Rectangle


@dataclass(frozen=True)
class WriteTask:
    """One file to write, or work that is left when all files are there."""

    elements: int
    """Number of values that it asks of the source."""
    run: Callable[[], None]
    last: bool = False
    """Whether it runs alone, after all others."""


class ProgressSource:
    """A WeightSource that counts the bytes that it is asked for. On a terminal it shows them with
    the remaining time in a bar."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._lock = Lock()
        self.bytes = 0
        self._bar: Any = None

    def show(self, total: int) -> None:
        """Start the bar; ``total`` is the number of all bytes."""
        self._bar = tqdm(total=total, unit="B", unit_scale=True, disable=not sys.stderr.isatty())

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        self._source(rectangle, out)
        self._count(out)

    def beside(self, source: WeightSource) -> WeightSource:
        """Return a wrapper of another source, whose bytes are counted here too."""

        def counted(rectangle: Rectangle, out: Tensor) -> None:
            source(rectangle, out)
            self._count(out)

        return counted

    def _count(self, out: Tensor) -> None:
        with self._lock:
            self.bytes += out.nbytes
            if self._bar is not None:
                self._bar.update(out.nbytes)


def run_write_tasks(tasks: Sequence[WriteTask], workers: int) -> None:
    """Run all tasks, ``workers`` at a time. The first error stops the tasks that have not begun,
    and is raised when the others have ended."""
    with thread_pool(workers) as pool:
        waiting = [pool.submit(task.run) for task in tasks if not task.last]
        done, _ = wait(waiting, return_when=FIRST_EXCEPTION)
        pool.shutdown(cancel_futures=True)
    for written in done:
        written.result()
    for task in tasks:
        if task.last:
            task.run()
