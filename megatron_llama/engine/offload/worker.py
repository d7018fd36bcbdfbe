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

import torch

from megatron_llama.distributed import device as devices
from megatron_llama.distributed.comm.worker import Task
from megatron_llama.errors import ConfigError, OffloadError, describe
from megatron_llama.plans.offload import core_list


def rank_cores(option: str, local_rank: int, local_ranks: int) -> tuple[int, ...]:
    """The processors of one of ``local_ranks`` ranks of this machine: an equal part of those that
    --offload-cores names (auto: one of each physical core). Where there are fewer than ranks, ranks
    share. Raises ConfigError for processors that there are not."""
    here = devices.physical_cores()
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
    """One thread; of the jobs that wait it takes the one with the lowest ``turn`` first, then the
    oldest. One that fails does not stop the next."""

    def __init__(self, cores: Sequence[int] = (), threads: int = 0) -> None:
        """``cores``: processors it may use, none: any; ``threads``: of torch's operators in it, 0:
        as many as cores. Raises OffloadError where the system does not let a thread choose its
        processors."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Spent at each kind of ``working``, so far."""
        self._jobs = _Tasks()
        first = Task(partial(_settle_in, tuple(cores), threads or len(cores)))
        self.put(first, turn=0)
        # the caller's own number is settled before this thread chooses one for itself
        torch.get_num_threads()
        self._thread = threading.Thread(
            target=_serve, args=(self._jobs,), name="optimizer", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._jobs.close)
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

    def put(self, task: Task, *, turn: int) -> None:
        """Perform a job in its turn. RuntimeError after ``close``."""
        self._jobs.put(task, turn)

    @contextmanager
    def working(self, what: str, elements: int) -> Iterator[None]:
        """In the thread: it does ``what`` to so many elements of a shard, and waits for nothing
        meanwhile."""
        begin = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - begin

    def close(self) -> None:
        """End the thread after what it still has to do."""
        self._jobs.close()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, at most so long."""
        self._thread.join(seconds)


WorkerFactory = Callable[[Sequence[int], int], HostWorker]
"""Makes the worker of a rank from its processors and number of threads."""


class _Tasks:
    """A queue by turn, whose thread does not keep its worker alive."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Task]] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, task: Task, turn: int) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError(
                    "the optimizer's worker is closed"
                )  # nobody would ever finish the job
            heapq.heappush(self._heap, (turn, next(self._numbers), task))
            self._changed.notify()

    def take(self) -> Task | None:
        """The next one; None: there will be none."""
        with self._changed:
            while not self._heap and not self._closed:
                self._changed.wait()
            return heapq.heappop(self._heap)[2] if self._heap else None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()


def _settle_in(cores: tuple[int, ...], threads: int) -> None:
    """In the thread, before anything else."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # of this thread, and of those that operators start from it
    if threads:
        torch.set_num_threads(threads)


def _serve(tasks: _Tasks) -> None:
    with torch.no_grad():
        while (task := tasks.take()) is not None:
            task.perform()
            del task
