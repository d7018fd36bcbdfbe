"""Logs as trainers write them: the lines here follow the format strings of Megatron-LM's ``training_log`` and torchtitan's
``MetricsProcessor``, of several years."""

from __future__ import annotations

import gzip
import io
import math
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.errors import DataError
from megatron_llama.metrics.log import MetricLog, StepRecord, ValidationRecord, compact_line, megatron_line
from megatron_llama.prove.logs import read_log

WHEN = datetime(2026, 5, 4, 3, 2, 1)


def record(iteration: int, loss: float | None, norm: float | None = 1.25) -> StepRecord:
    steps: dict[str, Any] = {"iteration": iteration, "train_iters": 100, "consumed_samples": 8 * iteration, "learning_rate": 1e-3, "global_batch_size": 8}
    losses: dict[str, Any] = {"lm_loss": loss, "mean_lm_loss": None if loss is None else loss + 0.5, "grad_norm": norm}
    rates: dict[str, Any] = {"elapsed_ms": 12.5, "tokens_per_second": 1e4, "tokens_per_second_per_gpu": 1e3, "tflops_per_gpu": 3.0, "eta_seconds": 60.0}
    return StepRecord(**steps, **losses, **rates, mfu=None, exposed_comm_ms=None, peak_memory_bytes=None)


def megatron(iteration: int, loss: str, *, norm: str = "1.250", skipped: int = 0) -> str:
    """A line of 2023 to 2026."""
    return (
        f" [2026-05-04 03:02:01] iteration {iteration:8d}/{100:8d} | consumed samples: {8 * iteration:12d} | elapsed time per iteration (ms): 12.5 "
        f"| throughput per GPU (TFLOP/s/GPU): 3.0 | learning rate: {1e-3:.6E} | global batch size: {8:5d} | lm loss: {loss} | loss scale: 1.0 "
        f"| grad norm: {norm} | num zeros: 0 | params norm: 12.345 | number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |"
    )


def titan(step: int, loss: str, *, norm: str = "  1.2500", prefix: str = "[rank0]:", colours: bool = False) -> str:
    """A line since mid-2025."""
    red, green, orange, reset = ("\x1b[31m", "\x1b[32m", "\x1b[38;2;180;60;0m", "\x1b[39m") if colours else ("",) * 4
    return (
        f"{prefix}[titan] 2026-05-04 03:02:01,338 - root - INFO - {red}step: {step:2}  {green}loss: {loss}  {orange}grad_norm: {norm}  "
        f"memory:  9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%{reset}"
    )


def write(folder: Path, lines: list[str], name: str = "run.log") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("\n".join([*lines, ""]))
    return path


def losses(path: Path) -> dict[int, float]:
    return {i: step.loss.value for i, step in read_log(path).steps.items() if step.loss is not None}


def test_our_log_is_read_with_all_its_digits(tmp_path: Path) -> None:
    with MetricLog(tmp_path, prints=True, start_iteration=0, train_iters=3, progress_bar=False, out=io.StringIO()) as log:
        log.write(record(1, 5.791619822382927))
        log.write_validation(ValidationRecord(1, 8, 5.5, 100))
        log.write(record(2, None, None))
        log.write(record(3, 5.25))
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"iteration": 4, "lm_lo')  # as a killed run leaves it
    run = read_log(tmp_path)
    assert run.trainer == "megatron_llama" and list(run.steps) == [1, 2, 3]
    first = run.steps[1]
    assert first.loss is not None and first.loss.value == 5.791619822382927 and 0 < first.loss.rounding < 1e-6
    assert first.grad_norm is not None and first.grad_norm.value == 1.25 and first.mean_of == 1
    lost = run.steps[2]
    assert lost.loss is not None and math.isnan(lost.loss.value) and lost.grad_norm is not None and math.isnan(lost.grad_norm.value)
    assert any("no finite loss at 1 iteration: 2" in note for note in run.notes)
    assert run.steps[3].where == f"{tmp_path}/log.jsonl:4"


