"""Files that ``report`` and ``plan`` read, with fields that nobody writes: each is shown, or refused with an error for users."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.errors import ConfigError, DataError
from megatron_llama.metrics.events import END, FAULT, REWIND, START, EventFile
from megatron_llama.planner.calibration import as_json, calibration_of, read_calibration
from megatron_llama.planner.run.folder import read_run
from megatron_llama.planner.run.page import report_page
from megatron_llama.planner.run.summary import summaries_as_json, summary_of
from megatron_llama.train.run.timeline_file import Recorded, Span, read_timeline, write_timeline

from tests.planner.test_run_page import MODEL, config_of, start


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HARMS: tuple[Any, ...] = (None, True, -1, 0, 2.5, 5e-324, 1e308, 10**18, 10**400, math.nan, math.inf, "x", "<script>", [], {}, {"a": 1})
HARMS += (nested(90), nested(900))


def harmed(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each field of an object, and of the objects in it, with every harm in its place."""
    for name, value in content.items():
        for harm in HARMS:
            yield f"{name} {harm!s:.20}", {**content, name: harm}
        if isinstance(value, dict):
            for where, inner in harmed(value):
                yield f"{name} {where}", {**content, name: inner}


def show(folder: Path) -> tuple[str, ...]:
    """What ``report`` does with a run. Returns what it has not understood."""
    summary = summary_of(read_run(str(folder)), None)
    list(summary.rows())
    json.dumps(summaries_as_json([summary]))
    page = report_page([summary])
    assert "<script>" not in page
    return summary.run.problems


STEP = {"iteration": 3, "learning_rate": 1e-3, "lm_loss": 2.0, "grad_norm": 1.0, "global_batch_size": 8, "consumed_samples": 24}
STEP |= {"elapsed_ms": 100.0, "skipped_iterations": 0, "data_parallel_bytes": 1000, "peak_memory_bytes": 10**9}
STEP["time"] = "2026-01-01T00:00:03"


def show_all(folder: Path, cases: Iterable[tuple[str, dict[str, Any]]], file: str, before: str) -> None:
    """A run for each harmed line, which stands behind a sound one."""
    for where, line in cases:
        (folder / file).write_text(f"{before}\n{json.dumps(line)}\n")
        try:
            show(folder)
        except Exception as error:
            raise AssertionError(f"{where}: {error!r}") from error


def test_each_field_of_a_log_line(tmp_path: Path) -> None:
    before = json.dumps({**STEP, "iteration": 2, "time": "2026-01-01T00:00:02"})
    cases = list(harmed(STEP))
    assert len(cases) > 150
    show_all(tmp_path, cases, "log.jsonl", before)


@pytest.mark.long
def test_each_field_of_an_event(tmp_path: Path) -> None:
    config = config_of(20, seq_length=2048, bf16=True)
    whole = start(config, data=[{"name": "a", "weight": 1, "samples": 10, "is": {"documents": 3}}])
    sections = {name: part for name, part in whole["config"].items() if name in ("model", "parallel")}
    whole["config"]["training"] = {"seq_length": 2048, "micro_batch_size": 1, "train_iters": 20, "global_batch_size": 8, "bf16": True}
    few = {name: {key: part[key] for key in list(part)[:12:2]} for name, part in sections.items()}
    (tmp_path / "log.jsonl").write_text(json.dumps(STEP) + "\n")
    lines = [
        *harmed({"event": START, "time": "2026-01-01T00:00:00", **{**whole, "config": few}}),
        *harmed({"event": REWIND, "time": "2026-01-01T00:00:01", "iteration": 1, "reached": 2}),
        *harmed({"event": FAULT, "time": "2026-01-01T00:00:01", "words": "rank 1 hangs"}),
        *harmed({"event": END, "time": "2026-01-01T00:00:01", "reason": "signal", "iteration": 3, "error": None}),
    ]
    sound = json.dumps({"event": START, "time": "2026-01-01T00:00:00", **whole})
    show_all(tmp_path, lines[::7], "events.jsonl", sound)


