"""That recordings of layouts miss nothing: no wait of the package, no stream, and no write to any memory."""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from tools.stream_check.events import Access, Alloc, Event, Free, Memory, Signal, Wait
from tools.stream_check.layouts import layouts
from tools.stream_check.recording import ROOT, Recording, RecordingError
from torch.utils._python_dispatch import TorchDispatchMode

from tools.stream_check import recording as recordings

WAITS = frozenset({"wait_event", "wait_stream", "record_event", "record", "synchronize", "host_event", "copy_to_host", "wait_for_copies"})
ELSEWHERE = frozenset({"host", "planner", "commands", "doctor"})
"""Folders of the package that no run on a device enters while it trains."""
IDLE = frozenset({"megatron_llama/train/run/profiling.py", "megatron_llama/train/run/timeline_recorder.py:TimelineRecorder"})
"""They wait so that a profile and a timeline begin and end with an idle device, and order nothing."""
SOME = (
    "optim, between steps", "optim_grads_params, 2 gradient slots", "optim_grads, reduced in bf16",
    "optim_grads_params, shards of one rank", "exact offload, between steps", "muon, sp", "averaged weights, optim_grads_params",
    "1f1b, pipeline rank 1, optim", "cp in a ring, sp, documents", "a line for each step, and stragglers",
    "sp in 2 pieces, recompute full, lora",
)


@cache
def recorded(name: str) -> Sequence[Event]:
    return tuple(layouts()[name](None))


