"""Files that describe others may be as large as these make them, for saving as for loading: what was saved can be loaded."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint import bounds, checksums, native
from megatron_llama.checkpoint.checksums import SUMS, read_sums, seal
from megatron_llama.checkpoint.container import Container
from megatron_llama.checkpoint.meta import read_meta_json
from megatron_llama.checkpoint.native_folder import open_native
from megatron_llama.config.limits import (
    INDEX_BYTES_PER_KIB,
    LARGEST_CHECKSUM_LIST,
    LARGEST_INDEX,
    LARGEST_META,
    LARGEST_RANKS,
    META_BYTES_PER_FILE,
)
from megatron_llama.errors import CheckpointError

from tests.checkpoint.cases import SINGLE, load_under, renew_sums, save_under
from tests.converter.distcp import write_folder
from tests.parallel.cases import Layout

ONE = Layout()


def without_free_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files stand for those of a run of thousands of ranks."""
    monkeypatch.setattr(bounds, "LARGEST_INDEX", 0)
    monkeypatch.setattr(bounds, "LARGEST_META", 0)


def test_an_index_above_the_free_bytes_is_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_free_bytes(monkeypatch)
    save_under(SINGLE, ONE, tmp_path)
    path = native.find(tmp_path)
    assert (path / ".metadata").stat().st_size > 1000 and (path / "meta.json").stat().st_size > 1000
    load_under(SINGLE, ONE, tmp_path)


def test_the_smallest_chunks_leave_room_for_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of one element, with long names: no run has more of an index for its bytes."""
    without_free_bytes(monkeypatch)
    parts = {f"optimizer.exp_avg_sq_scales.{'n' * 80}.{n}": (torch.ones(1, 8), [[1], [1] * 8]) for n in range(40)}
    write_folder(tmp_path, parts, {}, ranks=8)
    size = (tmp_path / ".metadata").stat().st_size
    assert 2 * size < bounds.largest_index(tmp_path, 2**62)
    assert len(Container(tmp_path).tensors) == 40


@pytest.mark.parametrize("read", [open_native, Container], ids=["native", "torch_dist"])
def test_an_index_too_large_for_its_files_takes_no_memory(tmp_path: Path, read: type) -> None:
    """A file with a hole takes no place on a disk."""
    (tmp_path / "__0_0.distcp").write_bytes(bytes(10_000))
    (tmp_path / ".metadata").touch()
    os.truncate(tmp_path / ".metadata", 2**40)
    (tmp_path / SUMS).write_text(f"{'0' * 64}  .metadata\n")
    bound = LARGEST_INDEX + 10_000 * INDEX_BYTES_PER_KIB // 1024
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"got a file of 1,099,511,627,776 bytes, expected at most {bound:,},"):
            read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2 * LARGEST_INDEX
    finally:
        tracemalloc.stop()


def test_only_files_count_and_no_more_than_are_needed(tmp_path: Path) -> None:
    for name in ("a.distcp", "b.distcp", "other"):
        (tmp_path / name).write_bytes(bytes(2**20))
    (tmp_path / "c.distcp").mkdir()
    (tmp_path / "d.distcp").symlink_to("/dev/zero")
    each = 2**10 * INDEX_BYTES_PER_KIB
    assert bounds.largest_index(tmp_path, 2**62) == LARGEST_INDEX + 2 * each
    assert bounds.largest_index(tmp_path, LARGEST_INDEX + 1) == LARGEST_INDEX + each
    assert bounds.largest_index(tmp_path / "missing", 2**62) == LARGEST_INDEX
    assert bounds.largest_meta(tmp_path, 2**62) == LARGEST_META + 2 * META_BYTES_PER_FILE


def test_a_meta_json_that_no_load_accepts_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_free_bytes(monkeypatch)
    (tmp_path / "__0_0.distcp").touch()
    content = json.dumps({"stream_places": "x" * (META_BYTES_PER_FILE - 100)}).encode()
    seal(tmp_path, {}, "meta.json", content)
    assert len(read_meta_json(tmp_path)) == 1
    with pytest.raises(CheckpointError, match=r"meta\.json: got .* bytes, expected at most 65,536, which is what a load accepts"):
        seal(tmp_path, {}, "meta.json", content + b" " * 100)
    assert len(read_meta_json(tmp_path)) == 1
    (tmp_path / "meta.json").write_bytes(content + b" " * 100)
    renew_sums(tmp_path)
    with pytest.raises(CheckpointError, match="expected at most 65,536,"):
        read_meta_json(tmp_path)


def test_an_index_that_no_load_accepts_ends_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an earlier checkpoint goes."""
    save_under(SINGLE, ONE, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    without_free_bytes(monkeypatch)
    monkeypatch.setattr(bounds, "INDEX_BYTES_PER_KIB", 0)
    with pytest.raises(CheckpointError, match=r"\.metadata: got .* bytes, expected at most 0, which is what a load accepts"):
        save_under(SINGLE, ONE, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_list_of_sums_has_room_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"{'0' * 64}  __{LARGEST_RANKS - 1}_0.distcp\n"
    assert 2 * len(line) * LARGEST_RANKS < LARGEST_CHECKSUM_LIST
    monkeypatch.setattr(checksums, "LARGEST_CHECKSUM_LIST", 2 * len(line))
    seal(tmp_path, {"a": "0" * 64}, "meta.json", b"{}")
    assert list(read_sums(tmp_path)) == ["a", "meta.json"]
    with pytest.raises(CheckpointError, match=r"SHA256SUMS: got .* bytes"):
        seal(tmp_path, {"a": "0" * 64, "b": "0" * 64}, "meta.json", b"{}")