@pytest.mark.parametrize(
    ("losses", "count"),
    [([5e-324, 1e-323], 2), ([1e-20, 3e-20], 2), ([1e99, -1e99], 2), ([1e15, 1e15 + 0.125], 2), ([1e-310] * 3, 3), ([1.0, 1e300], 1)],
)
def test_losses_of_any_size_are_drawn(tmp_path: Path, losses: list[float], count: int) -> None:
    lines = [json.dumps({**STEP, "iteration": place, "lm_loss": loss}) for place, loss in enumerate(losses, 1)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    assert show(tmp_path) == () and read_run(str(tmp_path)).steps["lm_loss"].shape == (len(losses),)


def test_a_log_of_thousands_of_columns_and_long_lines(tmp_path: Path) -> None:
    """Columns here and there are left out, those of the trainer are not."""
    wide = {f"column {name}": 1.0 for name in range(5000)}
    lines = [json.dumps({**STEP, "iteration": 1, **wide}), json.dumps({**STEP, "iteration": 2, "note": "x" * 5_000_000})]
    lines += [json.dumps({**STEP, "iteration": place, f"other {place}": 1.0}) for place in range(3, 20_000)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(str(tmp_path))
    assert len(run.steps) <= 200 and len(run.steps["lm_loss"]) == 19_998
    assert run.problems[0] == "log.jsonl:2: a line of more than 4,194,304 bytes" and "names of numbers are left out" in run.problems[1]


def test_a_log_of_nothing_that_is_understood(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("x\n" * 100_000 + json.dumps(STEP) + "\n")
    problems = show(tmp_path)
    assert len(problems) == 1001 and problems[-1] == "and 99,000 more lines"


@pytest.mark.parametrize("place", [lambda path: path.mkdir(), lambda path: path.symlink_to("nowhere")], ids=["folder", "link"])
def test_what_is_no_file_is_named(place: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps(STEP) + "\n")
    place(tmp_path / "events.jsonl")
    assert read_run(str(tmp_path)).problems == ("events.jsonl: neither a file nor a link to one",)


def test_a_billion_layers_get_no_plan(tmp_path: Path) -> None:
    config = dataclasses.replace(config_of(5), model=dataclasses.replace(MODEL, num_hidden_layers=10**9))
    EventFile(tmp_path).append(START, **start(config))
    plan = summary_of(read_run(str(tmp_path)), None).plan
    assert isinstance(plan, str) and "--num-hidden-layers: got 1000000000, expected at most 2,048" in plan


def test_each_number_of_a_calibration(tmp_path: Path) -> None:
    """It is refused, or planned with: times stay finite."""
    path = tmp_path / "own.json"
    sound = as_json(calibration_of("h100", None))
    refused = 0
    for where, content in harmed(sound):
        path.write_text(json.dumps(content))
        try:
            found = read_calibration(path)
        except ConfigError:
            refused += 1
            continue
        assert "precision" in where or found.gpu.node >= 1, where
        numbers = [getattr(part, item.name) for part in (found.gpu, found.fit) for item in dataclasses.fields(part)]
        assert all(math.isfinite(number) and 0 <= number <= 1e24 for number in numbers if isinstance(number, float)), where
        assert min(found.gpu.peak, found.gpu.hbm, found.gpu.nvlink, found.gpu.nic, found.fit.memory, found.fit.matmul_own) > 0, where
    assert refused > 500


TIMELINE = Recorded({}, 2, 1, "cpu", True, 0, 0.0, ("a", "b"), (Span(0, "compute", "F0", 0.0, 1.0), Span(1, "compute", "F0", 0.0, 1.0)))


def test_each_field_of_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_timeline(path, TIMELINE)
    sound = json.loads(path.read_text())
    place = next(place for place, event in enumerate(sound["traceEvents"]) if event["ph"] == "X")
    cases = list(harmed(sound)) + [
        (where, {**sound, "traceEvents": [*sound["traceEvents"][:place], event]}) for where, event in harmed(sound["traceEvents"][place])
    ]
    for where, content in cases:
        path.write_text(json.dumps(content))
        try:
            found = read_timeline(path)
        except ConfigError:
            continue
        assert found.per_node >= 1 and found.ranks >= 1 and all(math.isfinite(span.seconds) and span.rank >= 0 for span in found.spans), (
            where
        )


def test_timelines_that_are_larger_inside(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    path.write_bytes(gzip.compress(b" " * 200_000_000, 9))
    with pytest.raises(ConfigError, match=r"it unpacks to more than [\d,]+ bytes"):
        read_timeline(path)
    (tmp_path / "own.json").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="no regular file"):
        read_calibration(tmp_path / "own.json")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        read_timeline(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither"):
        os.mkfifo(tmp_path / "log.jsonl")
        read_run(str(tmp_path))


def test_a_log_without_checkpoints_is_read_without_torch(tmp_path: Path) -> None:
    """Its import takes longer than 200,000 lines."""
    line = {"iteration": 1, "learning_rate": 1e-4, "lm_loss": 3.0}
    (tmp_path / "log.jsonl").write_text(json.dumps(line) + "\n")
    code = "import sys; from megatron_llama.planner.run.folder import read_run; "
    code += "read_run(sys.argv[1]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
