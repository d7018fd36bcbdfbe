"""Processes of this machine, distinguished from later ones of the same number.

A number alone identifies no process: numbers are reused, containers count on their own, and two
machines may have one name. Where ``/proc`` is missing, only this process can be inspected.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
ENDED = "ZXx"
"""States of a process that has ended and whose parent has not asked for its status yet."""
STOPPED = "T"
"""The state of a process that SIGSTOP has stopped."""
TRACED = "t"
"""The state of a process that a debugger holds."""
UNKNOWN = "?"
"""The state of a process that cannot be inspected: for lack of file descriptors, or because
``/proc`` hides the processes of other users. It may run."""


@dataclass(frozen=True)
class Process:
    """A process, wherever it runs."""

    host: str
    """Name of its machine, for people."""
    boot: str
    """Start of the machine's system, drawn at random by the kernel; empty where it is unknown."""
    namespace: str
    """The namespace of its number, that of its container; empty where it is unknown."""
    pid: int
    start: int
    """Clock ticks from the start of the system to its own."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def visible(self) -> bool:
        """Whether this process could see it, if it ran: it is in the same container of the same
        machine, since the same start of the system, and not hidden from this user."""
        here = bool(self.boot and self.namespace) and (self.boot, self.namespace) == _here()
        return here and not (_stat(self.pid) is None and _may_exist(self.pid))

    @property
    def state(self) -> str:
        """Its state, one letter, where it is visible; empty if it has certainly ended."""
        fields = _stat(self.pid)
        if fields is None:
            return UNKNOWN if _may_exist(self.pid) else ""
        return "" if fields[19] != str(self.start) or fields[0] in ENDED else fields[0]

    def kill(self) -> bool:
        """Send SIGKILL to it, and never to a later process of its number. Returns False where the
        process is not visible, has ended or is another user's."""
        if not self.visible:
            return False
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or an old one; or it has ended
            return False
        try:
            # The state is read with an open descriptor: from here on the number cannot be reused.
            if self.state in ("", UNKNOWN):
                return False
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


def process_of(pid: int) -> Process | None:
    """Return the process of a number in this container; None if there is none, or without /proc."""
    fields = _stat(pid)
    boot, namespace = _here()
    if fields is None or not boot:
        return None
    return Process(socket.gethostname(), boot, namespace, pid, int(fields[19]))


def this_process() -> Process:
    """Return this process."""
    pid = os.getpid()
    return process_of(pid) or Process(socket.gethostname(), "", "", pid, 0)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its ``parent`` ends, whatever ends it: after SIGKILL
    the parent has no time to send anything."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def parent_of(pid: int) -> int:
    """Return the number of a process's parent; 0 if it is unknown."""
    fields = _stat(pid)
    return int(fields[1]) if fields is not None else 0


def first_environment(pid: int) -> Mapping[str, str]:
    """Return the environment with which a process began; empty where this user must not see it."""
    with suppress(OSError):
        content = (PROC / str(pid) / "environ").read_bytes()
        pairs = (entry.partition("=") for entry in os.fsdecode(content).split("\0"))
        return {name: value for name, _, value in pairs}
    return {}


def program_of(pid: int) -> str:
    """Return the name of the program that a process runs, at most 15 characters."""
    try:
        # The kernel cuts the name between two bytes, which may be those of one character.
        return os.fsdecode((PROC / str(pid) / "comm").read_bytes()).strip()
    except OSError:
        return ""


def _here() -> tuple[str, str]:
    """Return the start of this machine's system, and the container's namespace of process numbers.
    Empty where ``/proc`` is another container's, which has other numbers."""
    try:
        if os.readlink(PROC / "self") != str(os.getpid()):
            return "", ""
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return boot, os.readlink(PROC / "self/ns/pid")
    except OSError:
        return "", ""


def _stat(pid: int) -> list[str] | None:
    """Return the kernel's fields of a process, from its state on (field 3 of proc(5)); None if
    there are none, which ``_may_exist`` explains."""
    try:
        # The name of the program, in brackets, may hold anything, blanks and brackets too.
        return os.fsdecode((PROC / str(pid) / "stat").read_bytes()).rpartition(")")[2].split()
    except OSError:
        return None


def _may_exist(pid: int) -> bool:
    """Whether there may be a process of a number that ``/proc`` does not have."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # or no number that a process can have
        return False
    except OSError:  # it is another user's
        return True
    # It has begun since ``/proc`` was read, or ``/proc`` could not be read.
    return True
