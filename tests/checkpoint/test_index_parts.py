"""The index of a large checkpoint, in parts: what is saved comes back, a rank reads its own parts alone, and nothing is taken on trust."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_llama.checkpoint import checkpoint_dir, index_parts, index_writing, native
from megatron_llama.checkpoint.chunks import Region
from megatron_llama.checkpoint.index_writing import Outline, Sharing, merged_boxes, plan_part, plan_table
from megatron_llama.checkpoint.model_folders.formats import candidates
from megatron_llama.checkpoint.native_folder import open_native, read_regions, require_regions
from megatron_llama.checkpoint.saver import Saver
from megatron_llama.config.schema import CheckpointConfig
from megatron_llama.errors import CheckpointError
from megatron_llama.launch.launcher import Place
from megatron_llama.metrics.log import MetricLog
from megatron_llama.prove.run import states

from tests.checkpoint.cases import (
    SINGLE,
    TRAINED,
    Held,
    held,
    load_under,
    merged,
    renew_sums,
    same,
    save_under,
    state_at,
    trained,
    whole_weights,
)
from tests.harness import Cluster
from tests.parallel.cases import Layout

Box = tuple[tuple[int, ...], tuple[int, ...]]


@contextmanager
def in_parts() -> Iterator[None]:
    """The smallest index is one of a large run."""
    with patch.object(native, "LARGEST_WHOLE_INDEX", 0):
        yield


def save_in_parts(place: Place, layout: Layout, folder: Path, later: int = 2, sharing: int = index_writing.FEWEST_SHARING) -> Held:
    with in_parts(), patch.object(index_writing, "FEWEST_SHARING", sharing):
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


@pytest.mark.few(1, all=3)
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


SPREAD = [
    (Layout(tp=2, dp=4, sp=True, bucket=7_000), 2, ["index.pp0.dp", "index.pp0.tp0.dp", "index.pp0.tp1.dp"], Layout(dp=3, bucket=3_000)),
    (Layout(dp=7, kv_heads=1, strategy="optim_grads_params"), 3, ["index.pp0.tp0.dp"], Layout(tp=2, dp=2, kv_heads=1)),
    (Layout(dp=4, strategy="optim_grads_params", shard_size=2), 1, ["index.pp0.tp0.dp"], Layout(pp=2, dp=2, microbatches=2)),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("before", "sharing", "kinds", "after"), SPREAD, ids=["tp", "fsdp", "replicas"])
def test_groups_of_data_parallel_ranks_have_parts_of_their_own(
    cluster: Cluster, tmp_path: Path, before: Layout, sharing: int, kinds: list[str], after: Layout
) -> None:
    """As on a thousand ranks: a number of ranks that is no multiple, and replicas that write no chunk, are among them."""
    saved = cluster.run(before.world_size, save_in_parts, before, tmp_path, 0, sharing)
    # Ranks of a second replica hold copies, of which nothing is written.
    groups = -(-(before.shard_size or before.dp) // sharing)
    assert index_files(tmp_path) == sorted(["index.json", *(f"{kind}{group}.json" for kind in kinds for group in range(groups))])
    state = merged(part for rank in saved for part in rank.regions)
    for layout in (before, after):
        found = cluster.run(layout.world_size, load_under, layout, tmp_path, 0)
        assert same(merged(part for rank in found for part in rank.regions), state)
    path = native.find(tmp_path)
    checkpoint_dir.require_usable(path)
    native.require_complete(path, before.config(), optimizer=True)
    # Each rank of the same layout reads parts of its group alone, and one of norms where it has a piece of some.
    opened = set[str]()
    for rank, own in enumerate(saved):
        data, tensor = divmod(rank, before.tp)
        group = data % (before.shard_size or before.dp) // sharing
        names = {f"{kind}{group}.json" for kind in kinds if ".tp" not in kind or f".tp{tensor}." in kind}
        with patch.object(index_parts, "read_bounded", wraps=index_parts.read_bounded) as read:
            require_regions(open_native(path), [part_of(region) for region in own.regions], any_dtype=False)
        own_parts = {call.args[0].name for call in read.call_args_list}
        assert own_parts and own_parts <= names
        opened |= own_parts
    assert {"index.json", *opened} == set(index_files(tmp_path))


def test_the_number_of_parts_is_bounded_and_a_machine_shares_one() -> None:
    """In numbers of ranks: dp, pp and tp, and the groups in which dp is divided."""
    for dp, pp, tp, groups in ((1024, 1, 1, 128), (16384, 1, 1, 256), (128, 16, 8, 2), (8, 1, 1, 1), (16, 1, 1, 2), (100, 1, 8, 13), (4096, 32, 8, 1)):
        ranks = range(7, 7 + 3 * dp, 3)
        of_ranks = [Sharing.of(ranks, data, (0, pp), (0, tp)) for data in range(dp)]
        distinct = list(dict.fromkeys(of_ranks))
        assert [rank for group in distinct for rank in group.ranks] == list(ranks) and len(distinct) == groups
        assert all(rank in group.ranks for rank, group in zip(ranks, of_ranks, strict=True))
        assert len({group.own for group in distinct}) == groups


def keep_only(path: Path, kept: Sequence[str]) -> None:
    """Remove the other parts of an index."""
    for part in path.glob("index.pp*.json"):
        if part.name not in kept:
            part.unlink()


@pytest.fixture(scope="module")
def spread(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Held]]:
    """A checkpoint of tp 2, pp 2, dp 2, and what its ranks held."""
    folder = tmp_path_factory.mktemp("spread")
    return folder, cluster.run(8, save_in_parts, Layout(tp=2, pp=2, dp=2, bucket=7_000), folder)


@pytest.fixture
def copied(spread: tuple[Path, list[Held]], tmp_path: Path) -> Path:
    return native.find(shutil.copytree(spread[0], tmp_path / "copy"))


def test_a_rank_reads_the_part_of_its_place_and_what_its_stage_shares(spread: tuple[Path, list[Held]], copied: Path) -> None:
    """Of the same layout: all other parts may be gone."""
    keep_only(copied, ["index.pp1.json", "index.pp1.tp1.json"])
    for rank in (5, 7):  # pipeline rank 1, tensor rank 1
        container = open_native(copied)
        wanted = [part_of(region) for region in spread[1][rank].regions]
        require_regions(container, wanted, any_dtype=False)
        read_regions(container, wanted)
        assert all(torch.equal(found.tensor, kept.tensor) for found, kept in zip(wanted, spread[1][rank].regions, strict=True))
    other = part_of(spread[1][4].regions[0])  # tensor rank 0 of the same stage
    with pytest.raises(CheckpointError, match=r"index\.pp1\.tp0\.json: got No such file"):
        require_regions(open_native(copied), [other], any_dtype=False)
    assert len([name for name in open_native(copied).tensors if not name.startswith("optimizer.")]) == 4 * 9 + 3


def part_of(region: Region) -> Region:
    """The same region, to be read."""
    return Region(region.key, region.shape, region.offset, region.size, torch.full_like(region.tensor, torch.nan))


def test_a_resume_opens_no_part_of_other_ranks(cluster: Cluster, spread: tuple[Path, list[Held]]) -> None:
    """As the ranks themselves read: rank 0 alone opens the small files, and each rank its own parts."""
    opened = cluster.run(8, opened_by_a_load, Layout(tp=2, pp=2, dp=2, bucket=7_000), spread[0])
    for rank, names in enumerate(opened):
        stage, tp = rank // 4, rank % 2
        assert {name for name in names if name.startswith("index.pp")} == {f"index.pp{stage}.json", f"index.pp{stage}.tp{tp}.json"}
        small = {"meta.json", "index.json", "SHA256SUMS"}
        assert {name for name in names if name in small} == (small if rank == 0 else set())


def opened_by_a_load(place: Place, layout: Layout, folder: Path) -> set[str]:
    """The names of the files of a checkpoint that a rank opens."""
    run, names = trained(place, layout, 0), set[str]()
    real = Path.open

    def noting(path: Path, *arguments: Any, **options: Any) -> Any:
        names.add(path.name)
        return real(path, *arguments, **options)

    with patch.object(Path, "open", noting):
        native.load(folder, run.optimizer, run.mesh, layout.config().model)
    return names


def flip(path: Path, at: int = 200) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


PART = "index.pp1.tp0.json"
TORN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a part is missing": (lambda path: (path / PART).unlink(), rf"{PART}: got No such file"),
    "a part is cut off": (lambda path: os.truncate(path / PART, 300), rf"{PART}: got SHA-256 \w+ in 300 bytes, expected \w+ in [\d,]+, by index.json"),
    "a bit of a part": (lambda path: flip(path / PART), rf"{PART}: got SHA-256 "),
    "a part of another": (lambda path: shutil.copy(path / "index.pp0.tp0.json", path / PART), rf"{PART}: got SHA-256 "),
    "a bit of the table": (lambda path: flip(path / "index.json"), r"index\.json: got SHA-256 .*by SHA256SUMS"),
    "no table": (lambda path: (path / "index.json").unlink(), r"index\.json: got No such file"),
    "a file of tensors": (lambda path: (path / "__3_0.distcp").unlink(), r"__3_0\.distcp: got No such file"),
    "a short file of tensors": (lambda path: os.truncate(path / "__6_0.distcp", 1000), r"__6_0\.distcp: got 1000 bytes, expected \d+: it was cut off"),
}


@pytest.mark.parametrize("name", TORN)
def test_a_torn_checkpoint_is_passed_over_and_named(copied: Path, name: str) -> None:
    """Before any tensor is read, and before a part is parsed: a start takes the checkpoint before it."""
    damage, words = TORN[name]
    earlier = copied.with_name("iter_0000001")
    shutil.copytree(copied, earlier)
    renumber(earlier, 1)
    damage(copied)
    newest = checkpoint_dir.newest_usable(copied.parent)
    assert newest is not None and newest.path == earlier
    assert re.search(words, newest.passed_over[0].remedy), newest.passed_over[0].remedy
    with pytest.raises(CheckpointError, match=words):
        native.require_complete(copied, Layout().config(), optimizer=True)
    with pytest.raises(CheckpointError, match=words):
        checkpoint_dir.require_usable(copied)


def renumber(path: Path, iteration: int) -> None:
    content = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**content, "iteration": iteration}))
    renew_sums(path)


@pytest.mark.parametrize("name", ["a part is missing", "a bit of a part"])
def test_all_ranks_end_with_the_error_of_those_that_miss_a_part(cluster: Cluster, copied: Path, name: str) -> None:
    damage, words = TORN[name]
    damage(copied)
    layout = Layout(tp=2, pp=2, dp=2, bucket=7_000)
    errors = cluster.run(8, refusal_of_a_load, layout, copied)
    assert len(set(errors)) == 1 and re.search(rf"rank 4: .*{words}.*\(2 of 8 ranks failed\)", errors[0], re.DOTALL), errors


def refusal_of_a_load(place: Place, layout: Layout, path: Path) -> str:
    run = trained(place, layout, 0)
    with pytest.raises(CheckpointError) as caught:
        native.load(path, run.optimizer, run.mesh, layout.config().model)
    return f"{caught.value}"


def edit(path: Path, name: str, change: Callable[[Any], object]) -> None:
    """Change a part or the table, with all checksums renewed: what is wrong is for the checks behind those of the sums to find."""
    content = json.loads((path / name).read_text())
    change(content)
    (path / name).write_text(json.dumps(content))
    if name != "index.json":
        new = (path / name).read_bytes()
        table = json.loads((path / "index.json").read_text())
        [entry] = [entry for entry in table["parts"] if entry[0] == name]
        entry[1:] = [hashlib.sha256(new).hexdigest(), len(new)]
        (path / "index.json").write_text(json.dumps(table))
    renew_sums(path)


NORM = "model.layers.2.mlp.down_proj.weight"


def rows(part: Any) -> Any:
    return part["tensors"][NORM]


def cell(column: int, value: int) -> Callable[[Any], object]:
    def change(part: Any) -> None:
        rows(part)[0][column] = value

    return change


def more(column: int, by: int) -> Callable[[Any], object]:
    def change(part: Any) -> None:
        rows(part)[0][column] += by

    return change


def shared(part: Any) -> None:
    """All chunks of a tensor in one file, at one place."""
    for row in rows(part):
        row[:4] = rows(part)[0][:4]


LIES: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "a chunk less": (PART, lambda part: rows(part).pop(), f"{NORM} at .*got \\d+ elements, expected \\d+, the shape being .*chunks are missing"),
    "a chunk twice": (PART, lambda part: rows(part).append(rows(part)[0]), "overlapping chunks"),
    "a chunk elsewhere": (PART, more(4, 500), "got a chunk|elements"),
    "a larger chunk": (PART, more(7, 1), "got a chunk|overlapping"),
    "no chunks": (PART, lambda part: rows(part).clear(), f"{NORM}: got no chunks"),
    "a tensor less": (PART, lambda part: part["tensors"].pop(NORM), "tensors: got others, expected those that index.json puts into it"),
    "a tensor more": (PART, lambda part: part["tensors"].update(x=[]), "tensors: got others"),
    "another file": (PART, lambda part: part["files"].__setitem__(0, "__99_0.distcp"), "files: got others, expected files that index.json names"),
    "a file of another folder": (PART, lambda part: part["files"].__setitem__(0, "../x"), "files: got others"),
    "no such file": (PART, cell(0, 99), "expected file, offset, length"),
    "a place behind the end": (PART, cell(1, 2**40), "got a chunk at byte 1099511627776 of __"),
    "a negative place": (PART, cell(1, -1), "expected file, offset, length"),
    "a number that is none": (PART, cell(5, True), "expected file, offset, length"),
    "too few bytes": (PART, cell(2, 8), "expected as many bytes as it has values"),
    "no objects": (PART, lambda part: part.update(tensors=[]), "tensors: got others"),
    "a version to come": ("index.json", lambda table: table.update(version=2), "version: got 2, expected 1"),
    "a box less": ("index.json", lambda table: table["layouts"][0][1].pop(), "chunks are missing|a shape, and boxes"),
    "a box twice": ("index.json", lambda table: table["layouts"][0][1].append(table["layouts"][0][1][0]), "overlapping chunks"),
    "a box outside": ("index.json", lambda table: table["layouts"][0][1][0][1].__setitem__(0, 10**6), "expected one within"),
    "a part that is none": ("index.json", lambda table: table["layouts"][0][1][0].__setitem__(0, 99), "expected a shape, and boxes of it in parts"),
    "boxes without sides": ("index.json", lambda table: table["layouts"][0].__setitem__(0, []), "expected a shape, and boxes of it in parts"),
    "a layout that is none": ("index.json", lambda table: table["tensors"].update({NORM: ["float32", 10**6]}), "expected a dtype and a layout"),
    "a dtype that is none": ("index.json", lambda table: table["tensors"].update({NORM: ["int64", 0]}), "expected a dtype and a layout"),
    "a part elsewhere": ("index.json", lambda table: table["parts"][0].__setitem__(0, "../index.pp0.json"), "expected name, SHA-256 and bytes of a part"),
    "a sum that is none": ("index.json", lambda table: table["parts"][0].__setitem__(1, "0"), "expected name, SHA-256 and bytes of a part"),
    "a tensor file elsewhere": ("index.json", lambda table: table["files"].update({"../x": 1}), "expected a file of the folder: bytes"),
    "no parts": ("index.json", lambda table: table.pop("parts"), "parts: got NoneType, expected list"),
    "no tensors": ("index.json", lambda table: table.update(tensors=[]), "tensors: got list, expected dict"),
}


@pytest.mark.parametrize("name", LIES)
def test_an_index_that_cannot_be_meant_is_refused(copied: Path, name: str) -> None:
    """The proof that each element is there once is made of the table's boxes and of each part's chunks."""
    file, change, words = LIES[name]
    edit(copied, file, change)
    with pytest.raises(CheckpointError, match=words):
        checkpoint_dir.require_usable(copied)


def test_chunks_that_share_bytes_are_refused(copied: Path) -> None:
    edit(copied, PART, shared)
    with pytest.raises(CheckpointError, match="chunks that share bytes"):
        checkpoint_dir.require_usable(copied)


def test_what_the_checks_change_is_right_before(copied: Path) -> None:
    for name in (PART, "index.json"):
        edit(copied, name, lambda content: None)
    checkpoint_dir.require_usable(copied)


def test_a_checkpoint_of_the_version_before_is_loaded(tmp_path: Path) -> None:
    """One index for all ranks, written by the version that had no other: two ranks of a small model after two steps."""
    with tarfile.open(Path(__file__).with_name("one_index.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    path = native.find(tmp_path)
    assert checkpoint_dir.newest_usable(tmp_path) == checkpoint_dir.Usable(path, ())
    tensors = states(path)
    total = hashlib.sha256()
    for kind in (tensors.master, tensors.exp_avg, tensors.exp_avg_sq):
        for key in sorted(kind):
            total.update(kind[key].numpy().tobytes())
    # That version's own reader saw these bits.
    assert total.hexdigest() == "de1506956e4f2fe528c360421548a02f4f5b3d83c30017393de0881cfe3ea723"
    assert native.open_weights(path).meta.state == state_at(2)


def test_a_small_index_is_one_file_as_before(tmp_path: Path) -> None:
    save_under(SINGLE, Layout(), tmp_path)
    path = native.find(tmp_path)
    assert (path / ".metadata").is_file() and index_files(tmp_path) == []
    assert json.loads((path / "meta.json").read_text())["format_version"] == 1


def test_parts_and_one_index_replace_each_other(tmp_path: Path) -> None:
    """The same iteration, saved again: the folder has the files of one save."""
    for save in (save_in_parts, save_under, save_in_parts):
        saved = save(SINGLE, Layout(), tmp_path)
        assert same(merged(load_under(SINGLE, Layout(), tmp_path).regions), merged(saved.regions))
        assert (native.find(tmp_path) / ".metadata").exists() == (save is save_under)


def test_weights_are_read_without_an_engine(spread: tuple[Path, list[Held]]) -> None:
    state = merged(part for rank in spread[1] for part in rank.regions)
    weights = whole_weights(spread[0])
    assert same(weights, {name: state[name] for name in weights})
    assert list(candidates(spread[0])) == ["native"]


def cuts(shape: tuple[int, ...], draw: random.Random) -> list[Box]:
    """A box cut at random lines, again and again."""
    boxes: list[Box] = [((3,) * len(shape), shape)]
    for _ in range(40):
        offset, size = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(shape))
        at = draw.randrange(size[dim]) if size[dim] > 1 else 0
        first = (offset, (*size[:dim], at, *size[dim + 1 :]))
        second = ((*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), (*size[:dim], size[dim] - at, *size[dim + 1 :]))
        boxes += [box for box in (first, second) if 0 not in box[1]]
    return boxes


def elements(boxes: Sequence[Box]) -> list[tuple[int, ...]]:
    return sorted(at for offset, size in boxes for at in product(*(range(a, a + b) for a, b in zip(offset, size, strict=True))))


@pytest.mark.parametrize("shape", [(60,), (12, 9), (5, 6, 4)], ids=str)
def test_merging_keeps_each_element_as_often_as_it_was(shape: tuple[int, ...]) -> None:
    draw = random.Random(str(shape))
    for _ in range(20):
        boxes = cuts(shape, draw)
        boxes += draw.sample(boxes, draw.randrange(3))  # some twice
        draw.shuffle(boxes)
        found = merged_boxes(boxes)
        assert elements(found) == elements(boxes) and len(found) <= len(boxes)


def test_shards_of_a_matrix_become_one_box() -> None:
    """The end of a row, whole rows, the beginning of a row: as ranks cut flattened parameters."""
    flat = [(start, min(start + 37, 400)) for start in range(0, 400, 37)]
    boxes = list[Box]()
    for low, high in flat:
        while low < high:
            row, column = divmod(low, 20)
            size = (high - low) // 20 if column == 0 and high - low >= 20 else 0
            boxes.append(((row, column), (size, 20) if size else (1, min(20 - column, high - low))))
            low += size * 20 if size else min(20 - column, high - low)
    assert merged_boxes(boxes) == [((0, 0), (20, 20))]


def outline(key: str, *box: int, shape: tuple[int, ...] = (8,)) -> Outline:
    return Outline(key, shape, torch.float32, ((box[0],), (box[1],)))


def test_a_plan_whose_chunks_overlap_or_are_missing_is_refused() -> None:
    """As torch's planner does with one index for all."""
    for boxes, words in ((((0, 4),), "4 elements"), (((0, 5), (4, 4)), "overlapping chunks"), (((0, 8), (0, 8)), "overlapping chunks")):
        _, held = plan_part(Sharing.of([0, 1], 0, (0, 1), (0, 1)), [[outline("w", *box)] for box in boxes], set())
        with pytest.raises(CheckpointError, match=words):
            plan_table([held])