def sites() -> Iterator[tuple[str, int, int]]:
    """File, first and last line of every call that waits or records, outside of ``device.py``."""
    for path in sorted((ROOT / "megatron_llama").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if ELSEWHERE & set(path.parts) or file.endswith("engine/comm/device.py") or file in IDLE:
            continue
        tree = ast.parse(path.read_text())
        skipped = {node for top in tree.body if isinstance(top, ast.ClassDef) and f"{file}:{top.name}" in IDLE for node in ast.walk(top)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node not in skipped:
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                owner = ast.unparse(node.func)
                if name in WAITS - {"record"} or owner.endswith(("event.record", "work.wait", "message.wait")):
                    assert node.end_lineno is not None
                    yield file, node.lineno, node.end_lineno


@pytest.mark.long
def test_layouts_reach_every_wait_of_the_package() -> None:
    events = [event for name in SOME for event in recorded(name) if isinstance(event, (Signal, Wait))]
    reached = {(site.file, site.line) for event in events for site in (event.site, *(event.through if isinstance(event, Wait) else ()))}
    found = list(sites())
    assert len(found) > 25
    missed = [(file, first) for file, first, last in found if not any((file, line) in reached for line in range(first, last + 1))]
    assert missed == []


@pytest.mark.few(1, all=24)
@pytest.mark.parametrize("name", sorted(layouts())[::3])
def test_a_layout_can_be_recorded(name: str) -> None:
    """And every access is to memory that exists. A part of what ``python -m tools.stream_check --all`` records."""
    sizes = {}
    for event in layouts()[name](None):
        match event:
            case Alloc():
                sizes[event.buffer] = event.nbytes
            case Access():
                assert 0 <= event.begin < event.end <= sizes[event.buffer]


def test_threads_of_the_host_are_seen() -> None:
    """Without their operators a layout would look ordered."""
    optimizer = [
        event.operator
        for event in recorded("exact offload, between steps")
        if isinstance(event, Access) and event.line.name == "thread optimizer"
    ]
    assert any("fused_adamw" in operator for operator in optimizer)
    copies = {
        event.line.name
        for event in recorded("exact offload, between steps")
        if event.thread.name == "thread optimizer" and isinstance(event, Access)
    }
    assert "DeviceCopies to_device" in copies


WHERE_THE_HOST_WAITS = frozenset(
    {
        "megatron_llama/metrics/readback.py",  # a step late
        "megatron_llama/data/upload.py",  # two steps late
        "megatron_llama/engine/comm/groups.py",  # before the first step, and so the next four
        "megatron_llama/launch/mesh.py",
        "megatron_llama/engine/offload/copies.py",  # to close
        "megatron_llama/engine/offload/exact.py",
        "megatron_llama/model/init.py",
        "megatron_llama/train/run/bad_steps.py",
        "megatron_llama/train/run/progress.py",  # at log lines
    }
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    (
        "optim_grads_params, 2 gradient slots", "documents, no clipping", "fp16", "cp in a ring, sp, documents",
        "1f1b, pipeline rank 1, optim", "exact offload, speculative in vain", "sp with shared heads", "lora", "optim, two replicas",
    ),
)
def test_the_computing_thread_waits_for_the_device_where_it_is_meant_to(name: str) -> None:
    """``item``, ``nonzero``, a copy that is not pinned, and whatever else makes a host wait, would stop it inside of a step."""
    signals = (event for event in recorded(name) if isinstance(event, Signal) and not event.line.is_thread)
    streams = {event.token for event in signals if not event.line.name.startswith("gloo")}
    waits = [event for event in recorded(name) if isinstance(event, Wait) and event.line.is_thread and event.token in streams]
    main = [wait for wait in waits if wait.line.name == "thread MainThread" and not wait.site.file.startswith("tools/")]
    assert {wait.site.file for wait in main} <= WHERE_THE_HOST_WAITS
    assert any(wait.site.file == "megatron_llama/metrics/readback.py" for wait in main)


@pytest.mark.long
def test_a_recording_can_be_repeated() -> None:
    """Without threads of the host, whose events may come in another order."""
    recorded("optim")  # in the first one of a process torch holds its first tensor for longer
    first, second = (layouts()["optim_grads_params, 2 gradient slots"](None) for _ in range(2))
    assert first == second


@pytest.mark.long
@pytest.mark.parametrize("name", ["exact offload, ends when reduced", "zenflow overlapped, ends when updated", "optim"])
def test_everything_ends_within_the_recording(name: str) -> None:
    """Memory that ends after it could end under a copy, and nobody would know."""
    made = {event.buffer for event in recorded(name) if isinstance(event, Alloc)}
    assert made == {event.buffer for event in recorded(name) if isinstance(event, Free)}


def test_buffers_have_names_and_offload_is_pinned() -> None:
    kinds = {event.name: event.memory for event in recorded("exact offload, between steps") if isinstance(event, Alloc) and event.name}
    named = ("gradient slot", "parameter slot", "offload buffer for state", "offload buffer for staging", "upload buffer 1 on the device")
    assert all(any(word in name for name in kinds) for word in named)
    assert {kind for name, kind in kinds.items() if name.startswith("offload buffer")} == {Memory.PINNED}
    assert {kind for name, kind in kinds.items() if "slot" in name} == {Memory.DEVICE}


class Comparing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compares all memory before each operator with what it was after the one before. What has changed must be noted as written."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        self.before: dict[int, bytes] = {}
        self.seen = self.compared = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.compare(str(func))
        return func(*args, **(kwargs or {}))

    def compare(self, before: str) -> None:
        events = self.recording.events
        written: dict[int, list[tuple[int, int]]] = {}
        for event in events[self.seen :]:
            if isinstance(event, Access) and event.writes:
                written.setdefault(event.buffer, []).append((event.begin, event.end))
        self.seen = len(events)
        now = {}
        for number, content in self.contents():
            now[number] = content
            old = self.before.get(number)
            if old is None or old == content:
                continue
            changed = bytearray(content)
            for begin, end in written.get(number, ()):
                changed[begin:end] = old[begin:end]
            assert changed == old, f"buffer {number} has changed before {before}, and nobody is known to have written it"
            self.compared += 1
        self.before = now

    def contents(self) -> Iterator[tuple[int, bytes]]:
        for key, watch in list(self.recording._watches.items()):
            alive = watch.peek()
            if alive is not None and alive[0].nbytes():
                yield self.recording._storages[key].number, ctypes.string_at(alive[0].data_ptr(), alive[0].nbytes())


@pytest.mark.long
@pytest.mark.parametrize("name", ["optim_grads_params, 2 gradient slots", "sp", "cp in a ring", "lora", "recompute full", "fp16"])
def test_nothing_is_written_unseen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found: list[Comparing] = []
    seeing = Recording.seeing

    @contextmanager
    def compared(recording: Recording) -> Iterator[None]:
        found.append(Comparing(recording))
        with seeing(recording), found[-1]:
            yield

    monkeypatch.setattr(Recording, "seeing", compared)
    layouts()[name](None)
    assert sum(one.compared for one in found) > 500


def test_an_operator_that_hides_what_it_writes_is_found() -> None:
    with pytest.raises(AssertionError, match="nobody is known to have written it"):
        recording = Recording()
        with recording.seeing(), Comparing(recording):
            values = torch.zeros(4)
            values.sum()
            ctypes.memset(values.data_ptr(), 1, 4)
            values.sum()


def test_an_unknown_kind_of_operator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout whose step has one is no layout that was checked."""
    monkeypatch.setattr(recordings, "_UNSEEN", ("aten::embedding",))
    with pytest.raises(RecordingError, match=r"aten\.embedding\.default"):
        layouts()["optim"](None)
