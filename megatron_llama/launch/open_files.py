"""How many files and connections the processes of a job may hold open."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from megatron_llama.errors import ClusterError

PER_RANK = 4
"""Connections of a rank to the store: its own, the watch's, that of the process group, and that of
``--async-save``."""
OTHERS = 128
"""Files, pipes and libraries of a process beside them, rounded up."""


def raise_limit(process: int) -> int:
    """Let a process (0: this one) hold as many files open as the system allows it, and return how
    many these are: a shell's usual limit is 1,024, and the one above it is 100 times as much."""
    _, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    # Never unlimited, which some programs take for a size.
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    soft, _ = resource.prlimit(process, resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < most:
        # A launcher of another user stays as it is.
        with suppress(PermissionError, ProcessLookupError):
            resource.prlimit(process, resource.RLIMIT_NOFILE, (most, hard))
    soft, _ = resource.prlimit(process, resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else soft


def require_open_files(
    world_size: int, *, rank: int, in_launcher: bool, per_rank: int = PER_RANK
) -> None:
    """Raise the limit of this process. On rank 0 also see that whoever holds the store, this
    process or its launcher (``in_launcher``), may hold a connection of every rank: raises
    ClusterError. What cannot be connected ends in a traceback of a rank that is not to blame, or
    waits."""
    own = raise_limit(0)
    if rank != 0:
        return
    holder = os.getppid() if in_launcher else 0
    allowed = raise_limit(holder) if holder else own
    needed = per_rank * world_size + OTHERS
    if allowed < needed:
        raise ClusterError(
            "open files (ulimit -n)",
            got=f"{allowed} for the process that holds the store, at most",
            expected=f"{needed}: {per_rank} connections for each of {world_size} ranks, and "
            f"{OTHERS}",
            do=f"start the launcher under ulimit -n {needed} on the first machine "
            "(ulimit -Hn says what may be asked for; LimitNOFILE= of the service raises it)",
        )