@pytest.mark.parametrize(("line", "of", "more"), [(compact_line, 1, 0.0), (megatron_line, 10, 0.5)])
def test_our_lines_of_text(tmp_path: Path, line: Callable[[StepRecord, datetime], str], of: int, more: float) -> None:
    """The short ones hold the loss of the step, those of --log-format megatron the mean of the interval."""
    run = read_log(write(tmp_path, [line(record(i, 1.0 + i, None if i == 20 else 1.25), WHEN) for i in (10, 20, 30)]))
    assert run.trainer == "megatron_llama" and [step.mean_of for step in run.steps.values()] == [of] * 3
    assert [step.loss.value for step in run.steps.values() if step.loss] == [11.0 + more, 21.0 + more, 31.0 + more]
    norm = run.steps[20].grad_norm
    assert norm is not None and math.isnan(norm.value), "n/a stands for a norm that is not finite"


@pytest.mark.parametrize(
    "begins", ["  successfully loaded checkpoint from /c [ t 1/2, p 1/1 ] at iteration 26", " iterations  27 to 1,000"]
)
def test_the_first_mean_of_a_run_that_was_resumed_is_of_fewer_steps(tmp_path: Path, begins: str) -> None:
    """Nothing else in a text says that the sums began anew between two lines."""
    run = read_log(write(tmp_path, [*(megatron(i, "2.0E+00") for i in (10, 20)), begins, *(megatron(i, "2.0E+00") for i in (30, 40))]))
    assert [step.mean_of for step in run.steps.values()] == [10, 10, 4, 10]
    # A run says where it begins even if one line is all that it has printed.
    alone = read_log(write(tmp_path, [" iterations  1 to 30", megatron_line(record(30, 1.0), WHEN)]))
    assert [step.mean_of for step in alone.steps.values()] == [30]


MEGATRON_YEARS = {
    "2019": " iteration        1/     100 | elapsed time per iteration (ms): 512.3 | learning rate 1.500E-05 | lm loss 9.123457E+00 | loss scale 32768.0 |",
    "2020": " iteration        1/     100 | elapsed time per iteration (ms): 512.3 | learning rate: 1.500E-05 | lm loss: 9.123457E+00 | loss scale: 32768.0 "
    "| number of skipped iterations:   0 | number of nan iterations:   0 |",
    "2022": " iteration        1/     100 | consumed samples:            8 | elapsed time per iteration (ms): 512.3 | learning rate: 1.500E-05 "
    "| global batch size:     8 | lm loss: 9.123457E+00 | loss scale: 1.0 | grad norm: 1.250 | number of skipped iterations:   0 |",
    "2026": megatron(1, "9.123457E+00"),
    "behind a launcher": "[default7]: " + megatron(1, "9.123457E+00"),
}


@pytest.mark.parametrize("year", MEGATRON_YEARS)
def test_megatron_lines_of_all_years(tmp_path: Path, year: str) -> None:
    evaluation = " validation loss at iteration 1 | lm loss value: 7.000000E+00 | lm loss PPL: 1.096633E+03 | "
    run = read_log(write(tmp_path, ["setting up optimizer", MEGATRON_YEARS[year], evaluation, "-" * 80]))
    assert run.trainer == "Megatron-LM" and list(run.steps) == [1]
    loss, norm = run.steps[1].loss, run.steps[1].grad_norm
    assert loss is not None and loss.value == 9.123457 and loss.rounding == pytest.approx(5e-7 + 9.123457 * 2**-24)
    assert (norm is not None) == ("grad norm" in MEGATRON_YEARS[year])
    if norm is not None:
        assert norm.value == 1.25 and norm.rounding == pytest.approx(5e-4, rel=1e-3)


def test_megatron_means_are_of_the_interval_between_its_lines(tmp_path: Path) -> None:
    run = read_log(write(tmp_path, [megatron(i, f"{i:.6E}") for i in (1, 10, 20, 30, 35, 40)]))
    assert [step.mean_of for step in run.steps.values()] == [1, 10, 10, 10, 0, 10]
    assert run.notes == ("losses are means over 10 steps, as Megatron-LM prints them",)
    # One that begins later may begin in the middle of an interval, and one line shows no interval.
    assert [step.mean_of for step in read_log(write(tmp_path, [megatron(i, "2.0E+00") for i in (110, 120)])).steps.values()] == [0, 10]
    assert [step.mean_of for step in read_log(write(tmp_path, [megatron(100, "2.0E+00")])).steps.values()] == [0]


