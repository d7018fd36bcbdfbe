"""What is loaded is what was saved: sums, chunks bound to their index, fields with kind and range; nothing a file claims is believed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.checkpoint import checkpoint_dir, native
from megatron_llama.checkpoint.checksums import damaged_files
from megatron_llama.checkpoint.container import Container
from megatron_llama.checkpoint.index import Chunk, Place, StoredTensor, cover_problems
from megatron_llama.checkpoint.native_folder import open_native
from megatron_llama.config.schema import CheckpointConfig
from megatron_llama.errors import CheckpointError
from megatron_llama.train.setup.start import named_start
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.checkpoint.cases import SINGLE, load_under, merged, renew_sums, same, whole_weights
from tests.checkpoint.damage import Edit, edit_index, edit_meta
from tests.flipped import flip
from tests.parallel.cases import Layout, trainer

ONE = Layout()
DATA = "__0_0.distcp"


def load(path: Path) -> None:
    run = trainer(SINGLE, ONE)
    native.load(path, run.optimizer, run.mesh, ONE.config().model)


def place_of(metadata: Any, name: str) -> Any:
    return next(place for key, place in metadata.storage_data.items() if key.fqn == name)


def refusal(path: Path) -> str:
    """What loading says."""
    with pytest.raises(CheckpointError) as caught:
        load(path)
    return f"{caught.value}"


def test_a_changed_meta_json_is_refused_until_its_sum_is_renewed(copy: Path) -> None:
    edit_meta(consumed_samples=7)(copy)
    said = refusal(copy)
    assert f"{copy}/meta.json: got SHA-256 " in said and "by SHA256SUMS; restore" in said
    assert f"put its `sha256sum meta.json` into {copy}/SHA256SUMS" in said
    for read in (native.read_meta, native.open_weights):
        with pytest.raises(CheckpointError, match=r"meta\.json: got SHA-256"):
            read(copy)
    assert checkpoint_dir.validation_loss(copy) is None
    renew_sums(copy)
    assert native.read_meta(copy).state.consumed_samples == 7


def test_one_bit_of_the_index_is_seen(copy: Path) -> None:
    flip(copy / ".metadata", (copy / ".metadata").read_bytes().index(b"lm_head"))
    assert ".metadata: got SHA-256" in refusal(copy)


SUMS: dict[str, tuple[Callable[[str], str | None], str]] = {
    "missing": (lambda text: None, "got No such file or directory"),
    "empty": (lambda text: "", "got an empty file"),
    "noise": (lambda text: text[:40], "SHA256SUMS:1: got damaged content"),
    "elsewhere": (lambda text: text + f"{text[:64]}  ../other\n", "SHA256SUMS:4: got damaged content"),
    "a folder": (lambda text: text + f"{text[:64]}  ..\n", "SHA256SUMS:4: got damaged content"),
    "twice": (lambda text: text + text.splitlines()[0] + "\n", "SHA256SUMS:4: got .metadata for the second time"),
    "one left out": (lambda text: "".join(text.splitlines(True)[:-1]), "meta.json: got SHA-256"),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_damaged_list_of_sums_is_an_error(copy: Path, name: str) -> None:
    change, expected = SUMS[name]
    path = copy / "SHA256SUMS"
    content = change(path.read_text())
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert expected in refusal(copy)


def test_the_remedy_for_a_missing_list_works(copy: Path) -> None:
    (copy / "SHA256SUMS").unlink()
    command = refusal(copy).split("`")[1]
    subprocess.run(command, shell=True, cwd=copy, check=True)
    load(copy)


@pytest.mark.parametrize("name", ["SHA256SUMS", "meta.json", ".metadata", DATA])
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_no_device_and_no_pipe_is_read(copy: Path, name: str, kind: str) -> None:
    (copy / name).unlink()
    if kind == "device":
        (copy / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(copy / name)
    assert f"{name}: got no regular file" in refusal(copy)
    if name != "SHA256SUMS":
        assert any(f"{name}: got no file" in line for line in damaged_files(copy))


def test_a_link_to_a_file_is_fine(copy: Path) -> None:
    (copy / DATA).rename(copy.parent / "elsewhere")
    (copy / DATA).symlink_to(copy.parent / "elsewhere")
    load(copy)


def test_a_file_of_another_iteration_is_refused(copy: Path) -> None:
    """Same sizes, same tensors, other values: only what binds chunks to their index tells."""
    shutil.copy(copy.parent / "iter_0000001" / DATA, copy / DATA)
    said = refusal(copy)
    assert f"{DATA} " in said and " at (0" in said and "by the index: these values were saved at another time" in said
    with pytest.raises(CheckpointError, match="saved at another time"):
        whole_weights(copy)


def test_chunks_that_stand_for_each_other_are_refused(copy: Path) -> None:
    """Both projections have one shape; their places are exchanged in the file."""
    tensors = open_native(copy).tensors
    one, other = (tensors[f"model.layers.{layer}.self_attn.o_proj.weight"].chunks[0].place for layer in (0, 1))
    content = bytearray((copy / DATA).read_bytes())
    swapped = [bytes(content[place.offset : place.offset + place.length]) for place in (one, other)]
    assert len(swapped[0]) == len(swapped[1])
    content[one.offset : one.offset + one.length] = swapped[1]
    content[other.offset : other.offset + other.length] = swapped[0]
    (copy / DATA).write_bytes(content)
    renew_sums(copy)
    assert "o_proj.weight at (0, 0): got values with CRC-32" in refusal(copy)


def test_a_checkpoint_of_an_earlier_version_has_no_crc(copy: Path, good: Path) -> None:
    def forget(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            del place.crc32

    edit_index(forget)(copy)
    renew_sums(copy)
    assert same(merged(load_under(SINGLE, ONE, copy, 0).regions), merged(load_under(SINGLE, ONE, good, 0).regions))


def test_megatrons_reader_sees_exchanged_files_too(copy: Path) -> None:
    shutil.copy(copy.parent / "iter_0000001" / DATA, copy / DATA)
    container = Container(copy)
    container.require(container.tensors)
    damage = list(container.damaged())
    assert damage and all("saved at another time" in line for line in damage)


HEAD = "lm_head.weight"
NUMBERS = "expected numbers that are not negative"


def described(**fields: Any) -> Callable[[Any], object]:
    """Have the index say other things of the head."""
    return lambda m: [setattr(m.state_dict_metadata[HEAD], name, value) for name, value in fields.items()]


def placed(**fields: Any) -> Callable[[Any], object]:
    return lambda m: [setattr(place_of(m, HEAD), name, value) for name, value in fields.items()]


INDEX: dict[str, tuple[Callable[[Any], object], str]] = {
    "negative": (placed(offset=-1), NUMBERS),
    "huge": (placed(offset=10**30), NUMBERS),
    "text": (placed(length="9"), NUMBERS),
    "crc of another kind": (placed(crc32="x"), NUMBERS),
    "0-dim": (described(size=torch.Size([])), "expected 0 dimensions"),
    "many dimensions": (described(size=torch.Size([1] * 70)), "at most 64"),
    "other size": (described(size=torch.Size([300, 65])), "19200 elements, expected 19500"),
    "chunk twice": (lambda m: m.state_dict_metadata[HEAD].chunks.append(m.state_dict_metadata[HEAD].chunks[0]), "overlapping"),
    "an empty list of chunks": (described(chunks=[]), "chunks: got none"),
    "no chunks": (described(chunks=None), "chunks: got none"),
    "wrong kind": (lambda m: m.state_dict_metadata.update({HEAD: 3}), "lm_head.weight: got a int"),
    "no name": (lambda m: m.state_dict_metadata.update({3: m.state_dict_metadata[HEAD]}), "got 3, expected the name of a tensor"),
    "a place of another kind": (lambda m: m.storage_data.update({HEAD: 3}), "got str: int, expected MetadataIndex"),
    "a place without a name": (
        lambda m: m.storage_data.update({MetadataIndex(3): place_of(m, HEAD)}),  # type: ignore[arg-type]
        "storage_data: got 3, expected the name of a tensor",
    ),
    "a dtype of another kind": (
        lambda m: setattr(m.state_dict_metadata[HEAD].properties, "dtype", "float"),
        "lm_head.weight dtype: got 'float', expected a dtype of torch",
    ),
    "a chunk of another kind": (described(chunks=[3]), "lm_head.weight chunks: got int, expected ChunkStorageMetadata"),
    "no places": (lambda m: setattr(m, "storage_data", None), "without state_dict_metadata and storage_data"),
}
"""Beside those of every container: see test_container.py."""


@pytest.mark.parametrize("name", INDEX)
def test_an_index_that_cannot_be_meant_is_refused(copy: Path, name: str) -> None:
    change, expected = INDEX[name]
    edit_index(change)(copy)
    renew_sums(copy)
    assert expected in refusal(copy)
    assert checkpoint_dir.newest_usable(copy.parent).path.name == "iter_0000001"  # type: ignore[union-attr]


def test_a_pickle_sets_no_attribute_of_torchs_classes(copy: Path) -> None:
    """BUILD on a class would change it for the whole process."""
    name = "torch.distributed.checkpoint.metadata"
    content = f"c{name}\nMetadataIndex\nN}}S'fqn'\nS'planted'\ns\x86b.".encode("latin1")
    (copy / ".metadata").write_bytes(content)
    renew_sums(copy)
    assert "damaged content (TypeError)" in refusal(copy)
    assert not hasattr(MetadataIndex, "planted") and getattr(MetadataIndex, "fqn", None) != "planted"


META: dict[str, tuple[dict[str, object], str]] = {
    "iteration of another folder": ({"iteration": 3}, "iteration: got 3, expected 2, as in the folder's name"),
    "negative samples": ({"consumed_samples": -7}, "consumed_samples: got -7, expected an integer of at least 0"),
    "half an update": ({"optimizer_step": 2.5}, "optimizer_step: got 2.5"),
    "true": ({"optimizer_step": True}, "optimizer_step: got True"),
    "huge": ({"consumed_samples": 2**70}, "consumed_samples: got"),
    "no loss scale": ({"loss_scale": [0.0, 1.0, 1.0]}, "a scale above 0, and two counts"),
    "short loss scale": ({"loss_scale": [1.0]}, "loss_scale: got [1.0], expected an array of 3 finite numbers"),
    "nan": ({"weight_sum": float("nan")}, "weight_sum: got nan"),
    "a list": ({"config": []}, "config: got [], expected an object"),
    "a section": ({"config__training": 3}, "config training: got 3, expected an object"),
    "an option": ({"config__lora": {"lora_rank": "eight"}}, "config lora lora_rank: got 'eight', expected an integer"),
    "a list of options": ({"config__lora": {"lora_target_modules": 5}}, "lora_target_modules: got 5, expected an array of strings"),
    "history": (
        {"history": {"skipped": [3], "good_losses": [], "bad_in_a_row": 0}},
        "history skipped: got [3], expected an array of objects",
    ),
    "bad step": (
        {"history": {"skipped": [{"iteration": -1}], "good_losses": [None], "bad_in_a_row": 0}},
        "history skipped[0] iteration: got -1, expected an integer of at least 0",
    ),
    "places": ({"stream_places": [[[1, 2]]]}, "stream_places: got [1, 2], expected 4 numbers"),
    "not finite": ({"not_finite": [{"name": 3}]}, "not_finite: got [{'name': 3}], expected name, count, first and value"),
    "callbacks": ({"callbacks": 3}, "callbacks: got 3, expected an object"),
    "data": ({"training_data": 3}, "training_data: got 3, expected an object"),
    "model": ({"model": None}, "model: got None, expected an object"),
    "version": ({"format_version": True}, "format_version: got True, expected 1"),
    "seed": ({"seed": "x"}, "seed: got 'x'"),
}


@pytest.mark.parametrize("name", META)
def test_fields_have_kind_and_range(copy: Path, name: str) -> None:
    changes, expected = META[name]
    edit_meta(**changes)(copy)
    renew_sums(copy)
    with pytest.raises(CheckpointError) as caught:
        native.read_meta(copy)
    assert expected in f"{caught.value}" and f"{copy}/meta.json" in f"{caught.value}"


def test_all_fields_are_said_at_once(copy: Path) -> None:
    edit_meta(seed="x", consumed_samples=-7, weight_sum=-1, tokenizer_model=3)(copy)
    renew_sums(copy)
    with pytest.raises(CheckpointError) as caught:
        native.read_meta(copy)
    assert all(name in f"{caught.value}" for name in ("seed", "consumed_samples", "weight_sum", "tokenizer_model"))


def test_deep_json_is_an_error(copy: Path) -> None:
    (copy / "meta.json").write_text("[" * 100_000)
    renew_sums(copy)
    assert "meta.json" in refusal(copy)


def test_a_measured_loss_that_is_not_finite_is_none(copy: Path) -> None:
    edit_meta(validation_loss=float("nan"))(copy)
    renew_sums(copy)
    load(copy)
    assert checkpoint_dir.validation_loss(copy) is None


DAMAGED: dict[str, Edit] = {
    "meta.json": lambda path: (path / "meta.json").write_bytes((path / "meta.json").read_bytes()[:-9]),
    "no meta.json": lambda path: (path / "meta.json").unlink(),
    ".metadata": lambda path: (path / ".metadata").write_bytes(b"x"),
    "no .metadata": lambda path: (path / ".metadata").unlink(),
    "SHA256SUMS": lambda path: (path / "SHA256SUMS").write_bytes(b"x"),
    "no SHA256SUMS": lambda path: (path / "SHA256SUMS").unlink(),
    "no data": lambda path: (path / DATA).unlink(),
    "short data": lambda path: os.truncate(path / DATA, 1000),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_newest_checkpoint_is_passed_over_and_named(copy: Path, name: str) -> None:
    DAMAGED[name](copy)
    usable = checkpoint_dir.newest_usable(copy.parent)
    assert usable is not None and usable.path == copy.with_name("iter_0000001")
    (newer,) = usable.passed_over
    assert newer.path == copy and newer.problem == "is damaged"
    assert (DATA if name.endswith(" data") else name.split()[-1]) in newer.remedy


def mark(path: Path) -> None:
    edit_meta(not_finite=[{"name": "w", "count": 1, "first": [0], "value": "nan"}])(path)
    renew_sums(path)


def test_a_mark_is_looked_at_before_the_index(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading an index of millions of chunks takes minutes."""
    indices = []
    monkeypatch.setattr(checkpoint_dir, "open_native", lambda path: indices.append(path.name) or open_native(path))
    mark(copy)
    good = copy.with_name("iter_0000001")
    usable = checkpoint_dir.newest_usable(copy.parent)
    assert usable is not None and usable.path == good and indices == [good.name]
    (newer,) = usable.passed_over
    assert newer.path == copy and newer.problem == "has weights or moments that are not finite"


