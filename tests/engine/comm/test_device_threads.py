"""Threads of the package are on the device of the thread that starts them. The driver's calls are replaced: no GPU is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.worker import Task, Worker
from megatron_llama.engine.offload.copies import HostCopies
from megatron_llama.engine.offload.worker import HostWorker

RANKS_DEVICE = 3


@dataclass
class Driver:
    """What CUDA keeps: a current device for each thread, 0 at first; and every GPU on which work was begun, which has a context then."""

    local: threading.local = field(default_factory=threading.local)
    contexts: set[int] = field(default_factory=set)

    def current(self) -> int:
        return getattr(self.local, "device", 0)

    def choose(self, index: int) -> None:
        self.local.device = index

    def work(self) -> None:
        """What a thread does to a device, whatever it is: an event, a copy, an allocation."""
        self.contexts.add(self.current())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", found.current)
    monkeypatch.setattr(torch.cuda, "set_device", found.choose)
    found.choose(RANKS_DEVICE)
    return found


def in_worker(work: Callable[[], None]) -> None:
    worker = Worker("gathers")
    worker.submit(work).wait()
    worker.close()


def in_a_worker_of_a_worker(work: Callable[[], None]) -> None:
    in_worker(lambda: in_worker(work))


def in_offload(work: Callable[[], None]) -> None:
    worker, task = HostWorker(), Task(work)
    worker.put(task, priority=0)
    task.wait()
    worker.close(10.0)


def in_copies(work: Callable[[], None]) -> None:
    copies = HostCopies()
    for thread in (copies._to_host, copies._to_device):
        thread.submit(work).wait()
    copies.close()


def in_pool(work: Callable[[], None]) -> None:
    with devices.thread_pool(2) as pool:
        pool.submit(work).result()


@pytest.mark.parametrize("run", [in_worker, in_a_worker_of_a_worker, in_offload, in_copies, in_pool])
def test_no_thread_works_on_the_device_of_another_rank(run: Callable[[Callable[[], None]], None], driver: Driver) -> None:
    run(driver.work)
    assert driver.contexts == {RANKS_DEVICE}


def test_without_a_device_nobody_is_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask CUDA for the current device would initialize it: in a process that computes on its host, too."""

    def refuse(*_: object) -> None:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    seen: list[str] = []
    thread = devices.start_thread(seen.append, "ran", name="a thread")
    thread.join(10.0)
    assert seen == ["ran"] and thread.name == "a thread" and thread.daemon
