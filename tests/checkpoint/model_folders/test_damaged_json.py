"""Damaged JSON files beside a model: what transformers refuses is one error that names the file, and what it reads is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from megatron_llama.cli import main
from megatron_llama.config.json_file import BYTE_ORDER_MARK
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.checkpoint.model_folders.test_hf import written
from tests.data.tokenizer.byte_level import all_bytes

Capture = pytest.CaptureFixture[str]
NAMED = {"_name_or_path": "caf\N{LATIN SMALL LETTER E WITH ACUTE}"}
DAMAGES: Mapping[str, tuple[bytes, str]] = {
    "empty": (b"", "got an empty file"),
    "blank": (b" \n", "got an empty file"),
    "cut off": (b'{\n"eos_token_id": [2,', ":2: got "),
    "a list": (b"[]", "got a JSON list"),
    "null": (b"null", "got null"),
    "a byte-order mark": (BYTE_ORDER_MARK + json.dumps(NAMED).encode(), "got a byte-order mark"),
    "latin-1": (json.dumps(NAMED, ensure_ascii=False).encode("latin-1"), ":1: got the byte 0xe9, which is not UTF-8"),
    "utf-16": (json.dumps(NAMED).encode("utf-16"), "which is not UTF-8"),
    "deep": (b"[" * 100_000, "expected valid JSON"),
}
READERS = {
    "config.json": AutoConfig.from_pretrained,
    "generation_config.json": GenerationConfig.from_pretrained,
    "tokenizer_config.json": AutoTokenizer.from_pretrained,
    "special_tokens_map.json": AutoTokenizer.from_pretrained,
    "added_tokens.json": AutoTokenizer.from_pretrained,
    "model.safetensors.index.json": AutoModelForCausalLM.from_pretrained,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in shards, with a tokenizer of bytes beside it and all the small files that may lie there."""
    folder = written(tmp_path / "hf", max_shard_size="100KB", vocab_size=256)
    all_bytes().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "!"}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "!"}')
    (folder / "added_tokens.json").write_text("{}")
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file(name: str, damage: str, folder: Path, capsys: Capture) -> None:
    content, says = DAMAGES[damage]
    (folder / name).write_bytes(content)
    assert main(["generate", "--init-from-hf", str(folder), "--prompt", "a", "--max-new-tokens", "1"]) != 0
    said = capsys.readouterr().err
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert f"{folder / name}" in line and says in line and "; " in line and "Traceback" not in said


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_transformers_refuses_it_too(name: str, damage: str, folder: Path) -> None:
    """The last two files of ``READERS`` it no longer reads where the configuration of the tokenizer is of today."""
    (folder / name).write_bytes(DAMAGES[damage][0])
    with pytest.raises(Exception):  # noqa: B017  # each file has another error there, tracebacks among them
        READERS[name](folder)


@pytest.mark.parametrize("value", ["</s>", [2, "7"], True, {"id": 2}, [[2]]])
def test_end_tokens_that_are_none(value: object, folder: Path, capsys: Capture) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert main(["generate", "--init-from-hf", str(folder), "--prompt", "a"]) == 1
    said = capsys.readouterr().err
    assert f"generation_config.json eos_token_id: got {value!r}, expected a token id or a list of them; " in said


@pytest.mark.parametrize("damage", ["empty", "a list", "null", "a byte-order mark", "latin-1"])
def test_an_adapter(damage: str, folder: Path, tmp_path: Path, capsys: Capture) -> None:
    content, says = DAMAGES[damage]
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_bytes(content)
    assert main(["merge", str(folder), str(tmp_path / "out"), "--adapter", str(tmp_path / "adapter")]) == 1
    said = capsys.readouterr().err
    assert "adapter_config.json" in said and says in said and "Traceback" not in said


@pytest.mark.parametrize("damage", ["empty", "a list", "null", "a byte-order mark", "latin-1"])
def test_params_of_meta(damage: str, folder: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["convert", str(folder), str(tmp_path / "meta"), "--to", "meta"]) == 0
    (tmp_path / "meta" / "SHA256SUMS").unlink()  # which would name any other content
    content, says = DAMAGES[damage]
    (tmp_path / "meta" / "params.json").write_bytes(content)
    assert main(["convert", str(tmp_path / "meta"), str(tmp_path / "out"), "--to", "hf"]) == 1
    said = capsys.readouterr().err
    assert "params.json" in said and says in said and "Traceback" not in said
