"""tokenizer.json files, LLaMA 3's byte-level kind among them, and finding a tokenizer."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.data.tokenizer.packed import unpack
from megatron_llama.data.tokenizer.spm import SentencePieceTokenizer
from megatron_llama.errors import DataError
from tokenizers import processors
from transformers import AutoTokenizer

from tests.data.tokenizer.byte_level import learnt


@pytest.fixture(scope="module")
def llama3_like(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE, special tokens behind the vocabulary and a begin token in the post-processor."""
    tokenizer = learnt(texts, 1200)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 1200)])
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    folder = tmp_path_factory.mktemp("llama3")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": {"__type": "AddedToken", "content": "<|eot_id|>"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1201, 1202]}')
    return folder


def test_ids_are_those_of_transformers(llama3_like: Path, chunks: list[str]) -> None:
    ours = load_tokenizer(llama3_like)
    auto = AutoTokenizer.from_pretrained(llama3_like)
    assert [*map(unpack, ours.encode_packed(chunks))] == [
        auto(text, add_special_tokens=False, truncation=False, padding=False)["input_ids"] for text in chunks
    ]
    assert max(map(len, map(unpack, ours.encode_packed(chunks)))) > 16
    for text in chunks:
        assert ours.decode(ours.encode(text)) == text


def test_word_by_word_is_the_whole_text(folder: Path, texts: list[str]) -> None:
    """An exported sentencepiece model, over real text and over all short rows of what matters; a spelt special token among it."""
    odd = [" ", "\u2581", "\n", "\t", "\0", "7", "the", "a", "é", "\U0001f600", "\u0301", "</s>", "<0x0A>", "\xa0"]
    rows = ["".join(row) for length in range(4) for row in itertools.product(odd, repeat=length)]
    tokenizer = HFTokenizer(folder / "tokenizer.json")
    assert tokenizer._words is not None
    for batch in (texts, rows, rows):
        assert [*map(unpack, tokenizer.encode_packed(batch))] == [tokenizer.encode(text) for text in batch]


CHANGES: tuple[tuple[str, str, object], ...] = (
    ("normalizer", "type", "NFC"),
    ("model", "dropout", 0.5),
    ("model", "ignore_merges", True),
    ("model", "byte_fallback", False),
    ("model", "merges", [["a", "\u2581"]]),
    ("model", "merges", [["<0x0A>", "<0x0A>"]]),
)


def with_metaspace(folder: Path, target: Path, **changes: object) -> Path:
    """The same model as newer exports write it: spaces are escaped by a pre-tokenizer."""
    content = json.loads((folder / "tokenizer.json").read_text())
    steps = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    content |= {"normalizer": None, "pre_tokenizer": {**steps, **changes}}
    (target / "tokenizer.json").write_text(json.dumps(content))
    return target / "tokenizer.json"


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_spaces_escaped_by_a_pre_tokenizer(scheme: str, split: bool, folder: Path, texts: list[str], tmp_path: Path) -> None:
    """As the test above; with every kind of character beside every other, since a prefix depends on what a text begins with."""
    odd = [" ", "\u2581", "\n", "7", "the", "é", "\U0001f600", "</s>", "<0x0A>"]
    rows = ["".join(row) for length in range(4) for row in itertools.product(odd, repeat=length)]
    tokenizer = HFTokenizer(with_metaspace(folder, tmp_path, prepend_scheme=scheme, split=split))
    assert tokenizer._words is not None
    for batch in (texts[::4], rows):
        assert [*map(unpack, tokenizer.encode_packed(batch))] == [tokenizer.encode(text) for text in batch]


def test_metaspace_of_another_kind_takes_whole_texts(folder: Path, tmp_path: Path) -> None:
    assert HFTokenizer(with_metaspace(folder, tmp_path, replacement="_"))._words is None
    content = json.loads(with_metaspace(folder, tmp_path).read_text())
    for name, value in (("normalizer", {"type": "NFC"}), ("added_tokens", [*content["added_tokens"], added("a b")])):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | {name: value}))
        assert HFTokenizer(tmp_path / "tokenizer.json")._words is None


def added(text: str) -> dict[str, object]:
    """An entry of tokenizer.json."""
    return {"id": 4000, "content": text, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)}


