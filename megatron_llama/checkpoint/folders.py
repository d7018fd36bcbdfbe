"""Folders that appear whole or not at all, whenever the process dies.

A folder is written as ``NAME.incomplete``, synced and renamed. One that it replaces waits as
``NAME.replaced`` until the new one has its name: no file system renames onto a full folder. In an
object store it is written in its place: whoever writes it puts the file last without which it does
not count.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron_llama.checkpoint.storage_paths import is_remote, remove_tree

INCOMPLETE = ".incomplete"
REPLACED = ".replaced"


def staging(target: Path) -> Path:
    """Where ``target`` is written before it has its name."""
    if is_remote(target):
        return target
    return target.with_name(target.name + INCOMPLETE)


def set_aside(target: Path) -> Path:
    """Where the folder that ``target`` replaces waits."""
    return target.with_name(target.name + REPLACED)


def fresh_staging(target: Path) -> Path:
    """An empty folder to write ``target`` in; what a killed predecessor left there is removed."""
    folder = staging(target)
    if folder.exists():
        remove_tree(folder)
    folder.mkdir(parents=True)
    return folder


def discard(target: Path) -> None:
    """Remove what was staged, if it is still there: after an error."""
    folder = staging(target)
    if not is_remote(target):
        shutil.rmtree(folder, ignore_errors=True)


def commit(target: Path) -> None:
    """Give the staged folder its name. Its files are synced already."""
    if is_remote(target):
        return
    old = set_aside(target)
    sync(staging(target))
    if target.exists():
        if old.exists():
            shutil.rmtree(old)
        target.rename(old)
    staging(target).rename(target)
    sync(target.parent)
    if old.exists():
        shutil.rmtree(old)


def recover(target: Path) -> None:
    """Undo or finish a ``commit`` that was killed: the folder set aside comes back if it is the
    only one."""
    old = set_aside(target)
    if old.exists() and target.exists():
        shutil.rmtree(old)
    elif old.exists():
        old.rename(target)
        sync(target.parent)


def sync(path: Path) -> None:
    """Put a file's content, or the names in a folder, on the disk; an object is there once it is
    written."""
    if is_remote(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and put it on the disk."""
    path.write_bytes(content)
    sync(path)