def test_skipped_steps_of_megatron(tmp_path: Path) -> None:
    """The mean over an interval is then over fewer steps, and over none of them it is 0."""
    run = read_log(write(tmp_path, [megatron(10, "5.0E+00"), megatron(20, "4.0E+00", skipped=3), megatron(30, "3.0E+00")]))
    assert [step.mean_of for step in run.steps.values()] == [10, 0, 10]
    alone = read_log(write(tmp_path, [megatron(1, "5.0E+00"), megatron(2, "0.000000E+00", skipped=1), megatron(3, "nan")]))
    assert alone.steps[2].loss is None and alone.steps[3].loss is not None and math.isnan(alone.steps[3].loss.value)
    assert "no finite loss at 2 iterations: 2, 3" in alone.notes


def test_torchtitan_with_colours_ranks_and_validation(tmp_path: Path) -> None:
    lines = []
    for step, loss in ((1, " 8.13541"), (10, " 7.00012"), (20, " 6.50001")):
        lines += [titan(step, loss, prefix=f"[rank{rank}]:", colours=True) for rank in (0, 1)]
        lines += [titan(step, "-1.00000", prefix="[rank2]:")]
    lines.append(
        "[rank0]:[titan] 2026-05-04 03:02:01,338 - root - INFO - validate step: 20  loss:  9.9999  memory:  9.46GiB(64.99%)  tps: 7"
    )
    run = read_log(write(tmp_path, lines))
    assert run.trainer == "torchtitan" and losses(tmp_path) == {1: 8.13541, 10: 7.00012, 20: 6.50001}
    tenth = run.steps[10]
    assert tenth.loss is not None and tenth.loss.rounding == pytest.approx(5e-6, rel=0.1)
    assert tenth.grad_norm is not None and tenth.grad_norm.value == 1.25 and tenth.mean_of == 1
    assert run.notes[0].startswith("3 lines of ranks in front of the last pipeline stage")


def test_torchtitan_before_it_printed_norms_may_have_printed_means(tmp_path: Path) -> None:
    old = "[titan] 2024-10-01 03:02:01,338 - root - INFO - step: {:2}  loss: {:7.4f}  memory:  9.46GiB(64.99%)  wps: 7,282  mfu: 0.17%"
    assert [s.mean_of for s in read_log(write(tmp_path, [old.format(i, 7.0) for i in (1, 10, 20)])).steps.values()] == [0, 0, 0]
    assert [s.mean_of for s in read_log(write(tmp_path, [old.format(i, 7.0) for i in (1, 2, 3)])).steps.values()] == [1, 1, 1]


def test_a_restart_replaces_what_it_repeats(tmp_path: Path) -> None:
    first = [titan(i, f"{9 - i / 10:8.5f}") for i in range(1, 9)]
    again = [titan(i, f"{9 - i / 10 + (i > 6) / 100:8.5f}") for i in range(5, 8)]
    run = read_log(write(tmp_path, first + again))
    assert losses(tmp_path) == pytest.approx({1: 8.9, 2: 8.8, 3: 8.7, 4: 8.6, 5: 8.5, 6: 8.4, 7: 8.31})
    assert len(run.notes) == 1 and f"went back to iteration 7 ({tmp_path}/run.log:11)" in run.notes[0]
    # A second run behind the first is told.
    run = read_log(write(tmp_path, [titan(i, f" {loss}") for loss in (8.1, 9.1) for i in range(1, 9)]))
    assert losses(tmp_path) == dict.fromkeys(range(1, 9), 9.1)
    assert f"{tmp_path}/run.log:9 begins anew, and nothing before it counts: if these are two runs" in run.notes[0]
    # Files of a folder are parts of a run, in the order of their numbers.
    for part, start in ((2, 1), (10, 3)):
        write(tmp_path / "parts", [megatron(i, f"{i + part:.6E}") for i in range(start, start + 3)], f"slurm-{part}.out")
    assert losses(tmp_path / "parts") == {1: 3.0, 2: 4.0, 3: 13.0, 4: 14.0, 5: 15.0}


