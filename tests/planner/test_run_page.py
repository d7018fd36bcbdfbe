"""The page of ``report`` at lengths that no test trains: what is drawn of a million steps, and what is not shown to others."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_llama.config.schema import CheckpointConfig, Config, DataConfig, ModelConfig, TrainingConfig
from megatron_llama.metrics.events import END, REWIND, START, EventFile
from megatron_llama.metrics.log import MetricLog
from megatron_llama.planner.pictures.curves import COLUMNS, Axis, Curve, chart, short, thinned, visible_range
from megatron_llama.planner.run.folder import read_run
from megatron_llama.planner.run.incidents import Incidents, text, without_secrets
from megatron_llama.planner.run.page import BYTES, report_page
from megatron_llama.planner.run.summary import Summary, summary_of
from megatron_llama.train.setup.description import describe_config

from tests.metrics.test_metric_log import RECORD
from tests.planner.test_html import alone

SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
MODEL = ModelConfig(**SIZES, vocab_size=32000)


def start(config: Config, **details: Any) -> dict[str, Any]:
    """The details of a start on eight GPUs that the planner knows."""
    facts = {"iteration": 0, "reached": 0, "world_size": 8, "processes_per_machine": 8, "device": "NVIDIA H100 80GB HBM3"}
    known = {"device_is_host": False, "device_memory": 85_520_809_984, "versions": {"torch": "2.13.0"}}
    return {**facts, **known, "data": [], "config": asdict(config), **details}


def config_of(iterations: int, *, seq_length: int = 64, **more: Any) -> Config:
    training = TrainingConfig(train_iters=iterations, global_batch_size=8, seq_length=seq_length, **more)
    return Config(model=MODEL, training=training)


def rewrite(folder: Path, change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
    """Each line of a log, by its place, with other fields."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    (folder / "log.jsonl").write_text("".join(json.dumps(line | change(place, line)) + "\n" for place, line in enumerate(lines)))


def long_run(folder: Path, steps: int, spike: int) -> None:
    """As a trainer writes it, with one step whose loss is high."""
    folder.mkdir()
    noise = np.random.default_rng(1).normal(size=steps)
    with MetricLog(folder, prints=True, start_iteration=0, train_iters=steps, progress_bar=False, out=io.StringIO()) as log:
        log.write(replace(RECORD, iteration=1))
    [line] = (folder / "log.jsonl").read_text().splitlines()
    begin = json.loads(line)
    with (folder / "log.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = 9.0 if step == spike else 2.0 + 0.05 * noise[step - 1]
            time = f"2026-01-{1 + step // 86400:02d}T{step // 3600 % 24:02d}:{step // 60 % 60:02d}:{step % 60:02d}"
            file.write(json.dumps({**begin, "iteration": step, "lm_loss": loss, "time": time}) + "\n")


@pytest.mark.long
def test_a_long_run_is_a_small_page_and_keeps_its_spike(tmp_path: Path) -> None:
    long_run(tmp_path / "run", 60_000, 20_000)
    page = report_page([summary_of(read_run(str(tmp_path / "run")), None)])
    alone(page)
    assert len(page) < BYTES / 3
    [loss] = [svg for svg in re.findall(r"(?s)<svg.*?</svg>", page) if "<title>lm loss by iteration</title>" in svg]
    points = [tuple(map(float, pair.split(","))) for pair in re.findall(r"[\d.]+,[\d.]+", loss)]
    # One column reaches the upper edge, at a third of the axis; the others stay in the band of the noise.
    top = min(y for _, y in points)
    assert [x for x, y in points if y < top + 20] == pytest.approx([46 + 324 / 3], abs=1.0)
    assert "highest 9" in loss and len(points) <= 4 * COLUMNS + 4


@pytest.mark.long
def test_many_runs_with_many_restarts_stay_below_a_megabyte(tmp_path: Path) -> None:
    config = config_of(2000, seq_length=2048, bf16=True)
    for name in "abcdef":
        long_run(tmp_path / name, 1000, 1)
        events = EventFile(tmp_path / name)
        for number in range(300):
            events.append(START, **start(config, iteration=number, reached=number + 5, resumes=f"runs/{name}/iter_{number:07d}"))
    summaries = [summary_of(read_run(str(tmp_path / name)), None) for name in "abcdef"]
    page = report_page(summaries)
    assert len(alone(page).texts) > 1000 and len(page.encode()) < BYTES
    assert [one.incidents.restarts for one in summaries] == [299] * 6


def test_thinning_keeps_what_a_column_shows() -> None:
    """First, lowest, highest and last of each column, in their order; NaN is nothing; breaks part a curve."""
    chance = np.random.default_rng(2)
    x, y = np.arange(10_000.0), chance.normal(size=10_000)
    y[chance.integers(0, 10_000, 500)] = np.nan
    [whole] = thinned(Curve("a", x, y), 0.0, 10_000.0, 100)
    assert len(whole.x) <= 400 and (np.diff(whole.x) > 0).all()
    for column in range(100):
        inside = slice(100 * column, 100 * column + 100)
        kept = whole.y[(whole.x >= inside.start) & (whole.x < inside.stop)]
        known = y[inside][np.isfinite(y[inside])]
        assert (kept.min(), kept.max(), kept[0], kept[-1]) == (known.min(), known.max(), known[0], known[-1])
    pieces = list(thinned(Curve("a", x, y, breaks=(2500.0, 7000.0)), 0.0, 10_000.0, 100))
    assert [(int(piece.x[0]), int(piece.x[-1])) for piece in pieces] == [
        (int(x[part][np.isfinite(y[part])][0]), int(x[part][np.isfinite(y[part])][-1]))
        for part in (slice(0, 2500), slice(2500, 7000), slice(7000, 10_000))
    ]


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([], 0.0, 1.0), ([3.0], 2.85, 3.15), ([0.0, 0.0], -1.0, 1.0), ([1.0, 2.0, np.nan], 0.96, 2.04), ([2.0, 3.0] * 500 + [1e6], 1.94, 3.56)],
    ids=["nothing", "one", "zeros", "two", "far out"],
)
def test_the_range_of_an_axis(values: list[float], low: float, high: float) -> None:
    curve = Curve("a", np.arange(float(len(values))), np.array(values))
    assert visible_range([curve]) == pytest.approx((low, high))
    drawn = chart([curve], Axis(0.0, 1.0), title="t", description="d")
    assert drawn.count("<title>t</title><desc>") == 0 and "<title>t</title>\n<desc>d</desc>" in drawn and "nan" not in drawn


