"""Turns errors of the operating system into CheckpointErrors."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from megatron_llama.errors import CheckpointError, UserError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A section that writes ``path``. Any error in it becomes a CheckpointError that names the file
    and the cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: BaseException) -> CheckpointError:
    """Return the error of a file that could not be written."""
    # The operating system's error may be a cause of the cause: a full disk arrives as a
    # RuntimeError of torch's zip writer.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    where = path if cause is None else cause.filename or path
    got = f"{type(error).__name__}: {error}" if cause is None else cause.strerror
    do = "free space or mend the permissions, and try again; what was there before is untouched"
    return CheckpointError(where, got=got, expected="to write it", do=do)


REMEDIES: Mapping[int, str] = MappingProxyType(
    {
        errno.ENOSPC: "free space there, or give another folder",
        errno.EDQUOT: "free space there, or give another folder",
        errno.EACCES: "mend the permissions, or give another folder",
        errno.EPERM: "mend the permissions, or give another folder",
    }
)


def require_writable(folder: Path) -> None:
    """Raise CheckpointError unless files can be written into a folder, or into a new one of this
    name. Nothing stays there."""
    existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    try:
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        # A check of permissions is not enough: a disk may be full or read-only.
        with tempfile.TemporaryFile(dir=existing, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        # The user has named the folder; the cause lies in the folder above it.
        got = error.strerror if existing == folder else f"{existing}: {error.strerror}"
        do = REMEDIES.get(error.errno or 0, "give another folder")
        raise CheckpointError(
            folder, got=got, expected="a folder in which files can be written", do=do
        ) from error
