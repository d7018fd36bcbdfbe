"""Values that are not finite are found in every dtype and part, with their places in the whole tensor."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint import checkpoint_dir
from megatron_llama.checkpoint.checkpoint_dir import Retention, Standing, complete, newest_good, newest_usable, retain
from megatron_llama.checkpoint.chunks import Region
from megatron_llama.checkpoint.finite import (
    BLOCK,
    NotFinite,
    copy_to_host,
    describe_not_finite,
    find_all_not_finite,
    merge_not_finite,
    read_not_finite,
)
from megatron_llama.checkpoint.meta import marked_meta, read_meta_json
from megatron_llama.checkpoint.saver import Saver
from megatron_llama.config.schema import CheckpointConfig
from megatron_llama.errors import CheckpointError
from megatron_llama.metrics.log import MetricLog
from torch import Tensor

from tests.checkpoint.cases import SINGLE, state_at
from tests.over_cases import over_cases
from tests.parallel.cases import Layout, trainer

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def region(values: Tensor, offset: tuple[int, ...] = ()) -> Region:
    """A rectangle of a tensor that goes on behind it."""
    offset = offset or (0,) * values.dim()
    shape = tuple(start + size + 5 for start, size in zip(offset, values.shape, strict=True))
    return Region("w", shape, offset, tuple(values.shape), values)


@over_cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (299, 1023), (150, 3)])
def test_one_value_is_found_in_any_block(dtype: torch.dtype, value: float, place: tuple[int, int]) -> None:
    values = torch.ones(300, 1024, dtype=dtype)
    assert values.numel() > BLOCK
    values[place] = value
    copy, found = copy_to_host(region(values, (7, 2048)))
    assert found == NotFinite("w", 1, (7 + place[0], 2048 + place[1]), str(value))
    assert torch.equal(copy.nan_to_num(nan=5), values.nan_to_num(nan=5)) and copy.data_ptr() != values.data_ptr()


def test_opposite_infinities_do_not_cancel() -> None:
    values = torch.zeros(8)
    values[2], values[5] = torch.inf, -torch.inf
    assert copy_to_host(region(values))[1] == NotFinite("w", 2, (2,), "inf")


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values_are_finite(dtype: torch.dtype) -> None:
    """Their sum is not."""
    values = torch.full((BLOCK + 3,), torch.finfo(dtype).max, dtype=dtype)
    assert copy_to_host(region(values))[1] is None


@pytest.mark.parametrize(
    "values", [torch.full((4, 4), 255, dtype=torch.uint8), torch.empty(0, 4), torch.ones(())], ids=["codes", "none", "one"]
)
def test_codes_and_empty_tensors_are_finite(values: Tensor) -> None:
    copy, found = copy_to_host(region(values))
    assert found is None and torch.equal(copy, values)


def test_a_view_is_copied_in_its_own_order() -> None:
    values = torch.arange(12.0).view(3, 4).T
    values[1, 2] = torch.nan
    copy, found = copy_to_host(region(values))
    assert copy.is_contiguous() and torch.equal(copy.nan_to_num(), values.nan_to_num())
    assert found == NotFinite("w", 1, (1, 2), "nan")


def test_parts_of_a_tensor_become_one_entry() -> None:
    """The first place is that of the whole tensor, in whatever order ranks and parts come."""
    high, low = torch.ones(4, 3), torch.ones(4, 3)
    high[1, 1] = torch.nan
    low[3, 2] = low[3, 0] = -torch.inf
    (found,) = find_all_not_finite([region(high, (10, 0)), region(low, (2, 0))])
    assert found == NotFinite("w", 3, (5, 0), "-inf")
    assert merge_not_finite([found, NotFinite("a", 1, (0,), "nan")]) == (NotFinite("a", 1, (0,), "nan"), found)
    assert read_not_finite(json.loads(json.dumps(found.entry()))) == found


def test_weights_are_named_before_their_moments() -> None:
    entries = [NotFinite(name, 1, (0,), "nan") for name in ("optimizer.exp_avg.w", *"abcdef", "w")]
    words = describe_not_finite(entries)
    assert words.startswith("a (1 value, the first is nan at [0]), b (") and words.endswith(
        "e (1 value, the first is nan at [0]), 3 more tensors"
    )


def checkpoint(folder: Path, iteration: int, loss: float, *, good: bool) -> None:
    path = folder / f"iter_{iteration:07d}"
    path.mkdir()
    (path / ".metadata").touch()
    meta = json.dumps({"validation_loss": loss}).encode()
    meta = meta if good else marked_meta(meta, [NotFinite("w", 1, (0,), "nan")])
    (path / "meta.json").write_bytes(meta)
    (path / "SHA256SUMS").write_text(f"{hashlib.sha256(meta).hexdigest()}  meta.json\n")


@pytest.mark.parametrize(("newest", "stay"), [(1, [2, 4]), (2, [2, 3, 4]), (0, [1, 2, 3, 4])])
def test_the_newest_good_checkpoint_stays(newest: int, stay: list[int], tmp_path: Path) -> None:
    for iteration, good in enumerate((True, True, False, False), start=1):
        checkpoint(tmp_path, iteration, 10.0 - iteration, good=good)
    retain(tmp_path, Retention(newest))
    assert list(complete(tmp_path)) == stay
    assert os.readlink(tmp_path / "best") == "iter_0000002" and os.readlink(tmp_path / "last") == "iter_0000004"
    assert newest_good(tmp_path) == tmp_path / "iter_0000002"
    with pytest.raises(CheckpointError, match="none can be used"):  # their indices cannot be read
        newest_usable(tmp_path)


def tracked(folder: Path, iteration: int) -> None:
    """It is the one that was saved last."""
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")


@pytest.mark.parametrize("good", [False, True], ids=["marked", "good"])
def test_a_run_that_went_back_keeps_what_it_saves(good: bool, tmp_path: Path) -> None:
    """Whatever it has left behind: that may be damaged in ways which only loading shows."""
    for iteration in (1, 8, 9):
        checkpoint(tmp_path, iteration, 10.0 - iteration, good=good or iteration == 1)
    for iteration, stay in ((2, [1, 2]), (3, [2, 3]), (4, [3, 4])):
        checkpoint(tmp_path, iteration, 0.5 - 0.1 * iteration, good=True)
        tracked(tmp_path, iteration)
        retain(tmp_path, Retention(newest=2))
        assert list(complete(tmp_path)) == stay
        assert os.readlink(tmp_path / "last") == f"iter_{iteration:07d}"
        assert newest_good(tmp_path) == tmp_path / f"iter_{iteration:07d}"


def test_a_run_that_went_back_and_keeps_all_knows_what_it_saved_last(tmp_path: Path) -> None:
    for iteration, good in ((1, True), (2, True), (3, False), (8, True)):
        checkpoint(tmp_path, iteration, 1.0, good=good)
    tracked(tmp_path, 3)
    retain(tmp_path, Retention())
    assert list(complete(tmp_path)) == [1, 2, 3, 8] and os.readlink(tmp_path / "last") == "iter_0000003"
    assert newest_good(tmp_path) == tmp_path / "iter_0000002"


def test_a_process_that_saves_reads_each_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that it has saved again once more."""
    reads: list[str] = []
    monkeypatch.setattr(checkpoint_dir, "read_meta_json", lambda path: reads.append(path.name) or read_meta_json(path))
    known: dict[str, Standing] = {}

    def save(iteration: int, loss: float, *, good: bool = True) -> list[str]:
        checkpoint(tmp_path, iteration, loss, good=good)
        tracked(tmp_path, iteration)
        reads.clear()
        retain(tmp_path, Retention(newest=3), known=known)
        return sorted(reads)

    for iteration in (1, 2):
        checkpoint(tmp_path, iteration, 2.0, good=True)
    assert save(3, 1.0) == ["iter_0000001", "iter_0000002", "iter_0000003"]
    assert save(4, 1.5, good=False) == ["iter_0000004"]
    assert list(complete(tmp_path)) == [2, 3, 4] and os.readlink(tmp_path / "best") == "iter_0000003"
    shutil.rmtree(tmp_path / "iter_0000003")
    assert save(3, 9.0, good=False) == ["iter_0000003"]
    assert os.readlink(tmp_path / "best") == "iter_0000002" and known["iter_0000003"] == Standing(False, 9.0)
    assert known.keys() == {"iter_0000002", "iter_0000003", "iter_0000004"}


def test_a_run_reads_what_stays_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    monkeypatch.setattr(checkpoint_dir, "read_meta_json", lambda path: reads.append(path.name) or read_meta_json(path))
    run = trainer(SINGLE, Layout())
    config = replace(Layout().config(), checkpoint=CheckpointConfig(save=str(tmp_path)))
    log = MetricLog(None, prints=False, start_iteration=0, train_iters=9, progress_bar=False)
    saver = Saver(config, run.mesh, run.optimizer, None)
    for iteration in range(1, 4):
        saver.save(state_at(iteration), log)
    assert reads == ["iter_0000001", "iter_0000002", "iter_0000003"]


def test_one_whose_meta_is_damaged_is_no_good_checkpoint(tmp_path: Path) -> None:
    """The one before it stays beside a newest one that is marked."""
    for iteration, good in enumerate((True, True, False), start=1):
        checkpoint(tmp_path, iteration, 1.0, good=good)
    (tmp_path / "iter_0000002" / "meta.json").write_bytes(b"{")
    retain(tmp_path, Retention(newest=1))
    assert list(complete(tmp_path)) == [1, 3] and newest_good(tmp_path) == tmp_path / "iter_0000001"
