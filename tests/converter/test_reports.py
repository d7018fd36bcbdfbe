"""Public bug reports on files of models, tried here against transformers. Each test names its reports."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.cli import main
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.checkpoint.model_folders.test_hf import tensors, written
from tests.converter.converting import SIZES, convert, identical, refusal

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("metadata", [None, {}, {"format": "mlx", "note": "x"}])
def test_metadata_of_a_file_changes_nothing(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    """ml-explore/mlx#743, safetensors/safetensors#823, foundation-model-stack/fastsafetensors#89: other programs write none, or another
    ``format``. What is written here has the one that transformers asks for, in every file."""
    original = written(tmp_path / "original", **SIZES)
    folder = written(tmp_path / "folder", **SIZES)
    content = (folder / "model.safetensors").read_bytes()
    [size] = struct.unpack("<Q", content[:8])
    header = {name: value for name, value in json.loads(content[8 : 8 + size]).items() if name != "__metadata__"}
    made = json.dumps(header if metadata is None else {"__metadata__": metadata, **header}).encode()
    made += b" " * (-len(made) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(made)) + made + content[8 + size :])
    copy = convert(folder, tmp_path / "copy", "--to", "hf", "--max-shard-bytes", "100000")
    expected = tensors(original)
    assert tensors(copy).keys() == expected.keys()
    assert all(identical(values, expected[name]) for name, values in tensors(copy).items())
    files = sorted(copy.glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in expected.values())


def test_a_tied_embedding_that_is_stored_as_the_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """huggingface/transformers#34759: a program that drops copies of shared tensors may keep the head's name. NVIDIA/TensorRT-LLM#3324:
    without ``tie_word_embeddings`` one of them is not the other: then the weights are incomplete."""
    original = written(tmp_path / "original", **SIZES, tie_word_embeddings=True)
    folder = written(tmp_path / "folder", **SIZES, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    weights[HEAD] = weights.pop(EMBEDDING)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and torch.equal(model.state_dict()[EMBEDDING], weights[HEAD])
    for form in ("hf", "meta"):
        given = ("--hf-config", str(folder / "config.json")) if form == "meta" else ()
        copy = convert(convert(folder, tmp_path / form, "--to", form), tmp_path / f"{form}-back", "--to", "hf", *given)
        assert all(identical(values, tensors(original)[name]) for name, values in tensors(copy).items())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert f"{EMBEDDING}: got no such tensor" in refusal(capsys, folder, tmp_path / "out", "--to", "hf")


def test_an_adapter_without_the_prefix_of_peft_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """redai-studio/Relax#262: PEFT loads such a file with a warning, as additions that are all zero."""
    from peft import LoraConfig, get_peft_model

    original = written(tmp_path / "original", **SIZES)
    options: dict[str, Any] = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj", "down_proj"]}
    get_peft_model(AutoModelForCausalLM.from_pretrained(original), LoraConfig(**options)).save_pretrained(tmp_path / "adapter")
    words = ["merge", str(original), str(tmp_path / "merged"), "--adapter", str(tmp_path / "adapter")]
    weights = load_file(tmp_path / "adapter/adapter_model.safetensors")
    save_file(
        {name.removeprefix("base_model.model."): values for name, values in weights.items()}, tmp_path / "adapter/adapter_model.safetensors"
    )
    assert main(words) == 1
    assert "base_model.model.model.layers.0" in capsys.readouterr().err and not (tmp_path / "merged").exists()
    save_file(weights, tmp_path / "adapter/adapter_model.safetensors")
    assert main(words) == 0
