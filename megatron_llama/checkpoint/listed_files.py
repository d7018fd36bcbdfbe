"""Lists of checksums beside a model: written by exports and conversions, checked by whoever reads
the model. Small files are checked where they are read (``config/model_files.py``); here it is the
large ones, of which readers take pieces in any order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Self

from megatron_llama.checkpoint.checkpoint_dir import TRACKER
from megatron_llama.checkpoint.checksums import file_sum
from megatron_llama.checkpoint.folders import write_synced
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.config.model_files import META_SUMS, SUMS, ListedSum, read_sums, sum_problem
from megatron_llama.distributed.device import thread_pool
from megatron_llama.distributed.launcher import place_from_environment

HASHING_THREADS = 2
"""Threads of one process that compare files while others are read."""


def seal_files(folder: Path, workers: int = HASHING_THREADS) -> None:
    """Write the checksums of all files of a folder that is about to get its name, but for those
    that a program which goes on there writes anew."""
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


class ListedFilesCheck:
    """Compares the files of a folder with the lists of checksums there and in the folder above, in
    threads, while others read the same files: the bytes come from the disk once. It is a section,
    whose end stops what has not been compared."""

    def __init__(
        self, folder: Path | None, *, rank: int = 0, ranks: int = 1, workers: int = HASHING_THREADS
    ) -> None:
        """``None`` and a folder in an object store have nothing to compare. Of the ``ranks``
        processes of a machine each compares its share of the files; ``rank`` is this one. Raises
        CheckpointError for a list that cannot be read."""
        self._folder = folder
        self._stopped = Event()
        files = _listed_files(folder)[rank % ranks :: ranks] if isinstance(folder, Path) else []
        self._pool = thread_pool(workers)
        self._found = [self._pool.submit(_damage, *entry, self._stopped) for entry in files]

    def require(self) -> None:
        """Wait for all comparisons, and raise CheckpointError with the files that differ. Files
        that are missing are not looked for: their readers miss them."""
        problems = [problem for future in self._found if (problem := future.result()) is not None]
        refuse(f"{self._folder} is damaged, or its files stand for each other:", problems)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)


def check_of_machine(folder: str | Path | None) -> ListedFilesCheck:
    """Return the share of this process in a check of a folder that all processes of its machine
    read."""
    place = place_from_environment()
    path = None if folder is None else Path(folder)
    return ListedFilesCheck(path, rank=place.local_rank, ranks=max(place.local_world_size, 1))


def _listed_files(folder: Path) -> list[tuple[Path, ListedSum]]:
    """Return the files of a folder that a list names and that are there, the largest first."""
    found: Mapping[Path, ListedSum] = {
        place / name: listed
        for place in (folder.parent, folder)
        for name, listed in read_sums(place)[0].items()
    }
    present = [
        (path, listed)
        for path, listed in found.items()
        if folder in path.parents and path.name not in (SUMS, META_SUMS) and path.is_file()
    ]
    return sorted(present, key=lambda entry: entry[0].stat().st_size, reverse=True)


def _damage(path: Path, listed: ListedSum, stopped: Event) -> str | None:
    try:
        digest = file_sum(path, listed.kind, stopped)
    except OSError as error:
        return sum_problem(path, str(error.strerror), listed)
    if stopped.is_set() or digest == listed.digest:
        return None
    return sum_problem(path, f"{listed.kind} {digest}", listed)
