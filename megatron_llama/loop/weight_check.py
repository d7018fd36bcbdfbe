"""The files from which a run takes its weights are compared with the sums beside them while the run
loads them and trains. What one rank finds is known to all before anything is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from megatron_llama.checkpoint.listed_files import ListedFile, ListedFilesCheck, listed_files
from megatron_llama.conversion.formats import weight_files
from megatron_llama.data.mounts import file_identity
from megatron_llama.distributed.comm.object_collectives import (
    MEETING_SECONDS,
    all_gather_object,
    all_reduce_max,
    raise_error_on_all_ranks,
    raise_on_all_ranks,
)
from megatron_llama.distributed.launcher import place_from_environment
from megatron_llama.distributed.mesh import Axis
from megatron_llama.errors import CheckpointError


class WeightCheck:
    """A comparison in which each rank has its share of the files. It is a section, whose end stops
    what has not been compared."""

    def __init__(self, check: ListedFilesCheck, world: Axis) -> None:
        self._check = check
        self._world = world

    @property
    def problem(self) -> CheckpointError | None:
        """What is wrong with the files that this rank has compared so far."""
        return self._check.problem

    def require(self) -> None:
        """Wait until the files are compared on all ranks. Collective. Raises CheckpointError, on
        every rank, with those that differ."""
        words = "comparing the files of the weights with their sums"
        with self._world.recorder.outside_steps(words):
            # A large share of a slow disk takes longer than a collective may wait.
            waiting = True
            while waiting:
                waits = int(not self._check.is_done(MEETING_SECONDS))
                waits_somewhere, agreed = all_reduce_max(waits, self._world)
                agreed.wait()
                waiting = bool(waits_somewhere)
            raise_error_on_all_ranks(self.problem, self._world)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._check.__exit__(*error)


def begin_weight_check(
    folder: str | Path | None, world: Axis, *, in_background: bool = False
) -> WeightCheck:
    """Begin to compare the files from which the weights of a folder are read; those of one disk are
    shared out among all processes that read it. ``None`` has no files. With ``in_background`` the
    threads leave the processors to whoever computes meanwhile. Collective. Raises CheckpointError,
    on every rank, for a list that cannot be read, or a folder without weights."""
    path = Path(folder) if folder is not None else None
    # No thread is started before all ranks go on: nobody would end those of the others.
    with raise_on_all_ranks(world):
        # What else lies beside, such as the weights in another format, takes nobody's time.
        read = set(weight_files(path)) if path is not None else set()
        files = [file for file in listed_files(path) if file.path in read]
    local_rank = place_from_environment().local_rank
    seen = all_gather_object((_identity(files), local_rank), world)
    rank, ranks = share_of(world.rank, seen)
    own = files[rank::ranks]
    return WeightCheck(ListedFilesCheck(path, own, in_background=in_background), world)


def share_of(rank: int, seen: Sequence[tuple[str, int]]) -> tuple[int, int]:
    """Return which of how many shares of the files a rank compares; ``seen`` has of each rank what
    it sees, and its number on its machine. A thousand machines that each read all of a disk that
    they share would take it from the run.

    The first shares, which have the largest files, are on as many machines as there are."""
    sharing = [other for other, (files, _) in enumerate(seen) if files == seen[rank][0]]
    sharing.sort(key=lambda other: (seen[other][1], other))
    return sharing.index(rank), len(sharing)


def _identity(files: Sequence[ListedFile]) -> str:
    """Return a digest of which files this process sees: those that have it alike share a disk."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.listed.digest};".encode())
        # A file that went meanwhile is missed by its reader.
        with suppress(OSError):
            digest.update(f"{file_identity(str(file.path))};".encode())
    return digest.hexdigest()
