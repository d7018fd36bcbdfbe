"""Files that are whole or not there, whenever the process dies: each is written under a temporary
name beside its own, and renamed.

Folders that are renamed whole are in ``checkpoint/folders.py``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path, *, temporary: Path | None = None, synced: bool = False) -> Iterator[Path]:
    """Yield a temporary name under which the section writes a file. The file replaces ``path`` when
    the section ends, and is removed when it raises.

    Two processes that replace the same file each write their own ``temporary``. One that is given
    is a name in the same folder that others know. With ``synced`` the content is on the disk before
    the file gets its name: a crash of the machine cannot leave an empty file there."""
    if temporary is None:
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        if synced:
            sync_to_disk(temporary)
        os.replace(temporary, path)
    except BaseException:
        # The first error is the one to report. It may be why this one cannot be removed.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def sync_to_disk(path: Path) -> None:
    """Put the content of a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
