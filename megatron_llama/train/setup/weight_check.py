"""The comparison of a run's weight files with the sums beside them while the run loads them and
trains. All ranks know the findings of each before anything is kept."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from megatron_llama.checkpoint.listed_files import ListedFile, ListedFilesCheck, listed_files
from megatron_llama.checkpoint.model_folders.formats import weight_files
from megatron_llama.config.limits import WEIGHT_CHECK_SECONDS
from megatron_llama.data.mounts import file_identity
from megatron_llama.engine.comm.object_collectives import (
    MEETING_SECONDS,
    all_gather_object,
    all_reduce_max,
    raise_error_on_all_ranks,
    raise_on_all_ranks,
)
from megatron_llama.engine.mesh import Axis
from megatron_llama.errors import CheckpointError, counted
from megatron_llama.launch.launcher import place_from_environment
from megatron_llama.metrics.events import FAULT
from megatron_llama.metrics.log import MetricLog

DONE, WAITING, GIVEN_UP = range(3)
"""The state of a rank's share. The largest value of all ranks counts."""


class WeightCheck:
    """A comparison in which each rank has its share of the files. The end of its section stops it.

    Saves wait for it, but not forever, and not at all if the run was asked to stop, since it may be
    ended soon. Then a line says that the weights are not known to be sound."""

    def __init__(self, folder: Path | None, check: ListedFilesCheck, world: Axis) -> None:
        """``check`` is this rank's share."""
        self._folder = folder
        self._check = check
        self._world = world
        self._is_done = False
        self._has_waited = False
        self._saved: list[Path] = []
        """Checkpoints from before the end of the comparison."""

    @property
    def problem(self) -> CheckpointError | None:
        """The problem of the files that this rank has compared so far."""
        problem = self._check.problem
        # Retention may have removed all but the last, which may still be incomplete.
        saved = [path for path in self._saved if path == self._saved[-1] or path.is_dir()]
        if problem is None or not saved:
            return problem
        return CheckpointError(
            f"{problem}\nwhat this run has saved meanwhile began with these weights; remove it: "
            f"{', '.join(map(str, saved))}"
        )

    def require(self) -> None:
        """Wait until the files are compared on all ranks. Collective. Raises CheckpointError, on
        every rank, with those that differ."""
        self._wait(math.inf, lambda: False)

    def wait_before_save(
        self, log: MetricLog, was_asked_to_stop: Callable[[], bool], *, stopping: bool
    ) -> None:
        """Wait as long as a save may wait, with a line if some files are not compared then.
        Collective. Raises CheckpointError, on every rank, with those that differ."""
        if self._is_done:
            return
        seconds = 0.0 if stopping or self._has_waited else WEIGHT_CHECK_SECONDS
        self._wait(seconds, was_asked_to_stop)
        if not self._is_done and (stopping or not self._has_waited):
            self._say_what_is_left(log, stopping=stopping)
        self._has_waited = True

    def remember_save(self, checkpoint: Path | None) -> None:
        """Note a checkpoint that was written, or is about to be: damage that is found later is in
        it."""
        if not self._is_done and checkpoint is not None and checkpoint not in self._saved:
            self._saved.append(checkpoint)

    def wait_at_end(
        self, log: MetricLog, was_asked_to_stop: Callable[[], bool], *, stopped: bool
    ) -> bool:
        """Wait for all files, unless the run was asked to stop, and return whether they are
        compared. Collective. Raises CheckpointError, on every rank, with those that differ."""
        if self._is_done or stopped:
            return self._is_done
        self._wait(math.inf, was_asked_to_stop)
        if not self._is_done:
            self._say_what_is_left(log, stopping=True)
        return self._is_done

    def _wait(self, seconds: float, gives_up: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        words = "comparing the files of the weights with their sums"
        with self._world.recorder.outside_steps(words):
            # A large share of a slow disk takes longer than a collective may wait.
            waiting = True
            while waiting:
                left = min(max(deadline - time.monotonic(), 0.0), MEETING_SECONDS)
                state = WAITING if not self._check.is_done(left) else DONE
                if gives_up() or (state == WAITING and time.monotonic() >= deadline):
                    state = GIVEN_UP
                waiting = self._largest(state) == WAITING
            # Ranks that are done do not know when another one gives up.
            self._is_done = self._largest(DONE if self._check.is_done(0.0) else WAITING) == DONE
            raise_error_on_all_ranks(self.problem, self._world)

    def _largest(self, state: int) -> int:
        largest, agreed = all_reduce_max(state, self._world)
        agreed.wait()
        return int(largest)

    def _say_what_is_left(self, log: MetricLog, *, stopping: bool) -> None:
        by_rank = all_gather_object(self._check.left, self._world)
        # Machines with their own copies have the same names for them.
        left = {file.path: file for files in by_rank for file in files}.values()
        size = sum(file.size for file in left) / 2**30
        lists = sorted({str(file.listed.list) for file in left})
        are = "is" if len(left) == 1 else "are"
        words = (
            f"{counted(len(left), 'file')} of the weights in {self._folder}, {size:,.1f} GiB, "
            f"{are} not compared with {', '.join(lists)} yet, so what the run keeps now may have "
            "begun with damaged weights; "
        )
        words += (
            "it ends without comparing the rest, and exports nothing: compare the files before you "
            "go on with what is kept"
            if stopping
            else "the comparison goes on, and damage ends the run"
        )
        log.say(f" warning: {words}")
        log.event(FAULT, words=words)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._check.__exit__(*error)


def begin_weight_check(
    folder: str | Path | None, world: Axis, *, in_background: bool = False
) -> WeightCheck:
    """Begin to compare the files of a folder's weights; those of one disk are shared out among all
    processes that read it. ``None`` has no files. With ``in_background`` the threads leave the
    processors to other work. Collective. Raises CheckpointError, on every rank, for a list that
    cannot be read, or a folder without weights."""
    path = Path(folder) if folder is not None else None
    # No thread starts before all ranks go on: after an error of one rank no code would end the
    # threads of the others.
    with raise_on_all_ranks(world):
        files = files_of_weights(path)
    local_rank = place_from_environment().local_rank
    seen = all_gather_object((identity(files), local_rank), world)
    return begin_own_share(path, files, seen, world, in_background=in_background)


def files_of_weights(folder: Path | None) -> list[ListedFile]:
    """Return the files that ``begin_weight_check`` compares. Raises CheckpointError."""
    # Other files beside them, such as the weights in another format, are not compared.
    read = set(weight_files(folder)) if folder is not None else set()
    return [file for file in listed_files(folder) if file.path in read]


def begin_own_share(
    folder: Path | None,
    files: Sequence[ListedFile],
    seen: Sequence[tuple[str, int]],
    world: Axis,
    *,
    in_background: bool,
) -> WeightCheck:
    """Begin to compare this rank's share of ``files``, the ``files_of_weights``. ``seen`` has the
    ``identity`` of the files of each rank, and its number on its machine."""
    rank, ranks = share_of(world.rank, seen)
    check = ListedFilesCheck(folder, files[rank::ranks], in_background=in_background)
    return WeightCheck(folder, check, world)


def share_of(rank: int, seen: Sequence[tuple[str, int]]) -> tuple[int, int]:
    """Return the index of a rank's share of the files, and the number of shares. ``seen`` has the
    files that each rank sees, and its number on its machine. A thousand machines that each read all
    of a shared disk would take it from the run.

    The first shares, which have the largest files, are on as many machines as there are."""
    sharing = [peer for peer, (files, _) in enumerate(seen) if files == seen[rank][0]]
    sharing.sort(key=lambda peer: (seen[peer][1], peer))
    return sharing.index(rank), len(sharing)


def identity(files: Sequence[ListedFile]) -> str:
    """Return a digest of the files that this process sees: processes with the same digest share a
    disk."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.listed.digest};".encode())
        # The reader of a file that has vanished reports it.
        with suppress(OSError):
            digest.update(f"{file_identity(str(file.path))};".encode())
    return digest.hexdigest()
