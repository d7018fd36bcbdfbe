"""``report``: what became of real runs. Every number of the page is one of the files that the run has left."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import Any
from xml.etree import ElementTree

import pytest
from megatron_llama.cli import main

from tests.e2e.product import DP2, EVALUATED, GLOBAL_BATCH_SIZE, SEQ_LENGTH, Product, column, log, steps
from tests.planner.test_html import Read, alone

KILLED = 5
"""The run dies when its log has come so far, or a little later."""
SKIPPING = {"on_bad_step": "skip", "loss_spike_factor": 1.0001, "loss_spike_window": 1, "max_bad_steps": 99}
"""Every step whose loss is clearly higher than the last good one is a bad step."""


@pytest.fixture(scope="module")
def killed(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps over two datasets that died and was resumed, with evaluations."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    command = product.command(
        **DP2.options,
        save=folder,
        load="auto",
        train_iters=12,
        save_interval=3,
        **EVALUATED,
        data_path=(3, product.data, 1, f"{product.data}2"),
    )
    for suffix in (".bin", ".idx", ".meta.json"):
        shutil.copy(f"{product.data}{suffix}", f"{product.data}2{suffix}")
    run = product.launcher.start(command, 2)
    run.until(lambda: len(steps(folder)) >= KILLED and (folder / "iter_0000003" / "meta.json").exists())
    run.signal(Signals.SIGKILL)
    assert set(run.wait().codes) == {-9} and len(steps(folder)) < 12
    shutil.copytree(folder, folder.parent / "dead")
    product.launcher.run(command, 2).ok()
    return folder


def written(*words: object, folder: Path) -> tuple[str, dict[str, Any]]:
    """The page and the JSON of a report."""
    assert main(["report", *map(str, words), "--html", str(folder / "page.html"), "--json", str(folder / "page.json")]) == 0
    return (folder / "page.html").read_text(), json.loads((folder / "page.json").read_text())


def drawings(text: str) -> dict[str, ElementTree.Element]:
    """The SVGs of a page by what a screen reader calls them. Each is well-formed."""
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"(?s)<svg.*?</svg>", text)]
    return {str(svg.findtext("title")): svg for svg in found}


def values(svg: ElementTree.Element, css_class: str = "c0") -> list[tuple[float, float]]:
    """The points of a curve in the numbers of its axes, which are read off the ticks."""
    texts = [(one.text, float(one.get("x") or 0), float(one.get("y") or 0)) for one in svg.iter("text")]
    foot = max(y for _, _, y in texts)
    up = [(y - 4, float(str(text))) for text, _, y in texts if y != foot]
    along = [(x, float(str(text))) for text, x, y in texts if y == foot]
    points = " ".join(str(one.get("points")) for one in svg.iter("polyline") if one.get("class") == css_class)
    pairs = [tuple(map(float, pair.split(","))) for pair in points.split()]

    def read(at: float, ticks: list[tuple[float, float]]) -> float:
        (first, low), (last, high) = ticks[0], ticks[-1]
        return low + (at - first) * (high - low) / (last - first)

    return [(read(x, along[:-1]), read(y, up)) for x, y in pairs]  # the last text of the lower axis may be moved


def test_the_page_of_a_run_that_died(killed: Path, tmp_path: Path) -> None:
    text, found = written(killed, folder=tmp_path)
    page, [run] = alone(text), found["runs"]
    losses, evaluations = column(killed, "lm_loss"), [entry for entry in log(killed) if "validation_loss" in entry]
    assert (run["iteration"], run["train_iters"], run["consumed_samples"]) == (12, 12, 12 * GLOBAL_BATCH_SIZE)
    assert run["loss"] == losses[-1] and run["tokens"] == 12 * GLOBAL_BATCH_SIZE * SEQ_LENGTH
    assert run["validation_loss"] == evaluations[-1]["validation_loss"] and f"{run['validation_loss']:.4f}" in page.texts
    assert run["best_validation_loss"] == min(entry["validation_loss"] for entry in evaluations)
    for name in ("elapsed_ms", "tokens_per_second"):
        assert run["measured"][name] == pytest.approx(statistics.median(column(killed, name)))
    assert run["measured"]["peak_memory_bytes"] == max(column(killed, "peak_memory_bytes"))

    drawn = drawings(text)
    curve = values(drawn["lm loss by iteration"])
    assert [round(at) for at, _ in curve] == list(range(1, 13))
    assert [loss for _, loss in curve] == pytest.approx(losses, abs=0.01)
    assert [round(at) for at, _ in values(drawn["validation loss by iteration"])] == [0, 3, 6, 9, 12]
    assert {"gradient norm by iteration", "learning rate by iteration", "tokens/s by time since the start"} <= set(drawn)
    assert all(name and name != "None" for name in drawn)

    # Bytes are those of the plan, but for a message that is under way at the last line of each process.
    compared = {one["what"]: one for one in run["plan"]["compared"]}
    messages = compared["data-parallel messages of rank 0, a step"]
    assert messages["measured"] == pytest.approx(statistics.mean(column(killed, "data_parallel_bytes")))
    assert messages["measured"] == pytest.approx(messages["planned"], rel=0.15)
    assert compared["peak memory of rank 0"]["planned"] == sum(run["plan"]["memory_bytes"].values())
    # The restart is told with its checkpoint and what it cost.
    last = steps(killed.parent / "dead")[-1]["iteration"]
    [restart] = [one for one in run["incidents"] if one["kind"] == "restart"]
    saved = max(int(path.parent.name[5:]) for path in (killed.parent / "dead").glob("iter_*/meta.json"))
    assert run["restarts"] == 1 and restart["iteration"] == saved
    assert f"resumed from {killed}/iter_{saved:07d}" in restart["words"]
    assert run["repeated_steps"] == last - saved and (f"the log had come to {last}" in restart["words"]) == (last > saved)
    assert any("killed, or its machine failed" in one["words"] for one in run["incidents"])
    assert [one["words"] for one in run["incidents"]][-1] == "ended: the last iteration"
    assert all(one["words"] in page.texts for one in run["incidents"])

    # Three samples of four are of the first dataset.
    read = {Path(one["name"]).name: one["tokens"] for one in run["data"]}
    assert read == {"docs": 9 * GLOBAL_BATCH_SIZE * SEQ_LENGTH, "docs2": 3 * GLOBAL_BATCH_SIZE * SEQ_LENGTH}
    assert run["options"]["training.train_iters"] == "12" and "torch" in run["surroundings"]
    assert not run["problems"] and "Not understood" not in page.texts


def test_a_run_that_is_at_work_or_was_killed(killed: Path, tmp_path: Path) -> None:
    """Half a line at the end is none that was damaged."""
    folder = killed.parent / "dead"
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"iteration": 9')
    text, found = written(folder, folder=tmp_path)
    assert "The newest process has not said that it ended: it runs, or was killed." in Read(text).texts
    number = len((folder / "log.jsonl").read_text().splitlines())
    assert found["runs"][0]["problems"] == [f"log.jsonl:{number}: not finished; the run may be writing it"]


@pytest.mark.long
def test_steps_that_were_left_out_and_runs_side_by_side(
    killed: Path, product: Product, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    product.train(save=tmp_path / "a", train_iters=12, lr=0.03, **SKIPPING)
    skipped = [json.loads(line) for line in (tmp_path / "a" / "skipped.jsonl").read_text().splitlines()]
    assert skipped and sum(column(tmp_path / "a", "skipped_iterations")) == len(skipped)
    text, found = written(tmp_path / "a", folder=tmp_path)
    [run] = found["runs"]
    told = [one for one in run["incidents"] if one["kind"] == "skip"]
    assert [one["iteration"] for one in told] == [one["iteration"] for one in skipped]
    assert (run["skipped_steps"], run["overflows"]) == (len(skipped), 0)
    marks = [one for one in drawings(text)["lm loss by iteration"].iter("line") if one.get("class") == "skipped"]
    assert len(marks) == len(skipped)
    assert str(marks[0].findtext("title")).startswith(f"iteration {skipped[0]['iteration']}: loss spike")

    capsys.readouterr()
    text, found = written(killed, tmp_path / "a", folder=tmp_path)
    alone(text)
    assert found["differences"]["--lr"] == ["0.003", "0.03"] and found["differences"]["processes"] == ["2", "1"]
    assert "--seed" not in found["differences"] and "--save" not in found["differences"]
    assert "\n--lr: 0.003 | 0.03\n" in capsys.readouterr().out
    curves = drawings(text)["lm loss by iteration"]
    for place, folder in enumerate((killed, tmp_path / "a")):
        assert [loss for _, loss in values(curves, f"c{place}")] == pytest.approx(column(folder, "lm_loss"), abs=0.02)


def test_what_was_not_understood_is_named(straight: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight("one"), folder, ignore=shutil.ignore_patterns("iter_*", "last", "best", "tokenizer"))
    lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    damage = ["{broken <b>\n", "[1]\n", '{"iteration": 2}\n', lines[1], b"\xff\xfe\n".decode("latin1")]
    (folder / "log.jsonl").write_text("".join([*lines[:4], *damage, *lines[4:]]), encoding="latin1")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "landing", "time": "2026-01-01T00:00:00"}\n{"event": "start", "time": "2026-01-01T00:00:00"}\n')
    text, found = written(folder, folder=tmp_path)
    [run] = found["runs"]
    first = len((folder / "events.jsonl").read_text().splitlines()) - 1
    assert run["iteration"] == 6 and run["loss"] == column(straight("one"), "lm_loss")[-1]
    assert run["problems"] == [
        "log.jsonl:5: no JSON object: {broken <b>",
        "log.jsonl:6: no JSON object: [1]",
        "log.jsonl:7: no line of a step or an evaluation",
        "log.jsonl:8: iteration 1 comes after iteration 3",
        "log.jsonl:9: no JSON object: ��",
        f"events.jsonl:{first}: no event that this version knows",
        f"events.jsonl:{first + 1}: start whose iteration, reached, world_size, config cannot be used",
    ]
    assert "<b>" not in text.replace("<b>", "", text.count("<figcaption><b>"))
    assert "  not understood: log.jsonl:5: no JSON object: {broken <b>\n" in capsys.readouterr().out


def test_a_run_of_an_earlier_version(straight: Callable[[str], Path], tmp_path: Path) -> None:
    """Without events there is no plan and no list of restarts; the configuration is that of the newest checkpoint."""
    shutil.copytree(straight("one"), tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "events.jsonl").unlink()
    text, found = written(tmp_path / "run", folder=tmp_path)
    [run] = found["runs"]
    assert "did not write what a plan needs" in run["plan"]["none_because"] and run["options"]["training.seq_length"] == str(SEQ_LENGTH)
    assert run["tokens"] == 6 * GLOBAL_BATCH_SIZE * SEQ_LENGTH and "lm loss by iteration" in drawings(text)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: None, "got no folder, expected the folder of a run; give the --save of a run that has begun"),
        (lambda folder: folder.mkdir(), "got neither log.jsonl nor events.jsonl, expected the folder of a run"),
        (lambda folder: folder.mkdir() or (folder / "log.jsonl").write_text("x\n"), "got no line that is understood: log.jsonl:1: no JSON"),
    ],
    ids=["no folder", "another folder", "another file"],
)
def test_where_nothing_can_be_shown(make: Callable[[Path], object], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "a.html")]) == 1
    assert f"error: {tmp_path}/run: {says}" in capsys.readouterr().err and not (tmp_path / "a.html").exists()


def test_wrong_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 2 and "report: got no run, expected a folder; write report RUN" in capsys.readouterr().err
    assert main(["report", "a", "b", "a"]) == 2 and "report: got a twice, expected each run once" in capsys.readouterr().err
