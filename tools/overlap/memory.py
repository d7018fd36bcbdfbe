"""Memory of this process, as its allocator and the kernel see it: whether steps allocate more and
more, and whether one needs more than those before it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)
"""Of glibc's ``struct mallinfo2``, in its order."""


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def bytes_in_use() -> int:
    """Bytes that ``malloc`` has given out, in all threads: torch's CPU tensors are among them."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def peak_resident() -> int:
    """The most bytes that were resident since the last call, and the beginning of a new count."""
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    with open("/proc/self/clear_refs", "w") as counter:
        counter.write("5")
    return peak * 1024


@dataclass(frozen=True)
class Moment:
    """The end of a step."""

    in_use: int
    peak: int
    """Resident at most during the step."""


def look() -> Moment:
    """Now."""
    return Moment(bytes_in_use(), peak_resident())


def growth(steps: Sequence[Moment]) -> tuple[int, int]:
    """From the second step to the last: (by how many bytes more is in use, by how many the highest
    peak of the steps after the second exceeds that of the first two)."""
    later = max(step.peak for step in steps[2:])
    return steps[-1].in_use - steps[1].in_use, later - max(step.peak for step in steps[:2])
