"""LLaMA 3's file of ranks: the ids are those of tiktoken, in `tokenizers`, after an export, and in transformers."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sysconfig
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pytest
import tiktoken
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.data.tokenizer.packed import unpack
from megatron_llama.data.tokenizer.tiktoken import SPLIT, TiktokenTokenizer, _is_usual, byte_characters, special_tokens
from megatron_llama.errors import DataError
from transformers import AutoTokenizer

from tests.data.tokenizer.byte_level import WORDS, learnt, split_by

VOCAB = 3000
UNREACHED = b" zqxjk"


@pytest.fixture(scope="module")
def ranks(texts: list[str]) -> list[bytes]:
    """Tokens learnt as LLaMA 3's were: bytes first, then merges within the pieces of its own split. The last one, as some of LLaMA 3's,
    is reached by no merge: it counts only where it is a whole piece."""
    bpe = learnt(texts, VOCAB - 1, words=split_by(SPLIT))
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    assert sorted(byte_of) == sorted(WORDS.alphabet())
    tokens = sorted(bpe.get_vocab(), key=bpe.get_vocab().__getitem__)
    return [*(bytes(byte_of[character] for character in text) for text in tokens), UNREACHED]


ODD = (" ", "  ", "\n", "\r\n", "\t", "\xa0", "\u2028", "7", "1234", "the", "'S", "a", "é", "\U0001f600", ".", "<|eot_id|>", "\0")


def odd_rows() -> list[str]:
    """All short rows of what decides where LLaMA 3 cuts, and some long ones."""
    rows = ["".join(row) for length in range(4) for row in itertools.product(ODD, repeat=length)]
    rng = random.Random(0)
    return rows + ["".join(rng.choices(ODD, k=rng.randrange(4, 40))) for _ in range(3000)]


@pytest.mark.long
def test_word_by_word_is_the_whole_text(model: Path, texts: list[str], tmp_path: Path) -> None:
    """With tiktoken, as without it, and as tokenizer.json."""
    ours, alone = TiktokenTokenizer(model), TiktokenTokenizer(model)
    alone.__dict__["_library"] = None
    ours.save_hf(tmp_path)
    exported = HFTokenizer(tmp_path / "tokenizer.json")
    assert exported._words is not None and ours._library is not None
    for tokenizer in (ours, alone, exported):
        for batch in (texts, odd_rows(), odd_rows()):
            assert [*map(unpack, tokenizer.encode_packed(batch))] == [tokenizer.encode(text) for text in batch]
    assert exported.encode("<|eot_id|>") != ours.encode("<|eot_id|>")


def lines(ranks: list[bytes]) -> bytes:
    return b"".join(b"%s %d\n" % (b64encode(token), rank) for rank, token in enumerate(ranks))


@pytest.fixture(scope="module")
def model(ranks: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    path.write_bytes(lines(ranks))
    path.with_name("params.json").write_text(json.dumps({"use_scaled_rope": True, "vocab_size": VOCAB + 256}))
    return path


@pytest.fixture(scope="module")
def reference(ranks: list[bytes]) -> tiktoken.Encoding:
    special = {text: len(ranks) + at for at, text in enumerate(special_tokens("3.1"))}
    return tiktoken.Encoding(
        "llama3", pat_str=SPLIT, mergeable_ranks={token: rank for rank, token in enumerate(ranks)}, special_tokens=special
    )


def random_characters(count: int) -> list[str]:
    """Short texts of characters from all planes, so that every class of the split and every byte is met."""
    draw = random.Random(0)
    ranges = [(0x20, 0x7F), (0x0, 0x250), (0x250, 0x2FFF), (0x3000, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    return ["".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(40)) for _ in range(count)]


def random_bytes(count: int) -> list[str]:
    draw = random.Random(1)
    return [draw.randbytes(60).decode("utf-8", errors="replace") for _ in range(count)]


def runs(count: int) -> list[str]:
    draw = random.Random(2)
    units = [
        " ", "\n", "\r\n", "\t", "-", "=", "* ", "ab ", "a", "'s", "'LL", "\u017f", "'\u017f", "7", "\u00a0", "\u3000", "\u0085",
        "\u180e", "re", " zqxjk",
    ]
    return ["".join(draw.choice(units) * draw.choice([1, 1, 2, 9]) for _ in range(12)) for _ in range(count)]


def library() -> list[str]:
    """Python's own sources: code and comments in many languages' letters."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [path.read_text("utf-8", errors="replace") for path in sorted(folder.glob("*.py"))]


EVERYTHING: dict[str, Callable[[], list[str]]] = {
    "library": lambda: library()[::3], "unicode": lambda: random_characters(700), "bytes": lambda: random_bytes(700),
    "runs": lambda: runs(1000),
}