@pytest.mark.parametrize(
    ("loss", "norm"),
    [("lm loss", "grad-norm"), ("lm-loss-training/lm loss", "grad-norm/grad-norm"), ("loss_metrics/global_avg_loss", "grad_norm")],
)
def test_events_of_tensorboard(tmp_path: Path, loss: str, norm: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for part, steps in (("20260504-0302", range(10, 60, 10)), ("20260505-0302", range(40, 90, 10))):
        with SummaryWriter(str(tmp_path / "tb" / part)) as writer:
            for step in steps:
                writer.add_scalar(loss, 1 / step + (part == "20260505-0302"), step)
                writer.add_scalar(norm, 2.0, step)
    run = read_log(tmp_path)
    assert run.trainer == ("torchtitan" if "global" in loss else "Megatron-LM")
    assert losses(tmp_path) == pytest.approx({s: 1 / s + (s >= 40) for s in range(10, 90, 10)}, rel=1e-7)
    assert all(step.mean_of == 1 and step.grad_norm is not None and step.grad_norm.value == 2.0 for step in run.steps.values())
    assert any("went back to iteration 40" in note for note in run.notes)


OURS = '{"iteration": 2, "lm_loss": 1.0}'
REFUSED = {
    "no step": (["hello", "iteration 5 begins"], "no line of a training step"),
    "torn number": ([titan(1, " 8.1"), titan(2, "8.1step:")], "run.log:2: got '8.1step:'"),
    "two steps in a line": ([megatron(1, "1.0E+00") + megatron(2, "1.0E+00")], "run.log:1: got two steps in one line"),
    "two trainers": ([megatron(1, "1.0E+00"), titan(2, " 8.1")], "Megatron-LM"),
    "two runs": ([titan(i, f" {loss}") for i in range(1, 9) for loss in (8.1, 8.2)], "run.log:2: got another loss for iteration 1"),
    "only ranks without the loss": ([titan(1, "-1.00000")], "a loss of -1 in every line"),
    "somebody else's JSON": (['{"step": 1, "loss": 2.0}'], "run.log:1"),
    "a hole in our log": (['{"iteration": 1, "lm_loss": 2.0}', '{"iteration": 2, "lm_', '{"iteration": 3, "lm_loss": 2.0}'], "run.log:2"),
    "JSON over several lines": (["{", '  "log_history": []', "}"], "run.log:1: got JSON over several lines"),
    "a list in JSON": (["[", '  {"iteration": 1, "lm_loss": 2.0}', "]"], "run.log:1: got JSON over several lines"),
    "truth for a number": (['{"iteration": true, "lm_loss": 2.0}'], "run.log:1"),
    "a step before the first": (['{"iteration": 0, "lm_loss": 2.0}'], "run.log:1"),
    "a number beyond all others": (['{"iteration": 1, "lm_loss": 1' + 400 * "0" + "}"], "run.log:1: got 1000"),
    "a decimal comma": ([megatron(1, "5,940000E+00")], "run.log:1: got '5,940000E+00', expected a number; write it with a decimal point"),
    "thousands": ([titan(1, " 8.1", norm="1,234.5")], "run.log:1: got '1,234.5', expected a number; write it with a decimal point"),
    "nothing but a line that is cut off": ([megatron(1, "5.9E+00")[:180]], "got 1 line of a step without a whole loss left out"),
    "words for numbers": (['{"iteration": 1, "lm_loss": "two"}'], "got 'two'"),
    "a tiny number": ([" iteration 7/ 100 | lm loss: 1e-999999999999999999 |"], "expected a number"),
    "a long number": ([" iteration 7/ 100 | lm loss: " + "1" * 5000 + " |"], "expected a number"),
    "depth": (['{"iteration": 1, "lm_loss": 1.0, "a": ' + "[" * 100_000 + "]" * 100_000 + "}", OURS], "over several lines"),
    "a word for a count": (['{"iteration": 1, "lm_loss": 1.0, "skipped_iterations": "x"}'], "expected an object with iteration"),
    "a step beyond all others": (['{"iteration": 1000000000000000000, "lm_loss": 1.0}', OURS], "expected an object with iteration"),
    "a line of megabytes": ([OURS, '{"iteration": 3, "lm_loss": 1.0, "a": "' + "x" * 5_000_000 + '"}'], "a line of more than"),
}


def test_what_is_not_understood_is_named(tmp_path: Path) -> None:
    for lines, message in REFUSED.values():
        with pytest.raises(DataError, match=r"got .*, expected .*; ") as error:
            read_log(write(tmp_path, lines))
        assert message in str(error.value) and "run.log" in str(error.value)


@pytest.mark.parametrize("code", ["gzip", "utf-16", "utf-8-sig"])
def test_packed_texts_and_those_of_windows(tmp_path: Path, code: str) -> None:
    for name, lines in (
        ("a", [megatron(i, "2.0E+00") for i in (1, 2)]),
        ("b", ['{"iteration": 1, "lm_loss": 2.0}', '{"iteration": 2, "lm_loss": 2.0}']),
    ):
        text = "\r\n".join(lines)
        (tmp_path / f"{name}.log.gz").write_bytes(gzip.compress(text.encode()) if code == "gzip" else text.encode(code))
        assert losses(tmp_path) == {1: 2.0, 2: 2.0}, name
        (tmp_path / f"{name}.log.gz").unlink()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="pipe: got a pipe or a device, expected a file or a folder; write what it says into a file"):
        read_log(pipe)  # it would wait for a writer
    with pytest.raises(DataError, match="/proc/self/mem: got Input/output error, expected a log that can be read"):
        read_log(Path("/proc/self/mem"))
    packed = write(tmp_path, [megatron(i, "2.0E+00") for i in range(1, 99)])
    packed.write_bytes(gzip.compress(packed.read_bytes())[:-30])
    with pytest.raises(DataError, match=f"{packed}: got .*, expected a log that can be read"):
        read_log(packed)