def test_numbers_of_ticks() -> None:
    words = {0.0: "0", 0.002: "0.002", 1.5e-5: "1.5e-05", 9999.0: "9999", 12_500.0: "12.5k", 3e6: "3M", -2.5e9: "-2.5G", 1e12: "1T"}
    assert {value: short(value) for value in words} == words


def test_a_gpu_has_a_plan_of_time_and_memory(tmp_path: Path) -> None:
    config = config_of(20, seq_length=2048, bf16=True)
    config = replace(config, parallel=replace(config.parallel, data_parallel_sharding_strategy="optim_grads_params"))
    long_run(tmp_path / "run", 20, 20)
    EventFile(tmp_path / "run").append(START, **start(config))
    summary = summary_of(read_run(str(tmp_path / "run")), None)
    assert not isinstance(summary.plan, str), summary.plan
    found = {one.what: one for one in summary.plan.compared()}
    assert 0.05 < (found["step"].planned or 0) < 5 and 0.1 < (found["MFU"].planned or 0) < 0.8
    assert 2**33 < (found["peak memory of rank 0"].planned or 0) < 2**37
    assert found["peak memory of rank 0"].measured == RECORD.peak_memory_bytes
    page = alone(report_page([summary]))
    assert "Memory of rank 0" in page.texts and "measured" in page.texts
    assert describe_config(config, 8).items() <= summary.described().items() and set(summary.described().values()) <= set(page.texts)
    # A device that nobody knows has no times, but the same memory and bytes.
    (tmp_path / "run" / "events.jsonl").unlink()
    EventFile(tmp_path / "run").append(START, **start(config, device="AMD Instinct"))
    other = summary_of(read_run(str(tmp_path / "run")), None).plan
    assert not isinstance(other, str) and "does not know AMD Instinct" in next(iter(other.notes()))
    unknown = {one.what: one.planned for one in other.compared()}
    assert unknown["step"] is None and unknown["peak memory of rank 0"] == found["peak memory of rank 0"].planned
    # Options of another version are said, and everything else is shown.
    (tmp_path / "run" / "events.jsonl").unlink()
    foreign = start(config)
    foreign["config"]["training"]["warp_speed"] = 9
    EventFile(tmp_path / "run").append(START, **foreign)
    none = summary_of(read_run(str(tmp_path / "run")), None)
    assert isinstance(none.plan, str) and "got training.warp_speed, expected options of this version" in none.plan
    assert none.plan in alone(report_page([none])).texts


