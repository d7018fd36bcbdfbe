"""A sentencepiece model and its tokenizer.json give the same ids, in `tokenizers` and in transformers."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from megatron_llama.data.tokenizer.export import hf_tokenizer
from megatron_llama.data.tokenizer.packed import unpack
from megatron_llama.data.tokenizer.proto import parse_model
from megatron_llama.data.tokenizer.spm import SentencePieceTokenizer
from megatron_llama.errors import DataError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

EDGES = ["", " ", "  a  b ", "a\n ", " \n", "\n a", "\t", "😀é漢 x", "\uff41\uff42\uff43 ① ﬁ e\u0301", "\u3000 a\u00a0b", "\u2581x \u2581"]


def train(texts: list[str], **options: Any) -> bytes:
    model = io.BytesIO()
    lines = iter("".join(texts).split("\n"))
    defaults = {"model_type": "bpe", "vocab_size": 1500, "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **{**defaults, **options})
    return model.getvalue()


def test_runs_of_characters_merge_in_the_same_order(trained: SentencePieceTokenizer, folder: Path) -> None:
    twin = Tokenizer.from_file(str(folder / "tokenizer.json"))
    draw = random.Random(0)
    for _ in range(3000):
        unit = draw.choice([" ", "-", "=", "* ", "ab ", " =", "  \n", "re"])
        text = "".join(draw.choice([unit, unit, unit, "a", "."]) for _ in range(draw.randint(1, 60)))
        assert twin.encode(text, add_special_tokens=False).ids == trained.encode(text), repr(text)


@pytest.mark.parametrize("with_model_config", [False, True])
def test_transformers_gives_the_same_ids(
    trained: SentencePieceTokenizer, folder: Path, chunks: list[str], with_model_config: bool, tmp_path: Path
) -> None:
    trained.save_hf(tmp_path)
    if with_model_config:  # as in an exported model, where transformers chooses the tokenizer class by model type
        (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    auto = AutoTokenizer.from_pretrained(tmp_path)
    different = [text for text in [*chunks, *EDGES] if auto(text, add_special_tokens=False)["input_ids"] != trained.encode(text)]
    assert different == []
    assert auto("hello world")["input_ids"] == [1, *trained.encode("hello world")]
    assert (auto.bos_token_id, auto.eos_token_id, auto.unk_token_id, len(auto)) == (1, 2, 0, 4000)
    assert auto.decode(auto(chunks[7])["input_ids"], skip_special_tokens=True) == chunks[7]


def test_decoding_agrees(trained: SentencePieceTokenizer, folder: Path, chunks: list[str]) -> None:
    twin = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in chunks:
        ids = trained.encode(text)
        assert twin.decode(ids) == trained.decode(ids)


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": False},
        {"normalization_rule_name": "identity"},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False},
        {"byte_fallback": False, "character_coverage": 0.98},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_every_normalizer(options: dict[str, Any], texts: list[str], chunks: list[str]) -> None:
    data = train(texts, **options)
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    twin = hf_tokenizer(parse_model(data, "trained"), "trained", "<s>")
    different = [text for text in [*chunks, *EDGES] if twin.encode(text, add_special_tokens=False).ids != processor.encode(text)]
    assert different == []


SYMBOLS = ["[REF]", "[/REF]", "[REF", "a.b*c"]


@pytest.mark.parametrize("prefix", [True, False])
def test_user_defined_symbols(prefix: bool, texts: list[str], chunks: list[str], tmp_path: Path) -> None:
    """As Mistral's models have them: what follows one begins no word. In a text, in a prompt and after an export; alone a symbol has no
    space in front there."""
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "user_defined_symbols": SYMBOLS}
    (tmp_path / "tokenizer.model").write_bytes(train(texts, add_dummy_prefix=prefix, **options))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
    draw = random.Random(0)
    parts = [*SYMBOLS, " ", "a", "\n", "[", "REF", "]", "  ", "\u2581", "é", "the"]
    spelt = ["".join(draw.choices(parts, k=draw.randrange(2, 9))) for _ in range(3000)]
    cases = [text for text in [*chunks[::2], *(f"{text[:90]}[REF]{text[90:]}" for text in chunks[::4]), *spelt, *EDGES] if text not in SYMBOLS]
    ids = processor.encode(cases)
    tokenizer.save_hf(tmp_path / "hf")
    auto = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert [*map(unpack, tokenizer.encode_packed(cases))] == ids
    assert [auto(text, add_special_tokens=False)["input_ids"] for text in cases] == ids
    assert [tokenizer.encode_prompt(text)[1:] for text in cases] == ids
    assert [auto.decode(line) for line in ids] == [processor.decode(line) for line in ids]
    assert [auto(text, add_special_tokens=False)["input_ids"] for text in SYMBOLS] == [[processor.piece_to_id(text)] for text in SYMBOLS]
    assert [processor.encode(text)[int(prefix) :] for text in SYMBOLS] == [[processor.piece_to_id(text)] for text in SYMBOLS]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "unigram"}, "it is a unigram model with user-defined symbols"),
        ({"normalization_rule_name": "nmt_nfkc"}, "it normalizes text and has user-defined symbols"),
        ({"user_defined_symbols": ["<a>", "\u2581\u2581"]}, "its user-defined symbol '\u2581\u2581' has a space"),
    ],
)
def test_user_defined_symbols_that_cannot_be_expressed(options: dict[str, Any], message: str, texts: list[str]) -> None:
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "user_defined_symbols": ["<x>"]}
    with pytest.raises(DataError) as caught:
        hf_tokenizer(parse_model(train(texts[:30], vocab_size=700, **{**plain, **options}), "other.model"), "other.model", None)
    assert message in str(caught.value)


def test_models_without_a_counterpart_are_refused(texts: list[str]) -> None:
    data = train(texts, model_type="unigram", user_defined_symbols=["<x>"], treat_whitespace_as_suffix=True)
    with pytest.raises(DataError) as caught:
        hf_tokenizer(parse_model(data, "other.model"), "other.model", None)
    for word in ("other.model", "treat_whitespace_as_suffix", "user-defined"):
        assert word in str(caught.value)
    data = train(texts, model_type="char", vocab_size=400)
    with pytest.raises(DataError, match=r"model_type is 4, expected 2 \(BPE\) or 1 \(unigram\)"):
        hf_tokenizer(parse_model(data, "other.model"), "other.model", None)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"byte_fallback": False, "character_coverage": 0.98}, {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}],
    ids=lambda options: " ".join(map(str, options.values())) or "defaults",
)
def test_a_unigram_model(options: dict[str, Any], texts: list[str], chunks: list[str], tmp_path: Path) -> None:
    """A really trained one, in `tokenizers` and in transformers. sentencepiece adds scores in float32: where the same pieces can stand
    in several orders (rulers of one character, mostly), rounding decides for it, so there alone the order may differ."""
    (tmp_path / "tokenizer.model").write_bytes(train(texts, model_type="unigram", **options))
    tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
    tokenizer.save_hf(tmp_path / "hf")
    twin = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(tmp_path / "hf")
    cases = [*chunks, *EDGES, "<0x0A> <0xFF>", "日本語😀😀 xx"]
    ids = {text: (tokenizer.encode(text), twin.encode(text, add_special_tokens=False).ids) for text in cases}
    assert [text for text, (ours, theirs) in ids.items() if sorted(ours) != sorted(theirs)] == []
    other_order = [text for text, (ours, theirs) in ids.items() if ours != theirs]
    assert len(other_order) < 0.01 * len(cases)
    assert all(auto(text, add_special_tokens=False)["input_ids"] == theirs for text, (_, theirs) in ids.items())
    if options.get("byte_fallback", True):  # else sentencepiece writes a sign for what is unknown
        assert [twin.decode(ids[text][0]) for text in chunks] == [tokenizer.decode(ids[text][0]) for text in chunks]


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x0a\xff\xff\xff\x7fxx", b"\x0a\x02\x08"])
def test_damaged_proto(data: bytes) -> None:
    with pytest.raises(DataError, match=r"some\.model: got damaged content .* expected a sentencepiece model"):
        parse_model(data, "some.model")