def test_a_run_that_keeps_marked_checkpoints_goes_on_from_the_newest(copy: Path) -> None:
    options = CheckpointConfig(save=str(copy.parent), load="auto")
    mark(copy)
    for policy, name in (("stop", "iter_0000001"), ("rollback", "iter_0000001"), ("warn", "iter_0000002")):
        start = named_start(replace(options, on_bad_checkpoint=policy))
        assert start is not None and start.path.name == name
    (copy / DATA).unlink()
    start = named_start(replace(options, on_bad_checkpoint="warn"))
    assert start is not None and start.path.name == "iter_0000001" and start.passed_over[0].problem == "is damaged"


def test_a_marked_checkpoint_is_better_than_none(copy: Path) -> None:
    good = copy.with_name("iter_0000001")
    mark(copy)
    (good / DATA).unlink()
    assert checkpoint_dir.newest_usable(copy.parent) == checkpoint_dir.Usable(copy, ())
    (copy / DATA).unlink()
    with pytest.raises(CheckpointError, match="none can be used:") as caught:
        checkpoint_dir.newest_usable(copy.parent)
    assert f"{caught.value}".count(DATA) == 2


def test_a_run_does_not_start_anew_beside_checkpoints_that_are_all_damaged(copy: Path) -> None:
    for path in (copy, copy.with_name("iter_0000001")):
        (path / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match="has checkpoints, and none can be used:") as caught:
        checkpoint_dir.newest_usable(copy.parent)
    assert f"{caught.value}".count("SHA256SUMS: got No such file") == 2


