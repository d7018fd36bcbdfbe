"""What a step of the package does, written down as ``events`` while it runs on CPU tensors.

The device is ``DEVICE``, the CPU with an index: tensors that are made there, or by operators from
tensors that are there, count as the device's memory, and all operators on them as work of the
current stream. A dispatch mode sees every operator, a function mode answers where a tensor is and
sees what reads memory without an operator.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tools.stream_check.events import (
    Access,
    Alloc,
    Event,
    Free,
    Line,
    Memory,
    RecordStream,
    Signal,
    Site,
    Wait,
)

DEVICE = torch.device("cpu", 0)
"""Where the recorded device's tensors are. A tensor of the host has no index."""
ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = str(ROOT / "megatron_llama")
_SHARDING = str(ROOT / "megatron_llama" / "engine" / "shard")
_LAYERS = str(ROOT / "megatron_llama" / "model" / "nn")
_OWN = str(Path(__file__).resolve().parent)
_TORCH = str(Path(torch.__file__).parent)
_LIBRARY = str(Path(threading.__file__).parent)
_UNSEEN = ("aten::set_", "aten::resize_", "aten::as_strided_", "c10d::")
"""Operators that change what a tensor is, or send it past the recorded communicators."""
_EMPTY = ("aten::empty", "aten::new_empty")
_INDEXED = frozenset({"aten::index", "aten::index_put_", "aten::index_put"})
"""Operators that take indices from the host's memory."""
_COPIES = frozenset({"aten::copy_", "aten::_to_copy"})


def _callers() -> Iterator[tuple[str, int]]:
    """Yield file and line of everything that is being called, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _in_package(file: str) -> bool:
    return file.startswith(_PACKAGE) and not file.endswith("engine/comm/device.py")


class RecordingError(Exception):
    """Something happened that cannot be written down, or that a device would refuse."""


@dataclass(frozen=True)
class _Storage:
    number: int
    memory: Memory
    pooled: bool
    """Whether torch's allocator of pinned memory owns it, which waits for copies by itself."""


@dataclass(frozen=True)
class _Noted:
    """The events of a graph."""

    captures: bool
    events: list[Event] = field(default_factory=list)


