"""The memory of this machine that is left for the processes of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Controller:
    """The files in which one version of Linux's control groups keeps the numbers of a group."""

    mount: str
    name: str
    """The controller's name in /proc/self/cgroup."""
    limit: str
    used: str
    files: tuple[str, ...]
    """Entries of memory.stat that count cached files: the kernel gives these up when a process
    needs memory."""


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
    """Return the bytes that processes may still take: the machine's free memory, within the limits
    of this process's control groups (those of containers and batch systems). If the system does not
    tell, all memory of the machine. ``root`` is the root of the file system, for tests."""
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
    """Yield the folders of this process's group and of all groups around it. Inside a container the
    mount itself is a group of the container."""
    mount = root / controller.mount
    own = root / "proc/self/cgroup"
    yield mount
    for line in own.read_text().splitlines() if own.exists() else ():
        _, names, path = line.split(":", 2)
        if controller.name in names.split(","):
            inner = Path(path.lstrip("/"))
            yield from (mount / group for group in (inner, *inner.parents))


def _left(group: Path, controller: _Controller) -> int:
    """Return the bytes that one group has left. Raises OSError or ValueError if it has no limit."""
    limit, used = (int((group / name).read_text()) for name in (controller.limit, controller.used))
    entries = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    return limit - used + sum(int(size) for name, size in entries if name in controller.files)
