"""Compares the files of datasets with their sums: all files for ``inspect``, or some in the
background of a run, without taking resources that the run needs."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from megatron_llama.config.limits import DATASET_CHECK_SECONDS
from megatron_llama.data import page_cache
from megatron_llama.data.meta import SUMS, read_meta
from megatron_llama.data.mounts import file_identity
from megatron_llama.data.sums import SUFFIXES, DatasetSums, FileSums
from megatron_llama.data.words import is_url
from megatron_llama.engine.comm import device as devices
from megatron_llama.errors import DataError, listing

T = TypeVar("T")
BLOCK_BYTES = 4 << 20
"""Bytes that are read at a time: enough that the interpreter is rarely needed, and few enough that
a run which ends need not wait."""
RETRY_SECONDS = (1.0, 5.0, 20.0)
"""Pauses after each read of a run's check that the system has refused: a file of a server may have
a new handle then, and a process a free descriptor."""


def dataset_sums(prefix: str) -> DatasetSums | None:
    """Return the sums of a dataset; None for one of Megatron, or of an older version. Raises
    DataError for a meta.json that is damaged."""
    sums = (read_meta(prefix) or {}).get(SUMS)
    assert sums is None or isinstance(sums, DatasetSums)
    return sums


def verify_dataset(prefix: str) -> DatasetSums:
    """Read the files of a dataset, on the disk or behind a URL, and return their sums. Raises
    DataError with each file that differs from its sums, and for a dataset without sums."""
    sums = dataset_sums(prefix)
    if sums is None:
        raise DataError(
            f"{prefix}.meta.json",
            got="no sums, as of a dataset of Megatron or of an older version",
            expected="sums of the files",
            do="preprocess the text again to have them",
        )
    problems = []
    for suffix, file_sums in sums.by_suffix().items():
        name = prefix + suffix
        try:
            if is_url(name):
                # A run compares files on disks alone: readers of URLs are loaded for `inspect`.
                from megatron_llama.data.remote_indexed import verify_remote

                verify_remote(name, file_sums)
            else:
                _verify_local(name, file_sums)
        except DataError as problem:
            problems.append(str(problem))
    if problems:
        raise DataError(
            problems[0] if len(problems) == 1 else listing(f"{prefix} is damaged:", problems)
        )
    return sums


def _verify_local(name: str, sums: FileSums) -> None:
    try:
        with PieceReader(name, sums) as reader:
            for piece in range(len(sums.pieces)):
                reader.require(piece)
    except OSError as error:
        do = "mend the disk or its permissions, or copy the dataset again"
        got = _words(error)
        raise DataError(name, got=got, expected="a readable file", do=do) from error


class PieceReader:
    """Reads the pieces of one file on the disk. Pages that the kernel did not hold before are
    dropped again: a run's own pages must not make room for bytes that are read once."""

    def __init__(self, name: str, sums: FileSums) -> None:
        """Raises DataError if the file has another size, OSError if it cannot be opened."""
        self._name = name
        self._sums = sums
        self._buffer = memoryview(bytearray(BLOCK_BYTES))
        self._file = os.open(name, os.O_RDONLY)
        try:
            sums.require_size(name, os.fstat(self._file).st_size)
        except BaseException:
            os.close(self._file)
            raise
        page_cache.read_nothing_ahead(self._file)

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, *args: object) -> None:
        os.close(self._file)

    def require(self, piece: int, pause: Callable[[float], bool] = lambda _: False) -> bool:
        """Raise DataError unless a piece is as it was written, OSError if it cannot be read.
        ``pause`` is called with the seconds of each block; if it returns True, the reading ends and
        the result is False."""
        digest = hashlib.sha256()
        start, stop = self._sums.ends(piece)
        while start < stop:
            began = time.monotonic()
            content = self._read(start, min(stop - start, BLOCK_BYTES))
            if not content:
                self._sums.require_size(self._name, start)  # it has become shorter
            digest.update(content)
            start += len(content)
            if pause(time.monotonic() - began):
                return False
        self._sums.require_piece(self._name, piece, digest)
        return True

    def _read(self, start: int, count: int) -> memoryview:
        """Return some bytes from ``start`` on, ``count`` at most; none at the end of the file."""
        absent = page_cache.absent_ranges(self._file, start, count)
        wanted = self._buffer[:count]
        content = wanted[: os.preadv(self._file, [wanted], start)]
        page_cache.forget(self._file, absent)
        return content


