"""The thread of a rank that updates parameters on the host, on processors of its own."""

from __future__ import annotations

import heapq
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import torch

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.worker import Task
from megatron_llama.engine.offload_options import core_list
from megatron_llama.errors import ConfigError, OffloadError, describe


def physical_cores() -> tuple[int, ...]:
    """Return one processor of each physical core that this process may use; all processors if the
    system does not tell."""
    allowed = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )
    first: dict[str, int] = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        first.setdefault(siblings.read_text().strip() if siblings.exists() else str(cpu), cpu)
    return tuple(first.values())


def rank_cores(option: str, local_rank: int, local_ranks: int) -> tuple[int, ...]:
    """Return the processors of one of this machine's ``local_ranks`` ranks: an equal part of those
    that --offload-cores names (auto: one of each physical core). If there are fewer processors than
    ranks, ranks share. Raises ConfigError for processors that this process may not use."""
    here = physical_cores()
    cores = here if option == "auto" else core_list(option)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(here)
    missing = [core for core in cores if core not in allowed]
    if missing:
        got = ", ".join(map(str, missing[:4])) + (" and others" if len(missing) > 4 else "")
        do = "leave it out, or name some of these"
        expected = f"processors that this process may use: {', '.join(map(str, sorted(allowed)))}"
        raise ConfigError(describe("--offload-cores", got=got, expected=expected, do=do))
    share = len(cores) // local_ranks
    local_rank = local_rank % local_ranks
    return (
        cores[local_rank * share : (local_rank + 1) * share]
        if share
        else (cores[local_rank % len(cores)],)
    )


class HostWorker:
    """One thread with a queue: of the waiting tasks it takes the one with the lowest ``priority``,
    then the oldest. A task that fails does not stop the next."""

    def __init__(self, cores: Sequence[int] = (), threads: int = 0) -> None:
        """``cores`` are the processors that it may use (none: any); ``threads`` is the number of
        threads of torch's operators in it (0: as many as cores). Raises OffloadError where the
        system does not let a thread choose its processors."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds spent on each kind of ``working`` so far."""
        self._queue = _TaskQueue()
        first = Task(partial(_configure_thread, tuple(cores), threads or len(cores)))
        self.put(first, priority=0)
        # torch takes the number of threads from the environment when it is first asked. The caller
        # asks now, because set_num_threads in the new thread would otherwise decide for both.
        torch.get_num_threads()
        self._thread = devices.start_thread(_serve, self._queue, name="optimizer")
        weakref.finalize(self, self._queue.close)
        try:
            first.wait()
        except OSError as error:
            got = f"{', '.join(map(str, cores))}, refused: {error}"
            do = "name others, or ask who runs this machine or container"
            raise OffloadError(
                describe(
                    "--offload-cores",
                    got=got,
                    expected="processors that a thread may choose",
                    do=do,
                )
            ) from error

    def put(self, task: Task, *, priority: int) -> None:
        """Queue a task; the lowest ``priority`` goes first. Raises RuntimeError after ``close``."""
        self._queue.put(task, priority)

    @contextmanager
    def working(self, what: str, elements: int) -> Iterator[None]:
        """A section of the thread that does ``what`` to so many elements of a shard without waiting
        for anything. Its seconds are counted."""
        begin = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - begin

    def close(self, timeout: float = 0.0) -> None:
        """End the thread after the tasks it still has, and wait for it at most ``timeout``
        seconds."""
        self._queue.close()
        if timeout:
            self._thread.join(timeout)


WorkerFactory = Callable[[Sequence[int], int], HostWorker]
"""Makes the worker of a rank from its processors and number of threads."""


@contextmanager
def errors_of_bucket(label: str) -> Iterator[None]:
    """A section in which any error of a copy or of the worker becomes an OffloadError about the
    bucket ``label``. An OffloadError passes as it is, because other buckets than its own may
    wait for it."""
    try:
        yield
    except OffloadError:
        raise
    except Exception as error:
        where = f"optimizer offload, {label}"
        got = f"{type(error).__name__}: {error}"
        do = (
            "look at the memory of this machine and at what it printed before; "
            "resume from the last checkpoint"
        )
        raise OffloadError(
            describe(where, got=got, expected="an update on the host", do=do)
        ) from error


class _TaskQueue:
    """A queue by priority. The thread holds the queue and not the worker, so that the worker can be
    collected."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Task]] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, task: Task, priority: int) -> None:
        with self._changed:
            if self._closed:
                # The task would never be performed, and its waiter would hang.
                raise RuntimeError("the optimizer's worker is closed")
            heapq.heappush(self._heap, (priority, next(self._numbers), task))
            self._changed.notify()

    def take(self) -> Task | None:
        """Wait for the next task; None when there will be none."""
        with self._changed:
            while not self._heap and not self._closed:
                self._changed.wait()
            return heapq.heappop(self._heap)[2] if self._heap else None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()


def _configure_thread(cores: tuple[int, ...], threads: int) -> None:
    """Called by the thread before anything else."""
    if cores and hasattr(os, "sched_setaffinity"):
        # 0 is this thread. The threads that torch's operators start from it inherit the setting.
        os.sched_setaffinity(0, cores)
    if threads:
        torch.set_num_threads(threads)


def _serve(tasks: _TaskQueue) -> None:
    with torch.no_grad():  # grad mode belongs to a thread
        while (task := tasks.take()) is not None:
            task.perform()
            del task