class Recording:
    """The events of one run. Every thread of the run writes here."""

    def __init__(self, skip: Site | None = None) -> None:
        self.events: list[Event] = []
        self.messages: dict[int, Sequence[Tensor]] = {}
        """Tensors of the messages that nobody has waited for, by the token of their end."""
        self._skip = skip
        self._storages: dict[int, _Storage] = {}
        self._watches: dict[int, weakref.finalize[Any, Any]] = {}
        self._names: dict[int, str] = {}
        self._addresses: dict[int, int] = {}
        self._streams: list[Line] = []
        self._tokens = count()
        self._buffers = count()
        self._lines: dict[str, int] = {}
        self._local = threading.local()
        self._main = threading.current_thread()
        self._over = False
        self.computing = Stream(self, Line("computing stream", is_thread=False))

    # Where things happen

    def line(self, name: str, *, is_thread: bool) -> Line:
        """Return a new line. Its name gets a number if there is one of this name."""
        number = self._lines[name] = self._lines.get(name, 0) + 1
        line = Line(name if number == 1 else f"{name} {number}", is_thread)
        if not is_thread:
            self._streams.append(line)
        return line

    @property
    def thread(self) -> Line:
        """The line of the calling thread."""
        found: Line | None = getattr(self._local, "thread", None)
        if found is None:
            found = self.line(f"thread {threading.current_thread().name}", is_thread=True)
            self._local.thread = found
        return found

    @property
    def stream(self) -> Stream:
        """The current stream of the calling thread: at first the computing one, as on CUDA."""
        found: Stream = getattr(self._local, "stream", self.computing)
        return found

    @stream.setter
    def stream(self, stream: Stream) -> None:
        self._local.stream = stream

    def site(self) -> Site:
        """Return the nearest place in the package, ``device.py`` apart; without one, the nearest
        place that is neither here nor in torch."""
        outside = None
        for file, line in _callers():
            if _in_package(file):
                return Site(str(Path(file).relative_to(ROOT)), line)
            if outside is None and not file.startswith((_OWN, _TORCH, _LIBRARY, "<")):
                outside = file, line
        if outside is None:
            return Site("", 0)
        file, line = outside
        inside = file.startswith(str(ROOT))
        return Site(str(Path(file).relative_to(ROOT)) if inside else file, line)

    def _through(self) -> tuple[Site, ...]:
        """Return the places of ``engine/shard/`` and of the layers that lead here."""
        return tuple(
            Site(str(Path(file).relative_to(ROOT)), line)
            for file, line in _callers()
            if file.startswith((_SHARDING, _LAYERS))
        )

    def skips(self) -> bool:
        """Whether what is done here is left out: a planted fault."""
        if self._skip is None:
            return False
        return self.site() == self._skip or self._skip in self._through()

    # What happens

    def add(self, event: Event) -> None:
        """Append an event, unless the recording is over."""
        if self._over:
            return
        graph: _Noted | None = getattr(self._local, "graph", None)
        if graph is not None:
            graph.events.append(event)
        # A capture makes and frees memory, and does nothing else. Its points order nothing.
        if graph is None or not graph.captures or isinstance(event, Alloc | Free | Signal):
            self.events.append(event)

    @contextmanager
    def noting(self, *, captures: bool) -> Iterator[list[Event]]:
        """A section whose events of this thread are those of a graph, which is captured or
        replayed."""
        graph = self._local.graph = _Noted(captures)
        try:
            yield graph.events
        finally:
            self._local.graph = None

    def close(self) -> None:
        """Take no more events: what is freed from now on belongs to no step."""
        self._over = True
        for watch in self._watches.values():
            watch.detach()

    def signal(self, line: Line) -> int:
        """Note a point in the order of ``line``, and return its number."""
        token = next(self._tokens)
        self.add(Signal(self.thread, self.site(), line, token))
        return token

    def wait(self, line: Line, token: int | None) -> None:
        """Note that ``line`` waits for a point."""
        self.add(Wait(self.thread, self.site(), line, token, self._through()))

    def host_waits(self, line: Line) -> None:
        """Note that the calling thread waits for everything that ``line`` has been given."""
        self.wait(self.thread, self.signal(line))

    def access(self, line: Line, operator: str, tensor: Tensor, *, writes: bool) -> None:
        """Note that ``line`` reads or writes a tensor."""
        if not tensor.numel():
            return
        size = tensor.element_size()
        begin = int(tensor.storage_offset()) * size
        extent = sum(
            (length - 1) * stride
            for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        number = self.storage(tensor).number
        end = begin + (int(extent) + 1) * size
        self.add(Access(self.thread, self.site(), line, operator, number, begin, end, writes))

    # Memory

    def storage(
        self, tensor: Tensor, memory: Memory = Memory.HOST, *, pooled: bool = False
    ) -> _Storage:
        """Return what is known of a tensor's storage. One that nobody has seen is in ``memory``."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._storages.get(key)
        if found is None:
            found = _Storage(next(self._buffers), memory, pooled)
            self._storages[key] = found
            line = self.stream.line if memory is Memory.DEVICE else self.thread
            self.add(
                Alloc(
                    self.thread, self.site(), line, found.number, storage.nbytes(), memory, name=""
                )
            )
            self._watches[key] = weakref.finalize(storage, self._free, key, found.number)
            self._watches[key].atexit = False
        return found

    def memory(self, tensor: Tensor) -> Memory:
        """Return where a tensor is."""
        return self.storage(tensor).memory

    def memories(self) -> dict[int, Memory]:
        """Return where the storages are that exist, by number."""
        return {storage.number: storage.memory for storage in self._storages.values()}

    def asked(self, tensor: Tensor, address: int) -> None:
        """Note that the package has asked for the address of a tensor, to pin it perhaps."""
        self.storage(tensor)
        self._addresses[address] = tensor.untyped_storage()._cdata

    def pin(self, address: int) -> None:
        """Note that the storage of the tensor at an address is pinned from now on."""
        key = self._addresses[address]
        found = self._storages[key] = replace(self._storages[key], memory=Memory.PINNED)
        for place, event in enumerate(self.events):
            if isinstance(event, Alloc) and event.buffer == found.number:
                self.events[place] = replace(event, memory=Memory.PINNED)

    def record_stream(self, tensor: Tensor, line: Line) -> None:
        """Note that the allocator does not hand out a tensor's memory while ``line`` may use it."""
        if not self.skips():
            number = self.storage(tensor).number
            self.add(RecordStream(self.thread, self.site(), number, line))

    def end_messages(self) -> None:
        """Let go of the messages that nobody has waited for, as torch's watch does when it sees
        that they have ended."""
        while self.messages:
            token = next(iter(self.messages))
            self.wait(self.thread, token)
            del self.messages[token]

    def device_waits(self) -> None:
        """Note that the calling thread waits for the whole device."""
        for line in self._streams:
            self.host_waits(line)

    def _free(self, key: int, number: int) -> None:
        found = self._storages.get(key)
        if found is not None and found.number == number:
            del self._storages[key]
            del self._watches[key]
        self.add(Free(self.thread, self.site(), number))

    def name(self, tensor: Tensor, name: str) -> None:
        """Name the buffer of a tensor. The first name counts."""
        self._names.setdefault(self.storage(tensor).number, name)

    def named_events(self) -> list[Event]:
        """Return all events, with the names of buffers."""
        return [
            replace(event, name=self._names.get(event.buffer, ""))
            if isinstance(event, Alloc)
            else event
            for event in self.events
        ]

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """A section in which this thread's operators are recorded."""
        with _Functions(self), _Operators(self):
            yield

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """A section in which operators do what another rank would do, unrecorded."""
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            yield


class Stream:
    """A stream of the recorded device, with the methods of ``torch.cuda.Stream``."""

    device = DEVICE

    def __init__(self, recording: Recording, line: Line) -> None:
        self._recording = recording
        self.line = line

    def wait_stream(self, other: Stream) -> None:
        """Do nothing before ``other`` has done what it has been given."""
        if not self._recording.skips():
            self._recording.wait(self.line, self._recording.signal(other.line))

    def wait_event(self, event: DeviceEvent) -> None:
        """Do nothing before the event."""
        if not self._recording.skips():
            self._recording.wait(self.line, event.token)

    def record_event(self, event: DeviceEvent | None = None) -> DeviceEvent:
        """Record an event, by default a new one."""
        event = event or DeviceEvent(self._recording)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for everything that the stream has been given."""
        if not self._recording.skips():
            self._recording.host_waits(self.line)

    def query(self) -> bool:
        """Return True, as if the host had waited."""
        self.synchronize()
        return True


class DeviceEvent:
    """An event of the recorded device, with the methods of ``torch.Event``."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.token: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record it on a stream, by default the current one."""
        if not self._recording.skips():
            self.token = self._recording.signal((stream or self._recording.stream).line)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for it, by default the current one."""
        (stream or self._recording.stream).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        if not self._recording.skips():
            self._recording.wait(self._recording.thread, self.token)

    def query(self) -> bool:
        """Return True, as if the host had waited."""
        self.synchronize()
        return True

    def elapsed_time(self, later: DeviceEvent) -> float:
        """Return the milliseconds until ``later``: nothing takes time here."""
        return 0.0


def stream_name(frame: FrameType) -> str:
    """Return what a stream is assigned to where it is made: ``DeviceStream issuing``."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    found = re.search(r"(?:self\._*)?(\w+)\s*=", line)
    owner = frame.f_locals.get("self")
    words = [] if owner is None else [type(owner).__name__.lstrip("_")]
    return " ".join((*words, found[1] if found else "stream"))


class _Functions(TorchFunctionMode):
    """Answers where a tensor is, and sees what is read or moved without an operator."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        recording = self._recording
        if func == Tensor.device.__get__:  # a new object each time, so not ``is``
            return self._device(args[0])
        if func is Tensor.to:
            copy = bool(named.pop("copy", False))
            return self._to(args[0], *torch._C._nn._parse_to(*args[1:], **named), copy=copy)
        if func is Tensor.cpu:
            return self._to(args[0], torch.device("cpu"), None, False, None)
        if func in (torch.tensor, torch.as_tensor) and named.get("device") is not None:
            device = torch.device(named.pop("device"))
            with self:
                return func(*args, **named).to(device)
        if func is Tensor.backward:
            # Hooks that it calls would run without this mode.
            raise RecordingError("Tensor.backward: call torch.autograd.backward")
        if func is Tensor.is_pinned:
            return recording.memory(args[0]) is Memory.PINNED
        if func is Tensor.data_ptr:
            address: int = func(*args)
            with torch._C.DisableTorchFunction():
                recording.asked(args[0], address)
            return address
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self._read(args[0], func.__name__)
        return func(*args, **named)

    def _device(self, tensor: Tensor) -> torch.device:
        with torch._C.DisableTorchFunction():
            device = tensor.device
            if device.type != "cpu" or not tensor.untyped_storage()._cdata:
                return device
            there = self._recording.memory(tensor) is Memory.DEVICE
        return DEVICE if there else device

    def _to(
        self,
        tensor: Tensor,
        device: torch.device | None,
        dtype: torch.dtype | None,
        non_blocking: bool,
        memory_format: Any,
        *,
        copy: bool = False,
    ) -> Tensor:
        here = self._device(tensor)
        device = here if device is None else device
        if device.type != "cpu" or here.type != "cpu":
            return tensor.to(device, dtype, non_blocking=non_blocking, copy=copy)
        if device == here:
            return tensor.to(dtype or tensor.dtype, copy=copy)
        moved: Tensor = torch.ops.aten._to_copy.default(
            tensor,
            dtype=dtype or tensor.dtype,
            device=device if device.index is not None else torch.device("cpu", _TO_HOST),
            non_blocking=non_blocking,
        )
        return moved

    def _read(self, tensor: Tensor, how: str) -> None:
        recording = self._recording
        with torch._C.DisableTorchFunction():
            if recording.memory(tensor) is Memory.DEVICE:
                if how != "tolist":
                    raise RecordingError(f"{how} of a tensor on the device at {recording.site()}")
                recording.access(recording.stream.line, how, tensor, writes=False)
                recording.host_waits(recording.stream.line)
            else:
                recording.access(recording.thread, how, tensor, writes=False)


_TO_HOST = 1
"""The index of the device that ``_Operators`` takes for the host's memory, where an operator gets
tensors: without an index autograd asks for the memory of the tensors themselves."""


@dataclass(frozen=True)
class _Operator:
    """What the schema of an operator says."""

    name: str
    text: str
    written: frozenset[int | str]
    """Arguments that are written, by place or name."""
    unread: frozenset[int | str]
    """Arguments that are written and not read."""
    makes: bool
    """Whether new results are written: not so for ``empty``."""
    syncs: bool
    """Whether the host has to know a value to go on."""

    @staticmethod
    def of(func: Any) -> _Operator:
        if not isinstance(func, torch._ops.OpOverload):
            raise RecordingError(f"{func}: not an operator with a schema")
        schema = func._schema
        if schema.name.startswith(_UNSEEN) or any("Dict" in str(a.type) for a in schema.arguments):
            raise RecordingError(f"{func}: its schema does not say what it reads and writes")
        written: set[int | str] = set()
        out: set[int | str] = set()
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                key = argument.name if argument.kwarg_only else place
                written.add(key)
                if argument.kwarg_only:
                    out.add(key)
        if schema.is_mutable and not written:
            raise RecordingError(f"{func}: it changes something that its schema does not name")
        overwrites = schema.name in ("aten::copy_", "aten::zero_", "aten::fill_")
        plain = [result for result in schema.returns if "Tensor" not in str(result.type)]
        return _Operator(
            schema.name,
            str(func),
            frozenset(written),
            frozenset(written if overwrites else out),
            not schema.name.startswith(_EMPTY),
            bool(plain) or torch.Tag.dynamic_output_shape in func.tags,
        )


def _arguments(args: Sequence[Any], named: Mapping[str, Any]) -> list[tuple[int | str, Any]]:
    return [*enumerate(args), *named.items()]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._known: dict[Any, _Operator] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        operator = self._known.get(func)
        if operator is None:
            operator = self._known[func] = _Operator.of(func)
        with torch._C.DisableTorchFunction():
            return self._note(func, operator, args, dict(kwargs or {}))

    def _note(
        self, func: Any, operator: _Operator, args: Sequence[Any], named: dict[str, Any]
    ) -> Any:
        recording = self._recording
        given: list[tuple[int | str, Tensor]] = [
            (place, tensor)
            for place, value in _arguments(args, named)
            for tensor in _tensors(value)
        ]
        device = named.get("device")
        pinned = bool(named.pop("pin_memory", False))
        if any(tensor.device.type != "cpu" for _, tensor in given):
            return func(*args, **named)
        before = {tensor.untyped_storage()._cdata: recording.storage(tensor) for _, tensor in given}
        if device is not None and device.type == "cpu":
            named["device"] = torch.device("cpu")
        results = _run(func, args, named)
        found = _tensors(results)
        if any(tensor.device.type != "cpu" for tensor in found):
            return results
        fresh = [tensor for tensor in found if tensor.untyped_storage()._cdata not in before]
        where = self._where(device, given, pinned=pinned)
        for tensor in fresh:
            recording.storage(tensor, where, pooled=pinned)
        if operator.written or operator.syncs or (fresh and operator.makes):
            self._accesses(operator, args, named, given, fresh)
        return results

    def _where(
        self,
        device: torch.device | None,
        given: Sequence[tuple[int | str, Tensor]],
        *,
        pinned: bool,
    ) -> Memory:
        """Return the memory of new results."""
        if pinned:
            return Memory.PINNED
        if device is not None and device.index is not None:
            return Memory.HOST if device.index == _TO_HOST else Memory.DEVICE
        there = any(self._recording.memory(tensor) is Memory.DEVICE for _, tensor in given)
        return Memory.DEVICE if there else Memory.HOST

    def _accesses(
        self,
        operator: _Operator,
        args: Sequence[Any],
        named: Mapping[str, Any],
        given: Sequence[tuple[int | str, Tensor]],
        fresh: Sequence[Tensor],
    ) -> None:
        recording = self._recording
        memory = recording.memory
        stream = recording.stream.line
        thread = recording.thread
        node = torch._C._current_autograd_node()
        text = operator.text if node is None else f"{operator.text} in {node.name()}"
        reads = [tensor for place, tensor in given if place not in operator.unread]
        writes = [tensor for place, tensor in given if place in operator.written]
        writes += fresh if operator.makes else []
        touched = [*reads, *writes]
        if not any(memory(tensor) is Memory.DEVICE for tensor in touched):
            for tensor in reads:
                recording.access(thread, text, tensor, writes=False)
            for tensor in writes:
                recording.access(thread, text, tensor, writes=True)
            return
        waits = operator.syncs
        copies = operator.name in _COPIES
        if operator.name in _INDEXED:
            waits = waits or any(
                tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1])
            )
        for writing, tensors in ((False, reads), (True, writes)):
            for tensor in tensors:
                place = memory(tensor)
                if place is Memory.DEVICE:
                    recording.access(stream, text, tensor, writes=writing)
                elif copies and (place is Memory.PINNED or writing):
                    recording.access(stream, text, tensor, writes=writing)
                    self._keep(tensor)
                elif not writing and (copies or not tensor.dim() or operator.name in _INDEXED):
                    # Memory that is not pinned is read while the host issues the copy.
                    recording.access(thread, text, tensor, writes=False)
                else:
                    places = ", ".join(
                        f"{tuple(one.shape)} in {memory(one).value} memory" for one in touched
                    )
                    raise RecordingError(f"{text} at {recording.site()} mixes {places}")
        if copies:
            away = [tensor for tensor in touched if memory(tensor) is not Memory.DEVICE]
            to_pageable = any(memory(tensor) is Memory.HOST for tensor in writes)
            blocking = not _non_blocking(operator, args, named)
            waits = waits or (bool(away) and (blocking or to_pageable))
        if waits:
            recording.host_waits(stream)

    def _keep(self, tensor: Tensor) -> None:
        """torch's allocator of pinned memory does not hand it out before the copies of it."""
        recording = self._recording
        storage = recording.storage(tensor)
        if storage.pooled:
            recording.add(
                RecordStream(
                    recording.thread, recording.site(), storage.number, recording.stream.line
                )
            )


def _non_blocking(operator: _Operator, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    if operator.name == "aten::copy_" and len(args) > 2:
        return bool(args[2])
    return bool(named.get("non_blocking", False))


def _run(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    if str(func) == "megatron_llama.addmm_fp32.default":
        # The device's kernel does not exist on a host.
        view, left, right, beta = args
        product = left.to(view.dtype) @ right.to(view.dtype)
        view.copy_(product if beta == 0.0 else product.add_(view, alpha=beta))
        return None
    return func(*args, **named)