def told(folder: Path, *events: dict[str, Any]) -> Summary:
    with (folder / "events.jsonl").open("w") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    return summary_of(read_run(str(folder)), None)


def test_what_happened_is_told_in_order_with_its_cost(tmp_path: Path) -> None:
    """Two deaths, one with a word and one without, a rollback, a change of options, and a silence."""
    config = config_of(40)
    long_run(tmp_path / "run", 40, 7)
    # A line each minute, 41 minutes of silence in the middle.
    rewrite(
        tmp_path / "run",
        lambda place, line: {"time": f"2026-01-01T0{place // 20}:{place % 20:02d}:00", "elapsed_ms": 60_000.0},
    )
    changed = replace(config, optimizer=replace(config.optimizer, lr=9.0))
    summary = told(
        tmp_path / "run",
        {"event": START, "time": "2026-01-01T00:00:00", **start(config, reached=77)},
        {"event": REWIND, "time": "2026-01-01T00:05:30", "iteration": 2, "reached": 5},
        {"event": "fault", "time": "2026-01-01T00:09:20", "words": "rank 3 is stuck"},
        {"event": END, "time": "2026-01-01T00:09:30", "error": "rank 3: got no answer"},
        {"event": START, "time": "2026-01-01T00:10:30", **start(changed, world_size=4, iteration=8, reached=10, resumes="r/iter_0000008")},
        {"event": START, "time": "2026-01-01T00:12:30", **start(changed, world_size=4, iteration=8, reached=8, resumes="r/iter_0000008")},
    )
    found = summary.incidents
    assert (found.restarts, found.repeated, found.down_seconds) == (2, 3 + 2, 30.0 + 30.0)
    assert found.wall_seconds == 79 * 60 and found.step_seconds == 40 * 60 and found.is_open
    kinds = [(one.kind, one.words) for one in found.listed]
    assert [kind for kind, _ in kinds] == ["start", "rollback", "fault", "error", "restart", "error", "restart", "gap"]
    assert kinds[1][1] == "back to iteration 2; 3 steps done again" and kinds[3][1] == "ended: rank 3: got no answer"
    assert kinds[4][1] == (
        "resumed from r/iter_0000008; 0:00:30 after the last sign of life; 2 steps done again (the log had come to 10); "
        "8 processes before, 4 now; --lr 0.0003 before, 9.0 now"
    ).replace("0.0003", text(config.optimizer.lr))
    assert kinds[5][1].startswith("nothing was said at its end") and "done again" not in kinds[6][1]
    marked = [text for text in alone(report_page([summary])).texts if text.startswith("iteration ") and " to iteration 2" in text]
    assert marked[0] == f"iteration 2: {kinds[1][1]}" and "restarts and returns to a checkpoint" in report_page([summary])
    assert kinds[7][1] == "no line for 0:41:00, usually 0:01:00" and found.listed[7].iteration == 20


def test_passwords_are_not_shown(tmp_path: Path) -> None:
    secret = "s3://me:hunter2@bucket/text https://host/a.parquet?X-Amz-Signature=hunter2&b=1"
    assert without_secrets(secret) == "s3://...@bucket/text https://host/a.parquet?..."
    config = Config(
        model=MODEL,
        data=DataConfig(data_path=tuple(secret.split())),
        checkpoint=CheckpointConfig(save="gs://u:hunter2@b/run"),
        training=TrainingConfig(train_iters=3, global_batch_size=8, seq_length=64),
    )
    long_run(tmp_path / "run", 3, 2)
    data = [{"name": word, "samples": None, "weight": 1} for word in secret.split()]
    resumes = "gs://u:hunter2@b/run/iter_0000001"
    summary = told(tmp_path / "run", {"event": START, "time": "2026-01-01T00:00:00", **start(config, data=data, resumes=resumes)})
    page = report_page([summary])
    assert "hunter2" not in page and "hunter2" not in json.dumps(summary.as_json()) and "gs://...@b/run" in page


