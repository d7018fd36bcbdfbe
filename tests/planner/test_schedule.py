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
    assert "makespan     33 forward" in text and "in flight    4 3 2 1 microbatches" in text
    text = output([*FOUR, "zb-v"], capsys)
    assert "zb-v: 4 pipeline ranks x 2 chunks, 8 microbatches" in text and "rank 3  .   .   .   F0a F0b F1a F1b F2a" in text
    assert "formula (p-1)/(6m+p-1) = 5.88%" in text and "inside     0 0 0 0 idle" in text and "in flight    4 4 4 4 " in text
    assert "rank 0  F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1" in output([*FOUR, "zb-h1"], capsys)
    assert ", which needs 7 microbatches" in output(["schedule", "--pipeline-schedule", "zb-v", "--num-microbatches", "4"], capsys)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_measured_and_published_bubble_agree(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    extra = ["--virtual-pipeline-model-parallel-size", "2"] if name == "interleaved" else []
    (line,) = [line for line in output([*FOUR, name, *extra], capsys).splitlines() if line.startswith("bubble")]
    assert line.split()[1] == line.split()[-1]


def test_long_schedules_continue_below(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(["schedule", "--num-microbatches", "100", "--pipeline-schedule", "gpipe"], capsys)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    first = "".join(line.removeprefix("rank 0") for line in lines if line.startswith("rank 0"))
    words = [word.rstrip("-") for word in first.split() if word.strip("-.")]
    assert words == [f"{letter}{m}" for letter in "FB" for m in range(100)]


def test_the_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also in a page, with the numbers that the terminal has."""
    target, page = tmp_path / "schedule.svg", tmp_path / "a.html"
    shown = output([*FOUR, "1f1b", "--svg", str(target), "--html", str(page)], capsys)
    assert f"drawn in {target}" in shown and f"drawn in {page}" in shown and sorted(tmp_path.iterdir()) == [page, target]
    cell, row, left, top, ticks = 24, 34, 38, 16, 33
    found = ElementTree.fromstring(target.read_text()).iter("{http://www.w3.org/2000/svg}rect")
    boxes = [(item.get("fill"), *(float(item.get(key, "")) for key in ("x", "y", "width"))) for item in found]
    # The first pass of rank r begins at tick r, and the rank is idle before.
    for rank in range(4):
        inside = [(fill, x, width) for fill, x, y, width in boxes if y == top + rank * row + 1]
        assert inside[0][1:] == (left, ticks * cell) and inside[1][1] == left + rank * cell + 1
        assert sum(width + 2 for _, _, width in inside[1:]) == 24 * cell
    text = page.read_text()
    assert "<h1>1f1b: 4 pipeline ranks, 8 microbatches (validated)</h1>" in text and text.count("<rect") == len(boxes) > 60
