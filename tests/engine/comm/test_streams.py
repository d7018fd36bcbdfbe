"""Work beside the caller: its order, its threads, its errors, its end."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from megatron_llama.engine.comm.streams import Stream, open_stream

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["inline", "thread"])
def stream(request: pytest.FixtureRequest) -> Stream:
    opened = open_stream(CPU, inline=request.param)
    request.addfinalizer(opened.close)
    return opened


@pytest.mark.parametrize("way", ["run", "issue"])
def test_work_runs_in_order_and_its_errors_are_its_own(stream: Stream, way: str) -> None:
    ran: list[int] = []
    start = getattr(stream, way)
    done = [start(lambda number=number: ran.append(number)) for number in range(100)]
    done[-1].wait()
    assert ran == list(range(100))
    done[0].wait()
    done[0].wait()
    with pytest.raises(ZeroDivisionError):
        start(_fail).wait()


def test_what_is_issued_need_not_wait_for_what_runs() -> None:
    stream = open_stream(CPU, inline=False)
    names: list[str] = []
    go_on = threading.Event()
    running = stream.run(lambda: names.append(f"{threading.current_thread().name} {go_on.wait(timeout=60)}"))
    stream.issue(lambda: names.append(threading.current_thread().name)).wait()
    go_on.set()
    running.wait()
    stream.run_update(lambda: names.append(threading.current_thread().name)).wait()
    stream.close()
    assert names == ["issue", "follow_up True", "follow_up"]


def test_autograd_is_off(stream: Stream) -> None:
    found: list[bool] = []
    with torch.enable_grad():
        stream.run(lambda: found.append(torch.is_grad_enabled())).wait()
        assert torch.is_grad_enabled()
    assert found == [False]


def test_an_error_belongs_to_its_work() -> None:
    stream = open_stream(CPU, inline=False)
    ran: list[int] = []
    first, second, third = (stream.run(lambda: ran.append(1)), stream.run(_fail), stream.run(lambda: ran.append(3)))
    third.wait()
    first.wait()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            second.wait()
    assert ran == [1, 3]
    stream.close()


def _fail() -> None:
    raise ZeroDivisionError


def test_closing_ends_the_threads_after_their_work() -> None:
    before = set(threading.enumerate())
    stream = open_stream(CPU, inline=False)
    threads = set(threading.enumerate()) - before
    ran: list[int] = []
    for number in range(10):
        stream.run(lambda number=number: ran.append(number))
    stream.close()
    for thread in threads:
        thread.join(timeout=60)
    assert len(threads) == 2 and not any(thread.is_alive() for thread in threads) and ran == list(range(10))
    for put in (stream.run, stream.issue):
        with pytest.raises(RuntimeError, match="closed"):
            put(lambda: None)


def test_work_is_forgotten_when_it_is_done() -> None:
    """Or a thread would keep alive what it worked for."""

    class Owner:
        def work(self) -> None:
            pass

    stream, owner = open_stream(CPU, inline=False), Owner()
    watched = weakref.ref(owner)
    done = stream.run(owner.work)
    done.wait()
    del owner
    stream.run(lambda: None).wait()
    gc.collect()
    assert watched() is None
    stream.close()


@pytest.mark.gpu
def test_on_a_device_what_is_issued_does_not_wait_for_what_runs() -> None:
    """But what runs waits for what was issued before it, and both for the caller."""
    device, order = torch.device("cuda", 0), dict[str, torch.cuda.Event]()
    stream = open_stream(device, inline=False)

    def mark(name: str) -> None:
        order[name] = torch.cuda.current_stream(device).record_event()

    def busy(name: str) -> None:
        torch.cuda._sleep(1_000_000_000)  # cycles
        mark(name)

    running = stream.run(lambda: busy("first run"))
    stream.issue(lambda: mark("issued beside it"))
    order["issued beside it"].synchronize()
    assert not order["first run"].query()
    running.wait()
    mark("caller")
    order["caller"].synchronize()
    assert order["first run"].query()
    stream.issue(lambda: busy("issued"))
    stream.run(lambda: mark("second run"))
    order["second run"].synchronize()
    assert order["issued"].query()
    busy("caller")
    stream.issue(lambda: mark("issued"))
    order["issued"].synchronize()
    assert order["caller"].query()
