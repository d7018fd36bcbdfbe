"""A store that counts its requests, and how long a real one takes for one."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

CLIENTS = 4
REQUESTS = 4000
PATIENCE = timedelta(minutes=5)
"""How long processes wait for each other, which first import torch."""


class Counted:
    """A store in this process that counts who asks it how often. ``asking`` is the rank."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.asking = 0
        self.requests = Counter[int]()

    def __getattr__(self, name: str) -> Any:
        self.requests[self.asking] += 1
        return getattr(self.store, name)


@cache
def request_seconds() -> float:
    """Return the seconds between two answers of a TCPStore of which several processes ask as fast
    as they can."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("position", "x" * 100)
    spawn = multiprocessing.get_context("spawn")
    children = [
        spawn.Process(target=_ask, args=(server.port,), daemon=True) for _ in range(CLIENTS)
    ]
    for child in children:
        child.start()
    server.wait([f"ready/{number}" for number in range(CLIENTS)], PATIENCE)
    begun = time.perf_counter()
    server.set("go", "")
    server.wait([f"done/{number}" for number in range(CLIENTS)], PATIENCE)
    seconds = time.perf_counter() - begun
    for child in children:
        child.join()
    return seconds / (CLIENTS * REQUESTS)


def _ask(port: int) -> None:
    """Be a process that asks."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    number = store.add("clients", 1) - 1
    store.set(f"ready/{number}", "")
    store.wait(["go"])
    for _ in range(REQUESTS):
        store.get("position")
    store.set(f"done/{number}", "")
