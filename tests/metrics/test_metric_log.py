import contextlib
import fcntl
import io
import json
import os
import pty
import re
import struct
import termios
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import pytest
from megatron_llama.errors import TrainingError
from megatron_llama.metrics.log import (
    LossNames,
    MetricLog,
    StepRecord,
    ValidationRecord,
    compact_line,
    format_duration,
    last_iteration,
    megatron_line,
    truncate,
)

RECORD = StepRecord(
    iteration=1,
    train_iters=500_000,
    consumed_samples=128,
    learning_rate=1.5e-6,
    global_batch_size=128,
    lm_loss=12.5,
    mean_lm_loss=12.34567,
    grad_norm=1.2341,
    elapsed_ms=1234.54321,
    tokens_per_second=9876.04,
    tokens_per_second_per_gpu=1234.505,
    tflops_per_gpu=400.0123,
    mfu=0.12345,
    exposed_comm_ms=1.25,
    peak_memory_bytes=1_320_702_444,
    eta_seconds=3723.4,
    data_parallel_bytes=8_388_608.0,
)
KEYS = {
    "iteration", "lm_loss", "grad_norm", "loss_scale", "skipped_iterations", "learning_rate", "consumed_samples", "tokens_per_second",
    "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "exposed_comm_ms", "data_parallel_bytes", "elapsed_ms", "peak_memory_bytes",
    "global_batch_size", "eta_seconds",
}
NOW = datetime(2026, 8, 22, 15, 22, 22)
def opened(folder: Path | None, start: int = 0, **changes: Any) -> tuple[MetricLog, io.StringIO]:
    out = io.StringIO()
    options: dict[str, Any] = {"prints": True, "start_iteration": start, "train_iters": 500_000, "progress_bar": True, "out": out}
    return MetricLog(folder, **(options | changes)), out


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_slow_device_has_a_speed_too() -> None:
    line = megatron_line(replace(RECORD, tflops_per_gpu=0.0123), NOW)
    assert "| throughput per GPU (TFLOP/s/GPU): 0.0123 |" in line


def test_the_compact_line_has_what_scripts_look_for() -> None:
    record = replace(RECORD, iteration=2500, train_iters=10_000, global_batch_size=1024, consumed_samples=2_560_000, eta_seconds=92580.0)
    line = compact_line(record, NOW)
    assert line == (
        " iteration  2500/10000 | lm loss: 1.25000E+01 | grad norm: 1.234 | learning rate: 1.50E-06 | global batch size: 1024 | "
        "consumed samples: 2560000 | elapsed time per iteration (ms): 1235 | tokens/s/GPU: 1235 | MFU: 12.3% | memory: 1.2 GiB | ETA: 25:43:00"
    )
    assert len(line) <= 260
    unknown = {"lm_loss": None, "mean_lm_loss": None, "grad_norm": None, "mfu": None, "peak_memory_bytes": None, "eta_seconds": None}
    unusual = compact_line(replace(record, **unknown, loss_scale=512.0, skipped_iterations=2), NOW)
    assert " | lm loss: n/a | grad norm: n/a | " in unusual
    assert unusual.endswith(" | tokens/s/GPU: 1235 | ETA: n/a | loss scale: 512.0 | number of skipped iterations: 2")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00:00"), (59.6, "0:01:00"), (3599.7, "1:00:00"), (100 * 3600 + 61, "100:01:01")])
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_what_an_objective_counts_has_its_place(tmp_path: Path) -> None:
    """The loss under its name, the few numbers with room in the compact line, all of them in the others."""
    names = LossNames("loss", "pairs", perplexity=False)
    numbers = {"rewards/accuracies": 0.75, "rewards/margins": None, "logps/chosen": -123.4567}
    record = replace(RECORD, numbers=numbers, names=names)
    line = compact_line(record, NOW)
    assert " | loss: 1.25000E+01 | rewards/margins: n/a | rewards/accuracies: 0.75 | grad norm: 1.234 | " in line and "logps" not in line
    line = megatron_line(record, NOW)
    assert " | loss: 1.234567E+01 | " in line and " | rewards/accuracies: 0.75 | rewards/margins: n/a | logps/chosen: -123.457 | " in line
    log, out = opened(tmp_path)
    with log:
        log.write(record)
        log.write_validation(ValidationRecord(1, 128, 0.5, 24, {"logps/chosen": -120.25}, names))
    assert out.getvalue().splitlines()[1] == (
        " validation loss at iteration 1 | consumed samples:          128 | loss value: 5.000000E-01 | logps/chosen: -120.25 "
        "| validation pairs: 24 |"
    )
    step, evaluation = lines(tmp_path)
    assert {"loss": 12.5, **numbers}.items() <= step.items() and "lm_loss" not in step
    assert evaluation == {
        "iteration": 1, "consumed_samples": 128, "validation_loss": 0.5, "validation_pairs": 24, "validation_logps/chosen": -120.25,
    }


def test_json_lines_are_unrounded(tmp_path: Path) -> None:
    log, out = opened(tmp_path / "new" / "folder")
    with log:
        log.write_validation(ValidationRecord(0, 0, 10.123456789012345, 77))
        log.write(RECORD)
        log.write(replace(RECORD, iteration=2, mfu=None, exposed_comm_ms=None, peak_memory_bytes=None, eta_seconds=None))
        # Lines are on disk at once: nothing is lost when the run is killed.
        evaluation, first, second = lines(tmp_path / "new" / "folder")
    assert evaluation == {"iteration": 0, "consumed_samples": 0, "validation_loss": 10.123456789012345, "validation_tokens": 77}
    assert datetime.fromisoformat(first.pop("time")) <= datetime.now()
    assert first == {key: getattr(RECORD, key) for key in KEYS}
    assert second["iteration"] == 2
    assert [key for key, value in second.items() if value is None] == ["mfu", "exposed_comm_ms", "peak_memory_bytes", "eta_seconds"]
    printed = out.getvalue().splitlines()
    assert len(printed) == 3
    assert printed[1] == compact_line(RECORD, NOW)


