"""Text that is shown while it is made is the text of all its tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import sentencepiece as spm
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.data.tokenizer.stream import StopStrings, TextStream

from tests.data.tokenizer.byte_level import all_bytes

TEXTS = (
    "Plain words, and more of them.",
    "  spaces   first",
    "na\u00efve \u4f60\u597d \U0001f600\U0001f468\u200d\U0001f469 end",
    "a\nb\n\nc",
    "\ufffd stays",
    "",
)


@pytest.fixture(scope="module", params=["sentencepiece", "bytes"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        all_bytes().save(str(folder / "tokenizer.json"))
        return load_tokenizer(folder)
    (folder / "text").write_text("Plain words, and more of them.\n" * 20)
    spm.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), vocab_size=300, model_type="bpe", byte_fallback=True,
        minloglevel=2, hard_vocab_limit=False, normalization_rule_name="identity", remove_extra_whitespaces=False,
    )
    return load_tokenizer(Path(folder / "tokenizer.model"))


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_together_are_the_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    for before in {0, min(3, len(ids)), len(ids) // 2}:
        start = tokenizer.decode(ids[:before])
        if start and not text.startswith(start):
            continue  # the prompt ends within a character
        stream = TextStream(tokenizer, ids[:before])
        pieces = [stream.add(token) for token in ids[before:]]
        assert start + "".join(pieces) + stream.rest() == tokenizer.decode(ids)
        assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


def test_nothing_waits_longer_than_its_character(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    shown = [stream.add(token) for token in tokenizer.encode("ab \u4f60 c")]
    assert shown[-1] != "" and "\u4f60" in "".join(shown)
    assert TextStream(tokenizer).rest() == ""


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\u4f60")[:-1]
    stream = TextStream(tokenizer)
    assert "".join(stream.add(token) for token in ids) == "a" and stream.rest() == tokenizer.decode(ids)[1:] != ""


@pytest.mark.parametrize(
    ("strings", "text", "expected"),
    [
        (("END",), "an END here", "an "),
        (("END",), "EEN ENEND", "EEN EN"),
        (("aab",), "aaaab", "aa"),
        (("ab x", "b"), "ab x", "a"),  # complete first
        (("b", "ab"), "ab", ""),  # both are complete: the one that began first
        (("END", "\n\n"), "no end EN\n", "no end EN\n"),
        ((), "all", "all"),
    ],
)
def test_a_stop_string_ends_a_text_wherever_its_pieces_end(strings: tuple[str, ...], text: str, expected: str) -> None:
    for size in range(1, len(text) + 1):
        stop, shown = StopStrings(strings), ""
        for at in range(0, len(text), size):
            shown += stop.add(text[at : at + size])
            assert expected.startswith(shown)
            if stop.found:
                break
        assert shown + stop.rest() == expected and stop.found == (expected != text)
