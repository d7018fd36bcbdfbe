"""A fingerprint is that of the ids, not of the files, and a difference is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.data.tokenizer.fingerprint import Fingerprint, difference
from megatron_llama.data.tokenizer.load import load_tokenizer

from tests.data.tokenizer.layouts import LAYOUTS


def print_of(tokenizer: Tokenizer) -> Fingerprint:
    return Fingerprint.of(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize("name", [*LAYOUTS, "llama3/original", "mistral/tokenizer.model", "unigram/tokenizer.model"])
def test_all_files_of_a_tokenizer_have_one_fingerprint(name: str, layouts: Path, tmp_path: Path) -> None:
    """A .model, the tokenizer.json that it is exported to, and the one that somebody else has made of it."""
    tokenizer = load_tokenizer(layouts / name)
    tokenizer.save_hf(tmp_path)
    exported = load_tokenizer(tmp_path / "tokenizer.json")
    beside = load_tokenizer(layouts / name.split("/")[0])
    for other in (exported, beside):
        assert print_of(other) == print_of(tokenizer) and difference(other, tokenizer) == ""
    assert Fingerprint.read(json.loads(json.dumps(print_of(tokenizer).entry()))) == print_of(tokenizer)


def test_other_tokenizers_have_other_fingerprints(layouts: Path) -> None:
    tokenizers = {name: load_tokenizer(layouts / name) for name in LAYOUTS if name != "mistral"}  # the same model as llama2
    assert len({print_of(tokenizer) for tokenizer in tokenizers.values()}) == len(tokenizers)
    for name, tokenizer in tokenizers.items():
        assert all(bool(difference(tokenizer, other)) == (name != again) for again, other in tokenizers.items())


def changed(layouts: Path, name: str, folder: Path, change: Callable[[dict[str, Any]], None]) -> Tokenizer:
    shutil.copytree(layouts / name, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {str(token["id"]): {key: token[key] for key in token if key != "id"} for token in content["added_tokens"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def swap_tokens(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    names = {id: text for text, id in vocabulary.items()}
    vocabulary[names[500]], vocabulary[names[501]] = 501, 500


def test_what_differs_is_named(layouts: Path, tmp_path: Path) -> None:
    """Tokens, the order in which they are merged, and what happens to a text before."""
    own = load_tokenizer(layouts / "gpt2")
    swapped = changed(layouts, "gpt2", tmp_path / "swapped", swap_tokens)
    first, second = (own.decode([id]) for id in (500, 501))
    assert difference(swapped, own).replace("Ġ", " ") == f"token 500 is {second!r} here, {first!r} there"
    merged = changed(layouts, "gpt2", tmp_path / "merged", lambda content: content["model"]["merges"].reverse())
    lower = changed(layouts, "gpt2", tmp_path / "lower", lambda content: content.update(normalizer={"type": "Lowercase"}))
    for other in (merged, lower):
        assert print_of(other).tokens == print_of(own).tokens and print_of(other).probe != print_of(own).probe
    assert difference(lower, own).startswith("the text 'The quick brown fox jump'... has as its ids, from the 1th on, [")


def test_more_tokens_behind(layouts: Path, tmp_path: Path) -> None:
    """They change nothing for a text of the smaller tokenizer; special tokens may have other names."""
    own = load_tokenizer(layouts / "llama3")

    def add(content: dict[str, Any]) -> None:
        content["added_tokens"].append({**content["added_tokens"][-1], "id": own.vocab_size, "content": "[PAD]"})
        next(token for token in content["added_tokens"] if token["content"] == "<|reserved_special_token_0|>")["content"] = "<|tool|>"

    larger = changed(layouts, "llama3", tmp_path / "larger", add)
    assert larger.vocab_size == own.vocab_size + 1 and difference(larger, own) == difference(own, larger) == ""
    plain = changed(layouts, "llama3", tmp_path / "plain", lambda content: content["added_tokens"].pop())
    assert Fingerprint.of(own, plain.vocab_size) == print_of(plain) != print_of(own)