@pytest.mark.parametrize(("part", "name", "value"), CHANGES)
def test_only_what_is_known_goes_word_by_word(part: str, name: str, value: object, folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    if name == "merges":
        content["model"]["vocab"] |= {"a\u2581": 4000, "<0x0A><0x0A>": 4001}
    content[part][name] = value
    if part == "normalizer":
        content[part] = {name: value}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert HFTokenizer(tmp_path / "tokenizer.json")._words is None


def test_other_tokenizers_take_whole_texts_on_one_thread(llama3_like: Path, chunks: list[str]) -> None:
    code = (
        "import sys, os; from megatron_llama.data.tokenizer.hf import HFTokenizer; t = HFTokenizer(sys.argv[1]); before = dict(os.environ);"
        "threads = len(os.listdir('/proc/self/task')); t.encode_packed(['some words'] * 2000);"
        "assert t._words._words is None and dict(os.environ) == before; print(len(os.listdir('/proc/self/task')) - threads)"
    )
    command = [sys.executable, "-c", code, str(llama3_like / "tokenizer.json")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"


def test_special_tokens_from_the_config(llama3_like: Path) -> None:
    tokenizer = load_tokenizer(llama3_like)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (1203, 1200, 1202)
    assert tokenizer.decode([1200, *tokenizer.encode("def f"), 1202]) == "def f"


def test_special_tokens_by_well_known_names(llama3_like: Path, tmp_path: Path) -> None:
    shutil.copy(llama3_like / "tokenizer.json", tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1200, 1201)


def test_config_that_names_an_unknown_token(llama3_like: Path, tmp_path: Path) -> None:
    shutil.copy(llama3_like / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(DataError, match=r"tokenizer_config\.json: eos_token: got '<end>', expected a token of tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match="got a JSON list, expected a JSON object"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json:1: got Expecting property name .*, expected valid JSON"):
        load_tokenizer(tmp_path)


def test_save_copies_what_belongs_together(llama3_like: Path, tmp_path: Path) -> None:
    load_tokenizer(llama3_like).save_hf(tmp_path / "new" / "folder")
    copied = {path.name: path.read_bytes() for path in (tmp_path / "new" / "folder").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in llama3_like.iterdir()}


def test_folder_prefers_tokenizer_json(folder: Path, tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(folder), HFTokenizer)
    shutil.copy(folder / "tokenizer.model", tmp_path)
    assert isinstance(load_tokenizer(tmp_path), SentencePieceTokenizer)


@pytest.mark.parametrize("name", ["SentencePieceTokenizer", "Llama2Tokenizer"])
def test_megatron_types_for_sentencepiece(name: str, folder: Path, llama3_like: Path) -> None:
    assert isinstance(load_tokenizer(folder, name), SentencePieceTokenizer)
    with pytest.raises(DataError, match=f"got a .json file, expected .model for {name}"):
        load_tokenizer(folder / "tokenizer.json", name)
    with pytest.raises(DataError, match=r"expected tokenizer\.model"):
        load_tokenizer(llama3_like, name)


@pytest.mark.parametrize("name", ["HuggingFaceTokenizer", "PretrainedFromHF"])
def test_megatron_types_for_hugging_face(name: str, folder: Path, llama3_like: Path) -> None:
    assert isinstance(load_tokenizer(folder, name), HFTokenizer)
    assert isinstance(load_tokenizer(llama3_like / "tokenizer.json", name), HFTokenizer)


def test_paths_that_hold_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"got no such file, expected a \.model file, a tokenizer\.json, a tekken\.json or a folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(DataError, match=r"got a folder without them, expected tokenizer\.json or tokenizer\.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="tokenizer_type: got GPT2BPETokenizer, expected one of SentencePieceTokenizer"):
        load_tokenizer(tmp_path, "GPT2BPETokenizer")
    (tmp_path / "vocab.txt").write_text("a")
    with pytest.raises(DataError, match=r"got a \.txt file"):
        load_tokenizer(tmp_path / "vocab.txt")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match=r"expected a HuggingFace tokenizer\.json"):
        load_tokenizer(tmp_path)
