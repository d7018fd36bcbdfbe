"""Saves that training does not wait for: each rank has a process that writes what the rank has
copied into memory that both share.

The process is forked while its rank has one thread and has touched no device, and it dies with its
rank: it must not go on with a dead rank's save while a restarted run writes there. The processes
tell that of rank 0, or of the writer of their part of the index, through the job's store that their
files are on the disk. Nothing here is collective, so nothing can interfere with the order of
collectives.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from operator import itemgetter
from pathlib import Path
from typing import cast

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistNetworkError,
    DistStoreError,
    Store,
)

from megatron_llama.checkpoint.checkpoint_dir import Retention, Standing
from megatron_llama.checkpoint.chunks import Region
from megatron_llama.checkpoint.finite import NotFinite
from megatron_llama.checkpoint.folders import discard, staging
from megatron_llama.checkpoint.lease import Held
from megatron_llama.checkpoint.native import RankSavePlan, finish
from megatron_llama.checkpoint.storage import WrittenParts, write_parts
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.object_collectives import common_error
from megatron_llama.errors import CheckpointError, ConfigError
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.processes import end_with_parent
from megatron_llama.launch.store import connect

RANK = itemgetter(0)
Failures = list[tuple[int, CheckpointError]]
"""Ranks with their errors: the answer of a rank that has failed, and of a writer of a part of the
index if some of the ranks have whose chunks are in it."""
SLOTS = 2
"""Saves for which there is memory: one may begin while the previous one is being written."""
ALIGN_BYTES = 64
PATIENCE_SECONDS = 30.0
"""Seconds that a run which ends with an error waits for its last saves."""
STORE_GONE_SECONDS = 4.0
"""Seconds that a writing process without the job's store waits before it tells its rank."""
NICENESS = 10
"""Niceness of the writing process: where cores are few, training comes first."""


@contextmanager
def in_background(place: Place) -> Iterator[BackgroundSaver]:
    """A section with a writing process. Raises ConfigError where the system cannot have one."""
    if not hasattr(os, "memfd_create"):
        do = "leave --async-save out"
        raise ConfigError(
            "--async-save",
            got=sys.platform,
            expected="Linux, whose memory two processes can share",
            do=do,
        )
    with closing(BackgroundSaver(place)) as background:
        yield background


@dataclass(frozen=True)
class SaveTask:
    """One save: the copy in slot ``slot`` becomes the checkpoint ``target``."""

    number: int
    slot: int
    target: Path
    meta: bytes
    keep: Retention
    publishes_not_finite: bool
    """Whether it becomes a checkpoint even if some of its values are not finite."""
    held: Held | None

    @property
    def run(self) -> str:
        """The run's mark in the name of the staged folder."""
        return self.held.run if self.held is not None else ""


@dataclass(frozen=True)
class SaveOutcome:
    """Result of a save on this rank. On rank 0 it stands for all ranks."""

    target: Path
    error: CheckpointError | None = None
    not_finite: tuple[NotFinite, ...] = ()
    """The tensors with values that are infinite or NaN. Only rank 0 knows them."""


