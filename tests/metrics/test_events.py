"""``events.jsonl``: what has happened to a run, beside a log that is one consistent curve."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.errors import CheckpointError
from megatron_llama.metrics.events import END, FAULT, REWIND, SAVED, EventFile
from megatron_llama.metrics.log import last_iteration

from tests.metrics.test_metric_log import RECORD, opened


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_what_a_run_takes_back_stays_here(tmp_path: Path) -> None:
    """A return to a checkpoint, a death and a resume: none of them leaves a trace in the log."""
    log, _ = opened(tmp_path)
    with pytest.raises(RuntimeError), log:
        for iteration in (1, 2, 3):
            log.write(replace(RECORD, iteration=iteration))
        log.event(SAVED, path="iter_0000001")
        log.rewind(1)
        log.write(replace(RECORD, iteration=2))
        log.tell(FAULT, words="rank 3 is slow")
        raise RuntimeError("rank 3 is gone")
    log, _ = opened(tmp_path, start=1)
    with log:
        assert log.reached == 2
    found = events(tmp_path)
    assert all(event.pop("time").startswith("20") for event in found)
    assert found == [
        {"event": SAVED, "path": "iter_0000001"},
        {"event": REWIND, "iteration": 1, "reached": 3},
        {"event": FAULT, "words": "rank 3 is slow"},
        {"event": END, "error": "rank 3 is gone"},
    ]


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    lost = EventFile(tmp_path / "none")
    lost.tell(END, reason="")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/none/events.jsonl: got No such file or directory, expected to append a line"):
        lost.append(END, reason="")


@pytest.mark.parametrize(
    ("text", "last"),
    [
        (b"", 0),
        (b'{"iteration": 3}\n{"iteration": 7}\n{"itera', 7),
        (b'{"iteration": 3}\n[1]\n{"iteration": null}\n{}\n\xff\xfe\n', 3),
        (b'{"iteration": 4, "x": "' + 70_000 * b"a" + b'"}\n{"iteration": 5}\n', 5),
        (b'{"iteration": 4, "x": "' + 70_000 * b"a" + b'"}\n', 0),
    ],
    ids=["empty", "cut off", "foreign lines", "a long line before", "nothing whole in the tail"],
)
def test_how_far_a_log_had_come(text: bytes, last: int, tmp_path: Path) -> None:
    assert last_iteration(tmp_path / "none") == 0
    (tmp_path / "log.jsonl").write_bytes(text)
    assert last_iteration(tmp_path / "log.jsonl") == last
    assert os.listdir(tmp_path) == ["log.jsonl"]
