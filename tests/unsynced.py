"""Processes of tests that do not wait for the disk.

A process that is killed leaves all that it has written. Only a machine that loses its power would not, and none does in a test. Checkpoints
and conversions sync each file and folder, which takes a busy disk 0.1 s, thousands of times in a session."""

from __future__ import annotations

import os
from typing import Any


def leave_writes_to_the_system() -> None:
    """Have ``os.fsync`` of this process, and of those that are forked from it, make sure of the descriptor and return."""
    os.fsync = _is_open


def _is_open(fd: Any) -> None:
    os.fstat(fd if isinstance(fd, int) else fd.fileno())
