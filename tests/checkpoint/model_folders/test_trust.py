"""What a folder from elsewhere says of itself is compared with what it holds; nothing leads out of it, waits for ever or has no end."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.checkpoint.model_folders.formats import weight_files
from megatron_llama.cli import main
from megatron_llama.config.model_files import read_model_file
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.errors import CheckpointError
from safetensors.torch import load_file, save_file

from tests.checkpoint.model_folders.test_hf import written
from tests.converter.converting import convert, refusal
from tests.data.tokenizer.byte_level import all_bytes
from tests.flipped import flip
from tests.refused import all_refused

Capture = pytest.CaptureFixture[str]
TEXT = ["--prompt", "a", "--max-new-tokens", "1"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer of bytes and a chat template beside it."""
    folder = written(tmp_path_factory.mktemp("source") / "hf", max_shard_size="100KB", vocab_size=256)
    all_bytes().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "!"}')
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return folder


@pytest.fixture(scope="module")
def written_export(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("export") / "hf", "--to", "hf")


@pytest.fixture
def export(written_export: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written_export, tmp_path / "export")


def generated(folder: Path, capsys: Capture) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["generate", "--init-from-hf", str(folder), *TEXT])
    return status, capsys.readouterr().err


def test_every_file_of_a_conversion_is_listed_and_those_of_the_weights_are_known(written_export: Path, source: Path, tmp_path: Path) -> None:
    """Of the weights are all in which a format keeps tensors, in the folder itself or in the one that a tracker names, and nothing else."""
    padding = ["--make-vocab-size-divisible-by", "1"]
    folders = {"safetensors": written_export, "pth": convert(source, tmp_path / "meta", "--to", "meta")}
    folders |= {end: convert(source, tmp_path / to, "--to", to, *padding) for to, end in (("megatron", "pt"), ("torch_dist", "distcp"))}
    for ending, folder in folders.items():
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
        listed = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
        there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert there - listed == {"SHA256SUMS"} | ({"latest_checkpointed_iteration.txt"} & there)
        tensors, found = set(folder.rglob(f"*.{ending}")), set(weight_files(folder))
        others = {"common.pt", ".metadata", "metadata.json"} if ending == "distcp" else set()
        assert tensors and tensors <= found and {path.name for path in found - tensors} == others


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["flipped", "dropped"])
def test_a_file_of_an_export_that_is_another_one(name: str, damage: str, export: Path, tmp_path: Path, capsys: Capture) -> None:
    if damage == "flipped":
        flip(export / name, -2)
    else:
        (export / name).unlink()
    status, said = generated(export, capsys)
    assert status != 0 and name in said and "Traceback" not in said
    assert name in refusal(capsys, export, tmp_path / "out", "--to", "meta")


def test_a_file_that_was_changed_on_purpose(export: Path, capsys: Capture) -> None:
    """The error gives the command that takes the file's line out of the list."""
    template = export / "chat_template.jinja"
    template.write_text("{{ messages[-1]['content'] }}")
    status, said = generated(export, capsys)
    assert status != 0 and "if you changed it yourself" in said
    subprocess.run(said[said.index("sed -i") :].splitlines()[0], shell=True, check=True)
    assert generated(export, capsys)[0] == 0
    assert "tokenizer.json" in (export / "SHA256SUMS").read_text(), "the other lines stay"