def test_a_number_that_was_cut_off_is_none(tmp_path: Path) -> None:
    """Its digits that are left are another number: 5.376 of 5.376E-01."""
    whole = megatron(2, "5.376000E-01")
    for end in ("lm loss: 5.3", "lm loss: 5.376", "lm los", "| lear"):
        torn = whole[: whole.index(end[:7])] + end
        run = read_log(write(tmp_path, [megatron(1, "6.0E-01"), torn, *(megatron(i, "5.0E-01") for i in (3, 4, 5))]))
        assert list(run.steps) == [1, 3, 4, 5]
        assert run.notes == (f"1 line of a step without a whole loss left out, as cut off: {tmp_path}/run.log:2",)
    lines = [titan(step, " 8.13541") for step in range(1, 6)]
    lines[1] = lines[1][: lines[1].index("8.13541") + 4]
    lines[3] = lines[3][: lines[3].index("1.2500") + 3]
    run = read_log(write(tmp_path, lines))
    assert list(run.steps) == [1, 3, 5] and run.notes[0].startswith("2 lines of steps without a whole loss left out")
    [step] = read_log(write(tmp_path, [" iteration 0/ 100 | lm loss: sNaN12 | grad norm: nan77 |"])).steps.values()
    assert step.loss is not None and math.isnan(step.loss.value)


def test_folders_without_a_log_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_log(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no log in this folder"):
        read_log(tmp_path)
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("accuracy", 1.0, 1)
    with pytest.raises(DataError, match="got events named accuracy"):
        read_log(tmp_path)


SOUND = " iteration 5/ 100 | lm loss: 2.0E+00 | grad norm: 1.0 |\n iteration 6/ 100 | lm loss: 2.0E+00 | grad norm: 1.0 |\n"
LONG = 2_000_000
ENDLESS = {
    "blanks behind a word": "iteration" + " " * LONG,
    "blanks in a field": " iteration 7/ 100 | " + " " * LONG + "x |",
    "blanks behind a name": " iteration 7/ 100 | a" + " " * LONG + "|",
    "colons": " iteration 7/ 100 | " + "a : " * (LONG // 4) + "|",
    "losses": "step: 1 loss: " + "loss:" * (LONG // 5),
    "blanks behind a loss": "step: 1  loss: 2 " + " " * LONG,
    "places of checkpoints": "iteration " + "loaded checkpoint from " * (LONG // 23),
    "iterations of checkpoints": "iteration loaded checkpoint from " + " at iteration " * (LONG // 14),
    "words": "iteration " * (LONG // 10),
    "digits": "iteration " + "1" * LONG,
    "colours": "iteration " + "\x1b[" * (LONG // 2),
    "a line without an end": "iteration" * LONG,
}


def test_long_lines_take_no_longer_than_others(tmp_path: Path) -> None:
    """A pattern that goes back over a line would take hours for these."""
    for line in ENDLESS.values():
        assert list(read_log(write(tmp_path, [SOUND + line])).steps) == [5, 6]


@pytest.mark.long
def test_a_packed_file_that_is_larger_than_any_log(tmp_path: Path) -> None:
    path = tmp_path / "run.log.gz"
    path.write_bytes(gzip.compress((b" " * 999 + b"\n") * 500_000, 9))
    with pytest.raises(DataError, match=r"more than [\d,]+ characters in a file of [\d,]+ bytes"):
        read_log(path)