@pytest.mark.long
@pytest.mark.parametrize("make", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_ids_are_tiktokens(model: Path, reference: tiktoken.Encoding, make: Callable[[], list[str]]) -> None:
    ours = load_tokenizer(model)
    assert isinstance(ours, TiktokenTokenizer)
    different = [text for text in make() if ours.encode(text) != reference.encode_ordinary(text)]
    assert different == []


def test_ids_of_the_documentation_and_back(model: Path, reference: tiktoken.Encoding, texts: list[str], chunks: list[str]) -> None:
    ours = load_tokenizer(model)
    for text in [*texts, *chunks, "", " ", "\n"]:
        ids = ours.encode(text)
        assert ids == reference.encode_ordinary(text)
        assert ours.decode(ids) == text
    assert ours.encode(" zqxjk") == [VOCAB - 1] and len(ours.encode(" zqxjks")) > 2
    assert [*map(unpack, ours.encode_packed(chunks[:50]))] == [ours.encode(text) for text in chunks[:50]]


def test_texts_that_tiktoken_cannot_take(model: Path, texts: list[str]) -> None:
    """Runs of 25,000 characters, and more than 400,000 in all, beside usual ones."""
    ours = load_tokenizer(model)
    batch = ["a" * 30_000, "x", " " * 30_000 + "y", ("".join(texts) * 2)[:450_000], "b " * 20_000]
    assert [_is_usual(text) for text in batch] == [False, True, False, False, True]
    assert [*map(unpack, ours.encode_packed(batch))] == [ours.encode(text) for text in batch]


def test_special_tokens(model: Path, reference: tiktoken.Encoding) -> None:
    ours = load_tokenizer(model)
    assert (
        (ours.vocab_size, ours.bos_id, ours.eos_id)
        == (VOCAB + 256, VOCAB, VOCAB + 1)
        == (reference.n_vocab, VOCAB, reference.n_vocab - 255)
    )
    spelt = "a<|eot_id|><|begin_of_text|>b"
    assert ours.encode(spelt) == reference.encode_ordinary(spelt) and max(ours.encode(spelt)) < VOCAB
    assert ours.decode([VOCAB, *ours.encode("a b"), VOCAB + 9]) == "a b"


def test_an_export_gives_the_same_ids(model: Path, reference: tiktoken.Encoding, chunks: list[str], tmp_path: Path) -> None:
    load_tokenizer(model).save_hf(tmp_path)
    # As in an exported model, where transformers chooses the class by the type of the model.
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    again, auto = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(again, HFTokenizer)
    assert (
        (again.vocab_size, again.bos_id, again.eos_id)
        == (len(auto), auto.bos_token_id, auto.eos_token_id)
        == (VOCAB + 256, VOCAB, VOCAB + 1)
    )
    for text in [*chunks, *random_characters(500), *random_bytes(500), *runs(500)]:
        ids = reference.encode_ordinary(text)
        assert again.encode(text) == auto(text, add_special_tokens=False)["input_ids"] == ids
    assert auto("a b")["input_ids"] == [VOCAB, *reference.encode_ordinary("a b")]
    assert auto.decode(auto(chunks[7])["input_ids"], skip_special_tokens=True) == chunks[7]
    names = special_tokens("3.1")
    assert auto.convert_tokens_to_ids(names) == list(range(VOCAB, VOCAB + 256)) and auto.convert_ids_to_tokens(VOCAB + 9) == "<|eot_id|>"


def test_names_of_the_special_tokens() -> None:
    """As published: ids from 128000 on."""
    old, new = special_tokens("3"), special_tokens("3.1")
    assert len(old) == len(set(old)) == len(new) == len(set(new)) == 256
    reserved = "reserved_special_token"
    old_names = {4: f"{reserved}_2", 5: f"{reserved}_3", 8: f"{reserved}_4", 9: "eot_id", 10: f"{reserved}_5", 255: f"{reserved}_250"}
    new_names = {2: f"{reserved}_0", 3: f"{reserved}_1", 4: "finetune_right_pad_id", 5: f"{reserved}_2", 8: "eom_id", 9: "eot_id"}
    new_names |= {10: "python_tag", 11: f"{reserved}_3", 255: f"{reserved}_247"}
    for names, expected in ((old, old_names), (new, new_names)):
        assert {place: names[place] for place in expected} == {place: f"<|{name}|>" for place, name in expected.items()}


@pytest.mark.parametrize(("params", "name"), [({"use_scaled_rope": True}, "<|eom_id|>"), ({"dim": 64}, "<|reserved_special_token_4|>")])
def test_the_version_is_read_beside_the_file(params: dict[str, object], name: str, model: Path, tmp_path: Path) -> None:
    shutil.copy(model, tmp_path)
    (tmp_path / "params.json").write_text(json.dumps({**params, "vocab_size": VOCAB + 256}))
    load_tokenizer(tmp_path).save_hf(tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").encode(name) == [VOCAB + 8]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda good: good[:-4] + b"x\n", "line 3000: "),
        (lambda good: good.replace(b" 700\n", b" 7\n"), "line 701: rank 7, expected 700"),
        (lambda good: good[: len(good) // 2].rsplit(b" ", 1)[0], "not enough values to unpack"),
        (lambda good: b"\n".join(good.splitlines()[:200]) + b"\n", "no token for the byte 0x"),
        (lambda good: good + good.splitlines()[400].split()[0] + b" 3000\n", "line 3001: token b"),
        (lambda good: good + b"YWJjZA 3000\n", "line 3001: got b'YWJjZA 3000' (Incorrect padding), expected a base64 token"),
    ],
    ids=["rank", "order", "cut", "bytes", "twice", "base64"],
)
def test_damaged_files(damage: Callable[[bytes], bytes], message: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(damage(model.read_bytes()))
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith(f"{path}: got damaged content, expected a line for each token") and message in str(caught.value)
