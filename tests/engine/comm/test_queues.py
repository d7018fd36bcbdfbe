"""A CommQueue on the host starts exchanges in order, keeps its window, and outlives errors."""

from __future__ import annotations

import threading

import pytest
import torch
from megatron_llama.engine.comm.host.queues import SMALL_BYTES, HostCommQueue, HostPacedCommQueue
from megatron_llama.engine.comm.host.threads import ThreadStream
from megatron_llama.engine.comm.queues import CommQueue, open_comm_queue


class Message:
    """An exchange that arrives when the test says so."""

    def __init__(self, number: int, log: list[str], *, fails: bool = False) -> None:
        self.number, self.log, self.fails = number, log, fails
        self.started, self.arrived = threading.Event(), threading.Event()

    def start(self) -> None:
        """Noted."""
        self.log.append(f"start {self.number}")
        self.started.set()

    def wait(self) -> None:
        """Until the test lets it."""
        assert self.arrived.wait(timeout=60)
        self.log.append(f"wait {self.number}")
        if self.fails:
            raise ZeroDivisionError


@pytest.fixture(params=["host", "paced"])
def comm_queue(request: pytest.FixtureRequest) -> CommQueue:
    stream = ThreadStream()
    opened: CommQueue = HostCommQueue(stream, window=2) if request.param == "host" else HostPacedCommQueue(window=2)
    request.addfinalizer(stream.close)
    request.addfinalizer(opened.close)
    return opened


def test_two_are_under_way_and_the_third_starts_when_the_first_is_through(comm_queue: CommQueue) -> None:
    log: list[str] = []
    messages = [Message(number, log) for number in range(4)]
    done = [comm_queue.submit(message, size=SMALL_BYTES) for message in messages]
    for message in messages[:2]:
        assert message.started.wait(timeout=60)
    assert log == ["start 0", "start 1"]
    messages[1].arrived.set()
    messages[0].arrived.set()
    done[1].wait()
    for message in messages[2:]:
        message.arrived.set()
    done[3].wait()
    assert [line for line in log if line.startswith("start")] == [f"start {number}" for number in range(4)]
    assert [line for line in log if line.startswith("wait")] == [f"wait {number}" for number in range(4)]
    assert log.index("wait 0") < log.index("start 2") and log.index("wait 1") < log.index("start 3")


def test_small_messages_do_not_count(comm_queue: CommQueue) -> None:
    log: list[str] = []
    messages = [Message(number, log) for number in range(5)]
    done = [comm_queue.submit(m, size=SMALL_BYTES - (m.number in (1, 2))) for m in messages]
    for message in messages[:4]:
        assert message.started.wait(timeout=60)
    assert log == [f"start {number}" for number in range(4)], "two large ones, and the small ones between them"
    for message in messages:
        message.arrived.set()
    done[-1].wait()


def test_an_exchange_waits_for_what_makes_its_source(comm_queue: CommQueue) -> None:
    log: list[str] = []
    stream, go_on = ThreadStream(), threading.Event()
    messages = [Message(number, log) for number in range(2)]
    for message in messages:
        message.arrived.set()
    made = stream.run(lambda: log.append(f"made {go_on.wait(timeout=60)}"))
    failed = stream.run(_fail)
    done = [comm_queue.submit(m, size=SMALL_BYTES, after=a) for m, a in zip(messages, (made, failed), strict=True)]
    go_on.set()
    done[0].wait()
    assert log == ["made True", "start 0", "wait 0"]
    with pytest.raises(ZeroDivisionError):
        done[1].wait()
    assert log == ["made True", "start 0", "wait 0"], "what could not be made is not sent"
    stream.close()


def test_an_arrival_is_announced_before_the_next_exchange_starts(comm_queue: CommQueue) -> None:
    log: list[str] = []
    stream, go_on = ThreadStream(), threading.Event()
    messages = [Message(number, log) for number in range(3)]
    made = stream.run(lambda: log.append(f"made {go_on.wait(timeout=60)}"))
    done = [comm_queue.submit(m, size=SMALL_BYTES, after=made if m.number == 2 else None) for m in messages]
    assert messages[1].started.wait(timeout=60)
    messages[0].arrived.set()
    done[0].wait()
    assert log == ["start 0", "start 1", "wait 0"], "what makes the source of the third is still to come"
    go_on.set()
    for message in messages[1:]:
        message.arrived.set()
    done[2].wait()
    assert log.index("made True") < log.index("start 2")
    stream.close()


def test_an_arrival_waits_for_no_source_but_its_own() -> None:
    """Of two exchanges that are under way the second one arrives, though what makes the source of the third is still to come."""
    log: list[str] = []
    stream, go_on, comm_queue = (ThreadStream(), threading.Event(), HostPacedCommQueue(window=2))
    messages = [Message(number, log) for number in range(3)]
    made = stream.run(lambda: go_on.wait(timeout=60))
    done = [comm_queue.submit(m, size=SMALL_BYTES, after=made if m.number == 2 else None) for m in messages]
    for message in messages:
        message.arrived.set()
    done[0].wait()
    done[1].wait()
    assert sorted(log) == ["start 0", "start 1", "wait 0", "wait 1"]
    go_on.set()
    done[2].wait()
    comm_queue.close()
    stream.close()


def _fail() -> None:
    raise ZeroDivisionError


def test_an_error_belongs_to_its_message_and_the_next_goes_on(comm_queue: CommQueue) -> None:
    log: list[str] = []
    messages = [Message(0, log), Message(1, log, fails=True), Message(2, log)]
    done = [comm_queue.submit(message, size=SMALL_BYTES) for message in messages]
    for message in messages:
        message.arrived.set()
    done[2].wait()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            done[1].wait()
    done[0].wait()


def test_with_nobody_to_talk_to_everything_happens_at_once() -> None:
    log: list[str] = []
    message = Message(0, log)
    message.arrived.set()
    alone = open_comm_queue(torch.device("cpu"), ThreadStream(), inline=True)
    done = alone.submit(message, size=SMALL_BYTES)
    assert log == ["start 0"]
    done.wait()
    assert log == ["start 0", "wait 0"]
    alone.close()


def test_nobody_waits_for_a_thread_that_waits_without_end(comm_queue: CommQueue) -> None:
    log: list[str] = []
    messages = [Message(number, log) for number in range(4)]
    done = [comm_queue.submit(message, size=SMALL_BYTES) for message in messages]
    for message in messages[:2]:
        assert message.started.wait(timeout=60)
    comm_queue.fail(ConnectionError("the peer is gone"))
    later = Message(4, log)
    for future in (*done, comm_queue.submit(later, size=SMALL_BYTES)):
        with pytest.raises(ConnectionError, match="the peer is gone"):
            future.wait()
    assert not any(line.startswith("wait") for line in log)
    for message in (*messages, later):
        message.arrived.set()


def test_a_stream_that_has_failed_ends_all_waits() -> None:
    stream, go_on = ThreadStream(), threading.Event()
    done = [stream.run(go_on.wait), stream.run(go_on.wait), stream.issue(go_on.wait)]
    stream.fail(ConnectionError("the peer is gone"))
    for future in (*done, stream.run(_fail), stream.issue(_fail)):
        with pytest.raises(ConnectionError, match="the peer is gone"):
            future.wait()
    go_on.set()
    stream.close()
