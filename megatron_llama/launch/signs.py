"""Signs of life of the keepers whose ranks train (``keeper.py``).

A rank learns by its messages that another one is gone, but not while it waits for it to come, and
on GPUs not everywhere. A keeper sees at once that another one on its machine has ended. For other
machines each keeper counts in the store, and those of the first and the last rank, which are seldom
on one machine, look whether all counts go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_llama.launch.processes import Process

SILENT_SECONDS = 60.0
"""How long the count of a keeper may stand still: its machine may be very busy."""


class SignsOfLife:
    """Those of one generation of ranks, as one keeper sees them."""

    def __init__(
        self,
        store: Store,
        keeper: int,
        others: Collection[int],
        neighbours: Sequence[int],
        *,
        counts: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``others``: the keepers whose ranks train. ``neighbours``: those of them on this machine.
        ``counts``: whether this keeper looks at the counts of all. Every keeper has ``enter``ed."""
        self._store = store
        self._keeper = keeper
        self._counts = counts
        self._clock = clock
        self._others = sorted(others)
        self._neighbours = neighbour_processes(store, [*neighbours])
        self._seen = dict.fromkeys(self._others, b"")
        self._changed = dict.fromkeys(self._others, clock())

    def give(self) -> None:
        """Give a sign of this keeper."""
        self._store.add(_count(self._keeper), 1)

    def lost(self, silent_seconds: float = SILENT_SECONDS) -> list[int]:
        """Return the keepers that are gone, or have given no sign for so long."""
        gone = [rank for rank, process in self._neighbours.items() if has_ended(process)]
        if not self._counts:
            return gone
        now = self._clock()
        counts = self._store.multi_get([_count(rank) for rank in self._others])
        for rank, count in zip(self._others, counts, strict=True):
            if count != self._seen[rank]:
                self._seen[rank] = count
                self._changed[rank] = now
        silent = [rank for rank in self._others if now - self._changed[rank] > silent_seconds]
        return sorted({*gone, *silent})


def enter(store: Store, keeper: int, process: Process) -> None:
    """Say which process a keeper is, and give its first sign."""
    values = (process.host, process.boot, process.namespace, process.pid, process.start)
    store.set(_process(keeper), json.dumps(values))
    store.add(_count(keeper), 1)


def neighbour_processes(store: Store, keepers: Sequence[int]) -> dict[int, Process]:
    """Return the processes of keepers, as far as they have entered."""
    entered = [keeper for keeper in keepers if store.check([_process(keeper)])]
    texts = store.multi_get([_process(keeper) for keeper in entered]) if entered else []
    return {keeper: Process(*json.loads(text)) for keeper, text in zip(entered, texts, strict=True)}


def has_ended(process: Process) -> bool:
    """Whether a process has certainly ended, which can be seen on its machine."""
    return process.visible and not process.state


def _process(keeper: int) -> str:
    return f"process/{keeper}"


def _count(keeper: int) -> str:
    return f"signs/{keeper}"
