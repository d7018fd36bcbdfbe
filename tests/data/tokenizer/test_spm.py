from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
import sentencepiece
from megatron_llama.data.tokenizer.packed import unpack
from megatron_llama.data.tokenizer.spm import SentencePieceTokenizer, train_tokenizer
from megatron_llama.data.tokenizer.words import KEPT_LENGTH
from megatron_llama.errors import DataError

AWKWARD = [
    "",
    " ",
    "   leading and trailing   ",
    "\n\n\ttabs\tand\nnewlines\r\n",
    "a  b   c    d",
    "emoji 😀👩‍👩‍👧 flag 🇩🇪",
    "Ünïcödé 漢字 العربية e\u0301 ﬁ ①",
    "\u00a0no-break\u3000ideographic\u200bzero-width\ufeff",
    "nul\0byte",
    "<s> </s> <unk> <0x0A>",
    "1234567890.5e-3",
]


def test_round_trip_is_exact(trained: SentencePieceTokenizer, texts: list[str], chunks: list[str]) -> None:
    for text in [*AWKWARD, *texts, *chunks]:
        assert trained.decode(trained.encode(text)) == text


def test_word_by_word_is_sentencepiece(trained: SentencePieceTokenizer, texts: list[str]) -> None:
    """Over real text, and over all short rows of what matters: spaces, their escape, newlines, digits, letters, bytes, control tokens."""
    odd = [" ", "\u2581", "\n", "\t", "\0", "7", "the", "a", "é", "\U0001f600", "\u0301", "</s>", "\xa0", "_" * 70]
    rows = ["".join(row) for length in range(4) for row in itertools.product(odd, repeat=length)]
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained.path.read_bytes())
    words = trained._words
    assert words is not None
    for batch in (texts, rows, rows):
        assert [*map(unpack, trained.encode_packed(batch))] == processor.encode(batch)
    assert max(map(len, words._known)) <= KEPT_LENGTH and trained.encode_packed([]) == []


def test_a_model_with_spaces_inside_pieces_takes_whole_texts(texts: list[str], tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts[:20]), model_writer=model, model_type="bpe", vocab_size=600, byte_fallback=True,
        split_by_whitespace=False, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
    assert tokenizer._words is None
    assert [*map(unpack, tokenizer.encode_packed(texts[:20]))] == [tokenizer.encode(text) for text in texts[:20]]


def test_digits_stand_alone(trained: SentencePieceTokenizer) -> None:
    assert len(trained.encode("x2048")) == len(trained.encode("x")) + 4


def test_training_learns_and_repeats(trained: SentencePieceTokenizer, texts: list[str], tmp_path: Path) -> None:
    again = train_tokenizer(iter(texts), 4000, tmp_path / "again.model")
    whole = "".join(texts)
    ids = again.encode(whole)
    assert ids == trained.encode(whole)
    assert len(ids) < len(whole) / 2.5


@pytest.mark.parametrize(
    ("text", "vocab_size", "message"),
    [
        ("hello", 4000, "got too little text for vocab_size 4000, expected a vocab_size of at most 2"),
        ("the alphabet", 259, "got 259, expected more than 259"),
        (
            "abcdefghijklmnopqrstuvwxyz",
            270,
            "got more distinct characters than vocab_size 270 holds, expected a vocab_size of at least 286",
        ),
        ("", 400, "got no text, expected at least one line"),
    ],
)
def test_corpus_that_does_not_fit_vocab_size(text: str, vocab_size: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        train_tokenizer([text], vocab_size, tmp_path / "t.model")
    assert list(tmp_path.iterdir()) == []


def test_damaged_model(trained: SentencePieceTokenizer, tmp_path: Path) -> None:
    damaged = tmp_path / "tokenizer.model"
    damaged.write_bytes(trained.path.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"tokenizer\.model: got .* expected a sentencepiece model"):
        SentencePieceTokenizer(damaged)


def test_missing_special_tokens_are_none(texts: list[str], tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("".join(texts).split("\n")),
        model_prefix=str(tmp_path / "t"),
        vocab_size=500,
        bos_id=-1,
        eos_id=-1,
        minloglevel=2,
    )
    tokenizer = SentencePieceTokenizer(tmp_path / "t.model")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)