class BackgroundSaver:
    """A rank's end of its writing process. It has to be made before the process group, the device
    and threads exist, and closed at the end."""

    def __init__(self, place: Place) -> None:
        self._place = place
        # An anonymous file: containers limit /dev/shm to 64 MB. Each page takes memory only when it
        # is first written.
        self._memory = os.memfd_create("checkpoint")
        context = multiprocessing.get_context("fork")
        self._connection, there = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(there, self._connection, self._memory, place, os.getpid()),
            name="saving",
        )
        self._process.start()
        there.close()
        self._buffers: SharedBuffers | None = None
        self._room = ""
        self._open: list[SaveTask] = []
        self._started = 0

    @property
    def full(self) -> bool:
        """Whether the next save has to wait for an earlier one."""
        return len(self._open) == SLOTS

    @property
    def busy(self) -> bool:
        """Whether a save is under way on this rank."""
        return bool(self._open)

    def write(
        self,
        plan: RankSavePlan,
        target: Path,
        meta: bytes,
        keep: Retention,
        held: Held | None = None,
        *,
        publishes_not_finite: bool = True,
    ) -> None:
        """Copy the parts, and have them written into the staged folder of ``target``. The plan is
        the same every time, and ``full`` must be false. ``held`` is the run's lease on the folder;
        ``publishes_not_finite``: see ``SaveTask``.

        The copies are complete on return: then training may change the tensors."""
        assert not self.full, "collect an outcome first"
        if self._buffers is None:
            # Before the process hears of it: the first to arrive gives the memory its size, and the
            # process may be held to smaller files than its rank.
            self._buffers = SharedBuffers(self._memory, plan.parts)
            self._send(replace(plan, parts=_outlines(plan.parts)))
            self._room = plan.room
            for device in {part.tensor.device for part in plan.parts}:
                self._buffers.pin(device)
        slot = next(slot for slot in range(SLOTS) if slot not in {task.slot for task in self._open})
        self._buffers.fill(slot, plan.parts)
        task = SaveTask(self._started, slot, target, meta, keep, publishes_not_finite, held)
        self._started += 1
        self._open.append(task)
        self._send(task)

    def _send(self, message: object) -> None:
        with suppress(OSError):  # the process is gone: the next ``collect`` finds that out
            self._connection.send_bytes(pickle.dumps(message))

    def collect(self, seconds: float | None = 0.0) -> SaveOutcome | None:
        """Return the outcome of the oldest save under way, or None if there is none yet. Wait for
        it so many seconds; with None until it is there."""
        if not self._open or not self._connection.poll(seconds):
            return None
        try:
            outcome: SaveOutcome = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return self._lost()
        self._open.pop(0)
        return outcome

    def _lost(self) -> SaveOutcome:
        """Return the outcome of a save whose process is gone."""
        self._process.join()
        task = self._open.pop(0)
        where = f"{task.target} on rank {self._place.rank}"
        got = f"a writing process that ended with code {self._process.exitcode}"
        do = "look at the memory of that machine (a process killed for memory ends with -9)"
        error = CheckpointError(where, got=got, expected="its part of the checkpoint", do=do)
        # Rank 0's process must not wait for what this rank will never write.
        if self._place.world_size > 1 and self._place.rank:
            with suppress(DistError):  # the store is gone with its host, and no process waits
                failed = [(self._place.rank, error)]
                _answer(connect(self._place, self._room), task, self._place.rank, failed)
        return SaveOutcome(task.target, error)

    def close(self) -> None:
        """Give saves under way some time, and end the process. Errors of saves were collected
        before, or do not matter any more."""
        while self._open and self.collect(PATIENCE_SECONDS) is not None:
            pass
        self._connection.close()
        self._process.join(None if not self._open else 0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        os.close(self._memory)


class SharedBuffers:
    """Memory that two processes share, with room for the parts of a rank ``SLOTS`` times."""

    def __init__(self, memory: int, parts: Sequence[Region]) -> None:
        starts = []
        end = 0
        for part in parts:
            starts.append(end)
            end += -(-part.tensor.numel() * part.tensor.element_size() // ALIGN_BYTES) * ALIGN_BYTES
        size = max(1, end) * SLOTS
        os.ftruncate(memory, size)
        self._whole = torch.frombuffer(mmap.mmap(memory, size), dtype=torch.uint8)
        self.slots = tuple(
            tuple(
                _view(self._whole, slot * end + start, part)
                for start, part in zip(starts, parts, strict=True)
            )
            for slot in range(SLOTS)
        )

    def pin(self, device: torch.device) -> None:
        """Pin the memory, so that the device copies into it at full speed."""
        devices.pin(self._whole, device)

    def fill(self, slot: int, parts: Sequence[Region]) -> None:
        """Copy the parts, and wait for the copies."""
        for place, part in zip(self.slots[slot], parts, strict=True):
            place.tensor.copy_(part.tensor, non_blocking=True)
        for device in {part.tensor.device for part in parts}:
            devices.wait_for_copies(device)


def _view(whole: torch.Tensor, start: int, part: Region) -> Region:
    size = part.tensor.numel() * part.tensor.element_size()
    return replace(
        part, tensor=whole[start : start + size].view(part.tensor.dtype).view(part.tensor.shape)
    )


def _outlines(parts: Sequence[Region]) -> tuple[Region, ...]:
    """Return the same parts with tensors on the meta device."""
    return tuple(
        replace(part, tensor=torch.empty(part.tensor.shape, dtype=part.tensor.dtype, device="meta"))
        for part in parts
    )


def _serve(
    connection: Connection, parents: Connection, memory: int, place: Place, parent: int
) -> None:
    """Run the writing process: one save after the other, until the rank closes the connection."""
    # The rank's end of the pipe was inherited: while open here, the end of the rank is not seen.
    parents.close()
    end_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # These are meant for the rank, but a terminal or launcher sends them to the process group.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    torch.set_num_threads(1)  # the threads of the parent's pool do not exist after a fork
    try:
        plan = pickle.loads(connection.recv_bytes())
        writer = _Writer(place, SharedBuffers(memory, plan.parts), plan)
        while True:
            task = pickle.loads(connection.recv_bytes())
            try:
                outcome = writer.perform(task)
            except DistNetworkError:
                # The rank finds the reason by itself, and reports it: a launcher that was killed,
                # or a dead rank.
                connection.poll(STORE_GONE_SECONDS)
                outcome = SaveOutcome(task.target, _without_store(task.target, place.rank))
            connection.send_bytes(pickle.dumps(outcome))
    except (EOFError, OSError):
        return


def _without_store(target: Path, rank: int) -> CheckpointError:
    return CheckpointError(
        f"{target} on rank {rank}",
        got="no connection to the job's store",
        expected="the other ranks' word that their parts are written",
        do="look at the process that hosts the store: torchrun, or rank 0",
    )


class _Writer:
    def __init__(self, place: Place, buffers: SharedBuffers, plan: RankSavePlan) -> None:
        self._place = place
        self._buffers = buffers
        self._plan = plan
        self._store: Store | None = None
        self._known: dict[str, Standing] = {}
        """Standings of older checkpoints that have been read, by name."""

    def perform(self, task: SaveTask) -> SaveOutcome:
        """Write this rank's chunks. The writer of a part of the index waits for the ranks whose
        chunks are in it; rank 0 waits for all others, or for all writers, and completes the
        checkpoint."""
        plan, rank = self._plan, self._place.rank
        folder = staging(task.target, task.run)
        answer = self._caught(lambda: write_parts(folder, rank, self._buffers.slots[task.slot]))
        part = plan.part
        if part is not None:
            written, failed = self._sorted_out([answer, *self._received(task, part.ranks[1:])])
            answer = failed or self._caught(lambda: part.write(folder, written))
        if rank:
            _answer(self._connected(), task, rank, answer)
            return SaveOutcome(task.target)
        size = self._place.world_size
        reporting = plan.writers or range(size)
        written, failed = self._sorted_out([answer, *self._received(task, reporting[1:])])
        if failed:
            discard(task.target, task.run)
            error = failed[0][1] if size == 1 else common_error(sorted(failed, key=RANK), size)
            return SaveOutcome(task.target, cast(CheckpointError, error))
        assert plan.index is not None
        try:
            saved = finish(
                task.target,
                plan.index,
                written,
                task.meta,
                task.keep,
                task.held,
                publishes_not_finite=task.publishes_not_finite,
                known=self._known,
            )
        except CheckpointError as problem:
            discard(task.target, task.run)
            return SaveOutcome(task.target, problem)
        if not saved.published:
            discard(task.target, task.run)
        return SaveOutcome(task.target, not_finite=saved.not_finite)

    def _caught(self, write: Callable[[], WrittenParts]) -> WrittenParts | Failures:
        try:
            return write()
        except CheckpointError as error:
            return [(self._place.rank, error)]

    @staticmethod
    def _sorted_out(
        answers: Iterable[WrittenParts | Failures],
    ) -> tuple[list[WrittenParts], Failures]:
        written, failed = list[WrittenParts](), Failures()
        for answer in answers:
            if isinstance(answer, WrittenParts):
                written.append(answer)
            else:
                failed += answer
        return written, failed

    def _connected(self) -> Store:
        if self._store is None:
            self._store = connect(self._place, self._plan.room)
        return self._store

    def _received(self, task: SaveTask, ranks: Iterable[int]) -> Iterator[WrittenParts | Failures]:
        """Yield the answers of other ranks' processes, or of such a rank if its process is dead.
        One of them comes, or this process ends with its rank."""
        for rank in ranks:
            store, key = self._connected(), _key(task, rank)
            while True:
                try:
                    answer: WrittenParts | Failures = pickle.loads(store.get(key))
                except DistStoreError:
                    continue  # the store's timeout: a large part on a slow disk takes longer
                break
            store.delete_key(key)
            yield answer


def _key(task: SaveTask, rank: int) -> str:
    return f"{task.number}/{rank}"


def _answer(store: Store, task: SaveTask, rank: int, answer: object) -> None:
    store.set(_key(task, rank), pickle.dumps(answer))  # type: ignore[arg-type]  # bytes are as good
