"""Folders that appear whole or not at all, whenever the process dies.

A folder is written as ``NAME.incomplete``, synced and renamed. One that it replaces waits as ``NAME.replaced`` until the
new one has its name: no file system renames onto a full folder.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

INCOMPLETE, REPLACED = ".incomplete", ".replaced"


def staging(target: Path) -> Path:
    """Where ``target`` is written before it has its name."""
    return target.with_name(target.name + INCOMPLETE)


def set_aside(target: Path) -> Path:
    """Where the folder that ``target`` replaces waits."""
    return target.with_name(target.name + REPLACED)


def fresh_staging(target: Path) -> Path:
    """An empty folder to write ``target`` in; what a killed predecessor left there is removed."""
    folder = staging(target)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def commit(target: Path) -> None:
    """Give the staged folder its name. Its files are synced already."""
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
    """Undo or finish a ``commit`` that was killed: the folder set aside comes back if it is the only one."""
    old = set_aside(target)
    if old.exists() and target.exists():
        shutil.rmtree(old)
    elif old.exists():
        old.rename(target)
        sync(target.parent)


def sync(path: Path) -> None:
    """Put a file's content, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and put it on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
