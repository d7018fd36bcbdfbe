"""Folders on a disk, and folders in an object store (``s3://bucket/run``), which knows neither
renaming nor links.

Both behave as ``pathlib.Path``. The differences are in ``folders.py`` and ``checkpoint_dir.py``,
behind ``is_remote``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from megatron_llama.errors import CheckpointError


def storage_path(name: str | Path) -> Path:
    """Return the folder of that name. Raises CheckpointError for a URL that no installed package
    can read."""
    if not isinstance(name, str):
        return name
    if "://" not in name:
        return Path(name)
    try:
        from upath import UPath

        # Listings are not cached: other processes write there too.
        path = UPath(name, use_listings_cache=False)
        path.fs.invalidate_cache()  # asks for the store's package
        return cast(Path, path)
    except ImportError as error:
        do = "pip install '.[fsspec]' and the package of the store, such as s3fs"
        raise CheckpointError(
            name, got=str(error), expected="packages that read such a URL", do=do
        ) from error
    except ValueError as error:
        do = "give a path, or a URL that fsspec knows"
        raise CheckpointError(name, got=str(error), expected="a path or a URL", do=do) from error


def is_remote(path: Path) -> bool:
    """Whether the path lies in an object store."""
    return not isinstance(path, Path)


def local_folder(name: str) -> Path:
    """Return the folder for a run's small files that grow line by line: the folder itself. For an
    object store, whose objects are written once, it is a folder in the working directory with the
    name of the last part of the URL."""
    path = storage_path(name)
    return Path(path.name) if is_remote(path) else path


def remove_tree(folder: Path) -> None:
    """Remove a folder with everything in it."""
    if is_remote(folder):
        folder.fs.rm(folder.path, recursive=True)  # type: ignore[attr-defined]
    else:
        shutil.rmtree(folder)


@contextmanager
def local_copy(folder: Path) -> Iterator[Path]:
    """A section in which the files of a folder are on the disk: the folder itself, or a copy that
    is removed at the end."""
    if not is_remote(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        if folder.is_dir():
            copy_files(folder, Path(name))
        yield Path(name)


def copy_files(folder: Path, target: Path) -> None:
    """Copy the files of a folder, and those of the folders in it, between any two places."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if entry.is_dir():
            copy_files(entry, target / entry.name)
        else:
            (target / entry.name).write_bytes(entry.read_bytes())
