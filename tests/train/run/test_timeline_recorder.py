"""Clocks of ranks, and notes on the host and on a device; ``e2e/test_timeline.py`` has whole runs."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.schedule import Action, Op
from megatron_llama.train.run.timeline_file import COMPUTE, GATHERS, ITERATIONS, OTHER, UPDATES, WAITS, Span, tracks
from megatron_llama.train.run.timeline_recorder import Notes, clock_offset

from tests.harness import Cluster


def offsets(place: Place) -> tuple[float, float]:
    """Of clocks that are a hundred seconds apart each."""
    mesh = build_mesh(Config(), rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    return clock_offset(mesh.world, lambda: time.perf_counter() + 100.0 * place.rank)


def test_clocks_are_brought_together(cluster: Cluster) -> None:
    """All on one machine: what is left of the difference is the error, which is no larger than it says."""
    found = cluster.run(3, offsets)
    assert found[0] == (0.0, 0.0)
    for rank, (offset, error) in enumerate(found[1:], 1):
        assert 0 < error < 1.0 and abs(offset + 100.0 * rank) <= error


def test_notes_are_what_the_recorder_saw() -> None:
    """From several threads; nothing before the beginning, nothing behind the end, nothing without a timeline."""
    recorder = Recorder()
    assert recorder.begin("update", 1) is None and recorder.count("dp_gather", "all_gather", 8, 1) is None
    notes, begun = Notes(recorder, torch.device("cpu")), time.perf_counter()
    notes.begin()
    notes.next_iteration(7)
    message = recorder.count("dp_gather", "all_gather", 64, 3)
    action = recorder.begin("action", Action(Op.FORWARD, 1, 2))
    with recorder.exposed("parameters"):
        pass
    with recorder.exposed("all_reduce on world"):
        pass
    assert action is not None and message is not None
    action.end()
    devices.start_thread(end_one, recorder, name="other").join()
    notes.next_iteration(8)
    recorder.evaluating = True
    message.end()
    evaluated = recorder.count("tp", "all_reduce", 16)
    assert evaluated is not None
    evaluated.end()
    notes.finish()
    assert recorder.begin("update", 1) is None and recorder.traffic["tp", "all_reduce"].bytes == 16
    spans = {(span.lane, span.name): span for span in notes.spans(5, 100.0)}
    at = {"iteration": 7}
    assert {key: span.details for key, span in spans.items()} == {
        (ITERATIONS, "iteration 7"): at,
        (ITERATIONS, "iteration 8"): {"iteration": 8},
        (COMPUTE, "forward 2"): {**at, "op": "forward", "stage": 1, "microbatch": 2},
        (GATHERS, "all_gather 3"): {**at, "axis": "dp_gather", "operation": "all_gather", "bytes": 64, "bucket": 3},
        (WAITS, "parameters"): {**at, "on": GATHERS},
        (WAITS, "all_reduce on world"): {**at, "on": OTHER},
        (UPDATES, "update 4"): {**at, "bucket": 4},
        ("tp", "all_reduce"): {"iteration": 8, "axis": "tp", "operation": "all_reduce", "bytes": 16, "evaluation": 1},
    }
    assert all(begun + 100 <= span.begin <= span.end <= time.perf_counter() + 100 and span.rank == 5 for span in spans.values())
    wait, action_span = spans[WAITS, "parameters"], spans[COMPUTE, "forward 2"]
    assert action_span.begin <= wait.begin and wait.end <= action_span.end
    assert spans[ITERATIONS, "iteration 7"].end <= spans[GATHERS, "all_gather 3"].end <= spans[ITERATIONS, "iteration 8"].end


def end_one(recorder: Recorder) -> None:
    """An update of another thread; its waits are not exposed."""
    note = recorder.begin("update", 4)
    assert note is not None
    with recorder.exposed("a message"):
        note.end()


def test_what_overlaps_gets_a_track_of_its_own() -> None:
    times = [(0.0, 3.0), (1.0, 2.0), (2.0, 4.0), (3.0, 5.0), (3.5, 6.0)]
    spans = [Span(0, GATHERS, str(place), *one) for place, one in enumerate(times)]
    assert [[span.name for span in track] for track in tracks(spans)] == [["0", "3"], ["1", "2"], ["4"]]


@pytest.mark.gpu
def test_moments_of_a_device_are_those_of_its_work() -> None:
    """The host is through long before: passes last as long as their kernels, one behind the other, on the clock of the host."""
    device, recorder = torch.device("cuda"), Recorder()
    matrix = torch.randn(4096, 4096, device=device)
    matrix @ matrix
    torch.cuda.synchronize()
    notes, begun = Notes(recorder, device), time.perf_counter()
    notes.begin()
    notes.next_iteration(1)
    for microbatch in range(4):
        note = recorder.begin("action", Action(Op.FORWARD, 0, microbatch))
        for _ in range(20):
            matrix @ matrix
        assert note is not None
        note.end()
    issued = time.perf_counter()
    notes.finish()
    ended = time.perf_counter()
    passes = [span for span in notes.spans(0, 0.0) if span.lane == COMPUTE]
    assert all(before.end <= after.begin + 1e-6 for before, after in pairwise(passes)) and len(passes) == 4
    assert begun <= passes[0].begin and passes[-1].end <= ended + 1e-3
    assert passes[-1].end > issued and min(span.seconds for span in passes) > 1e-3
