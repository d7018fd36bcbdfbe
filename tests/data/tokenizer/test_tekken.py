"""Mistral's ``tekken.json``: the ids are those of tiktoken behind the special tokens, and it is a tokenizer for every command."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from megatron_llama.cli import main
from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.data.tokenizer.fingerprint import difference
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.data.tokenizer.packed import unpack
from megatron_llama.data.tokenizer.tekken import TekkenTokenizer
from megatron_llama.errors import DataError
from megatron_llama.tune.sft.chat import ChatTokenizer
from transformers import AutoTokenizer

from tests.data.tokenizer.byte_level import learnt, split_by
from tests.data.tokenizer.layouts import MISTRAL_CHAT, TEKKEN_SPLIT
from tests.data.tokenizer.test_tiktoken import odd_rows, random_characters, runs

SPECIAL = 30
LEARNT = 800
NAMES = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]


@pytest.fixture(scope="module")
def tokens(texts: list[str]) -> list[bytes]:
    """The bytes in their order, then what is learnt of Python's documentation."""
    bpe = learnt(texts[:30], LEARNT, words=split_by(TEKKEN_SPLIT))
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    byte_of = {chr(byte): byte for byte in printed} | {chr(256 + at): byte for at, byte in enumerate(others)}
    longer = sorted(bpe.get_vocab(), key=bpe.get_vocab().__getitem__)[256:]
    return [*(bytes([byte]) for byte in range(256)), *(bytes(byte_of[character] for character in text) for text in longer)]


