"""A folder on this machine that keeps blocks of remote files, for all processes that share it.

A block is a file of its own, which is written under another name and then renamed: a process that
is killed at any moment leaves no half a block behind. A CRC-32 stands behind each 16 KiB of it, and
the name of a whole file has one, so that a block that the disk has changed is read again from the
server.

The folder of a file's blocks is named by its URL, size and version, so that blocks of an older
version are never read again. When the folder has grown beyond its bound, the blocks that were not
used for longest are removed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import queue
import struct
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_llama.data.byte_ranges import SourceFile, read_range
from megatron_llama.data.words import is_url
from megatron_llama.engine.comm import device as devices
from megatron_llama.errors import ConfigError, DataError

BLOCK_BYTES = 1 << 20
"""Bytes of one request. A request costs the latency of the store and a share of its bandwidth;
where they cost the same, half of the time is lost to neither: 20 ms at 50 MB/s are 1 MB. Shuffled
samples of a few KiB each touch another block at first, so larger blocks would read much that
is not needed soon."""
WHOLE_BYTES = 8 << 20
"""Bytes of one request for a file that is read whole."""
THREADS = 8
"""Requests at a time."""
SLICE_BYTES = 16 << 10
"""Bytes of a block with a checksum of their own: a sample reads one or two of them, not the
block."""
_SUM = struct.Struct("<I")
_LOCKS = 64
_SCANNED_AFTER = 64 << 20
"""The folder is looked through after each process has written so many bytes."""
_ABANDONED = 3600.0
"""Seconds after which a file without its final name belongs to a process that was killed."""
_TEMPORARY = ".tmp-"
_WHOLE = "whole"
_STAMP = "summed"
_STAMP_SECONDS = 300.0
"""Seconds for which a copy that one process has summed is not summed by others. All ranks of a
machine open it when a run starts, one after another; a disk takes longer to decay."""


def cache_folder(path: str | None) -> Path:
    """Return the folder of --data-cache-path, or the default one. Raises ConfigError for a URL, and
    below a home that is not known."""
    path = "~/.cache/megatron_llama/data" if path is None else path
    got = path
    if not is_url(path):
        try:
            return Path(path).expanduser()
        except RuntimeError:  # a container may have a user who has no name
            got = f"{path}, of a user without a home"
    raise ConfigError(
        "--data-cache-path",
        got=got,
        expected="a folder on a disk of this machine",
        do="give a path, such as /scratch/data-cache",
    )


class BlockCache:
    """Reads remote files by blocks, and keeps these in a folder. Several threads and processes may
    read at the same time; of those that miss the same block one asks the server for it."""

    def __init__(self, folder: Path, limit: int, *, block_bytes: int = BLOCK_BYTES) -> None:
        """``limit``: bytes that the folder is to hold at most. Processes that share it may exceed
        that together by 64 MiB, or a sixteenth of it, each. Raises DataError if the folder cannot
        be written."""
        self.folder = folder
        self._limit = limit
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._pending: dict[tuple[SourceFile, int], Future[bytes]] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = 0
        self._interval = min(_SCANNED_AFTER, limit // 16)
        self._unscanned = self._interval  # the first block finds out what is there
        with _writing(folder):
            (folder / "locks").mkdir(parents=True, exist_ok=True)
        weakref.finalize(self, _end, self._work)

    def fetch(self, file: SourceFile, start: int, stop: int) -> None:
        """Begin to read the blocks with the bytes [start, stop) of a file. Errors are raised when
        they are read."""
        for number in self._numbers(start, stop):
            try:
                _mark_used(self._path(file, number))  # it is needed soon: not to be removed before
            except OSError:
                self._ask(file, number)

    def read(self, file: SourceFile, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of a file. Raises DataError if they cannot be read, or if
        the file has changed."""
        pieces = []
        for number in self._numbers(start, stop):
            begin = number * self._block_bytes
            first = max(start - begin, 0)
            last = min(stop - begin, self._block_bytes)
            content = self._stored(file, number, first, last)
            if content is None:
                content = self._ask(file, number).result()[first:last]
            pieces.append(content)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def whole(self, file: SourceFile) -> Path:
        """Return a copy of a whole file on the disk. Raises DataError if it cannot be read. The
        copy may be removed later on: it has to be opened at once."""
        with self._claimed(file, 0):
            for path in self._folder(file).glob(f"{_WHOLE}-*"):
                with suppress(OSError):
                    if _has_stamp(path):
                        return path
                    if path.name == _whole_name(_content_sum(path)):
                        _mark_used(path)
                        _leave_stamp(path)
                        return path
                    path.unlink()  # the disk has changed it, or another program
            starts = range(0, file.size, WHOLE_BYTES)
            pieces = (read_range(file, at, min(at + WHOLE_BYTES, file.size)) for at in starts)
            path = self._write(self._folder(file) / _WHOLE, pieces, name_by_sum=True)
            _leave_stamp(path)
            return path

    def _numbers(self, start: int, stop: int) -> range:
        return range(start // self._block_bytes, -(-stop // self._block_bytes))

    def _folder(self, file: SourceFile) -> Path:
        named = f"{file.path}\n{file.size}\n{file.version}"
        return self.folder / hashlib.sha256(named.encode()).hexdigest()[:32]

    def _path(self, file: SourceFile, number: int) -> Path:
        start, stop = self._ends(file, number)
        return self._folder(file) / f"{start}-{stop}"

    def _ends(self, file: SourceFile, number: int) -> tuple[int, int]:
        start = number * self._block_bytes
        return start, min(start + self._block_bytes, file.size)

    def _stored(self, file: SourceFile, number: int, first: int, last: int) -> bytes | None:
        """Return the bytes [first, last) of a block; None if it is not in the folder."""
        start, stop = self._ends(file, number)
        path = self._path(file, number)
        try:
            with open(path, "rb", buffering=0) as block:
                slices = -(-(stop - start) // SLICE_BYTES)
                if os.fstat(block.fileno()).st_size != stop - start + slices * _SUM.size:
                    return None  # a disk that was full, or that lost power
                content = _checked_bytes(block.fileno(), first, last, stop - start)
            _mark_used(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unusable(path, error) from error
        return content

    def _ask(self, file: SourceFile, number: int) -> Future[bytes]:
        """Have a thread read a block, unless one does already."""
        with self._lock:
            pending = self._pending.get((file, number))
            if pending is not None:
                return pending
            future = self._pending[file, number] = Future()
            if self._threads < THREADS:
                self._threads += 1
                devices.start_thread(_work, self._work, name="data cache")
        self._work.put(lambda: self._answer(file, number, future))
        return future

    def _answer(self, file: SourceFile, number: int, future: Future[bytes]) -> None:
        try:
            content = self._block(file, number)
        except BaseException as error:
            self._pending.pop((file, number))
            future.set_exception(error)
        else:
            self._pending.pop((file, number))
            future.set_result(content)

    def _block(self, file: SourceFile, number: int) -> bytes:
        start, stop = self._ends(file, number)
        with self._claimed(file, number):
            # Another process may have had it meanwhile.
            content = self._stored(file, number, 0, stop - start)
            if content is None:
                content = read_range(file, start, stop)
                self._write(self._path(file, number), iter((content, _slice_sums(content))))
        return content

    @contextmanager
    def _claimed(self, file: SourceFile, number: int) -> Iterator[None]:
        """A section in which no other process or thread reads this block from the server. The
        kernel ends it when a process dies. Where the file system has no locks, several may read
        the same."""
        name = f"{(int(self._folder(file).name, 16) + number) % _LOCKS:02}"
        try:
            lock = os.open(self.folder / "locks" / name, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError:
            yield
            return
        try:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _write(self, path: Path, pieces: Iterator[bytes], *, name_by_sum: bool = False) -> Path:
        """Write a file, and return its path. ``name_by_sum`` adds its checksum to the name."""
        content_sum = 0
        # Not `replacing`: the file's name may be known at its end only.
        temporary = path.with_name(f"{path.name}{_TEMPORARY}{uuid.uuid4().hex}")
        size = 0
        try:
            with _writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(temporary, "xb") as file:
                    for piece in pieces:
                        size += file.write(piece)
                        content_sum = zlib.crc32(piece, content_sum)
                if name_by_sum:
                    path = path.with_name(_whole_name(content_sum))
                _mark_used(temporary)
                os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        with self._lock:
            self._unscanned += size
            scans = self._unscanned >= self._interval
            if scans:
                self._unscanned = 0
        if scans:
            with _writing(self.folder):
                self._make_room()
        return path

    def _make_room(self) -> None:
        """Remove the files that were not used for longest, if there is more than the bound."""
        files = []
        for folder in self.folder.iterdir():
            if folder.name == "locks":
                continue
            # Another process may remove files, too.
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        seen = entry.stat()
                        files.append((seen.st_mtime_ns, seen.st_size, entry.path))
        before = time.time_ns() - int(_ABANDONED * 1e9)
        held = sum(size for _, size, _ in files)
        for used, size, path in sorted(files):
            temporary = _TEMPORARY in path
            # Down to less than the bound: else every block that comes would look through it again.
            over = held > self._limit - self._interval
            if (used < before) if temporary else over:
                with suppress(OSError):
                    os.unlink(path)
                held -= size


def _whole_name(content_sum: int) -> str:
    """Return the name of the copy of a whole file, in which earlier versions had no checksum."""
    return f"{_WHOLE}-{content_sum:08x}"


def _leave_stamp(path: Path) -> None:
    """Tell other processes that a copy has its sum, which takes a second of each GiB."""
    with suppress(OSError):
        stamp = path.with_name(_STAMP)
        stamp.write_text(_stamp_of(path))
        _mark_used(stamp)


def _has_stamp(path: Path) -> bool:
    """Whether a copy had its sum a moment ago, and was not touched since."""
    stamp = path.with_name(_STAMP)
    try:
        age = time.time() - stamp.stat().st_mtime
        return abs(age) < _STAMP_SECONDS and stamp.read_text() == _stamp_of(path)
    except (OSError, UnicodeError):
        return False


def _stamp_of(path: Path) -> str:
    status = path.stat()
    return f"{path.name} {status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _content_sum(path: Path) -> int:
    content_sum = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(WHOLE_BYTES):
            content_sum = zlib.crc32(piece, content_sum)
    return content_sum


def _slice_sums(content: bytes) -> bytes:
    """Return the checksums of a block, which stand behind its content."""
    view = memoryview(content)
    starts = range(0, len(content), SLICE_BYTES)
    return b"".join(_SUM.pack(zlib.crc32(view[at : at + SLICE_BYTES])) for at in starts)


def _checked_bytes(block: int, first: int, last: int, size: int) -> bytes | None:
    """Return the bytes [first, last) of a block of ``size``; None if they have changed since they
    were written. Whole slices are read."""
    begin = first // SLICE_BYTES
    end = -(-last // SLICE_BYTES)
    start = begin * SLICE_BYTES
    stop = min(end * SLICE_BYTES, size)
    content = os.pread(block, stop - start, start)
    sums = os.pread(block, (end - begin) * _SUM.size, size + begin * _SUM.size)
    if len(content) != stop - start or _slice_sums(content) != sums:
        return None
    return content[first - start : last - start]


def _mark_used(path: Path) -> None:
    # The kernel's own time of a change is too coarse to order what is used in the same step.
    now = time.time_ns()
    os.utime(path, ns=(now, now))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> DataError:
    return DataError(
        path,
        got=error.strerror or str(error),
        expected="a folder that keeps blocks of remote files",
        do="give another --data-cache-path, or a smaller --data-cache-gib",
    )


def _work(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := work.get()) is not None:
        task()
        del task  # it holds the cache, whose threads end when its last holder is gone


def _end(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    for _ in range(THREADS):
        work.put(None)
