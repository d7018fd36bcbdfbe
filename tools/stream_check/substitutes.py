"""What stands in the package for the accelerator and for threads while a step is recorded.

``engine/comm/device.py`` runs as it is, over an accelerator whose streams and events are those of
``recording``. Threads, events, locks and queues of the package order one thread after another in
the recording, and nothing else does.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from megatron_llama.engine.comm import device as devices
from tools.stream_check.recording import DeviceEvent, Recording, Stream, stream_name

_HOST_KERNELS = frozenset(
    f"megatron_llama.model.nn.{name}" for name in ("attention", "documents", "sliding")
)
"""Modules that choose kernels by device and have none here but the host's: attention runs torch's
kernel for CPUs instead of cuDNN's, flash or the efficient one, which read and write the same."""


class _Namespace:
    """A module with some of its attributes replaced."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _accelerator(recording: Recording) -> _Namespace:
    """``torch`` as ``device.py`` sees it."""

    def new_stream(device: torch.device | None = None, priority: int = 0) -> Stream:
        frame = sys._getframe(1)
        if frame.f_code.co_filename == devices.__file__:
            assert frame.f_back is not None
            frame = frame.f_back
        return Stream(recording, recording.line(stream_name(frame), is_thread=False))

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        before = recording.stream
        recording.stream = stream
        try:
            yield
        finally:
            recording.stream = before

    def register(address: int, size: int, flags: int) -> int:
        recording.pin(address)
        return 0

    def new_event(*arguments: Any, **named: Any) -> DeviceEvent:
        return DeviceEvent(recording)

    def synchronize(device: torch.device | None = None) -> None:
        recording.device_waits()

    cuda = SimpleNamespace(
        Stream=new_stream,
        Event=new_event,
        stream=on_stream,
        current_stream=lambda device=None: recording.stream,
        synchronize=synchronize,
        set_device=lambda device: None,
        current_device=lambda: 0,
        is_initialized=lambda: True,
        cudart=lambda: SimpleNamespace(
            cudaHostRegister=register, cudaHostUnregister=lambda address: 0
        ),
        check_error=lambda status: None,
        get_device_name=lambda device=None: "a recorded device",
        max_memory_allocated=lambda device=None: 0,
        get_device_capability=lambda device=None: (0, 0),
        is_available=lambda: True,
        empty_cache=lambda: None,
    )
    return _Namespace(torch, cuda=cuda, Event=new_event)


def _threads(recording: Recording) -> dict[str, Any]:
    """Substitutes for names of ``threading`` and ``queue``."""

    class RecordedFlag(threading.Event):
        def __init__(self) -> None:
            super().__init__()
            self._token: int | None = None

        def set(self) -> None:
            if self._token is None:
                self._token = recording.signal(recording.thread)
            super().set()

        def clear(self) -> None:
            super().clear()
            self._token = None

        def is_set(self) -> bool:
            done = super().is_set()
            if done:
                recording.wait(recording.thread, self._token)
            return done

        def wait(self, timeout: float | None = None) -> bool:
            done = super().wait(timeout)
            if done:
                recording.wait(recording.thread, self._token)
            return done

    class RecordedLock:
        def __init__(self) -> None:
            self._lock = threading.Lock()
            self._token: int | None = None

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            taken = self._lock.acquire(blocking, timeout)
            if taken and self._token is not None:
                recording.wait(recording.thread, self._token)
            return taken

        def release(self) -> None:
            self._token = recording.signal(recording.thread)
            self._lock.release()

        def locked(self) -> bool:
            return self._lock.locked()

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *error: object) -> None:
            self.release()

    class RecordedQueue:
        def __init__(self) -> None:
            self._queue: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

        def put(self, item: Any) -> None:
            self._queue.put((recording.signal(recording.thread), item))

        def get(self) -> Any:
            token, item = self._queue.get()
            recording.wait(recording.thread, token)
            return item

    return {
        "Event": RecordedFlag,
        "Lock": RecordedLock,
        "Condition": lambda: threading.Condition(RecordedLock()),  # type: ignore[arg-type]
        "SimpleQueue": RecordedQueue,
    }


@contextmanager
def _started(recording: Recording) -> Iterator[None]:
    """A section in which whatever thread is started is recorded, of any class: what one that is not
    recorded does would go unseen."""
    start = threading.Thread.start
    run = threading.Thread.run
    join = threading.Thread.join
    begun: dict[threading.Thread, int] = {}
    ended: dict[threading.Thread, int] = {}

    def start_recorded(thread: threading.Thread) -> None:
        begun[thread] = recording.signal(recording.thread)
        start(thread)

    def run_recorded(thread: threading.Thread) -> None:
        recording.wait(recording.thread, begun[thread])
        with recording.seeing():
            run(thread)
        ended[thread] = recording.signal(recording.thread)

    def join_recorded(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if thread in ended and not thread.is_alive():
            recording.wait(recording.thread, ended[thread])

    with (
        patch.object(threading.Thread, "start", start_recorded),
        patch.object(threading.Thread, "run", run_recorded),
        patch.object(threading.Thread, "join", join_recorded),
    ):
        yield


@contextmanager
def substituted(recording: Recording) -> Iterator[None]:
    """A section in which the package runs on the recorded device, in recorded threads."""
    threads = _threads(recording)
    threading_names = {name: value for name, value in threads.items() if name != "SimpleQueue"}

    def is_host(device: torch.device) -> bool:
        return device.type == "cpu" and device.index is None

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        recording.record_stream(tensor, stream.line)

    replaced: list[tuple[Any, Any]] = [
        (devices.is_host, is_host),
        (threading, _Namespace(threading, **threading_names)),
        (threading.Lock, threads["Lock"]),
        (queue.SimpleQueue, threads["SimpleQueue"]),
    ]
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if not name.startswith("megatron_llama") or name in _HOST_KERNELS:
                continue
            for key, value in list(vars(module).items()):
                for original, substitute in replaced:
                    if value is original:
                        stack.enter_context(patch.object(module, key, substitute))
        stack.enter_context(patch.object(devices, "torch", _accelerator(recording)))
        stack.enter_context(_started(recording))
        # torch refuses the stream before a function mode is asked.
        stack.enter_context(patch.object(torch.Tensor, "record_stream", record_stream))
        yield
