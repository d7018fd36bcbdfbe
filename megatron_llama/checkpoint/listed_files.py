"""Lists of checksums beside a model: exports and conversions write them, readers of the model check
them. Small files are checked where they are read (``config/model_files.py``). This module checks
the large ones: their readers take pieces in any order, and a run begins to train before they are
compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from threading import Event
from typing import NamedTuple, Self

from megatron_llama.checkpoint.checkpoint_dir import TRACKER
from megatron_llama.checkpoint.checksums import file_sum
from megatron_llama.checkpoint.folders import write_synced
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.config.model_files import META_SUMS, SUMS, ListedSum, read_sums, sum_problem
from megatron_llama.engine.comm.device import take_least_priority, thread_pool
from megatron_llama.errors import CheckpointError

HASHING_THREADS = 2
"""Threads of one process that compare files while the same files are read."""


def seal_files(folder: Path, workers: int = HASHING_THREADS) -> None:
    """Write the checksums of all files of a folder that is about to get its name. Left out are
    files that a program which goes on there writes anew."""
    paths = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name not in (SUMS, TRACKER)
    )
    with thread_pool(workers) as pool:
        digests = list(pool.map(file_sum, paths))
    lines = (
        f"{digest}  {path.relative_to(folder)}\n"
        for path, digest in zip(paths, digests, strict=True)
    )
    if paths:
        write_synced(folder / SUMS, "".join(lines).encode())


class ListedFile(NamedTuple):
    """A file that a list names and that is there."""

    path: Path
    listed: ListedSum
    size: int
    """Bytes."""


class ListedFilesCheck:
    """Compares files of a folder with the lists of checksums there and in the folder above, in
    threads, while other code reads the same files: the bytes come from the disk once. It is a
    context manager, whose end stops comparisons that are left."""

    def __init__(
        self,
        folder: Path | None,
        files: Sequence[ListedFile] | None = None,
        *,
        workers: int = HASHING_THREADS,
        in_background: bool = False,
    ) -> None:
        """``files`` are by default all ``listed_files`` of the folder. With ``in_background`` the
        threads leave the processors to other work. Raises CheckpointError for a list that cannot be
        read."""
        self._folder = folder
        self._stopped = Event()
        files = listed_files(folder) if files is None else files
        self._pool = thread_pool(workers)
        self._comparisons = {
            file: self._pool.submit(_compare, file, self._stopped, in_background=in_background)
            for file in files
        }

    @property
    def problem(self) -> CheckpointError | None:
        """The damage to the files that have been compared so far."""
        try:
            self._refuse_damaged()
        except CheckpointError as error:
            return error
        return None

    @property
    def left(self) -> list[ListedFile]:
        """The files that have not been compared yet."""
        return [file for file, comparison in self._comparisons.items() if not comparison.done()]

    def is_done(self, seconds: float) -> bool:
        """Wait for all comparisons, ``seconds`` at most, and return whether they have ended."""
        return not wait(self._comparisons.values(), seconds).not_done

    def require(self) -> None:
        """Wait for all comparisons, and raise CheckpointError with the files that differ. Missing
        files are left to their readers."""
        wait(self._comparisons.values())
        self._refuse_damaged()

    def _refuse_damaged(self) -> None:
        ended = [job for job in self._comparisons.values() if job.done() and not job.cancelled()]
        problems = [problem for job in ended if (problem := job.result()) is not None]
        refuse(f"{self._folder} is damaged, or its files stand for each other:", problems)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)


def listed_files(folder: Path | None) -> list[ListedFile]:
    """Return the files of a folder that a list names and that are there, the largest first. There
    are none for ``None`` and in an object store. Raises CheckpointError for a list that cannot be
    read."""
    if not isinstance(folder, Path):
        return []
    named: Mapping[Path, ListedSum] = {
        place / name: listed
        for place in (folder.parent, folder)
        for name, listed in read_sums(place)[0].items()
    }
    present = [
        ListedFile(path, listed, path.stat().st_size)
        for path, listed in named.items()
        if folder in path.parents and path.name not in (SUMS, META_SUMS) and path.is_file()
    ]
    return sorted(present, key=lambda file: (-file.size, file.path))


def _compare(file: ListedFile, stopped: Event, *, in_background: bool) -> str | None:
    """Return the damage to a file; None without any, or if the comparison was stopped."""
    path, listed, _ = file
    if in_background:
        take_least_priority()
    try:
        digest = file_sum(path, listed.kind, stopped)
    except OSError as error:
        return sum_problem(path, str(error.strerror), listed)
    if stopped.is_set() or digest == listed.digest:
        return None
    return sum_problem(path, f"{listed.kind} {digest}", listed)
