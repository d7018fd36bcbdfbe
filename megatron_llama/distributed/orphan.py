"""Notices that the launcher of this process is gone. One that SIGKILL or the kernel has ended could
not end its ranks: they would train on beside the run that is started in its place.

Only a launcher that owns its ranks counts, torchrun's agent or Slurm's: a process that somebody has
started with ``nohup`` goes on when its shell ends. The kernel could send a signal instead
(``PR_SET_PDEATHSIG``), but it does so when the parent's *thread* ends, which is no fault, and not
when a shell stands between launcher and rank.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from megatron_llama.distributed.launcher import launching_processes

POLL_SECONDS = 1.0
PATIENCE_SECONDS = 2.5
"""How long a process waits for what it tells others before it ends."""


@contextmanager
def following_launcher(end: Callable[[str], None], *, patience: float = 0.0) -> Iterator[None]:
    """A section that calls ``end``, in a thread, if the launcher of this process is gone, with
    words that say so. ``patience``: seconds that it waits before, for one that began later."""
    depends_on = launching_processes()
    if not depends_on:
        yield
        return
    over = threading.Event()

    def follow() -> None:
        while not over.wait(POLL_SECONDS):
            gone = [process for process in depends_on if not process.state]
            if gone and not over.wait(patience):
                end(f"its launcher ({gone[0]}) is gone")

    thread = threading.Thread(target=follow, name="launcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


@contextmanager
def ending_with_launcher(rank: int) -> Iterator[None]:
    """A section in which this process ends when its launcher is gone, also where nothing watches
    it: before it meets others, and while it leaves them."""

    def end(why: str) -> None:
        with suppress(OSError):  # the launcher may have been the reader of this pipe
            print(f"rank {rank} was ended: {why}", file=sys.stderr, flush=True)
        os._exit(1)

    with following_launcher(end, patience=PATIENCE_SECONDS):
        yield
