"""Rounding is told from faults by how differences grow: in real pairs of short runs, and in curves made for one question each.
``tools/drift_rates.py`` measures how often, over many runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_llama.errors import DataError
from megatron_llama.launch.launcher import Place
from megatron_llama.prove.drift import ALARM, Drift, Dtype, as_json, compare_logs, judge, lines
from megatron_llama.prove.drift import Difference as D

from tests.parallel.cases import Layout, trainer
from tests.prove.test_logs import megatron, titan, write

STEPS, FAULT = 12, 8
HERE = Place(0, 1, 0)


def curve(layout: Layout, fault_at: int = 0) -> list[tuple[float, float]]:
    """Losses and norms of a real run. From ``fault_at`` on a microbatch is read twice, in the place of another one."""
    run = trainer(HERE, replace(layout, steps=STEPS, layers=2))
    found = []
    for index in range(STEPS):
        batches = run.batches(index)
        if fault_at and index + 1 >= fault_at:
            batches[-1] = batches[0]
        loss = run.runtime.step(batches)
        norm = run.optimizer.step(1e-3, clip=layout.clip).grad_norm
        found.append((loss.item(), norm.item()))
    return found


def ours(folder: Path, numbers: Sequence[tuple[float, float]]) -> Path:
    entries = [json.dumps({"iteration": i, "lm_loss": loss, "grad_norm": norm}) for i, (loss, norm) in enumerate(numbers, 1)]
    return write(folder, entries, "log.jsonl")


def printed(folder: Path, numbers: Sequence[tuple[float, float]]) -> Path:
    """What Megatron prints of it."""
    return write(folder, [megatron(i, f"{loss:.6E}", norm=f"{norm:.3f}") for i, (loss, norm) in enumerate(numbers, 1)])


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_real_runs(tmp_path: Path, dtype: Dtype) -> None:
    """Summing the gradients of four microbatches is rounding; reading one of them twice is not, and the step is named."""
    bf16 = dtype == "bf16"
    one, four = Layout(bf16=bf16), Layout(bf16=bf16, microbatches=4)
    reference, right, wrong = curve(one), curve(four), curve(four, FAULT)
    assert right != reference, "two layouts round alike, and nothing is shown"
    for number, form in enumerate((ours, printed)):
        logs = [form(tmp_path / f"{number}{name}", found) for name, found in (("a", reference), ("b", right), ("c", wrong))]
        good, bad = compare_logs(logs[0], logs[1], dtype=dtype), compare_logs(logs[0], logs[2], dtype=dtype)
        assert good.verdict == "rounding" and good.rises == (), (form, good)
        assert bad.verdict == "drift" and bad.rises[0].iteration == FAULT and bad.rises[0].quantity == "loss", (form, bad.rises)
        assert f"up to step {FAULT - 1} the losses agree" in bad.why
    same = compare_logs(logs[0], printed(tmp_path / "again", reference), dtype=dtype)
    assert same.verdict == "rounding" and "is the same in both, in all digits" in same.why


def noisy(size: Callable[[int], float], *, steps: int = 200, seed: int = 1, norms: float = 20.0) -> list[D]:
    """Differences whose spread at a step is ``size``, of norms so many times as much."""
    chance = random.Random(seed)
    return [D(i, chance.gauss(0, 1) * size(i), 1e-9, chance.gauss(0, 1) * size(i) * norms, 1e-9) for i in range(1, steps + 1)]


def at(found: Drift) -> int | None:
    return found.rises[0].iteration if found.rises else None


def test_growth_is_no_drift_and_a_step_that_parts_the_curves_is() -> None:
    """A difference may grow by six orders of magnitude, and end far above any fixed bound; a step is found far below it."""
    for seed in range(20):
        found = judge(noisy(lambda i: 1e-8 * math.exp(0.07 * i), seed=seed), dtype="fp32")
        assert found.verdict == "rounding" and max(abs(d.loss or 0.0) for d in found.differences) > 1e-3, found.rises
    for seed in range(5):
        found = judge(noisy(lambda i: 1e-8 * (1000 if i >= 100 else 1), seed=seed), dtype="fp32")
        assert max(abs(d.loss or 0.0) for d in found.differences) < 1e-4
        assert found.verdict == "drift" and 100 <= (at(found) or 0) <= 102 and found.rises[0].probability < ALARM


def late(size: Callable[[int], float]) -> list[D]:
    return [d for d in noisy(size) if d.iteration > 100]


def hidden(digits: float) -> list[D]:
    """Equal losses of few digits, then others of so many."""
    return [D(i, 0.0, digits, None, 0.0) if i < 50 else D(i, 3e-6, 1e-9, None, 0.0) for i in range(1, 100)]


JUDGED: dict[str, tuple[list[D], Dtype, int | str]] = {
    "one bad step, and the curves come back": (noisy(lambda i: 1e-8 * (1e5 if i == 50 else 1)), "fp32", 50),
    "a drift in fp32": (noisy(lambda i: 1e-5), "fp32", 1),
    "as much is rounding in bf16": (noisy(lambda i: 1e-5), "bf16", "rounding"),
    "coarse digits may have hidden it": (hidden(1e-6), "fp32", "rounding"),
    "fine ones would not": (hidden(1e-9), "fp32", 50),
    "too few digits": ([D(i, 0.0, 5e-3, None, 0.0) for i in range(1, 50)], "bf16", "digits"),
    "too few steps": (noisy(lambda i: 1e-8, steps=2), "fp32", "2 steps"),
    "how far right runs have grown apart by a late beginning nobody knows": (late(lambda i: 1e-3), "fp32", "first common step is 101"),
    "a late beginning": (late(lambda i: 1e-8), "fp32", "rounding"),
    "a fault after it": (late(lambda i: 1e-3 * (1000 if i >= 150 else 1)), "fp32", 150),
}


def test_curves_are_judged() -> None:
    for name, (differences, dtype, expected) in JUDGED.items():
        found = judge(differences, dtype=dtype)
        if isinstance(expected, int):
            assert found.verdict == "drift" and at(found) == expected, name
        else:
            assert found.verdict == expected or (found.verdict == "cannot say" and expected in found.why), (name, found)
    assert {rise.iteration for rise in judge(JUDGED["one bad step, and the curves come back"][0], dtype="fp32").rises} == {50}


def test_gradients_that_differ_under_equal_losses_are_named() -> None:
    differences = [replace(d, grad_norm=0.1) if d.iteration >= 30 else d for d in noisy(lambda i: 1e-8)]
    found = judge(differences, dtype="fp32")
    assert (found.rises[0].quantity, at(found)) == ("gradient norm", 30) and "its gradients do not" in found.why
    later = judge([replace(d, loss=0.1) if d.iteration >= 40 else d for d in differences], dtype="fp32")
    assert (later.rises[0].quantity, at(later)) == ("gradient norm", 30) and {r.iteration for r in later.rises} == {30, 40}


def test_what_digits_may_hide_is_no_difference(tmp_path: Path) -> None:
    """Two runs that are 1e-7 apart, printed with five digits: some steps round up in one and down in the other."""
    chance = random.Random(3)
    values = [5.0 - i / 50 + chance.gauss(0, 0.1) for i in range(100)]
    a = write(tmp_path / "a", [titan(i, f"{value:8.4f}") for i, value in enumerate(values, 1)])
    b = write(tmp_path / "b", [titan(i, f"{value * (1 + chance.gauss(0, 1e-5)):8.4f}") for i, value in enumerate(values, 1)])
    found = compare_logs(a, b, dtype="fp32")
    assert found.verdict == "rounding" and any(d.loss for d in found.differences)
    assert found.seen_from["loss"] > 1e-4, "the digits are told"
    c = write(tmp_path / "c", [titan(i, f"{value * (1.01 if i > 60 else 1):8.4f}") for i, value in enumerate(values, 1)])
    assert at(compare_logs(a, c, dtype="fp32")) == 61


def test_a_run_that_alone_has_no_finite_loss_drifts(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [megatron(i, "2.000000E+00") for i in range(1, 9)])
    b = write(tmp_path / "b", [megatron(i, "nan" if i == 5 else "2.000000E+00") for i in range(1, 9)])
    found = compare_logs(a, b, dtype="bf16")
    assert at(found) == 5 and f"{b} has no finite loss in step 5" in found.why
    json.dumps(as_json(found), allow_nan=False)
    both = write(tmp_path / "c", [megatron(i, "nan" if i == 5 else "2.000000E+00") for i in range(1, 9)])
    assert compare_logs(b, both, dtype="bf16").verdict == "rounding"


NUMBERS = [(5 - i / 10, 1.25) for i in range(20)]


def test_logs_that_cannot_be_compared(tmp_path: Path) -> None:
    a = ours(tmp_path / "a", NUMBERS)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for same in (a, tmp_path / "link" / "log.jsonl"):
        with pytest.raises(DataError, match="the same log twice"):
            compare_logs(a, same, dtype="bf16")
    early, later = (write(tmp_path / name, [megatron(i, "2.0E+00") for i in steps]) for name, steps in (("b", (1, 2)), ("c", (3, 4))))
    with pytest.raises(DataError, match="iterations 1 to 2 and iterations 3 to 4"):
        compare_logs(early, later, dtype="bf16")


def test_a_gradient_norm_that_one_run_alone_lacks_is_a_drift(tmp_path: Path) -> None:
    """Its losses agree in that step, and behind it."""
    a = ours(tmp_path / "a", NUMBERS)
    b = ours(tmp_path / "b", [(loss, math.nan if i == 7 else norm) for i, (loss, norm) in enumerate(NUMBERS, 1)])
    found = compare_logs(a, b, dtype="bf16")
    assert (found.verdict, at(found), found.rises[0].quantity) == ("drift", 7, "gradient norm")
    assert f"{b} has no finite gradient norm in step 7, where the other run has one" in found.why
    null = write(tmp_path / "c", b.read_text().replace("NaN", "null").splitlines(), "log.jsonl")
    assert at(compare_logs(null, a, dtype="bf16")) == 7, "null stands for a number that is not finite"
    lost = write(tmp_path / "d", a.read_text().replace('"lm_loss": 4.4', '"lm_loss": null').splitlines(), "log.jsonl")
    assert at(compare_logs(a, lost, dtype="bf16")) == 7 and "no finite loss in step 7" in compare_logs(a, lost, dtype="bf16").why


def test_behind_a_step_that_one_run_alone_has_skipped_nothing_is_said(tmp_path: Path) -> None:
    """The curves part there, and right runs in fp16 may."""
    skipping = [{"iteration": i, "lm_loss": loss * (1 + (i > 7) / 100), "grad_norm": 1.25} for i, (loss, _) in enumerate(NUMBERS, 1)]
    skipping[6] |= {"grad_norm": None, "skipped_iterations": 1}
    a = ours(tmp_path / "a", NUMBERS)
    b = write(tmp_path / "b", [json.dumps(entry) for entry in skipping], "log.jsonl")
    for one, other in ((a, b), (b, a)):
        found = compare_logs(one, other, dtype="fp16")
        assert found.verdict == "cannot say" and f"{b} has skipped a step at iteration 7" in found.why, found
    skipping[3]["lm_loss"] = 9.0
    before = write(tmp_path / "c", [json.dumps(entry) for entry in skipping], "log.jsonl")
    assert at(compare_logs(a, before, dtype="fp16")) == 4, "a drift before it is one"
    both = write(tmp_path / "d", [json.dumps(entry) for entry in skipping], "log.jsonl")
    assert compare_logs(before, both, dtype="fp16").verdict == "rounding"
    # A line for each step and a line for every tenth tell of the same skipped step.
    each, tenth = (
        write(tmp_path / name, [megatron(i, "2.000000E+00", skipped=int(10 - every < i <= 10)) for i in range(every, 41, every)])
        for name, every in (("e", 1), ("f", 10))
    )
    assert compare_logs(each, tenth, dtype="bf16").verdict == "rounding"


def test_lines_that_one_log_lacks_are_told(tmp_path: Path) -> None:
    lines = [megatron(i, "2.000000E+00") for i in range(1, 21)]
    torn = [line[:150] if i == 9 else line for i, line in enumerate(lines, 1)]
    found = compare_logs(write(tmp_path / "a", lines), write(tmp_path / "b", torn), dtype="bf16")
    assert [d.iteration for d in found.differences] == [*range(1, 9), *range(10, 21)]
    assert any(note.endswith("run.log has no line for 1 iteration: 9") for note in found.notes), found.notes


def test_means_of_an_interval_are_compared_with_means(tmp_path: Path) -> None:
    losses = [5 - i / 10 for i in range(1, 41)]
    each = ours(tmp_path / "a", [(loss, 1.25) for loss in losses])
    means = [megatron(i, f"{sum(losses[i - 10 : i]) / 10:.6E}") for i in (10, 20, 30, 40)]
    found = compare_logs(each, write(tmp_path / "b", means), dtype="fp32")
    assert found.verdict == "rounding" and [d.loss is not None for d in found.differences] == [True] * 4
    # The same lines as the losses of single steps would be far off.
    unknown = write(tmp_path / "c", [line.replace("grad norm", "other") for line in means[1:]])
    partly = compare_logs(each, unknown, dtype="fp32")
    assert [d.loss is not None for d in partly.differences] == [False, True, True]
    assert any("the losses of 1 iteration are left out" in note for note in partly.notes)


def test_means_of_nobody_knows_what_are_compared_if_the_lines_are_the_same(tmp_path: Path) -> None:
    """torchtitan of 2024 printed means and did not say so."""
    ten, again, twenty = (
        write(tmp_path / name, [titan(i, f"{5 - i / 100:8.5f}").replace("grad_norm:   1.2500  ", "") for i in steps])
        for name, steps in (("a", range(10, 90, 10)), ("b", range(10, 90, 10)), ("c", range(20, 100, 20)))
    )
    assert [d.loss for d in compare_logs(ten, again, dtype="bf16").differences] == [0.0] * 8
    found = compare_logs(ten, twenty, dtype="bf16")
    assert found.verdict == "cannot say" and [d.loss for d in found.differences] == [None] * 4


def test_lines_say_step_factor_and_how_rare_it_is() -> None:
    text = "\n".join(lines(judge(noisy(lambda i: 1e-8 * (1e6 if i >= 100 else 1)), dtype="fp32", notes=["a: went back"])))
    assert text.startswith("drift from step 100: up to step 99 the losses agree") and "(200 steps compared, 1 to 200, fp32)" in text
    assert "step 100: loss" in text and "times); fewer than 1 in 1,000,000 pairs of right runs has this" in text
    assert text.endswith("  a: went back") and "in the first of these steps a drift is seen from: loss" in text
    assert next(lines(judge(noisy(lambda i: 1e-8), dtype="fp32"))).startswith("rounding: the losses are at most")
