"""Damaged checkpoints, wrong models and full disks: one clear error on every rank, and nothing half done."""

from __future__ import annotations

import pickle
import re
import resource
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_llama.checkpoint import checkpoint_dir, native
from megatron_llama.checkpoint.failures import require_writable
from megatron_llama.errors import CheckpointError
from megatron_llama.launch.launcher import Place
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from tests.checkpoint.cases import SINGLE, copies, full_disk, load_under, merged, renew_sums, same, save_under, state_at, trained
from tests.checkpoint.damage import edit_index, edit_meta
from tests.flipped import flip
from tests.harness import Cluster
from tests.parallel.cases import Layout, trainer
from tests.torch_twin import drawn

ONE = Layout()


def data_file(path: Path) -> Path:
    (file,) = path.glob("*.distcp")
    return file


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def zero(path: Path) -> None:
    file = data_file(path)
    file.write_bytes(bytes(file.stat().st_size))


def flip_in_the_head(path: Path) -> None:
    """One bit, in the middle of the output head's values."""
    (place, *_) = [at for key, at in FileSystemReader(path).read_metadata().storage_data.items() if key.fqn == "lm_head.weight"]
    flip(data_file(path), place.offset + place.length // 2, 8)


class Bomb:
    """What an attacker would put into a pickle."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return subprocess.getoutput, ("touch exploded",)


def plant_bomb(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Bomb()))


DAMAGE = {
    "no meta": (lambda path: (path / "meta.json").unlink(), r"meta\.json: got No such file or directory, .*; restore"),
    "meta is not JSON": (lambda path: cut(path / "meta.json", 30), r"meta\.json:3: got .*, expected valid JSON; restore"),
    "meta is a list": (lambda path: (path / "meta.json").write_text("[]"), r"meta\.json: got a JSON list, expected a JSON object; restore"),
    "meta lacks a field": (edit_meta(loss_scale=...), r"meta\.json loss_scale: got no such field, expected one; restore"),
    "later format": (edit_meta(format_version=3), r"format_version: got 3, expected 1 or 2; .*version of this program"),
    "index with code": (plant_bomb, r"\.metadata: got a pickle that calls subprocess\.getoutput, .*nothing was run"),
    "no data": (
        lambda path: data_file(path).unlink(),
        r"__0_0\.distcp: got No such file or directory, expected a file of \d+ bytes; restore",
    ),
    "data cut off": (lambda path: cut(data_file(path), 5000), r"__0_0\.distcp: got 5000 bytes, expected \d+: it was cut off; restore"),
    "data lost": (zero, r"__0_0\.distcp \S+ at \(0,.*\): got damaged content \(\w+\), expected a tensor that torch\.save wrote; restore"),
    "bit flipped": (
        flip_in_the_head,
        r"__0_0\.distcp lm_head\.weight at \(0, 0\): got damaged content \(a checksum does not match\), expected what was saved; restore",
    ),
    "tensor missing": (
        edit_index(lambda index: index.state_dict_metadata.pop("optimizer.exp_avg.lm_head.weight")),
        r"optimizer\.exp_avg\.lm_head\.weight: got no such tensor, expected shape \(300, 64\)",
    ),
}
"""What makes an index unusable is in test_container.py, and what makes meta.json so in test_trust.py."""


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(copy: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    damage, message = DAMAGE[name]
    damage(copy)
    renew_sums(copy)
    run = trainer(SINGLE, ONE)
    before = merged(copies(run.optimizer))
    with pytest.raises(CheckpointError, match=message) as caught:
        native.load(copy, run.optimizer, run.mesh, ONE.config().model)
    assert str(copy) in str(caught.value)
    if name in ("meta lacks a field", "index with code", "data cut off", "bit flipped"):
        with pytest.raises(CheckpointError, match=message):  # without an engine
            drawn(native.open_weights(copy), "lm_head.weight", (300, 64))
    # Only damage inside a file of the right size can show while tensors are being read.
    assert same(merged(copies(run.optimizer)), before) or name in ("data lost", "bit flipped")
    assert not (tmp_path / "exploded").exists()


def test_export_needs_no_optimizer_state(copy: Path) -> None:
    def without_state(index: Metadata) -> None:
        for key in [key for key in index.state_dict_metadata if key.startswith("optimizer.")]:
            del index.state_dict_metadata[key]

    edit_index(without_state)(copy)
    renew_sums(copy)
    native.open_weights(copy)


def test_another_model_is_refused_with_every_field(good: Path) -> None:
    run = trainer(SINGLE, ONE)
    scaling = {"rope_type": "linear", "factor": 2.0}
    other = replace(ONE.config().model, rms_norm_eps=1e-6, rope_theta=5e5, rope_scaling=scaling, num_hidden_layers=8)
    with pytest.raises(CheckpointError) as caught:
        native.load(good, run.optimizer, run.mesh, other)
    text = str(caught.value)
    assert "another model" in text and text.count("meta.json") == 3 and "rms_norm_eps" not in text  # that warns
    for line in ("num_hidden_layers: got 4, expected 8;", "rope_theta: got 10000.0, expected 500000.0;"):
        assert line in text
    assert "rope_scaling: got None, expected {'rope_type': 'linear', 'factor': 2.0};" in text


def test_fields_without_effect_may_differ(good: Path) -> None:
    run = trainer(SINGLE, ONE)
    model = replace(ONE.config().model, preset="mine", max_position_embeddings=64, initializer_range=0.1, eos_token_id=2, bos_token_id=1)
    assert native.load(good, run.optimizer, run.mesh, model) == state_at(2)


def test_another_precision_is_refused(good: Path) -> None:
    run = trainer(SINGLE, Layout(fp64=True))
    with pytest.raises(CheckpointError, match=r"got torch\.float32, expected torch\.float64; resume in the precision"):
        native.load(good, run.optimizer, run.mesh, ONE.config().model)


def test_a_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing: got no such folder, expected iter_NNNNNNN"):
        native.read_meta(tmp_path / "missing")
    (tmp_path / "iter_0000003.incomplete").mkdir()
    with pytest.raises(CheckpointError, match="got a folder without complete checkpoints"):
        checkpoint_dir.find(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"give the checkpoint of a run \(.*generate and chat read such a folder with --init-from-hf\)"
    ):
        checkpoint_dir.find(tmp_path)


@pytest.mark.parametrize("folder", ["/proc/runs/mine", "/proc"])
def test_a_place_where_nobody_can_write_is_named_as_it_was_given(folder: str) -> None:
    with pytest.raises(
        CheckpointError, match=rf"^{folder}: got .*, expected a folder in which files can be written; .*give another folder$"
    ):
        require_writable(Path(folder))


def message_of_load(place: Place, layout: Layout, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_under(place, layout, folder)
    return str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize(
    "damage", [pytest.param(zero, marks=pytest.mark.long), lambda path: data_file(path).unlink()], ids=["content", "file"]
)
def test_ranks_agree_on_damage_that_one_of_them_meets(cluster: Cluster, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """The file of the second pipeline stage is read by that stage alone."""
    layout = Layout(pp=2)
    cluster.run(2, save_under, layout, tmp_path)
    path = tmp_path / "iter_0000002"
    (path / "__0_0.distcp").rename(tmp_path / "first")
    damage(path)
    (tmp_path / "first").rename(path / "__0_0.distcp")
    messages = cluster.run(2, message_of_load, layout, tmp_path)
    assert messages[0] == messages[1]
    assert re.search(r"rank 1: .*__1_0\.distcp.*: got ", messages[0], re.DOTALL)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("size", "file"), [(100_000, r"__0_0\.distcp"), (0, r"__0_0\.distcp")])
def test_a_full_disk_leaves_the_last_checkpoint(copy: Path, size: int, file: str) -> None:
    folder = copy.parent
    run = trained(SINGLE, ONE)
    with full_disk(size), pytest.raises(CheckpointError, match=rf"iter_0000003\.incomplete/{file}: got File too large, .*; free space"):
        native.save(folder, run.optimizer, run.mesh, state_at(3), ONE.config())
    assert checkpoint_dir.latest(folder) == copy
    assert names(folder) == ["iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"]
    assert native.save(folder, run.optimizer, run.mesh, state_at(3), ONE.config()) == checkpoint_dir.latest(folder)


def test_a_disk_that_fills_up_at_the_end_leaves_the_last_checkpoint(copy: Path) -> None:
    """Saving the same iteration again: what it replaces stays."""
    run = trained(SINGLE, ONE, steps=0)
    long = replace(ONE.config(), data=replace(ONE.config().data, tokenizer_model="x" * 10_000_000))
    with full_disk(5_000_000), pytest.raises(CheckpointError, match=r"meta\.json|iter_0000002: got File too large"):
        native.save(copy.parent, run.optimizer, run.mesh, state_at(2), long)
    assert native.read_meta(copy).optimizer_step == 2
    assert names(copy.parent) == ["iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"]


def message_of_save(place: Place, layout: Layout, folder: Path, full_rank: int) -> str:
    run = trained(place, layout)
    with full_disk(50_000 if place.rank == full_rank else resource.RLIM_INFINITY), pytest.raises(CheckpointError) as caught:
        native.save(folder, run.optimizer, run.mesh, state_at(3), layout.config())
    assert native.save(folder, run.optimizer, run.mesh, state_at(4), layout.config()) == folder / "iter_0000004"
    return str(caught.value)


@pytest.mark.few(1)
@pytest.mark.parametrize("full_rank", [1, 0])
def test_ranks_agree_on_a_full_disk_of_one(cluster: Cluster, tmp_path: Path, full_rank: int) -> None:
    messages = cluster.run(2, message_of_save, Layout(dp=2), tmp_path, full_rank)
    assert messages[0] == messages[1]
    assert re.fullmatch(rf"rank {full_rank}: .*__{full_rank}_0\.distcp: got File too large, .*", messages[0])
    assert names(tmp_path) == ["iter_0000004", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("name", ["save", "save/latest_checkpointed_iteration.txt"], ids=["a file for the folder", "a folder for the tracker"])
def test_what_is_in_the_way_is_named_and_stays(name: str, tmp_path: Path) -> None:
    save, path = tmp_path / "save", tmp_path / name
    path.write_text("not a folder") if path == save else path.mkdir(parents=True)
    said = "File exists" if path == save else "Is a directory"
    run = trained(SINGLE, ONE, steps=0)
    with pytest.raises(CheckpointError, match=rf"{path.name}\S*: got {said}, expected to write it"):
        native.save(save, run.optimizer, run.mesh, state_at(1), ONE.config())
    assert path.read_text() == "not a folder" if path == save else names(save) == ["iter_0000001", path.name]


def save_apart(place: Place, layout: Layout, folder: Path) -> str:
    run = trained(place, layout, steps=0)
    with pytest.raises(CheckpointError) as caught:
        native.save(folder / f"machine {place.rank}", run.optimizer, run.mesh, state_at(1), layout.config())
    return str(caught.value)


def test_a_folder_that_machines_do_not_share_is_noticed(cluster: Cluster, tmp_path: Path) -> None:
    messages = cluster.run(2, save_apart, Layout(dp=2), tmp_path)
    assert messages[0] == messages[1]
    assert re.search(r"__1_0\.distcp: got No such file or directory, .* save to a folder that all machines share", messages[0])
    assert checkpoint_dir.latest(tmp_path / "machine 0") is None
