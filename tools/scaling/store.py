"""A store that counts its requests, and how long a real one takes for one."""

from __future__ import annotations

import os
import time
from collections import Counter
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

CLIENTS = 4
REQUESTS = 4000


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
    children = []
    for _ in range(CLIENTS):
        child = os.fork()
        if child == 0:
            _ask(server.port)
        children.append(child)
    server.wait([f"ready/{number}" for number in range(CLIENTS)], timedelta(seconds=60))
    begun = time.perf_counter()
    server.set("go", "")
    for child in children:
        os.waitpid(child, 0)
    return (time.perf_counter() - begun) / (CLIENTS * REQUESTS)


def _ask(port: int) -> None:
    """Be a process that asks, and end."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    store.set(f"ready/{store.add('clients', 1) - 1}", "")
    store.wait(["go"])
    for _ in range(REQUESTS):
        store.get("position")
    os._exit(0)