@pytest.fixture(scope="module")
def content(tokens: list[bytes]) -> dict[str, Any]:
    """As Mistral's files: more tokens than the model has rows for, and special tokens of which the last have no name."""
    config = {"pattern": TEKKEN_SPLIT, "num_vocab_tokens": LEARNT, "default_vocab_size": LEARNT + SPECIAL - 50}
    entries = [{"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None} for rank, token in enumerate(tokens)]
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(NAMES)]
    return {"config": {**config, "default_num_special_tokens": SPECIAL, "version": "v13"}, "vocab": entries, "special_tokens": special}


@pytest.fixture(scope="module")
def file(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tekken") / "tekken.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def reference(tokens: list[bytes]) -> Callable[[str], list[int]]:
    ranks = {token: rank for rank, token in enumerate(tokens[: LEARNT - 50])}
    encoding = tiktoken.Encoding("tekken", pat_str=TEKKEN_SPLIT, mergeable_ranks=ranks, special_tokens={})
    return lambda text: [SPECIAL + rank for rank in encoding.encode_ordinary(text)]


def test_ids_are_tiktokens_behind_the_special_tokens(file: Path, reference: Callable[[str], list[int]], chunks: list[str]) -> None:
    """With tiktoken and without it; a special token that a text spells stays text, and in a prompt it is the token."""
    texts = [*chunks[::4], *odd_rows()[::4], *random_characters(200), *runs(300), "[INST] a [/INST]</s>"]
    ids = [reference(text) for text in texts]
    ours, alone = load_tokenizer(file), TekkenTokenizer(file)
    alone.__dict__["_library"] = None
    for tokenizer in (ours, alone):
        assert [*map(unpack, tokenizer.encode_packed(texts))] == [tokenizer.encode(text) for text in texts] == ids
    assert [ours.decode(line) for line in ids] == texts
    assert (ours.vocab_size, ours.base_vocab_size, ours.bos_id, ours.eos_id) == (LEARNT + SPECIAL - 50, LEARNT + SPECIAL - 50, 1, 2)
    assert [ours.token(id) for id in (0, 4, 5, 29)] == ["<unk>", "[/INST]", "<SPECIAL_5>", "<SPECIAL_29>"]
    assert ours.encode_prompt("[INST]a[/INST]") == [1, 3, *reference("a"), 4]


def test_an_export_has_the_same_ids(file: Path, reference: Callable[[str], list[int]], chunks: list[str], tmp_path: Path) -> None:
    ours = load_tokenizer(file.parent)
    ours.save_hf(tmp_path)
    auto, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    texts = [*chunks[::4], *odd_rows()[::4], *random_characters(200)]
    ids = [reference(text) for text in texts]
    assert [auto(text, add_special_tokens=False)["input_ids"] for text in texts] == [again.encode(text) for text in texts] == ids
    assert auto("[INST] a[/INST]")["input_ids"] == ours.encode_prompt("[INST] a[/INST]")
    assert (len(auto), auto.bos_token_id, auto.eos_token_id) == (ours.vocab_size, 1, 2) and difference(again, ours) == ""


def test_it_is_a_tokenizer_for_every_command(file: Path, reference: Callable[[str], list[int]], texts: list[str], tmp_path: Path) -> None:
    """Preprocessing, which keeps a copy, training from it, an export, and a conversation."""
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:20]))
    prefix = str(tmp_path / "data")
    given = ["--input", str(tmp_path / "text.jsonl"), "--output-prefix", prefix, "--tokenizer-model", str(file), "--append-eod"]
    assert main(["preprocess", *given]) == 0
    data = IndexedDataset(Path(prefix))
    assert data.tokens(0, data.num_tokens).tolist() == [id for text in texts[:20] for id in (*reference(text), 2)]
    assert json.loads(Path(f"{prefix}.meta.json").read_text())["tokenizer"].endswith("data-tokenizer/tekken.json")
    shape = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --intermediate-size 16 --seq-length 64 --global-batch-size 2 --lr 1e-3"
    run = ["--data-path", prefix, "--train-iters", "1", "--split", "100,0,0", "--export-hf", str(tmp_path / "hf")]
    assert main(["pretrain", *shape.split(), *run]) == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (1, 2, LEARNT + SPECIAL - 50)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(texts[0])["input_ids"] == [1, *reference(texts[0])]
    (tmp_path / "chat.jinja").write_text(MISTRAL_CHAT)
    chat = ChatTokenizer(load_tokenizer(file), str(tmp_path / "chat.jinja"))
    talk = [{"role": "user", "content": "What is a statement?"}]
    auto = AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = auto.apply_chat_template(talk, chat_template=MISTRAL_CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert chat.continued(talk) == theirs


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a byte": (lambda content: content["vocab"][65].update(token_bytes=b64encode(b"AAAA").decode()), "got no token for the byte 0x41"),
    "ranks": (lambda content: content["vocab"].insert(300, content["vocab"].pop(301)), "got vocab without some of the ranks up to 749, or in another order"),
    "cut": (lambda content: content.update(vocab=content["vocab"][:500]), "got vocab without some of the ranks up to 749"),
    "a pattern that is none": (lambda content: content["config"].update(pattern="(["), "expected an expression in config pattern"),
    "no pattern": (lambda content: content["config"].pop("pattern"), "config pattern: got no such field"),
    "no specials": (lambda content: content.pop("special_tokens"), "got no special_tokens, in version v13"),
    "no end": (lambda content: content["special_tokens"][2].update(token_str="<end>"), "got no special token '</s>'"),
    "twice": (lambda content: content["special_tokens"][3].update(token_str="<s>"), "got a token that comes twice"),
    "both": (lambda content: content["special_tokens"][3].update(token_str="a"), "got 'a' as a special token and as a usual one"),
    "too many": (lambda content: content["config"].update(default_num_special_tokens=2, default_vocab_size=700), "got 5 special_tokens, default_num"),
    "base64": (lambda content: content["vocab"][400].update(token_bytes="a"), "got Invalid base64-encoded string"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_files(damage: Callable[[dict[str, Any]], object], message: str, content: dict[str, Any], tmp_path: Path) -> None:
    broken = json.loads(json.dumps(content))
    damage(broken)
    (tmp_path / "tekken.json").write_text(json.dumps(broken))
    with pytest.raises(DataError) as caught:
        load_tokenizer(tmp_path)
    assert message in str(caught.value) and str(caught.value).startswith(f"{tmp_path}/tekken.json")
