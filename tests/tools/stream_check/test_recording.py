"""What a recording says of programs small enough to write their events down by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.worker import Worker
from megatron_llama.metrics.readback import Readback
from tools.stream_check.communicators import BACKEND, process_group
from tools.stream_check.events import Access, Alloc, Event, Free, RecordStream, Signal, Site, Wait
from tools.stream_check.recording import DEVICE, Recording, RecordingError
from tools.stream_check.substitutes import substituted

HERE = "tests/tools/stream_check/test_recording.py"


@contextmanager
def recorded(skip: Site | None = None) -> Iterator[Recording]:
    recording = Recording(skip)
    with substituted(recording), recording.seeing():
        yield recording
        recording.close()


def told(recording: Recording) -> list[str]:
    """Events as words: what the list says, without sites and threads."""
    words = []
    for event in recording.named_events():
        match event:
            case Alloc():
                words.append(f"alloc {event.buffer} of {event.nbytes} {event.memory.value} by {event.line.name}")
            case Free():
                words.append(f"free {event.buffer}")
            case RecordStream():
                words.append(f"keep {event.buffer} for {event.line.name}")
            case Access():
                verb = "writes" if event.writes else "reads"
                words.append(f"{event.line.name} {verb} {event.buffer} [{event.begin}, {event.end}) {event.operator}")
            case Signal():
                words.append(f"signal {event.token} of {event.line.name}")
            case Wait():
                words.append(f"{event.line.name} waits for {event.token}")
    return words


def test_two_streams_and_an_event() -> None:
    with recorded() as recording:
        side = devices.new_stream(DEVICE)
        values = torch.ones(4, device=DEVICE)
        side.wait_stream(devices.current_stream(DEVICE))
        with devices.on_stream(side):
            doubled = values[1:3] * 2
            event = side.record_event()
        devices.current_stream(DEVICE).wait_event(event)
        doubled.add_(1)
        del doubled
    assert told(recording) == [
        "alloc 0 of 16 device by computing stream",
        "computing stream writes 0 [0, 16) aten.ones.default",
        "signal 0 of computing stream",
        "side waits for 0",
        "alloc 1 of 8 device by side",
        "side reads 0 [4, 12) aten.mul.Tensor",
        "side writes 1 [0, 8) aten.mul.Tensor",
        "signal 1 of side",
        "computing stream waits for 1",
        "computing stream reads 1 [0, 8) aten.add_.Tensor",
        "computing stream writes 1 [0, 8) aten.add_.Tensor",
        "free 1",
    ]
    assert {event.site.file for event in recording.events} == {HERE}


def test_numbers_come_back_through_pinned_memory() -> None:
    with recorded() as recording:
        number = torch.zeros((), dtype=torch.float64, device=DEVICE)
        back = Readback([number])
        assert back.read() == [0.0]
    words = told(recording)
    copy = words.index("computing stream writes 2 [0, 8) aten.copy_.default")
    assert "alloc 2 of 8 pinned by thread MainThread" in words
    assert words[copy:] == [
        "computing stream writes 2 [0, 8) aten.copy_.default",
        "keep 2 for computing stream",
        "signal 0 of computing stream",
        "free 1",
        "thread MainThread waits for 0",
        "thread MainThread reads 2 [0, 8) tolist",
    ]


def test_a_number_that_the_host_asks_for_waits() -> None:
    with recorded() as recording:
        assert float(torch.zeros((), device=DEVICE)) == 0.0
    assert told(recording)[2:5] == [
        "computing stream reads 0 [0, 4) aten._local_scalar_dense.default",
        "signal 0 of computing stream",
        "thread MainThread waits for 0",
    ]


def test_threads_are_ordered_by_what_they_pass() -> None:
    """A worker sees what was done before ``submit``, and whoever waits sees what the worker did."""
    with recorded() as recording:
        worker = Worker("side")
        values = torch.zeros(2)
        worker.submit(lambda: values.add_(1)).wait()
        values.add_(1)
        worker.close()
        worker.join(60.0)
    assert values.tolist() == [2.0, 2.0]
    events = recording.events
    adds = [event for event in events if isinstance(event, Access) and event.writes and "add_" in event.operator]
    assert [event.line.name for event in adds] == ["thread side", "thread MainThread"]
    for first, second in ((0, adds[0]), (events.index(adds[0]), adds[1])):
        between = events[first : events.index(second)]
        signals = {event.token for event in between if isinstance(event, Signal) and event.line != second.line}
        assert any(isinstance(event, Wait) and event.line == second.line and event.token in signals for event in between)


def test_a_skipped_site_neither_waits_nor_records() -> None:
    def program(skip: Site | None) -> list[Event]:
        with recorded(skip) as recording:
            worker = devices.new_stream(DEVICE)
            event = worker.record_event()
            devices.current_stream(DEVICE).wait_event(event)
        return recording.events

    signal, wait = program(None)
    assert isinstance(signal, Signal)
    assert isinstance(wait, Wait)
    assert wait.token == signal.token
    without = program(signal.site)
    assert [type(event) for event in without] == [Wait]
    assert isinstance(without[0], Wait)
    assert without[0].token is None
    assert program(wait.site) == [signal]


def test_what_a_schema_does_not_say_is_refused() -> None:
    with recorded():
        values = torch.zeros(4, device=DEVICE)
        with pytest.raises(RecordingError, match=r"aten\.resize_"):
            values.resize_(8)


def test_operators_on_two_memories_are_refused() -> None:
    """As CUDA does: CPU tensors alone would add them."""
    with recorded(), pytest.raises(RecordingError, match=r"aten\.add\.Tensor .* device memory, \(4,\) in host memory"):
        torch.zeros(4, device=DEVICE) + torch.zeros(4)


def test_tensors_know_where_they_are() -> None:
    with recorded():
        there = torch.zeros(2, device=DEVICE)
        assert there.device == DEVICE
        assert (there + 1).device == DEVICE
        assert there.to(DEVICE) is there
        here = there.cpu()
        assert here.device == torch.device("cpu")
        assert not devices.is_host(there.device)
        assert devices.is_host(here.device)
        assert here.to(DEVICE).device == DEVICE
        weight = torch.ones(2, device=DEVICE, requires_grad=True)
        torch.autograd.backward(weight.double().sum())
        assert weight.grad is not None
        assert weight.grad.device == DEVICE


@contextmanager
def two_ranks() -> Iterator[Recording]:
    recording = Recording()
    with process_group(recording, 0, 2), substituted(recording), recording.seeing():
        yield recording
        recording.close()


def test_a_collective_runs_on_its_communicator_and_keeps_its_tensor() -> None:
    """The current stream waits for it, the host does not, and memory is not given back before that."""
    with two_ranks() as recording:
        work = dist.all_reduce(torch.zeros(2, device=DEVICE), async_op=True)
        assert work is not None
        torch.ones(2, device=DEVICE)
        work.wait()
    assert told(recording)[2:] == [
        "signal 0 of computing stream",
        "communicator world waits for 0",
        "communicator world reads 0 [0, 8) all_reduce 0 on world",
        "communicator world writes 0 [0, 8) all_reduce 0 on world",
        "signal 1 of communicator world",
        "alloc 1 of 8 device by computing stream",
        "computing stream writes 1 [0, 8) aten.ones.default",
        "free 1",
        "computing stream waits for 1",
        "free 0",
    ]


def test_a_collective_that_is_waited_for_at_once_runs_on_the_current_stream() -> None:
    with two_ranks() as recording:
        dist.all_reduce(torch.zeros(2, device=DEVICE))
    assert told(recording)[2] == "computing stream reads 0 [0, 8) all_reduce 0 on world"


def test_messages_of_a_pair_have_a_stream_and_batches_that_of_the_group() -> None:
    with two_ranks() as recording:
        values = torch.ones(2, device=DEVICE)
        received = torch.ones(2, device=DEVICE)
        for work in (dist.isend(values, 1), dist.irecv(received, 1)):
            assert work is not None
            work.wait()
        batch = [dist.P2POp(dist.isend, values, 1), dist.P2POp(dist.irecv, received, 1)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
    lines = [event.line.name for event in recording.events if isinstance(event, Access) and "on world" in event.operator]
    assert lines == ["communicator world 0:1"] * 2 + ["communicator world"] * 2


def test_what_the_backend_refuses_is_refused() -> None:
    with two_ranks():
        axis = dist.new_group([0, 1], backend=BACKEND)
        axis._name = "dp"  # as the mesh names it
        with pytest.raises(RecordingError, match="an axis has NCCL alone"):
            dist.all_reduce(torch.zeros(2), group=axis)
        with pytest.raises(RecordingError, match="NCCL has no such type"):
            dist.all_reduce(torch.zeros(2, dtype=torch.int16, device=DEVICE))
        dist.all_reduce(torch.zeros(2))  # the group of all ranks has gloo as well


def test_the_host_waits_for_copies_of_memory_that_is_not_pinned() -> None:
    """It reads such memory itself, on the way there, and is stopped on both ways unless the copy to the device may go on without it."""
    with recorded() as recording:
        there = torch.ones(2).to(DEVICE)
        there.cpu()
        torch.ones(2).to(DEVICE, non_blocking=True)
    words = told(recording)
    assert [word for word in words if "_to_copy" in word or "signal" in word or "waits" in word] == [
        "thread MainThread reads 0 [0, 8) aten._to_copy.default",
        "computing stream writes 1 [0, 8) aten._to_copy.default",
        "signal 0 of computing stream",
        "thread MainThread waits for 0",
        "computing stream reads 1 [0, 8) aten._to_copy.default",
        "computing stream writes 2 [0, 8) aten._to_copy.default",
        "signal 1 of computing stream",
        "thread MainThread waits for 1",
        "thread MainThread reads 3 [0, 8) aten._to_copy.default",
        "computing stream writes 4 [0, 8) aten._to_copy.default",
    ]
