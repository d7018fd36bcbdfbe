"""``SHA256SUMS``: the checksums of all files of a checkpoint, as ``sha256sum --check`` reads
them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_llama.checkpoint.folders import sync, write_synced
from megatron_llama.errors import CheckpointError, describe

SUMS = "SHA256SUMS"
_READ_BYTES = 2**20


class HashedFile:
    """A new file for sequential writing. It computes its checksum, and is on the disk when it is
    closed without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._hash = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> int:
        """Append bytes."""
        self._hash.update(content)
        return self._file.write(content)

    def tell(self) -> int:
        """Return the number of bytes so far."""
        return self._file.tell()

    def flush(self) -> None:
        """Flush the file, as those who write to any file expect to."""
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
    folder count: where folders cannot be renamed, readers take those for complete that have it."""
    complete = {**sums, last: hashlib.sha256(content).hexdigest()}
    write_synced(
        folder / SUMS,
        "".join(f"{digest}  {name}\n" for name, digest in sorted(complete.items())).encode(),
    )
    write_synced(folder / last, content)


def read_sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by name. Raises CheckpointError when the list is missing or
    damaged."""
    path = folder / SUMS
    do = "verify a copy, or an earlier checkpoint"
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) else "damaged content"
        raise CheckpointError(path, got=got, expected="the list of checksums", do=do) from error
    found = [re.fullmatch(r"([0-9a-f]{64})  ([^/]+)", line) for line in lines]
    if not found or None in found:
        raise CheckpointError(
            path, got="damaged content", expected="a checksum and a file name in each line", do=do
        )
    return {match[2]: match[1] for match in found if match is not None}


def damaged_files(folder: Path) -> list[str]:
    """Read all files of a checkpoint and return a line for each that is missing, damaged or does
    not belong there. Raises CheckpointError when the list of checksums itself cannot be read."""
    sums = read_sums(folder)
    problems = []
    do = "restore the file from a copy, or load an earlier checkpoint"
    for name, expected in sums.items():
        path = folder / name
        try:
            got = _sum(path)
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


def _sum(path: Path) -> str:
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            hashed.update(block)
    return hashed.hexdigest()