class DatasetCheck:
    """A thread that compares datasets on the disk with their sums while a run trains. It has the
    least priority, rests as long as it reads, and ends after some minutes, finished or not."""

    def __init__(
        self,
        prefixes: Sequence[str],
        *,
        share: tuple[int, int] = (0, 1),
        say: Callable[[str], None],
        seconds: float = DATASET_CHECK_SECONDS,
        first: float | None = None,
    ) -> None:
        """``share`` (r, n): of each file the r-th of n parts is read, because other machines read
        the others: see ``share_of``. ``say`` prints a line, from any thread. ``first``, from 0 to
        1, is where in the share the check begins. By default the place is drawn, so that several
        starts that each end too soon read all of a large dataset together."""
        self.problem: DataError | None = None
        """Damage to a file, as soon as it is known."""
        self._share = share
        # The generators that a run seeds would draw the same at each start.
        self._first = random.SystemRandom().random() if first is None else first
        self._say = say
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._end = threading.Event()
        local = [prefix for prefix in dict.fromkeys(prefixes) if not is_url(prefix)]
        self._thread = (
            devices.start_thread(self._run, local, name="check of the data") if local else None
        )

    def __enter__(self) -> DatasetCheck:
        return self

    def __exit__(self, *args: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)  # a server of files may not answer

    def finish(self) -> None:
        """Wait until everything is compared, or the time is up."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, prefixes: Sequence[str]) -> None:
        devices.take_least_priority()
        try:
            self._compare(prefixes)
        except Exception as error:  # an error that a thread raises is not seen elsewhere
            _note(f"the check of --data-path has ended with {type(error).__name__}: {error}")

    def _compare(self, prefixes: Sequence[str]) -> None:
        files = [file for prefix in prefixes for file in self._files(prefix)]
        size = sum(sums.size for _, sums in files)
        pieces = [(name, sums, piece) for name, sums in files for piece in self._own(sums)]
        share = sum(map(_size, pieces))
        first = min(int(self._first * len(pieces)), len(pieces) - 1)
        read = 0
        for name, sums, piece in pieces[first:] + pieces[:first]:
            try:
                whole = self._retry(partial(self._require, name, sums, piece))
            except DataError as error:
                self.problem = error
                return
            except OSError as error:
                start, stop = sums.ends(piece)
                _note(_given_up(f"{name}: bytes {start} to {stop}", error, read, share))
                return
            if not whole:
                if not self._end.is_set():
                    self._say(_unfinished(read, share, size, self._seconds))
                return
            read += _size((name, sums, piece))

    def _files(self, prefix: str) -> Sequence[tuple[str, FileSums]]:
        """Return the files of a dataset with their sums. There are none if its meta.json, which the
        run has read before, cannot be read now: without sums nothing is known to be damaged."""
        try:
            sums = self._retry(partial(_sums_of_files, prefix))
        except (OSError, DataError) as error:
            _note(f"{prefix} is not compared with its sums: {error}")
            return ()
        return [(prefix + suffix, of_file) for suffix, of_file in (sums or {}).items()]

    def _require(self, name: str, sums: FileSums, piece: int) -> bool:
        # The file is opened anew for each piece: the handle of a server's file may become stale.
        with PieceReader(name, sums) as reader:
            return reader.require(piece, self._pause)

    def _retry(self, act: Callable[[], T]) -> T | None:
        """Return the result of ``act``, which is called again after OSErrors; None if the check
        ends meanwhile. Raises the last OSError."""
        for seconds in RETRY_SECONDS:
            with suppress(OSError):
                return act()
            if self._pause(seconds):
                return None
        return act()

    def _own(self, sums: FileSums) -> range:
        """Return the pieces of a file that this process reads."""
        rank, count = self._share
        pieces = len(sums.pieces)
        return range(pieces * rank // count, pieces * (rank + 1) // count)

    def _pause(self, seconds: float) -> bool:
        """Rest for so many seconds. Return whether to end."""
        return self._end.wait(seconds) or time.monotonic() > self._deadline


def seen_files(prefixes: Sequence[str]) -> str:
    """Return a digest of the files that this machine sees under the prefixes: machines with the
    same digest share a disk. Empty without prefixes."""
    digest = hashlib.sha256()
    for prefix in prefixes:
        for suffix in SUFFIXES if not is_url(prefix) else ():
            with suppress(OSError):
                digest.update(f"{file_identity(prefix + suffix)};".encode())
    return digest.hexdigest() if prefixes else ""


def share_of(rank: int, seen: Sequence[str]) -> tuple[int, int]:
    """Return which of how many parts of the files a rank reads; ``seen`` has the ``seen_files`` of
    all ranks. A thousand machines that each read all of a disk that they share would take it from
    the run."""
    sharing = [machine for machine, files in enumerate(seen) if files == seen[rank]]
    return sharing.index(rank), len(sharing)


def _size(piece: tuple[str, FileSums, int]) -> int:
    """Return the bytes of a piece of a file."""
    _, sums, number = piece
    start, stop = sums.ends(number)
    return stop - start


def _sums_of_files(prefix: str) -> Mapping[str, FileSums]:
    """Return the sums of the files of a dataset, the index first; none for a dataset without sums.
    Raises OSError if its meta.json cannot be read."""
    try:
        sums = dataset_sums(prefix)
    except DataError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from error
        raise
    return MappingProxyType({}) if sums is None else dict(reversed(sums.by_suffix().items()))


def _unfinished(read: int, share: int, size: int, seconds: float) -> str:
    whole = f"the {size / 2**30:,.1f} GiB of --data-path that have sums and are on disks"
    if share < size:
        whole = f"this machine's share of {share / 2**30:,.1f} GiB of {whole}"
    return (
        f" after {seconds / 60:g} minutes {read / 2**30:,.1f} GiB of {whole} are compared with "
        "their sums, and are as they were written; the next start begins at another place of "
        "chance; inspect dataset PREFIX --verify reads all"
    )


def _given_up(where: str, error: OSError, read: int, size: int) -> str:
    return (
        f"{where}: not compared with their sums, since they cannot be read: {_words(error)}; "
        f"{read / 2**30:,.1f} GiB were compared before and are as they were written, the rest of "
        f"{size / 2**30:,.1f} GiB is not compared; inspect dataset PREFIX --verify reads all"
    )


def _note(words: str) -> None:
    """Print a line of this machine, whose ranks may all be ones that print no log."""
    print(f"note: {words} (on {socket.gethostname()})", file=sys.stderr, flush=True)


def _words(error: OSError) -> str:
    return error.strerror or str(error)