def test_strange_names_and_trackers_are_nobodys(copy: Path) -> None:
    folder = copy.parent
    for name in ("iter_" + "9" * 19, "iter_" + "9" * 200, "iter_00000000000002", "iter_٠٠٠٠٠٠٩"):
        shutil.copytree(copy, folder / name)
    assert list(checkpoint_dir.complete(folder)) == [1, 2]
    tracker = folder / checkpoint_dir.TRACKER
    for content in (b"1_0", b"\xff", b"-1", b"1" * 10**6, "٢".encode()):
        tracker.write_bytes(content)
        assert checkpoint_dir.latest(folder) == copy
    tracker.write_bytes(b" 1\n")
    assert checkpoint_dir.latest(folder) == copy.with_name("iter_0000001")
    tracker.unlink()
    os.mkfifo(tracker)
    assert checkpoint_dir.latest(folder) == copy


def stored(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> StoredTensor:
    place = Place("f", 0, 2**40)
    return StoredTensor(shape, torch.float32, tuple(Chunk(offset, size, place) for offset, size in sorted(boxes)), False)


def test_any_way_to_cut_a_tensor_is_judged_in_time() -> None:
    """100,000 boxes of a grid, and five that no straight line divides."""
    grid = [((row, column), (1, 1)) for row in range(250) for column in range(400)]
    assert list(cover_problems("w", stored(grid, (250, 400)), do="")) == []
    grid[-1] = ((0, 0), (1, 1))
    assert "overlapping chunks at (0, 0)" in next(cover_problems("w", stored(grid, (250, 400)), do=""))
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert list(cover_problems("w", stored(wheel, (3, 3)), do="")) == []
    wheel[4] = ((0, 1), (1, 1))
    assert "overlapping chunks" in next(cover_problems("w", stored(wheel, (3, 3)), do=""))
    stripes = [((0, column), (2**30, 1)) for column in range(5000)] + [((row, 0), (1, 2**30)) for row in range(5000)]
    assert "overlapping" in next(cover_problems("w", stored(stripes, (2**31, 2**31)), do=""))
