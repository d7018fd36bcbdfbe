"""``SHA256SUMS``: the checksums of all files of a checkpoint, as ``sha256sum --check`` reads
them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Self

from megatron_llama.checkpoint.bounds import largest_meta, require_size, size_of
from megatron_llama.checkpoint.folders import sync, write_synced
from megatron_llama.checkpoint.index import INDEX_TABLE, METADATA
from megatron_llama.config.limits import LARGEST_CHECKSUM_LIST
from megatron_llama.config.model_files import SUMS as SUMS
from megatron_llama.config.model_files import parse_sum_line, read_bounded
from megatron_llama.errors import CheckpointError, describe

ANOTHER_COPY = "restore the file from a copy, or load an earlier checkpoint"
_READ_BYTES = 2**20
_NAME = re.compile(r"\.?\w[\w.-]*")


class HashedFile:
    """A new file for sequential writing. It computes its checksum. When it is closed without an
    error, it is on the disk."""

    def __init__(self, path: Path, *, tail_bytes: int = 0) -> None:
        """``tail_bytes`` is the number of last bytes that ``tail`` keeps."""
        self._path = path
        self._file = path.open("wb")
        self._hash = hashlib.sha256()
        self._tail_bytes = tail_bytes
        self.tail = b""

    def write(self, content: bytes | memoryview) -> int:
        """Append bytes."""
        self._hash.update(content)
        if self._tail_bytes:
            self.tail = (self.tail + bytes(content[-self._tail_bytes :]))[-self._tail_bytes :]
        return self._file.write(content)

    def tell(self) -> int:
        """Return the number of bytes so far."""
        return self._file.tell()

    def flush(self) -> None:
        """Flush the file, as writers to any file expect to."""
        self._file.flush()

    @property
    def sum(self) -> str:
        """SHA-256 of the content so far, hexadecimal."""
        return self._hash.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if error is None:
            sync(self._path)


def seal(folder: Path, sums: Mapping[str, str], last: str, content: bytes) -> None:
    """Write the list of checksums, ordered by name, and then the file ``last``, which makes the
    folder count: where folders cannot be renamed, readers take a folder with it for complete.
    Raises CheckpointError for a file that is too large to be read again."""
    complete = {**sums, last: hashlib.sha256(content).hexdigest()}
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(complete.items())).encode()
    require_size(folder / SUMS, len(lines), LARGEST_CHECKSUM_LIST, do="save from fewer ranks")
    bound = largest_meta(folder, len(content))
    do = "give fewer --stream-lanes or fewer texts, whose places it holds"
    require_size(folder / last, len(content), bound, do=do)
    write_synced(folder / SUMS, lines)
    write_synced(folder / last, content)


def read_sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint by name. Raises CheckpointError when the list
    is missing or damaged."""
    path = folder / SUMS
    index = "index*.json" if (folder / INDEX_TABLE).is_file() else METADATA
    do = (
        "restore it from a copy, or load an earlier checkpoint; if you trust the files as they "
        f"are, run `sha256sum {index} meta.json *.distcp > {SUMS}` in {folder}"
    )
    content = read_bounded(path, limit=LARGEST_CHECKSUM_LIST, do=do)
    sums: dict[str, str] = {}
    expected = "a checksum and the name of a file of the folder in each line"
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        where = f"{path}:{number}"
        digest, name = parse_sum_line(line) or ("", "")
        # Only this project writes the list: any other form than its own is damage.
        if line != f"{digest}  {name}" or not _NAME.fullmatch(name) or name == SUMS:
            raise CheckpointError(where, got="damaged content", expected=expected, do=do)
        if name in sums:
            got = f"{name} for the second time"
            raise CheckpointError(where, got=got, expected="each file once", do=do)
        sums[name] = digest
    if not sums:
        raise CheckpointError(path, got="an empty file", expected=expected, do=do)
    return sums


def read_listed(folder: Path, name: str, *, largest: Callable[[Path, int], int]) -> bytes:
    """Return the content of a file of a checkpoint whose checksum is the listed one. ``largest``
    gives the most bytes that it may have: one of the functions of ``bounds``. Raises
    CheckpointError naming the file."""
    path = folder / name
    limit = largest(folder, size_of(path))
    content = read_bounded(path, limit=limit, do=ANOTHER_COPY)
    listed = read_sums(folder).get(name)
    got = hashlib.sha256(content).hexdigest()
    if got != listed:
        renew = f"if you changed it on purpose, put its `sha256sum {name}` into {folder / SUMS}"
        raise CheckpointError(
            path,
            got=f"SHA-256 {got}",
            expected=f"{listed or 'one that is listed'}, by {SUMS}",
            do=f"{ANOTHER_COPY}; {renew}",
        )
    return content


def damaged_files(folder: Path) -> list[str]:
    """Read all files of a checkpoint and return a line for each that is missing, damaged or does
    not belong there. Raises CheckpointError when the list of checksums itself cannot be read."""
    sums = read_sums(folder)
    problems = []
    do = ANOTHER_COPY
    for name, expected in sums.items():
        path = folder / name
        try:
            if path.exists() and not path.is_file():  # a device may have no end
                problems.append(describe(path, got="no file", expected="a regular file", do=do))
                continue
            got = file_sum(path)
        except OSError as error:
            problems.append(
                describe(
                    path, got=error.strerror, expected=f"a file with SHA-256 {expected}", do=do
                )
            )
            continue
        if got != expected:
            problems.append(
                describe(
                    path,
                    got=f"SHA-256 {got} in {path.stat().st_size} bytes",
                    expected=expected,
                    do=do,
                )
            )
    for path in sorted(folder.iterdir()):
        if path.name not in sums and path.name != SUMS:
            problems.append(
                describe(path, got="a file", expected="none of this name", do="move it elsewhere")
            )
    return problems


def file_sum(path: Path, kind: str = "sha256", stopped: Event | None = None) -> str:
    """Return the checksum of a file, ``sha256`` or ``md5``, hexadecimal. Once ``stopped`` is set,
    it is that of the file's beginning."""
    hashed = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while (block := file.read(_READ_BYTES)) and not (stopped and stopped.is_set()):
            hashed.update(block)
    return hashed.hexdigest()
