"""Ranks on this machine: a pool of processes that is started once and joins a new gloo group for
every job."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megatron_llama.launch.join import meet_on_loopback
from megatron_llama.launch.launcher import Place, hide_accelerators

PRELOAD = ("megatron_llama.prove.run",)
"""Modules that the server imports once, before it forks the workers."""
GRACE_SECONDS = 10.0
"""Time for peers of a failed worker. They lose their connections and fail too, or are killed."""
MOST_THREADS = 8
"""Most threads of a worker between jobs. Each connection of a group that is kept alive has a thread
that wakes up a hundred times a second. After some jobs of Megatron-Core, whose modules keep groups,
thousands of threads took both processors of a machine."""
TASKS = Path("/proc/self/task")
"""Folder with an entry for each thread of this process, on Linux only."""
PRINTED_LAST = "\nthe last lines of "
"""Separator between the exception and the printed lines in a rank's error."""
SHOWN_LINES = 30
"""Most printed lines of a failed rank that its error has."""


class WorkerError(Exception):
    """Raised for a job that failed. The message has the ranks and their tracebacks."""

    def __init__(self, title: str, errors: Mapping[int, str]) -> None:
        """``errors`` are by rank, the first failure first."""
        told = [f"--- rank {rank}: {error}" for rank, error in errors.items()]
        super().__init__("\n".join([title, *told]))
        self.errors = errors


@dataclass(frozen=True)
class _Job:
    number: int
    place: Place
    function: Callable[..., Any]
    args: tuple[Any, ...]
    timeout: float
    output: Path | None


@dataclass(frozen=True)
class _Outcome:
    """The answer of a worker, which has only an ``error`` if the worker failed."""

    result: Any = None
    error: str | None = None
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection


