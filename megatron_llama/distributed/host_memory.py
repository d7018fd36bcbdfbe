"""What this machine's memory has left for the processes of a run. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Controller:
    """How one version of Linux's control groups says what a group has."""

    mount: str
    name: str
    """In /proc/self/cgroup."""
    limit: str
    used: str
    files: tuple[str, ...]
    """Entries of memory.stat: kept of files, and given up before anybody goes without."""


_NEW = _Controller(
    "sys/fs/cgroup", "", "memory.max", "memory.current", ("inactive_file", "active_file")
)
_OLD = _Controller(
    "sys/fs/cgroup/memory",
    "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def free_bytes(root: Path = Path("/")) -> int:
    """Memory that processes may still take: what the machine has left, within the limits of the
    groups to which this process belongs, those of containers and of batch systems. Where the system
    does not say, all there is. ``root``: of the file system."""
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    info = root / "proc/meminfo"
    if info.exists():
        free += [
            int(line.split()[1]) * 1024
            for line in info.read_text().splitlines()
            if line.startswith("MemAvailable:")
        ]
    for controller in (_NEW, _OLD):
        for group in _groups(root, controller):
            with suppress(OSError, ValueError):  # there is none, or its limit is the word "max"
                free.append(_left(group, controller))
    return max(0, min(free))


def _groups(root: Path, controller: _Controller) -> Iterator[Path]:
    """The folder of this process's group, and of all groups that hold it. Inside a container the
    mount itself is one of the container."""
    mount = root / controller.mount
    own = root / "proc/self/cgroup"
    yield mount
    for line in own.read_text().splitlines() if own.exists() else ():
        _, names, path = line.split(":", 2)
        if controller.name in names.split(","):
            inner = Path(path.lstrip("/"))
            yield from (mount / part for part in (inner, *inner.parents))


def _left(group: Path, controller: _Controller) -> int:
    """Of one group. Raises OSError or ValueError where it has no limit."""
    limit, used = (int((group / name).read_text()) for name in (controller.limit, controller.used))
    entries = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    return limit - used + sum(int(size) for name, size in entries if name in controller.files)