def test_a_list_of_other_things(source: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = shutil.copytree(source, tmp_path / "hf")
    (folder / "SHA256SUMS").write_text(
        f"SHA256 (config.json) = {'0' * 64}\n{'0' * 64}  README.md\n{'0' * 64}  ../../etc/passwd\n{'0' * 64}  /dev/zero\n"
    )
    status, said = generated(folder, capsys)
    assert status == 0
    assert "SHA256SUMS: 3 lines not as sha256sum writes them" in said


def test_links_out_of_a_folder(source: Path, tmp_path: Path, capsys: Capture) -> None:
    """What is read there would end in an export."""
    secret = tmp_path / "secret"
    secret.write_text("{% raw %}a key{% endraw %}")
    for name in ("chat_template.jinja", "tokenizer_config.json", "vocab.json"):
        folder = shutil.copytree(source, tmp_path / f"with {name}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
        said = refusal(capsys, folder, tmp_path / "out", "--to", "hf")
        assert f"{name}: got a link to {secret}" in said and "cp --remove-destination" in said


def test_the_links_of_a_hub_cache(source: Path, tmp_path: Path, capsys: Capture) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        shutil.copyfile(path, repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert generated(snapshot, capsys)[0] == 0
    convert(snapshot, tmp_path / "out", "--to", "hf")
    (tmp_path / "other" / "blobs").mkdir(parents=True)
    shutil.copyfile(source / "config.json", tmp_path / "other" / "blobs" / "0")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "other" / "blobs" / "0")
    assert "got a link to" in generated(snapshot, capsys)[1]


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


STORES: dict[str, Callable[[bytes], str]] = {
    "the hub's blobs, as its downloads of 2023 link to them": lambda content: f"models--org--name/blobs/{git_digest(content)}",
    "the hub's blobs of large files": lambda content: f"models--org--name/blobs/{hashlib.sha256(content).hexdigest()}",
    "DVC": lambda content: f"files/md5/{(digest := hashlib.md5(content).hexdigest()):.2}/{digest[2:]}",
    "git-annex": lambda content: f"annex/SHA256E-s{len(content)}--{hashlib.sha256(content).hexdigest()}.json",
}


@pytest.mark.parametrize("named", STORES.values(), ids=STORES)
def test_links_into_a_store_that_names_files_by_their_content(named: Callable[[bytes], str], source: Path, tmp_path: Path) -> None:
    content = (source / "config.json").read_bytes()
    stored = tmp_path / "store" / named(content)
    stored.parent.mkdir(parents=True)
    stored.write_bytes(content)
    (tmp_path / "model").mkdir()
    link = tmp_path / "model" / "config.json"
    link.symlink_to(stored)
    assert read_model_file(link) == content
    stored.write_bytes(content + b" ")  # a file that only has such a name
    with pytest.raises(CheckpointError, match=r"got a link to .*cp --remove-destination"):
        read_model_file(link)


def test_blobs_that_lie_on_another_disk(source: Path, tmp_path: Path) -> None:
    repository, disk = tmp_path / "models--org--name", tmp_path / "disk"
    (repository / "snapshots" / "0123").mkdir(parents=True)
    disk.mkdir()
    (repository / "blobs").symlink_to(disk)
    shutil.copyfile(source / "config.json", disk / "etag")
    link = repository / "snapshots" / "0123" / "config.json"
    link.symlink_to("../../blobs/etag")
    assert read_model_file(link) == (source / "config.json").read_bytes()


def test_a_list_in_the_folder_above_is_of_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "config.json"
    file.write_text("{}")
    twice = "".join(f"{digit * 64}  other.iso\n" for digit in "01")
    (tmp_path / "SHA256SUMS").write_text(twice)
    assert read_model_file(file) == b"{}"
    (tmp_path / "SHA256SUMS").write_text(twice.replace("other.iso", "model/config.json"))
    with pytest.raises(CheckpointError, match=r"got two sums of model/config\.json"):
        read_model_file(file)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "adapter.bin"])
def test_pipes_and_devices_are_not_opened(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="got no regular file but a named pipe"):
        read_model_file(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="got no regular file but a device"):
        read_model_file(tmp_path / name)


