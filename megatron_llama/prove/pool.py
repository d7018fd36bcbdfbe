"""Ranks on this machine: a pool of processes, started once, that joins a fresh gloo group for every
job."""

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
"""Imported once, by the server that the workers are forked from."""
GRACE_SECONDS = 10.0
"""After one worker failed, its peers lose their connections and fail too; those that do not are
killed."""
MOST_THREADS = 8
"""Of a worker between jobs. Each connection of a group that something keeps alive has a thread that
wakes up a hundred times a second: after some jobs of Megatron-Core, whose modules keep groups,
thousands of them took both processors of a machine."""
TASKS = Path("/proc/self/task")
"""Has an entry for each thread of this process; on Linux only."""
PRINTED_LAST = "\nthe last lines of "
"""What stands in a rank's error between what it has raised and what it had printed."""
SHOWN_LINES = 30
"""Of what a rank that failed has printed."""


class WorkerError(Exception):
    """A job failed. The message names the ranks and holds their tracebacks."""

    def __init__(self, title: str, errors: Mapping[int, str]) -> None:
        """``errors``: by rank, the first failure first."""
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
    """What a worker sent back; ``error`` alone when it failed."""

    result: Any = None
    error: str | None = None
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection


class WorkerPool:
    """The pool. Use it as a context manager: no worker is left when it ends, also by Control-C.

    ``pool.run(world_size, function, *args)`` calls ``function(place, *args)`` on the first
    ``world_size`` workers. A worker that raises, dies or does not come back in time fails the job
    by rank, and is replaced at the next job."""

    def __init__(self, preload: Sequence[str] = PRELOAD, *, accelerators: bool = False) -> None:
        """``preload``: modules that all workers find imported. ``accelerators``: whether they see
        the GPUs of this machine."""
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
        """Results of ``function(place, *args)`` by rank. Raises WorkerError.

        ``function`` is importable by name (module level); arguments and results are pickled. Each
        call is in a process group of the job's own, if there is more than one rank. What rank r
        prints goes to the file ``rank{r}.txt`` in the folder ``output``, if one is given, and the
        last lines of it into the error. ``timeout`` is in seconds."""
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
            # What the workers are doing belongs to nobody any more: the next job gets others.
            for rank in range(world_size):
                self._discard(rank)
            raise
        kept = outcomes.keys() & self._workers.keys()
        succeeded = [rank for rank in kept if outcomes[rank].error is None]
        for rank in succeeded:
            self._workers[rank].connection.send_bytes(b"leave the group")
        # torch names a group by how many this process has begun to join, and counts one that it
        # could not join, because a peer had died: in the next job a worker that has failed would
        # wait for a group of another name.
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
        """One outcome for every rank. Workers that died or came too late are discarded, which is
        their outcome."""
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
        """How many threads the worker has after it has left its group."""
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
    """This process, and those that it starts, are not called for the moment that somebody has a
    message for them, but when others have worked for a while. With eight ranks on two cores every
    message would change who computes."""
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _stay(rank: int) -> None:
    """All threads of a rank on one processor, where its data is. With ``be_patient`` five layouts
    of four and eight ranks took 5.9 s on two cores instead of 9.0."""
    if hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[rank % len(processors)]})


def _serve(connection: Connection, store_port: int, rank: int, accelerators: bool) -> None:
    """A worker's life: one job after the other, until the pool closes the connection."""
    # A terminal sends Control-C to the workers, too. What becomes of them is for the pool to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    be_patient()
    _stay(rank)
    torch.set_num_threads(1)
    meet_on_loopback()
    if not accelerators:
        hide_accelerators()
    store = TCPStore("127.0.0.1", store_port, is_master=False)
    while True:
        # What was imported need not be looked at again by each collection: that is half of the time
        # in which a small run starts. A run of the trainer undoes it at its end.
        gc.freeze()
        try:
            succeeded, answer = _attempt(connection.recv_bytes(), store)
            connection.send_bytes(answer)
            # Leaving the group closes its sockets. Success: when every rank has its result.
            # Failure: at once, so that the peers learn that this rank will not answer.
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
    # Groups in reference cycles keep their threads, hundreds after some jobs; and what is frozen
    # before the next job is never collected.
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
    """What a rank has printed before it failed, as it follows its error."""
    file = _file(output, rank) if output is not None else None
    lines = file.read_text(errors="replace").splitlines() if file and file.exists() else []
    return "\n".join([f"{PRINTED_LAST}{file}:", *lines[-SHOWN_LINES:]]) if lines else ""


@contextmanager
def _printing_to(file: Path) -> Iterator[None]:
    """Have everything that this process prints appended to ``file``: also what libraries print,
    and what is said about a process that dies."""
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
