"""Folders with several sets of weights: those count that transformers takes, and a line names both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint.model_folders.hf.reader import HFWeights
from megatron_llama.cli import main
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.checkpoint.model_folders.test_hf import hf_model, same, tensors, written

Capture = pytest.CaptureFixture[str]
SHARDS = {"max_shard_size": "60KB"}
HEAD = "lm_head.weight"


def old_shards(folder: Path) -> None:
    written(folder, **SHARDS)


def old_index(folder: Path) -> None:
    written(folder, **SHARDS)
    for path in folder.glob("model-*.safetensors"):
        path.unlink()


def new_single(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def new_bin(folder: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, folder / "pytorch_model.bin")


def old_bin_shards(folder: Path) -> None:
    written(folder)
    content = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model-00001-of-00001.bin")
    weight_map = dict.fromkeys(content, "pytorch_model-00001-of-00001.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("old", "new", "read", "beside"),
    [
        (old_index, new_single, "model.safetensors", "model.safetensors.index.json"),
        (old_shards, new_single, "model.safetensors", "model.safetensors.index.json"),
        (old_shards, new_bin, "model.safetensors.index.json", "pytorch_model.bin"),
        (written, new_bin, "model.safetensors", "pytorch_model.bin"),
        (old_bin_shards, new_bin, "pytorch_model.bin", "pytorch_model.bin.index.json"),
    ],
)
def test_transformers_weights_are_read(
    old: Callable[[Path], None],
    new: Callable[[Path, dict[str, Tensor]], None],
    read: str,
    beside: str,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    folder = tmp_path / "hf"
    old(folder)
    new(folder, {name: tensor + 1 for name, tensor in hf_model().state_dict().items()})
    assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "hf"]) == 0
    said = capsys.readouterr().out
    assert same(tensors(tmp_path / "out"), LlamaForCausalLM.from_pretrained(folder).state_dict())
    assert f"note: {folder / read}: the weights are read from it, not from {beside} beside it, as in transformers" in said


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    """A copy with the same values does no harm. With other values transformers takes the shard that it reads last."""
    folder = written(tmp_path / "hf", **SHARDS)
    home = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][HEAD]
    other = next(path for path in sorted(folder.glob("model-*.safetensors")) if path.name != home)
    head = load_file(folder / home)[HEAD]
    save_file({**load_file(other), HEAD: head}, other, {"format": "pt"})
    found = torch.empty_like(head)
    HFWeights(folder)(Rectangle(HEAD, tuple(head.shape), (0, 0), tuple(head.shape), 0), found)
    assert torch.equal(found, head)
    save_file({**load_file(other), HEAD: head + 1}, other, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{HEAD}: got other values in model-\d+-of-\d+\.safetensors than in another file of model\.saf"):
        HFWeights(folder)


@pytest.mark.parametrize(
    ("prefix", "within"),
    [
        ("_orig_mod.", "a module of torch.compile"),
        ("module.", "DistributedDataParallel"),
        ("module._orig_mod.", "a module of torch.compile"),
        ("base_model.model.", "a model of PEFT"),
        ("_fsdp_wrapped_module.", "FullyShardedDataParallel"),
        ("policy.", "another"),
    ],
)
def test_names_of_a_wrapped_model(prefix: str, within: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "hf")
    count = len(tensors(folder))
    new_single(folder, {prefix + name: tensor for name, tensor in tensors(folder).items()})
    message = rf"got {count} tensors whose names begin with '{prefix}', expected .*; this is a model within {within}: save the inner"
    with pytest.raises(CheckpointError, match=message):
        HFWeights(folder)


@pytest.mark.parametrize("content", ['{"weight_map": {}}', "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_files(content: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "hf", **SHARDS)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json: got none, expected a weight_map with the file of each tensor"):
        HFWeights(folder)
