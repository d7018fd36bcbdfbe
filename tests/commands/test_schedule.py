"""The ``schedule`` command: its text grid, its numbers, its picture and its errors."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
from megatron_llama.cli import main
from megatron_llama.commands.common.picture import CHARACTERS, GLYPHS, Canvas

FOUR = ["schedule", "--pipeline-model-parallel-size", "4", "--num-microbatches", "8", "--pipeline-schedule"]


def output(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def pixels(data: bytes) -> list[list[tuple[int, int, int]]]:
    """Decode an 8-bit RGB PNG without filters, checking every checksum."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks: dict[bytes, bytes] = {}
    at = 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *form = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert form == [8, 2, 0, 0, 0]
    raw = zlib.decompress(chunks[b"IDAT"])
    stride = 1 + 3 * width
    assert len(raw) == height * stride and {raw[row * stride] for row in range(height)} == {0}
    lines = [raw[row * stride + 1 : (row + 1) * stride] for row in range(height)]
    return [[(line[3 * x], line[3 * x + 1], line[3 * x + 2]) for x in range(width)] for line in lines]


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
def test_the_picture(name: str, ticks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "schedule.png"
    assert f"drawn in {target}" in output([*FOUR, name, "--png", str(target)], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["schedule.png"]
    image = pixels(target.read_bytes())
    cell, row, left, top = 24, 34, 38, 16
    assert (len(image[0]), len(image)) == (left + ticks * cell + 16 + cell // 2, top + 4 * row + 30 + row + 16)
    forward, idle = (49, 104, 190), (238, 240, 244)
    # Beside the number: the first pass of rank r begins at tick r, and the rank is idle before.
    for rank in range(4):
        line = image[top + rank * row + row // 2]
        assert [line[left + tick * cell + 4] for tick in range(rank + 1)] == [idle] * rank + [forward]
    share = sum(line[left + tick * cell + cell // 2] == idle for line in image[top + 4 : top + 4 * row : row] for tick in range(ticks))
    assert share == 4 * ticks - {"1f1b": 4 * 24, "zb-v": 4 * 48}[name]


def test_text_is_drawn_where_it_belongs() -> None:
    canvas = Canvas(20, 20, (255, 255, 255))
    canvas.text(10, 10, "1", (0, 0, 0), scale=1)
    dark = {(x, y) for y, line in enumerate(pixels(canvas.png())) for x, colour in enumerate(line) if colour == (0, 0, 0)}
    assert dark == {(10, y) for y in range(7, 14)} | {(9, 8), (9, 13), (11, 13)}
    assert len(GLYPHS) == len(CHARACTERS) == len(set(GLYPHS))


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FOUR, "interleaved"]) == 2
    assert "--virtual-pipeline-model-parallel-size: got 1, expected 2 or more" in capsys.readouterr().err
    assert main([*FOUR, "1f1b", "--png", str(tmp_path / "absent" / "a.png")]) == 2
    assert "--png: got" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
