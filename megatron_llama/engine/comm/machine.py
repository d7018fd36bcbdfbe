"""The name of this machine."""

from __future__ import annotations

import socket
from pathlib import Path


def machine_name() -> str:
    """Return a text that differs between machines, and between containers on one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text() if boot.exists() else "")
