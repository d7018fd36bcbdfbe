"""A hostile input, and the tools to make one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.harm.materials import SAVED

CHECKPOINT = f"iter_{SAVED:07d}"
Change = Callable[[Path], None]
"""Makes the copy of a material hostile; it gets the folder of the copy."""


@dataclass(frozen=True)
class Hostile:
    """One hostile input."""

    name: str
    format: str
    """The format whose reader gets it."""
    change: Change
    may_be_taken: bool = False
    """Another result is no lie: what it says is possible."""


def reseal(folder: Path) -> None:
    """Write the sums anew, as one does who wants to be believed."""
    for sums in folder.rglob("SHA256SUMS"):
        names = [line.split("  ", 1)[1] for line in sums.read_text().splitlines()]
        lines = []
        for name in names:
            path = sums.parent / name
            if path.is_file() and path.stat().st_size < 2**26:
                lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n")
        sums.write_text("".join(lines))


def with_json(name: str, edit: Callable[[Any], Any]) -> Change:
    """Change the content of a JSON file; ``edit`` returns the new one, or None for one that it has
    changed in place."""

    def change(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text())
        edited = edit(content)
        path.write_text(json.dumps(content if edited is None else edited))
        reseal(folder)

    return change


def with_field(file: str, field: str, value: object) -> Change:
    """Set a field of a JSON file. ``file`` may be a pattern; dots lead to inner fields, which are
    made where they are missing."""

    def change(folder: Path) -> None:
        path = sorted(folder.glob(file))[0]
        content = json.loads(path.read_text())
        *outer, last = field.split(".")
        inner = content
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = value
        path.write_text(json.dumps(content))
        reseal(folder)

    return change


def with_text(name: str, edit: Callable[[str], str]) -> Change:
    """Change the text of a file."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(edit(path.read_text()))
        reseal(folder)

    return change


def with_bytes(name: str, edit: Callable[[bytes], bytes]) -> Change:
    """Change the bytes of a file, which may not have been there."""

    def change(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(edit(path.read_bytes() if path.exists() else b""))
        reseal(folder)

    return change


def extended(name: str, more: bytes) -> Change:
    """Put more bytes behind a content."""
    return with_bytes(name, lambda before: before + more)


def replaced(name: str, content: bytes) -> Change:
    """Put another content there."""
    return with_bytes(name, lambda _: content)
