"""A tracker that fails or hangs costs its own copy of some lines, and nothing else."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from megatron_llama.metrics import trackers
from megatron_llama.metrics.events import START, EventFile, tracked_runs
from megatron_llama.metrics.log import MetricLog, StepRecord, ValidationRecord
from megatron_llama.metrics.trackers import Tracker

from tests.metrics.test_metric_log import RECORD


class Service:
    """A receiver with a fault: it refuses the line of one iteration, or does not answer from then on."""

    def __init__(self, refuses: int = 0, hangs: int = 0) -> None:
        self.refuses = refuses
        self.hangs = hangs
        self.taken: list[int] = []
        self.closed = False

    def step(self, record: StepRecord) -> None:
        if record.iteration == self.hangs:
            Event().wait()
        if record.iteration == self.refuses:
            raise ConnectionError("no route to host")
        self.taken.append(record.iteration)

    def validation(self, record: ValidationRecord) -> None:
        raise ValueError("a name that it does not allow")

    def rewind(self, iteration: int) -> None:
        self.taken.append(-iteration)

    def close(self) -> None:
        self.closed = True


def written(folder: Path, service: Service) -> tuple[str, str]:
    """Four steps, an evaluation and a return to iteration 2, and the end. Returns what was printed, and the words of the events."""
    out = io.StringIO()
    feed = Tracker("Service llamas", service, run="7")
    with MetricLog(folder, prints=True, start_iteration=0, train_iters=4, progress_bar=False, out=out, trackers=[feed]) as log:
        assert log.tracked == {"Service llamas": "7"}
        for iteration in (1, 2, 3):
            log.write(replace(RECORD, iteration=iteration))
        log.write_validation(ValidationRecord(3, 9, 2.5, 99))
        log.rewind(2)
        for iteration in (3, 4):
            log.write(replace(RECORD, iteration=iteration))
    lines = [json.loads(line)["iteration"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, 4]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return out.getvalue(), "\n".join(event.get("words", "") for event in events)


def test_a_refused_line_is_said_and_the_others_follow(tmp_path: Path) -> None:
    service = Service(refuses=2)
    said, told = written(tmp_path, service)
    assert service.taken == [1, 3, -2, 3, 4] and service.closed
    for words in (said, told):
        assert words.count("Service llamas: got ConnectionError: no route to host, expected it to take a line; log.jsonl has") == 1
        assert "Service llamas lacks 2 lines of this process, which log.jsonl has" in words


def test_a_service_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    service = Service(hangs=3)
    said, told = written(tmp_path, service)
    assert service.taken == [1, 2] and not service.closed
    for words in (said, told):
        assert "Service llamas has not answered for 0 s: it lacks up to the last 5 lines of this process, which log.jsonl has" in words


def test_the_runs_of_trackers_are_those_of_the_last_fresh_start(tmp_path: Path) -> None:
    assert tracked_runs(tmp_path / "none") == {}
    events = EventFile(tmp_path)
    for iteration, runs in ((0, {"MLflow a": "1", "W&B b": "2"}), (4, {"MLflow a": "1"}), (0, {"MLflow a": "3"}), (2, {"Trackio c": "4"})):
        events.append(START, iteration=iteration, trackers=runs)
    with events.path.open("a") as file:
        file.write('{"event": "start", "iteration": 3, "trackers": [1]}\n[]\n{"event": "start", "iter')
    assert tracked_runs(tmp_path) == {"MLflow a": "3", "Trackio c": "4"}
