"""A long text is encoded in pieces, with the ids of the whole: those that the libraries give."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_llama.data.tokenizer import hf_words, words
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.data.tokenizer.packed import unpack

from tests.data.tokenizer.layouts import LAYOUTS, TIKTOKEN

PIECE = 40
WHOLE = {"gemma", "wordpiece", "unigram"}
"""Layouts of which no place is known where a text can be cut."""
ODD = [
    " ", "  ", "\n", "\n\n", " \n", "\t", "\xa0", "\u2581", "\u3000", "7", "1234", "the", "'s", "'S", "don't", "a", "B", "é", "e\u0301",
    "\u0301",
]
ODD += [
    "\U0001f600", "我们", "文档\uff0c", "。", "」", "がぎ", "\u1112\u1161\u11ab", "\u212a", "\u037e", ".", "...", "/", "!\n/", "</s>", "<s>",
    "<|eot_id|>",
]
ODD += ["<|endoftext|>", "<|im_start|>", "<unk>", "<0x0A>", "\0", "https://a.b/c?d=e", "x_y", "def f(self):", "\uff21\uff22"]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (words, hf_words):
        monkeypatch.setattr(module, "PIECE", PIECE)
    monkeypatch.setattr(hf_words, "_BEHIND_ADDED", 3)


@pytest.fixture(scope="module")
def long_texts(texts: list[str]) -> list[str]:
    """Real text, rows of what decides where tokenizers cut, and text without a space."""
    rng = random.Random(1)
    rows = ["".join(rng.choices(ODD, k=rng.randrange(30, 90))) for _ in range(400)]
    rows += ["".join(rng.choices([part for part in ODD if "<" not in part], k=60)) for _ in range(200)]
    return [*texts[:12], *rows, "我们的文档" * 60, "ACGT" * 100, " " * 300, "\n" * 300, "</s>" * 80, "x" * 39 + "</s>" + "y" * 60]


def pieces(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    return map(unpack, tokenizer.encode_long(text))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*LAYOUTS, TIKTOKEN])
def test_pieces_have_the_ids_of_the_whole(name: str, layouts: Path, long_texts: list[str]) -> None:
    tokenizer = load_tokenizer(layouts / name)
    expected = [tokenizer.encode(text) for text in long_texts]
    assert [[id for piece in pieces(tokenizer, text) for id in piece] for text in long_texts] == expected
    assert [*map(unpack, tokenizer.encode_packed(long_texts))] == expected
    assert unpack(b"".join(tokenizer.encode_long(""))) == []
    counts = [len([*pieces(tokenizer, text)]) for text in long_texts[:12]]
    if name in WHOLE:
        assert set(counts) == {1}
    else:
        assert all(count > len(text) / PIECE / 2 for count, text in zip(counts, long_texts, strict=False)), (
            "most texts are cut wherever they may be"
        )


@pytest.mark.long
def test_a_model_with_spaces_of_its_own_places(layouts: Path, long_texts: list[str], tmp_path: Path) -> None:
    """Every scheme of Metaspace, which escapes spaces without a normalizer."""
    content = json.loads((layouts / "mistral" / "tokenizer.json").read_text())
    for scheme in ("first", "always", "never"):
        for split in (True, False):
            steps = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": split}
            (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "normalizer": None, "pre_tokenizer": steps}))
            tokenizer = HFTokenizer(tmp_path / "tokenizer.json")
            for text in long_texts:
                assert [id for piece in pieces(tokenizer, text) for id in piece] == tokenizer.encode(text)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_look_around_them(flag: str, layouts: Path, long_texts: list[str], tmp_path: Path) -> None:
    """They may take what stands in another piece: such a text stays whole."""
    content = json.loads((layouts / "llama3" / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token[flag] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = HFTokenizer(tmp_path / "tokenizer.json")
    rows = [text for text in long_texts if "<|eot_id|>" in text]
    assert rows
    for text in rows:
        found = [*pieces(tokenizer, text)]
        assert len(found) == 1 and found[0] == tokenizer.encode(text)


def test_the_cut_of_byte_level_tokenizers_is_one_of_words() -> None:
    """No combining mark and nothing that NFC joins stands behind a cut."""
    import unicodedata

    for code in range(sys.maxunicode):
        text = "a" + chr(code)
        if words.split_cut(text, 1) == 1:
            assert unicodedata.category(chr(code))[0] in "PSZ", hex(code)
            assert unicodedata.combining(chr(code)) == 0 and unicodedata.is_normalized("NFC", text)
