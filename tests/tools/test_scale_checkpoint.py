"""Figures of large jobs are those of the plans that ranks really have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.chunks import Region, regions
from megatron_llama.config.schema import Config
from megatron_llama.engine.pieces import shard_pieces
from megatron_llama.launch.launcher import Place
from tools.scaling import checkpoint
from tools.scaling.rows import COMPUTED, MEASURED, Row, table

from tests.harness import Cluster
from tests.parallel.cases import Layout, trainer

LAYOUT = Layout(tp=2, pp=2, dp=2, bucket=7_000)
Boxes = set[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


class SmallGrid(checkpoint.Grid):
    """The model of the tests."""

    def config(self) -> Config:
        return Layout(tp=self.tp, pp=self.pp, dp=self.dp, bucket=LAYOUT.bucket).config()


GRID = SmallGrid(2, 2, 2)


def boxes(parts: Iterable[Region]) -> Boxes:
    return {(part.key, part.shape, part.offset, part.size) for part in parts}


def of_an_engine(place: Place) -> tuple[Boxes, Boxes]:
    """What a rank writes, and what it loads."""
    run = trainer(place, LAYOUT)
    return boxes(native.plan_save(run.optimizer, run.mesh).parts), boxes(regions(shard_pieces(run.optimizer)))


def test_regions_without_an_engine_are_those_of_the_engines(cluster: Cluster) -> None:
    for rank, (written, loaded) in enumerate(cluster.run(8, of_an_engine)):
        stage, data, tensor = rank // 4, rank // 2 % 2, rank % 2
        assert GRID.rank(stage, data, tensor) == rank
        for primary, expected in ((True, written), (False, loaded)):
            [parts] = checkpoint.group_parts(GRID, stage, tensor, [data], primary=primary)
            assert boxes(parts) == expected


@pytest.mark.long
def test_a_rank_reads_its_part_and_rank_0_the_index(tmp_path: Path) -> None:
    saves = checkpoint.saved(tmp_path, GRID)
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("index*.json")}
    assert [row.bytes for row in saves if row.what.startswith("index: 6 parts")] == [sum(sizes.values())]
    rank_0, sent, same, *_ = (row for row in checkpoint.resumed(GRID) if row.part == "resume")
    small = sum((tmp_path / name).stat().st_size for name in ("meta.json", "index.json"))
    sums = (tmp_path / "SHA256SUMS").stat().st_size
    beside = 4096  # /proc, and the first read of a file's end
    assert rank_0.bytes is not None and 0 <= rank_0.bytes - (sum(sizes.values()) + small - sizes["index.json"] + 2 * sums) < beside
    assert sent.bytes == sizes["index.json"] and same.bytes is not None
    assert 0 <= same.bytes - sizes["index.pp1.tp1.json"] - sizes["index.pp1.json"] < beside


def test_a_table_says_what_was_computed() -> None:
    rows = [Row("save", "a", "rank 0", 0.01234, 2_500_000, MEASURED), Row("save", "b", "others", None, None, COMPUTED, 512)]
    assert table(rows, 1024).splitlines()[2:] == [
        "| save | a | rank 0 | 0.0123 | 2.5 MB |  | measured |",
        "| save | b | others |  |  | 512 B | computed |",
    ]


@pytest.mark.long
def test_the_tool_prints_a_table_for_each_number(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import scale

    monkeypatch.setattr(checkpoint, "of_world", lambda world: SmallGrid(2, 2, world // 4))
    monkeypatch.setattr("sys.argv", ["tools/scale.py", "--world", "8", "16", "--part", "save"])
    scale.main()
    out = capsys.readouterr().out
    assert re.findall(r"^\| ([\d,]+) processes", out, re.MULTILINE) == ["8", "16"]
    assert out.count("| save | write a part | writers |") == 2


@pytest.mark.long
def test_one_index_is_read_whole_by_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "of_world", lambda world: GRID)
    _, write, read = checkpoint.one_index(8)
    assert read.bytes is not None and write.bytes is not None and 0 <= read.bytes - write.bytes < 8192