def test_a_plan_is_compared_with_steps_of_its_own_layout(tmp_path: Path) -> None:
    config = config_of(20, bf16=True)
    long_run(tmp_path / "run", 20, 20)
    names = ("elapsed_ms", "peak_memory_bytes", "data_parallel_bytes")
    rewrite(tmp_path / "run", lambda place, line: dict(zip(names, (900.0, 9000, 0) if place < 12 else (100.0, 1000, 700), strict=True)))
    first = {"event": START, "time": "2026-01-01T00:00:00", **start(config, world_size=4)}
    wider = {"event": START, "time": "2026-01-01T00:00:12", **start(config, iteration=12, reached=12)}
    # Going on with another end is going on with the same steps.
    longer = replace(config, training=replace(config.training, exit_interval=20))
    again = {"event": START, "time": "2026-01-01T00:00:16", **start(longer, iteration=16, reached=16)}
    for events, expected in (
        ((first, wider), (100.0, 1000, 700)),
        ((first, wider, again), (100.0, 1000, 700)),
        ((first,), (900.0, 9000, 280)),
    ):
        measured = told(tmp_path / "run", *events).as_json()["measured"]
        assert tuple(measured[name] for name in names) == pytest.approx(expected)
    # Nothing has been measured yet of the layout in which a run has just gone on.
    moved = {"event": START, "time": "2026-01-01T00:00:20", **start(config, world_size=2, iteration=20, reached=20)}
    assert told(tmp_path / "run", first, moved).as_json()["measured"]["elapsed_ms"] is None


LEFT_OUT = {"iteration": 3, "first_sample": 16, "last_sample": 23, "reason": "loss spike", "value": 9.0}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("file", "changes", "says"),
    [
        ("skipped", {"iteration": "3"}, "skipped.jsonl:1: no step that was left out"),
        ("events", {"data": [None]}, "events.jsonl:1: start whose data cannot be used"),
        ("events", {"data": [{"name": "a", "weight": "3"}]}, "events.jsonl:1: start whose data cannot be used"),
        ("events", {"iteration": -1, "reached": 10**30}, "events.jsonl:1: start whose iteration, reached cannot be used"),
        ("events", {"config": {"training": []}}, "events.jsonl:1: start whose config cannot be used"),
        ("log", {"validation_loss": float("nan")}, "log.jsonl:1: no line of a step or an evaluation"),
        ("log", {"iteration": 10**30}, "log.jsonl:1: no line of a step or an evaluation"),
        ("log", {"time": "2026-01-01T00:00:00+02:00"}, None),
        ("log", {"elapsed_ms": 10**400, "tokens_per_second": float("inf")}, None),
    ],
)
def test_a_damaged_line_is_named_and_the_others_are_shown(file: str, changes: dict[str, Any], says: str | None, tmp_path: Path) -> None:
    config = config_of(20, on_bad_step="skip")
    long_run(tmp_path / "run", 20, 20)
    begun = {"event": START, "time": "2026-01-01T00:00:00", **start(config)}
    for name, entry in (("skipped", LEFT_OUT), ("events", begun)):
        (tmp_path / "run" / f"{name}.jsonl").write_text(json.dumps(entry) + "\n" + json.dumps(entry) + "\n")
    damaged = tmp_path / "run" / f"{file}.jsonl"
    whole = damaged.read_text().splitlines()
    damaged.write_text("\n".join([json.dumps({**json.loads(whole[0]), **changes}), *whole[1:], ""]))
    summary = summary_of(read_run(str(tmp_path / "run")), None)
    assert summary.run.problems == (() if says is None else (says,))
    page = alone(report_page([summary]))
    assert "lm loss by iteration" in page.texts and "loss spike 9: samples 16 to 23 are left out" in page.texts
    assert json.loads(json.dumps(summary.as_json(), allow_nan=False))["iteration"] == 20


def test_runs_of_few_lines_have_a_page(tmp_path: Path) -> None:
    """One that never logged a step, and one whose curves have one point, well after the start. Overflows are no steps that were left out."""
    failed = {"event": END, "time": "2026-01-01T00:00:09", "error": "out of memory"}
    summary = told(tmp_path, {"event": START, "time": "2026-01-01T00:00:00", **start(config_of(3))}, failed)
    assert summary.iteration == 0 and Incidents(summary.run).wall_seconds == 9.0
    assert "ended: out of memory" in alone(report_page([summary])).texts
    long_run(tmp_path / "run", 1, 1)
    first = {"event": START, "time": "2025-12-31T23:59:00", **start(config_of(40, fp16=True, on_bad_step="skip"))}
    drawn = alone(report_page([told(tmp_path / "run", first)]))
    assert {"tokens/s by time since the start", "lm loss by iteration"} <= set(drawn.texts)
    long_run(tmp_path / "overflows", 20, 20)
    rewrite(tmp_path / "overflows", lambda place, line: {"skipped_iterations": 1})
    (tmp_path / "overflows" / "skipped.jsonl").write_text(json.dumps(LEFT_OUT) + "\n")
    assert json.loads(json.dumps(told(tmp_path / "overflows", first).as_json()))["overflows"] == 19
