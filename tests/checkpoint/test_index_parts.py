"""The index of a large checkpoint, in parts: what is saved comes back, a rank reads its own parts alone, and nothing is taken on trust."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_llama.checkpoint import checkpoint_dir, native
from megatron_llama.checkpoint.chunks import Region, regions
from megatron_llama.checkpoint.index_writing import HeldBoxes, Outline, merged_boxes, plan_part, plan_table
from megatron_llama.checkpoint.native_folder import open_native, read_regions, require_regions
from megatron_llama.engine.pieces import shard_pieces
from megatron_llama.errors import CheckpointError
from megatron_llama.launch.launcher import Place

from tests.checkpoint.cases import SINGLE, TRAINED, Held, held, load_under, merged, renew_sums, same, save_under, state_at, trained, whole_weights
from tests.harness import Cluster
from tests.parallel.cases import Layout

Box = tuple[tuple[int, ...], tuple[int, ...]]


@contextmanager
def in_parts() -> Iterator[None]:
    """The smallest index is one of a large run."""
    with patch.object(native, "LARGEST_WHOLE_INDEX", 0):
        yield


def save_in_parts(place: Place, layout: Layout, folder: Path, later: int = 2) -> Held:
    with in_parts():
        return save_under(place, layout, folder, later)


def index_files(folder: Path) -> list[str]:
    return sorted(path.name for path in native.find(folder).glob("index*.json"))


CASES = [
    (Layout(tp=2, pp=2, dp=2, sp=True, bucket=7_000), Layout(dp=2, strategy="no_shard", bucket=3_000)),
    (Layout(dp=4, strategy="optim_grads_params", shard_size=2, slots="3", grad_slots=1), Layout(tp=4, pp=2, microbatches=2)),
    (Layout(tp=4, kv_heads=1, sp=True), Layout(cp=2, dp=2, kv_heads=1, strategy="optim_grads")),
    (Layout(pp=2, virtual=2, schedule="zb-v", microbatches=2, tied=True), Layout(tp=2, tied=True, bucket=3_000)),
    (Layout(pp=2, tp=2, tied=True, lora=2), Layout(dp=2, tied=True, lora=2)),
]
PARTS = [
    ["index.json", *(f"index.pp{stage}{tp}.json" for stage in (0, 1) for tp in ("", ".tp0", ".tp1"))],
    ["index.json", "index.pp0.tp0.json"],
    ["index.json", "index.pp0.json", *(f"index.pp0.tp{rank}.json" for rank in range(4))],
    ["index.json", "index.pp0.tp0.json", "index.pp1.tp0.json"],
    ["index.json", *(f"index.pp{stage}{tp}.json" for stage in (0, 1) for tp in ("", ".tp0", ".tp1"))],
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("before", "after", "parts"), [(*case, parts) for case, parts in zip(CASES, PARTS, strict=True)], ids=str)
def test_parts_are_loaded_under_their_layout_and_under_another(
    cluster: Cluster, tmp_path: Path, before: Layout, after: Layout, parts: list[str]
) -> None:
    saved = cluster.run(before.world_size, save_in_parts, before, tmp_path)
    path = native.find(tmp_path)
    assert index_files(tmp_path) == sorted(parts) and not (path / ".metadata").exists()
    assert json.loads((path / "meta.json").read_text())["format_version"] == 2
    state = merged(part for rank in saved for part in rank.regions)
    for layout in (before, after):
        found = cluster.run(layout.world_size, load_under, layout, tmp_path)
        assert same(merged(part for rank in found for part in rank.regions), state)
        assert {step for rank in found for step in rank.steps} == {float(TRAINED)}
        if layout == before:
            assert [rank.later for rank in found] == [rank.later for rank in saved]
    checkpoint_dir.require_usable(path)
    native.require_complete(path, before.config(), optimizer=True)
