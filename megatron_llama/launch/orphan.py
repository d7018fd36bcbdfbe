"""The end of a process whose launcher is gone. A launcher that SIGKILL or the kernel has ended
could not end its ranks: they would train on beside the run that is started in its place.

Only a launcher that owns its ranks counts, torchrun's agent or Slurm's: a process started with
``nohup`` goes on when its shell ends. The kernel could send a signal instead
(``PR_SET_PDEATHSIG``), but it does so when the parent's *thread* ends, which is no fault, and not
when a shell stands between launcher and rank.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from megatron_llama.launch.launcher import launching_processes

POLL_SECONDS = 1.0
PATIENCE_SECONDS = 2.5
"""How long a process that ends waits until the others are told."""


class LauncherFollower:
    """Calls ``end`` in a thread, with the reason, if the launcher of this process is gone between
    ``begin`` and ``stop``."""

    def __init__(self, end: Callable[[str], None], *, patience: float = 0.0) -> None:
        """It is made while the launcher surely runs. ``patience``: seconds before the call, for
        another follower that has more to say."""
        self._end = end
        self._patience = patience
        self._depends_on = launching_processes()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread, if a launcher owns this process."""
        if self._depends_on:
            self._thread = threading.Thread(target=self._follow, name="launcher", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread: a program may fork after it."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(POLL_SECONDS)

    def _follow(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            gone = [process for process in self._depends_on if not process.state]
            if gone and not self._over.wait(self._patience):
                self._end(f"its launcher ({gone[0]}) is gone")


@contextmanager
def following_launcher(end: Callable[[str], None]) -> Iterator[None]:
    """Call ``end`` in a thread if the launcher of this process is gone during the section."""
    follower = LauncherFollower(end)
    follower.begin()
    try:
        yield
    finally:
        follower.stop()


@contextmanager
def ending_with_launcher(rank: int) -> Iterator[LauncherFollower]:
    """End this process if its launcher is gone during the section, also where no watch runs: before
    it meets others, and while it leaves them. It holds from ``begin`` on, which is called after the
    forks of this process: a fork copies no thread."""

    def end(why: str) -> None:
        with suppress(OSError):  # the launcher may have been the reader of this pipe
            print(f"rank {rank} was ended: {why}", file=sys.stderr, flush=True)
        os._exit(1)

    follower = LauncherFollower(end, patience=PATIENCE_SECONDS)
    try:
        yield follower
    finally:
        follower.stop()
