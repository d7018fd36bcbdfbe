"""The ``schedule`` command: its text grid, its numbers, its drawing and its errors."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from megatron_llama.cli import main

FOUR = ["schedule", "--pipeline-model-parallel-size", "4", "--num-microbatches", "8", "--pipeline-schedule"]


def output(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_one_row_per_rank_on_a_time_grid(capsys: pytest.CaptureFixture[str]) -> None:
    text = output([*FOUR, "1f1b"], capsys)
    assert "1f1b: 4 pipeline ranks, 8 microbatches (validated)" in text
    assert "rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- F4 B1--- F5" in text
    assert "rank 3  .  .  .  F0 B0--- F1 B1--- F2" in text
    assert "bubble       27.27% of the makespan; formula (p-1)/(m+p-1) = 27.27%" in text
    assert "makespan     33 forward" in text and "in flight    4 3 2 1 microbatches" in text


def test_zero_bubble_grid_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    text = output([*FOUR, "zb-v"], capsys)
    assert "zb-v: 4 pipeline ranks x 2 chunks, 8 microbatches" in text
    assert "rank 3  .   .   .   F0a F0b F1a F1b F2a" in text
    assert "formula (p-1)/(6m+p-1) = 5.88%" in text and "inside     0 0 0 0 idle" in text and "in flight    4 4 4 4 " in text
    assert "rank 0  F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1" in output([*FOUR, "zb-h1"], capsys)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_measured_and_published_bubble_agree(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    extra = ["--virtual-pipeline-model-parallel-size", "2"] if name == "interleaved" else []
    (line,) = [line for line in output([*FOUR, name, *extra], capsys).splitlines() if line.startswith("bubble")]
    assert line.split()[1] == line.split()[-1]


def test_too_few_microbatches_for_the_formula_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(["schedule", "--pipeline-schedule", "zb-v", "--num-microbatches", "4"], capsys)
    assert ", which needs 7 microbatches" in text


def test_long_schedules_continue_below(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(["schedule", "--num-microbatches", "100", "--pipeline-schedule", "gpipe"], capsys)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    first = "".join(line.removeprefix("rank 0") for line in lines if line.startswith("rank 0"))
    words = [word.rstrip("-") for word in first.split() if word.strip("-.")]
    assert words == [f"{letter}{m}" for letter in "FB" for m in range(100)]


@pytest.mark.parametrize(("name", "ticks"), [("1f1b", 33), ("zb-v", 51)])
def test_the_drawing(name: str, ticks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "schedule.svg"
    assert f"drawn in {target}" in output([*FOUR, name, "--svg", str(target)], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["schedule.svg"]
    root = ElementTree.fromstring(target.read_text())
    cell, row, left, top = 24, 34, 38, 16
    size = left + ticks * cell + 16 + cell // 2, top + 4 * row + 30 + row + 16
    assert (root.get("width"), root.get("height")) == tuple(map(str, size))
    boxes = [
        (item.get("fill"), *(float(item.get(key, "")) for key in ("x", "y", "width")))
        for item in root.iter("{http://www.w3.org/2000/svg}rect")
    ]
    forward, idle = "#3168be", "#eef0f4"
    # The first pass of rank r begins at tick r, and the rank is idle before.
    for rank in range(4):
        inside = [(fill, x, width) for fill, x, y, width in boxes if y == top + rank * row + 1]
        assert inside[0] == (idle, left, ticks * cell)
        assert inside[1][:2] == (forward, left + rank * cell + 1)
        busy = sum(width + 2 for _, _, width in inside[1:])
        assert busy == {"1f1b": 24, "zb-v": 48}[name] * cell
        numbers = [
            item.text
            for item in root.iter("{http://www.w3.org/2000/svg}text")
            if float(item.get("y", "")) == top + rank * row + row / 2 + 5.2
        ]
        assert len(numbers) == len(inside) and numbers[:2] == [str(rank), "0"]


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same drawing, with the numbers that the terminal has."""
    words = [*FOUR, "zb-v", "--svg", str(tmp_path / "a.svg"), "--html", str(tmp_path / "a.html")]
    assert f"drawn in {tmp_path}/a.html\n" in output(words, capsys)
    text = (tmp_path / "a.html").read_text()
    assert "<h1>zb-v: 4 pipeline ranks x 2 chunks, 8 microbatches (validated)</h1>" in text and "formula (p-1)/(6m+p-1) = 5.88%" in text
    assert text.count("<rect") == (tmp_path / "a.svg").read_text().count("<rect") > 100


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FOUR, "interleaved"]) == 2
    assert "--virtual-pipeline-model-parallel-size: got 1, expected 2 or more" in capsys.readouterr().err
    assert main([*FOUR, "1f1b", "--svg", str(tmp_path / "absent" / "a.svg")]) == 2
    assert "--svg: got" in capsys.readouterr().err
    assert main([*FOUR, "1f1b", "--png", "a.png"]) == 2
    assert "--png: got a.png, expected --svg FILE; " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