def test_a_small_file_that_is_huge(source: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = shutil.copytree(source, tmp_path / "hf")
    os.truncate(folder / "config.json", 2**40)
    status, said = generated(folder, capsys)
    assert status != 0 and "config.json: got a file of 1,099,511,627,776 bytes, expected at most" in said


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../b", "", "x" * 5_000])
def test_shards_stay_in_the_folder(name: str, source: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = shutil.copytree(source, tmp_path / "hf")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    status, said = generated(folder, capsys)
    assert status != 0 and "model.safetensors.index.json weight_map: got" in said


def test_a_tokenizer_that_is_named_and_missing(source: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = shutil.copytree(source, tmp_path / "hf")
    (folder / "tokenizer.json").unlink()
    assert (
        "tokenizer.json: got no such file, expected it, by tokenizer_config.json: tokenizer_class PreTrainedTokenizerFast"
        in generated(folder, capsys)[1]
    )


def test_an_expression_that_tries_without_end(source: Path, tmp_path: Path) -> None:
    """The library gives it up with a panic, which is no Exception."""
    content = json.loads((source / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    for encode in (
        tokenizer.encode,
        tokenizer.encode_prompt,
        lambda text: tokenizer.encode_packed([text]),
        lambda text: list(tokenizer.encode_long(text)),
    ):
        with pytest.raises(ValueError, match=r"tokenizer\.json: got content on which the library fails"):
            encode("a" * 40 + "b")


ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"lora_alpha": float("nan")}, "lora_alpha: got nan, expected a finite number"),
    "a rank of 2.5": ({"r": 2.5}, "r: got 2.5, expected an integer"),
    "true": ({"r": True}, "r: got True, expected an integer"),
    "a text": ({"use_rslora": "no"}, "use_rslora: got 'no', expected true or false"),
    "huge": ({"lora_alpha": 1e308}, "lora_alpha: got 1e+308, expected a finite number"),
    "ranks": ({"rank_pattern": [1]}, "rank_pattern: got [1], expected an object"),
    "targets": ({"target_modules": [["q_proj"]]}, "target_modules: got [['q_proj']]"),
    "modules": ({"modules_to_save": 3}, "modules_to_save: got 3, expected a list of names"),
    "another method": ({"peft_type": "IA3"}, "peft_type: got IA3, expected LORA"),
    "biases": ({"bias": "all"}, "bias: got all, expected none"),
    "start": ({"init_lora_weights": ["pissa"]}, "init_lora_weights: got ['pissa']"),
}


def adapter(folder: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None, **fields: Any) -> Path:
    """An addition to q_proj of the two layers, in PEFT's format."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    hidden = 64
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": torch.ones(shape)
        for layer in range(2)
        for half, shape in (("A", (2, hidden)), ("B", (hidden, 2)))
    }
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def merged(source: Path, addition: Path, target: Path, capsys: Capture) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["merge", str(source), str(target), "--adapter", str(addition)])
    return status, capsys.readouterr().err


@pytest.mark.parametrize(("fields", "says"), ADAPTERS.values(), ids=ADAPTERS)
def test_fields_of_an_adapter(fields: dict[str, Any], says: str, source: Path, tmp_path: Path, capsys: Capture) -> None:
    status, said = merged(source, adapter(tmp_path / "adapter", **fields), tmp_path / "out", capsys)
    assert status == 1 and f"adapter_config.json {says}" in said
    assert not (tmp_path / "out").exists()


def test_weights_of_an_adapter_that_are_none(source: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = adapter(tmp_path / "adapter", lambda tensors: tensors.update({name: tensor.int() for name, tensor in tensors.items()}))
    said = all_refused(merged(source, folder, tmp_path / "out", capsys)[1])
    assert {(each.key, each.got) for each in said} == {("checkpoint.model_folders.peft.adapter.PeftAdapter._problems:2", "I32")}
    (folder / "adapter_model.safetensors").write_bytes(b"{}")
    said = all_refused(merged(source, folder, tmp_path / "out", capsys)[1])
    assert [each.key for each in said] == ["checkpoint.model_folders.peft.adapter.PeftAdapter.__init__:2"]


def test_integers_in_the_place_of_weights(source: Path, tmp_path: Path, capsys: Capture) -> None:
    name = "model.norm.weight"
    folder = shutil.copytree(source, tmp_path / "hf")
    [shard] = [path for path in folder.glob("*.safetensors") if name in load_file(path)]
    for wrong, says in ((torch.ones(64, dtype=torch.int64), "got I64"), (torch.tensor(1.0), "got shape ()")):
        save_file({**load_file(shard), name: wrong}, shard, {"format": "pt"})
        status, said = generated(folder, capsys)
        assert status != 0 and name in said and says in said


NUMBERS: dict[str, dict[str, Any]] = {
    "a factor of 1e308": {"rope_scaling": {"rope_type": "linear", "factor": 1e308}},
    "a factor that is none": {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}},
    "a length below 0": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": -5}},
    "half a position": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32.5}},
    "a base of 0": {"rope_theta": 0},
    "a base of infinity": {"rope_theta": float("inf")},
    "an integer of 400 digits": {"rope_theta": 10**400},
    "a factor of a list": {"rope_scaling": {"rope_type": "longrope", "short_factor": [float("nan")] * 4, "long_factor": [1.0] * 4}},
    "an epsilon that vanishes": {"rms_norm_eps": 5e-324},
    "an end below 0": {"eos_token_id": -1},
    "ends below 0": {"eos_token_id": [2, -1]},
    "kinds of layers": {"layer_types": [["full_attention"], "full_attention"]},
}


@pytest.mark.parametrize("fields", NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_a_config(fields: dict[str, Any], source: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = shutil.copytree(source, tmp_path / "hf")
    content = json.loads((folder / "config.json").read_text())
    content.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(content | fields))
    status, said = generated(folder, capsys)
    assert status != 0 and "config.json" in said and next(iter(fields)) in said and "Traceback" not in said


def test_a_weight_of_metas_without_dimensions(source: Path, tmp_path: Path, capsys: Capture) -> None:
    meta = convert(source, tmp_path / "meta", "--to", "meta")
    (meta / "SHA256SUMS").unlink()
    path = meta / "consolidated.00.pth"
    content = torch.load(path)
    torch.save(content | {"output.weight": torch.tensor(1.0)}, path)
    assert "output.weight: got shape (), expected a matrix" in refusal(capsys, meta, tmp_path / "out", "--to", "hf")
    torch.save(content, path)
    for name, wrong in (("dim", 64.5), ("n_heads", -8), ("norm_eps", float("nan")), ("rope_theta", [1])):
        params = json.loads((meta / "params.json").read_text())
        (meta / "params.json").write_text(json.dumps(params | {name: wrong}))
        assert f"params.json {name}: got {wrong!r}" in refusal(capsys, meta, tmp_path / "out", "--to", "hf")
        (meta / "params.json").write_text(json.dumps(params))
