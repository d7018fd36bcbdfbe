"""Real processes for tests: a pool of workers, started once, that joins a fresh gloo group for every job.

``cluster.run(world_size, function, *args)`` calls ``function(place, *args)`` on the first ``world_size`` workers and returns
their results in rank order. ``function`` is importable by name (module level); arguments and results are pickled.
A worker that raises, dies or does not come back in time fails the job by rank, and is replaced at the next job.
"""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_llama.distributed.launcher import Place
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

PRELOAD = ["megatron_llama.model.init", "megatron_llama.engine.build", "megatron_llama.pipeline.runtime", "tests.harness"]
"""Imported once, by the server that the workers are forked from."""
SMALL_JOB = 2
"""Processes."""
GRACE_SECONDS = 10.0
"""After one worker failed, its peers lose their connections and fail too; those that do not are killed."""
MOST_THREADS = 8
"""Of a worker between jobs. Each connection of a group that something keeps alive has a thread that wakes up a hundred times a second: after
some jobs of Megatron-Core, whose modules keep groups, thousands of them took both processors from the tests."""


class WorkerError(AssertionError):
    """A job failed. The message names the ranks and holds their tracebacks."""


@dataclass(frozen=True)
class _Job:
    number: int
    place: Place
    function: Callable[..., Any]
    args: tuple[Any, ...]
    timeout: float


@dataclass(frozen=True)
class _Outcome:
    """What a worker sent back; ``error`` alone when it failed."""

    result: Any = None
    error: str | None = None
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection


class Cluster:
    """The pool. Use it as a context manager."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: dict[int, _Worker] = {}
        self._jobs = 0

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in list(self._workers):
            self._discard(rank)

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
        """Results of ``function(place, *args)`` by rank. Raises WorkerError."""
        self._jobs += 1
        with _room(world_size):
            for rank in range(world_size):
                self._start(rank)
                job = _Job(self._jobs, Place(rank, world_size, rank), function, args, timeout)
                self._workers[rank].connection.send_bytes(pickle.dumps(job))
            outcomes = self._collect(world_size, timeout)
        succeeded = [rank for rank in outcomes.keys() & self._workers.keys() if outcomes[rank].error is None]
        for rank in succeeded:
            self._workers[rank].connection.send_bytes(b"leave the group")
        # torch names a group by how many this process has begun to join, and counts one that it could not join, because a peer had died:
        # in the next job a worker that has failed would wait for a group of another name.
        for rank in outcomes.keys() & self._workers.keys() - set(succeeded):
            self._discard(rank)
        for rank in succeeded:
            if self._threads_left(rank) > MOST_THREADS:
                self._discard(rank)
        in_time = sorted(outcomes.items(), key=lambda item: item[1].at)
        errors = [f"--- rank {rank}: {outcome.error}" for rank, outcome in in_time if outcome.error is not None]
        if errors:
            title = f"{function.__qualname__} failed on {len(errors)} of {world_size} ranks, first failure first"
            raise WorkerError("\n".join([title, *errors]))
        return [outcomes[rank].result for rank in range(world_size)]

    def _collect(self, world_size: int, timeout: float) -> dict[int, _Outcome]:
        """One outcome for every rank. Workers that died or came too late are discarded, which is their outcome."""
        outcomes: dict[int, _Outcome] = {}
        deadline = time.monotonic() + timeout
        while waiting := {self._workers[rank].connection: rank for rank in range(world_size) if rank not in outcomes}:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                outcomes |= {rank: self._lost(rank, "did not come back in time, killed") for rank in waiting.values()}
            for rank in [rank for connection, rank in waiting.items() if connection in ready]:
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return outcomes

    def _receive(self, rank: int) -> _Outcome:
        try:
            outcome: _Outcome = pickle.loads(self._workers[rank].connection.recv_bytes())
            return outcome
        except EOFError:
            self._workers[rank].process.join()
            return self._lost(rank, f"died with exit code {self._workers[rank].process.exitcode}")

    def _lost(self, rank: int, reason: str) -> _Outcome:
        self._discard(rank)
        return _Outcome(error=reason)

    def _start(self, rank: int) -> None:
        if rank in self._workers:
            return
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self._store.port, rank), name=f"rank {rank}", daemon=True)
        process.start()
        there.close()
        self._workers[rank] = _Worker(process, here)

    def _threads_left(self, rank: int) -> int:
        """How many threads the worker has after it has left its group."""
        try:
            return int(self._workers[rank].connection.recv_bytes())
        except EOFError:
            return MOST_THREADS + 1

    def _discard(self, rank: int) -> None:
        worker = self._workers.pop(rank)
        worker.connection.close()
        worker.process.kill()
        worker.process.join()


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


def be_patient() -> None:
    """This process, and those that it starts, are not called for the moment that somebody has a message for them, but when others have
    worked for a while. With eight ranks on two cores every message would change who computes."""
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _stay(rank: int) -> None:
    """All threads of a rank on one processor, where its data is. With ``be_patient`` five layouts of four and eight ranks took 5.9 s on two
    cores instead of 9.0."""
    if hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[rank % len(processors)]})


def _serve(connection: Connection, store_port: int, rank: int) -> None:
    """A worker's life: one job after the other, until the pool closes the connection."""
    be_patient()
    _stay(rank)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore("127.0.0.1", store_port, is_master=False)
    gc.freeze()  # what was imported need not be looked at again by each collection
    while True:
        try:
            succeeded, answer = _attempt(connection.recv_bytes(), store)
            connection.send_bytes(answer)
            # Leaving the group closes its sockets. Success: when every rank has its result. Failure: at once, so that the
            # peers learn that this rank will not answer.
            if succeeded:
                connection.recv_bytes()
                _leave()
                connection.send_bytes(str(len(os.listdir("/proc/self/task"))).encode())
            else:
                _leave()
                connection.recv_bytes()
        except EOFError:
            return


def _attempt(message: bytes, store: Store) -> tuple[bool, bytes]:
    try:
        return True, pickle.dumps(_Outcome(result=_perform(pickle.loads(message), store)))
    except Exception:
        return False, pickle.dumps(_Outcome(error=traceback.format_exc()))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # groups in reference cycles keep their threads: hundreds after some jobs


def _perform(job: _Job, store: Store) -> Any:
    place = job.place
    if place.world_size > 1:
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"job {job.number}", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=job.timeout),
        )
    return job.function(place, *job.args)
