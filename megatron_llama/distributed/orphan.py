"""Notices that the launcher of this process is gone. One that SIGKILL or the kernel has ended could
not end its ranks: they would train on beside the run that is started in its place.

Only a launcher that owns its ranks counts, torchrun's agent or Slurm's: a process that somebody has
started with ``nohup`` goes on when its shell ends. The kernel could send a signal instead
(``PR_SET_PDEATHSIG``), but it does so when the parent's *thread* ends, which is no fault, and not
when a shell stands between launcher and rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_llama.distributed.launcher import launching_processes

POLL_SECONDS = 1.0


@contextmanager
def following_launcher(end: Callable[[str], None]) -> Iterator[None]:
    """A section that calls ``end``, in a thread, if the launcher of this process is gone, with
    words that say so."""
    depends_on = launching_processes()
    if not depends_on:
        yield
        return
    over = threading.Event()

    def follow() -> None:
        while not over.wait(POLL_SECONDS):
            gone = [process for process in depends_on if not process.state]
            if gone:
                end(f"its launcher ({gone[0]}) is gone")
                return

    thread = threading.Thread(target=follow, name="launcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