class WorkerPool:
    """A pool of workers. As a context manager it leaves no worker at its end, even by Control-C.

    ``pool.run(world_size, function, *args)`` calls ``function(place, *args)`` on the first
    ``world_size`` workers. A worker that raises, dies or does not come back in time fails the job
    by rank, and is replaced at the next job."""

    def __init__(self, preload: Sequence[str] = PRELOAD, *, accelerators: bool = False) -> None:
        """``preload`` are modules that all workers find imported. ``accelerators`` says whether the
        workers see the GPUs of this machine."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._accelerators = accelerators
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: dict[int, _Worker] = {}
        self._jobs = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in list(self._workers):
            self._discard(rank)

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 180.0,
        output: Path | None = None,
    ) -> list[Any]:
        """Return the results of ``function(place, *args)`` by rank. Raises WorkerError.

        ``function`` is importable by name (module level); arguments and results are pickled. Each
        call is in a process group of its job, if there is more than one rank. If a folder
        ``output`` is given, the output of rank r goes to the file ``rank{r}.txt`` there, and its
        last lines into the error. ``timeout`` is in seconds."""
        self._jobs += 1
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        try:
            for rank in range(world_size):
                self._start(rank)
                place = Place(rank, world_size, rank, local_world_size=world_size)
                job = _Job(self._jobs, place, function, args, timeout, output)
                self._workers[rank].connection.send_bytes(pickle.dumps(job))
            outcomes = self._collect(world_size, timeout)
        except BaseException:
            # The results of these workers are no longer wanted. The next job gets new workers.
            for rank in range(world_size):
                self._discard(rank)
            raise
        kept = outcomes.keys() & self._workers.keys()
        succeeded = [rank for rank in kept if outcomes[rank].error is None]
        for rank in succeeded:
            self._workers[rank].connection.send_bytes(b"leave the group")
        # torch names a group by the number of groups that the process has begun to join, including
        # one that it could not join because a peer had died. In the next job a failed worker would
        # wait for a group with another name.
        for rank in kept - set(succeeded):
            self._discard(rank)
        for rank in succeeded:
            if self._threads_left(rank) > MOST_THREADS:
                self._discard(rank)
        in_time = sorted(outcomes.items(), key=lambda item: item[1].at)
        errors = {
            rank: outcome.error + _last_lines(output, rank)
            for rank, outcome in in_time
            if outcome.error is not None
        }
        if errors:
            raise WorkerError(
                f"{function.__qualname__} failed on {len(errors)} of {world_size} ranks, "
                "first failure first",
                errors,
            )
        return [outcomes[rank].result for rank in range(world_size)]

    def _collect(self, world_size: int, timeout: float) -> dict[int, _Outcome]:
        """Return the outcome of every rank. Workers that died or were late are discarded, with an
        error as their outcome."""
        outcomes: dict[int, _Outcome] = {}
        deadline = time.monotonic() + timeout
        while waiting := {
            self._workers[rank].connection: rank
            for rank in range(world_size)
            if rank not in outcomes
        }:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = "did not come back in time, killed"
                outcomes |= {rank: self._lost(rank, late) for rank in waiting.values()}
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
        process = self._context.Process(
            target=_serve,
            args=(there, self._store.port, rank, self._accelerators),
            name=f"rank {rank}",
            daemon=True,
        )
        process.start()
        there.close()
        self._workers[rank] = _Worker(process, here)

    def _threads_left(self, rank: int) -> int:
        """Return the number of threads of a worker that has left its group."""
        try:
            return int(self._workers[rank].connection.recv_bytes())
        except EOFError:
            return MOST_THREADS + 1

    def _discard(self, rank: int) -> None:
        worker = self._workers.pop(rank, None)
        if worker is None:
            return
        worker.connection.close()
        worker.process.kill()
        worker.process.join()


def be_patient() -> None:
    """Let this process and its children wait for their turn when a message arrives, until others
    have worked for a while. With eight ranks on two cores every message would otherwise switch
    processes."""
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _stay(rank: int) -> None:
    """Keep all threads of a rank on one processor, where its data is. With ``be_patient`` five
    layouts of four and eight ranks took 5.9 s on two cores instead of 9.0."""
    if hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[rank % len(processors)]})


def _serve(connection: Connection, store_port: int, rank: int, accelerators: bool) -> None:
    """Run one job after the other as a worker, until the pool closes the connection."""
    # A terminal sends Control-C to the workers, too. The pool decides when they end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    be_patient()
    _stay(rank)
    torch.set_num_threads(1)
    meet_on_loopback()
    if not accelerators:
        hide_accelerators()
    store = TCPStore("127.0.0.1", store_port, is_master=False)
    while True:
        # Collections need not look at imported objects again, which would take half of the time to
        # start a small run.
        gc.freeze()
        try:
            succeeded, answer = _attempt(connection.recv_bytes(), store)
            connection.send_bytes(answer)
            # Leaving the group closes its sockets. After success a rank leaves when every rank has
            # its result. After failure it leaves at once, so that its peers fail too.
            if succeeded:
                connection.recv_bytes()
                _leave()
                threads = len(list(TASKS.iterdir())) if TASKS.exists() else 1
                connection.send_bytes(str(threads).encode())
            else:
                _leave()
                connection.recv_bytes()
        except (EOFError, BrokenPipeError):
            return


def _attempt(message: bytes, store: Store) -> tuple[bool, bytes]:
    try:
        return True, pickle.dumps(_Outcome(result=_perform(pickle.loads(message), store)))
    except Exception:
        return False, pickle.dumps(_Outcome(error=traceback.format_exc()))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # Groups in reference cycles keep their threads, hundreds after some jobs. Objects that are
    # frozen before the next job are never collected.
    gc.collect()


def _perform(job: _Job, store: Store) -> Any:
    place = job.place
    printed = _printing_to(_file(job.output, place.rank)) if job.output else nullcontext()
    with printed:
        if place.world_size > 1:
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"job {job.number}", store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=job.timeout),
            )
        return job.function(place, *job.args)


def _file(output: Path, rank: int) -> Path:
    return output / f"rank{rank}.txt"


def _last_lines(output: Path | None, rank: int) -> str:
    """Return the last lines that a failed rank has printed, as its error has them."""
    file = _file(output, rank) if output is not None else None
    lines = file.read_text(errors="replace").splitlines() if file and file.exists() else []
    return "\n".join([f"{PRINTED_LAST}{file}:", *lines[-SHOWN_LINES:]]) if lines else ""


@contextmanager
def _printing_to(file: Path) -> Iterator[None]:
    """Append all output of this process to ``file``, including the output of libraries and messages
    about a process that dies."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(file, "ab") as opened:
        kept = os.dup(1), os.dup(2)
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