def test_other_ranks_are_silent(tmp_path: Path) -> None:
    log, out = opened(tmp_path / "never", prints=False)
    with log:
        log.advance()
        log.write(RECORD)
        log.write_validation(ValidationRecord(0, 0, 1.0, 1))
        log.say("hello")
    assert out.getvalue() == ""
    assert not (tmp_path / "never").exists()


def test_numbers_that_are_not_finite_stop_the_run(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    with log, pytest.raises(TrainingError, match="lm_loss at iteration 1: got nan, expected a finite number"):
        log.write(replace(RECORD, lm_loss=float("nan")))
    assert lines(tmp_path) == []


def test_a_resumed_run_continues_one_curve(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    with log:
        log.write_validation(ValidationRecord(0, 0, 9.0, 8))
        for iteration in (1, 2, 3, 4):
            log.write(replace(RECORD, iteration=iteration, lm_loss=10.0 - iteration))
            if iteration % 2 == 0:
                log.write_validation(ValidationRecord(iteration, iteration, 9.0 - iteration, 8))
    whole = lines(tmp_path)
    # Killed in the middle of a line, then resumed from the checkpoint at iteration 2.
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"iteration": 2, "lm_loss": 1.')
    log, out = opened(tmp_path, start=2)
    with log:
        assert [line["iteration"] for line in lines(tmp_path)] == [0, 1, 2, 2]
        log.write_validation(ValidationRecord(2, 2, 7.0, 8))
        for iteration in (3, 4):
            log.write(replace(RECORD, iteration=iteration, lm_loss=10.0 - iteration))
        log.write_validation(ValidationRecord(4, 4, 5.0, 8))
    again = lines(tmp_path)
    for line in (*whole, *again):
        line.pop("time", None)  # the clock's, to the second
    assert again == whole
    assert out.getvalue().count("validation loss at iteration 2 ") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_what_is_not_of_the_curve_is_only_printed(tmp_path: Path) -> None:
    """As the evaluation with which a resumed run begins between two that are due."""
    log, out = opened(tmp_path, start=1)
    with log:
        log.write_validation(ValidationRecord(1, 1, 8.0, 8), in_curve=False)
        log.write_validation(ValidationRecord(2, 2, 7.0, 8))
    assert [line["iteration"] for line in lines(tmp_path)] == [2] and log.evaluated == {2: 7.0}
    assert out.getvalue().count("validation loss at iteration ") == 2


def test_a_run_that_returns_to_its_start_keeps_the_evaluation_before_it(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    with log:
        log.write_validation(ValidationRecord(0, 0, 9.0, 8))
        log.write(RECORD)
        log.rewind(0)
        log.write(RECORD)
    assert [line["iteration"] for line in lines(tmp_path)] == [0, 1] and log.evaluated == {0: 9.0}


def test_truncation_keeps_lines_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    kept = '{"iteration": 1, "lm_loss": 1.50}\n{"iteration":2}\n'
    path.write_bytes(kept.encode() + b'\xff\xfe\n[1]\n{"lm_loss": 1}\n{"iteration": 3}\n{"itera')
    assert truncate(path, 2) == [{"iteration": 1, "lm_loss": 1.5}, {"iteration": 2}]
    assert path.read_text() == kept


def test_lines_that_no_parser_takes_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    deep = "[" * 2_000 + "]" * 2_000
    path.write_text(f'{{"iteration": 1}}\n{{"iteration": {"9" * 5_000}}}\n{deep}\n')
    assert last_iteration(path) == 1
    assert truncate(path, 2) == [{"iteration": 1}] and path.read_text() == '{"iteration": 1}\n'


def on_a_terminal(use: Callable[[TextIO], None]) -> str:
    """Everything that ``use`` writes to a terminal of 24 x 120."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        use(terminal)
    shown = b""
    # Linux ends the reading side of a closed terminal with an error, other systems with nothing.
    with contextlib.suppress(OSError):
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    return shown.decode()


def test_the_bar_is_on_a_terminal_and_text_stands_above_it(tmp_path: Path) -> None:
    def use(terminal: TextIO) -> None:
        with MetricLog(tmp_path, prints=True, start_iteration=3, train_iters=5, progress_bar=True, out=terminal) as log:
            log.write(replace(RECORD, iteration=4))
            log.advance()
            log.advance()

    shown = on_a_terminal(use)
    assert "3/5" in shown and "5/5" in shown
    [line] = [line for line in re.split(r"[\r\n]+", shown) if "lm loss" in line]
    assert line == compact_line(replace(RECORD, iteration=4), NOW)


@pytest.mark.tries("progress_bar")
def test_no_bar_when_not_asked_or_not_on_a_terminal(tmp_path: Path) -> None:
    log, out = opened(tmp_path)
    with log:
        log.advance()
    assert out.getvalue() == ""

    def use(terminal: TextIO) -> None:
        with MetricLog(tmp_path, prints=True, start_iteration=0, train_iters=5, progress_bar=False, out=terminal) as quiet:
            quiet.advance()
            quiet.say("only this")

    assert on_a_terminal(use).split() == ["only", "this"]


def test_a_fresh_start_begins_a_new_curve(tmp_path: Path) -> None:
    for _ in range(2):
        log, _ = opened(tmp_path)
        with log:
            log.write_validation(ValidationRecord(0, 0, 9.0, 8))
            log.write(RECORD)
    assert [line["iteration"] for line in lines(tmp_path)] == [0, 1]
