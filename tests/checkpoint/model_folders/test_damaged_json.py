"""Damaged JSON files beside a model, which transformers refuses too: one error that names the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from megatron_llama.cli import main
from megatron_llama.config.json_file import BYTE_ORDER_MARK

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


FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
FILES += ["model.safetensors.index.json"]


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
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file(name: str, damage: str, folder: Path, capsys: Capture) -> None:
    content, says = DAMAGES[damage]
    (folder / name).write_bytes(content)
    assert main(["generate", "--init-from-hf", str(folder), "--prompt", "a", "--max-new-tokens", "1"]) != 0
    said = capsys.readouterr().err
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert f"{folder / name}" in line and says in line and "; " in line and "Traceback" not in said


@pytest.mark.parametrize("value", ["</s>", [2, "7"], True, {"id": 2}, [[2]]])
def test_end_tokens_that_are_none(value: object, folder: Path, capsys: Capture) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert main(["generate", "--init-from-hf", str(folder), "--prompt", "a"]) == 1
    said = capsys.readouterr().err
    assert f"generation_config.json eos_token_id: got {value!r}, expected a token id or a list of them; " in said


@pytest.mark.parametrize("damage", ["empty", "a list", "null", "a byte-order mark", "latin-1"])
def test_an_adapter_and_params_of_meta(damage: str, folder: Path, tmp_path: Path, capsys: Capture) -> None:
    adapter, meta, out = (str(tmp_path / name) for name in ("adapter", "meta", "out"))
    assert main(["convert", str(folder), meta, "--to", "meta"]) == 0
    (tmp_path / "meta" / "SHA256SUMS").unlink()  # which would name any other content
    (tmp_path / "adapter").mkdir()
    content, says = DAMAGES[damage]
    for path, words in (
        (tmp_path / "adapter" / "adapter_config.json", ["merge", str(folder), out, "--adapter", adapter]),
        (tmp_path / "meta" / "params.json", ["convert", meta, out, "--to", "hf"]),
    ):
        path.write_bytes(content)
        assert main(words) == 1
        said = capsys.readouterr().err
        assert path.name in said and says in said and "Traceback" not in said
