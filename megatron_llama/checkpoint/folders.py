"""Folders that appear whole or not at all, whenever the process dies.

A folder is written as ``NAME.incomplete``, synced and renamed. Where another run can take the
folder over while this one is stopped, the run's own name stands in it (``NAME.RUN.incomplete``): no
run then renames or removes a folder that another one has begun. The folder that it replaces waits
as ``NAME.replaced`` until the new one has its name: no file system renames onto a folder with files
in it. An object store cannot rename, so there the folder is written in its place, and its last file
is the one without which the folder does not count."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.storage_paths import is_remote, remove_tree
from megatron_llama.errors import CheckpointError
from megatron_llama.files import sync_to_disk

INCOMPLETE = ".incomplete"
REPLACED = ".replaced"


def staging(target: Path, run: str = "") -> Path:
    """Return the path at which ``target`` is written before it gets its name. ``run`` tells the run
    that writes it from others; it may be empty."""
    if is_remote(target):
        return target
    return target.with_name(target.name + (f".{run}" if run else "") + INCOMPLETE)


def set_aside(target: Path) -> Path:
    """Return the path at which the folder that ``target`` replaces waits."""
    return target.with_name(target.name + REPLACED)


def fresh_staging(target: Path, run: str = "") -> Path:
    """Make an empty folder to write ``target`` in. Remains of a killed process are removed."""
    folder = staging(target, run)
    if folder.exists():
        remove_tree(folder)
    folder.mkdir(parents=True)
    return folder


def discard(target: Path, run: str = "") -> None:
    """Remove the staged folder, if it is there, after an error."""
    if not is_remote(target):
        shutil.rmtree(staging(target, run), ignore_errors=True)


def commit(target: Path, run: str = "") -> None:
    """Give the staged folder its name. Its files are synced already."""
    if is_remote(target):
        return
    staged = staging(target, run)
    old = set_aside(target)
    # The names in the folder must be on the disk before the folder gets its own name.
    sync(staged)
    if target.exists():
        if old.exists():
            shutil.rmtree(old)
        target.rename(old)
    # Between these two renames only NAME.replaced is there: ``recover`` and readers know that name.
    staged.rename(target)
    sync(target.parent)
    # The old folder goes last, when the new name is safe from a crash of the machine.
    if old.exists():
        shutil.rmtree(old)


def recover(target: Path) -> None:
    """Finish or undo a ``commit`` that was killed: without a new folder the old one gets its name
    back."""
    old = set_aside(target)
    if old.exists() and target.exists():
        shutil.rmtree(old)
    elif old.exists():
        old.rename(target)
        sync(target.parent)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A section that writes the files of ``target`` into the folder that it yields. The folder gets
    its name when the section ends, and is removed if it raises. Errors of the operating system
    become CheckpointErrors."""
    try:
        with writing(target):
            recover(target)
            yield fresh_staging(target)
            commit(target)
    finally:
        discard(target)


def require_replaceable(
    target: Path, patterns: Sequence[str], *, expected: str, marker: str | None = None
) -> bool:
    """Return whether ``target`` holds anything that would be replaced. Raises CheckpointError if it
    holds a name that matches none of ``patterns``, or files without one named ``marker``: then they
    are not this program's. ``expected`` is for the message.
    """
    names = sorted(entry.name for entry in target.iterdir()) if target.exists() else []
    strange = [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)]
    if strange or (names and marker is not None and marker not in names):
        got = f"a folder with {', '.join((strange or names)[:3])}"
        raise CheckpointError(target, got=got, expected=expected, do="give another path")
    return bool(names)


def sync(path: Path) -> None:
    """Put the content of a file, or the names in a folder, on the disk. An object is in its store
    once it is written."""
    if not is_remote(path):
        sync_to_disk(path)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and put it on the disk."""
    path.write_bytes(content)
    sync(path)
