"""Readers of files of lines that another program may have written, or that may be damaged: no line
and no nesting takes more memory than its bound."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from errno import EINVAL
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, AnyStr

from megatron_llama.config.limits import LARGEST_DEPTH, LARGEST_LINE

KINDS: Mapping[int, str] = MappingProxyType(
    {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFDIR: "a folder",
    }
)
"""Things that may have the name of a file, by their type in the file system."""


def require_regular(path: Path) -> None:
    """Raise OSError unless a path leads to a regular file: opening a pipe would wait forever, and a
    device has no end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(EINVAL, f"no regular file but {kind}", str(path))


def bounded_lines(file: IO[AnyStr], limit: int = LARGEST_LINE) -> Iterator[AnyStr | None]:
    """Yield the lines of a file with their ends; None for one that is longer than ``limit``."""
    while line := file.readline(limit + 1):
        if len(line) <= limit:
            yield line
            continue
        while line and line[-1:] not in ("\n", b"\n"):
            line = file.readline(limit)
        yield None


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for nesting so deep that a walk
    through it would fail."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [value]
    for _ in range(LARGEST_DEPTH):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return value
    raise ValueError(f"nested more than {LARGEST_DEPTH} times")


def _containers(value: Any) -> list[Any]:
    """Return the objects and arrays in an object or array."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [held for held in inner if isinstance(held, dict | list)]
