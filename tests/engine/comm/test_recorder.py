"""What a rank notes of itself."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

import pytest
from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.engine.comm.worker import Worker
from megatron_llama.launch.hang_report import hang_report, waiting


def in_a_thread_of_torch(work: Callable[[], object]) -> None:
    """Call ``work`` in a thread that Python has not made, as autograd's for the tensors of a device, while this one waits for it."""
    done = threading.Event()

    def run() -> None:
        work()
        done.set()

    _thread.start_new_thread(run, ())
    done.wait()


def in_a_worker(work: Callable[[], object]) -> None:
    worker = Worker("gathers")
    worker.submit(work).wait()
    worker.close()


def here(work: Callable[[], object]) -> None:
    work()


@pytest.mark.parametrize(("run", "computes"), [(here, True), (in_a_thread_of_torch, True), (in_a_worker, False)])
def test_waits_of_threads_that_compute_are_exposed(run: Callable[[Callable[[], object]], None], computes: bool) -> None:
    """Also those of the backward pass on a GPU, which runs in a thread of autograd's; not those of threads that wait so that it need not."""
    recorder = Recorder()
    marks: list[str] = []
    recorder.mark = lambda: marks.append("mark")
    seen: list[tuple[str, bool]] = []

    def backward() -> None:
        with recorder.exposed("parameters"):
            seen.append((hang_report(recorder), waiting(recorder) is not None))

    run(backward)
    assert (recorder.take_exposed_seconds() > 0) is computes
    assert len(marks) == (2 if computes else 0)
    assert seen == [("the start (iteration 0)" + (", waiting for parameters" if computes else ""), computes)]
    assert recorder.waits == {}


def test_what_is_done_for_the_first_time_and_what_is_no_part_of_a_step() -> None:
    recorder = Recorder()
    recorder.enter("forward 0", part="forward")
    assert recorder.part not in recorder.performed
    recorder.enter("forward 1", part="forward")
    assert recorder.part in recorder.performed
    progress = recorder.progress
    with recorder.outside_steps("saving"):
        assert (recorder.doing, recorder.part) == ("saving", None)
    assert (recorder.doing, recorder.part) == ("forward 1", None)
    assert recorder.progress > progress
