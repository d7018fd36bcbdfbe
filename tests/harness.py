"""The workers of tests: the pool of ``megatron_llama.prove.pool``, which waits where other processes test on the same machine.

``cluster.run(world_size, function, *args)`` calls ``function(place, *args)`` on the first ``world_size`` workers and returns
their results in rank order.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megatron_llama.prove.pool import WorkerError, WorkerPool, be_patient

from tests.unsynced import leave_writes_to_the_system

__all__ = ["PRELOAD", "Cluster", "WorkerError", "be_patient"]

PRELOAD = ["megatron_llama.prove.run", "tests.harness"]
"""Imported once, by the server that the workers are forked from."""
SMALL_JOB = 2
"""Processes."""
leave_writes_to_the_system()  # the server of the workers imports this file


class Cluster(WorkerPool):
    """The pool of a test session."""

    def __init__(self) -> None:
        super().__init__(PRELOAD, accelerators=True)

    def __enter__(self) -> Cluster:
        return self

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 180.0, output: Path | None = None
    ) -> list[Any]:
        """See WorkerPool."""
        with _room(world_size):
            return super().run(world_size, function, *args, timeout=timeout, output=output)


@contextmanager
def _room(world_size: int) -> Iterator[None]:
    """Two small jobs at a time on this machine, or a large one, also of pools in other processes: two large ones on few cores keep each
    other from work (a test of 5 s took minutes). Everybody takes the first half before the second: nobody waits in a circle."""
    half = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2
    with ExitStack() as taken:
        for number in (half,) if world_size <= SMALL_JOB else (0, 1):
            file = taken.enter_context(open(Path(tempfile.gettempdir(), f"megatron_llama-tests-{number}.lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