def test_what_the_other_tensor_ranks_do_not_write_has_a_part_of_its_own() -> None:
    places = [Sharing.of([tensor], 0, (3, 4), (tensor, 2)) for tensor in (0, 1)]
    first, held = plan_part(places[0], [[outline("norm", 0, 8), outline("w", 0, 4)]], {"norm"})
    second, others = plan_part(places[1], [[outline("w", 4, 4), outline("whole", 0, 8)]], set())
    assert {part: sorted(tensors) for part, tensors in first.chunks.items()} == {"index.pp3.json": ["norm"], "index.pp3.tp0.json": ["w"]}
    assert {part: sorted(tensors) for part, tensors in second.chunks.items()} == {"index.pp3.tp1.json": ["w", "whole"]}
    assert plan_table([held, others]).parts == ["index.pp3.json", "index.pp3.tp0.json", "index.pp3.tp1.json"]


def saves_of_a_run(place: Place, layout: Layout, folder: Path) -> tuple[int, list[Held]]:
    """Two saves of one run with a step between them: the number of plans, and what each save had to hold."""
    config = replace(layout.config(), checkpoint=CheckpointConfig(save=str(folder)))
    run = trained(place, layout)
    log = MetricLog(None, prints=False, start_iteration=0, train_iters=9, progress_bar=False)
    saver, saves = Saver(config, run.mesh, run.optimizer, None), []
    with in_parts(), patch.object(native, "plan_save", wraps=native.plan_save) as planned:
        for iteration in (1, 2):
            saver.save(state_at(iteration), log)
            saves.append(held(run, 1))
    return planned.call_count, saves


def test_saves_that_training_waits_for_plan_once(cluster: Cluster, tmp_path: Path) -> None:
    """The plan names live tensors: each save has the values of its step."""
    layout = Layout(tp=2, dp=2)
    ranks = cluster.run(4, saves_of_a_run, layout, tmp_path)
    assert {plans for plans, _ in ranks} == {1}
    expected = [merged(part for _, saves in ranks for part in saves[number].regions) for number in (0, 1)]
    assert not same(*expected)
    for number in (0, 1):
        found = whole_weights(tmp_path / f"iter_000000{number + 1}")
        assert same(found, {name: expected[number][name] for name in found})


def test_the_remedy_for_a_missing_list_works(copied: Path) -> None:
    (copied / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match=r"run `sha256sum index\*\.json meta\.json \*\.distcp > SHA256SUMS` in") as refused:
        checkpoint_dir.require_usable(copied)
    command = re.search("`(.*)`", f"{refused.value}")
    assert command is not None
    subprocess.run(command[1], shell=True, cwd=copied, check=True)
    checkpoint_dir.require_usable(copied)
