"""Changes of a checkpoint's small files."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader

Edit = Callable[[Path], object]


def edit_meta(**changes: object) -> Edit:
    """Set fields of meta.json, ``a__b`` in an object of it; those that are ``...`` go."""

    def edit(path: Path) -> None:
        content = json.loads((path / "meta.json").read_text())
        for name, value in changes.items():
            outer, _, last = name.rpartition("__")
            fields = content[outer] if outer else content
            fields[last] = value
            if value is ...:
                del fields[last]
        (path / "meta.json").write_text(json.dumps(content))

    return edit


def edit_index(change: Callable[[Any], object]) -> Edit:
    """Change the index as torch reads it."""

    def edit(path: Path) -> None:
        metadata = FileSystemReader(path).read_metadata()
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return edit
