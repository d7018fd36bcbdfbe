"""Ten tokenizers as third parties ship them: what transformers makes of their folders."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.data.tokenizer.packed import unpack
from megatron_llama.errors import DataError
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.problems import UnusableError
from transformers import AutoTokenizer

from tests.data.tokenizer.layouts import LAYOUTS, TIKTOKEN

REBUILT = {"llama2": r"\s", "mistral": r"\s", "smollm2": r"[\s\S]*  \d"}
"""Texts that begin so have other ids in transformers 5 than in transformers 4 and in the file: LlamaTokenizer leaves out the space that
sentencepiece puts before a space, GPT2Tokenizer forgets that digits stand alone. Ours are the file's."""


def usual(name: str, chunks: list[str]) -> list[str]:
    return [text for text in chunks[::3] if not re.match(REBUILT.get(name, r"(?!)"), text)]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_ids_of_the_text_alone_are_those_of_transformers(name: str, layouts: Path, chunks: list[str]) -> None:
    ours, auto = load_tokenizer(layouts / name), AutoTokenizer.from_pretrained(layouts / name)
    assert ours.vocab_size == len(auto)
    assert len(usual(name, chunks)) > 500
    assert [text for text in usual(name, chunks) if ours.encode(text) != auto(text, add_special_tokens=False)["input_ids"]] == []


def test_ranks_of_llama3_have_the_ids_of_its_json(layouts: Path, chunks: list[str]) -> None:
    ranks, ours = load_tokenizer(layouts / TIKTOKEN), load_tokenizer(layouts / "llama3")
    assert [ranks.encode(text) for text in chunks] == [ours.encode(text) for text in chunks]
    assert ranks.vocab_size == ours.vocab_size and ranks.bos_id == ours.bos_id


@pytest.mark.few(4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_prompt_has_the_ids_of_transformers(name: str, layouts: Path, chunks: list[str], tmp_path: Path) -> None:
    """With what the tokenizer adds and what a text spells; from the folder, and from what is saved of it."""
    auto, ours = AutoTokenizer.from_pretrained(layouts / name), load_tokenizer(layouts / name)
    ours.save_hf(tmp_path)
    exported, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    texts = ["", *usual(name, chunks), *(f"a{token}b" for token in sorted(auto.all_special_tokens))]
    theirs = [auto(text)["input_ids"] for text in texts]
    assert [ours.encode_prompt(text) for text in texts] == theirs
    assert [again.encode_prompt(text) for text in texts] == theirs
    assert [exported(text)["input_ids"] for text in texts] == theirs
    assert (exported.bos_token_id, exported.eos_token_id) == (auto.bos_token_id, auto.eos_token_id)


@pytest.mark.parametrize("name", ["llama2", "llama3", "qwen", "smollm2", "mistral", "tekken", "gemma"])
def test_a_conversation_has_the_ids_of_transformers(name: str, layouts: Path, tmp_path: Path) -> None:
    """One begin token, though the template writes it and the tokenizer adds it; and so for a checkpoint's copy of the tokenizer."""
    auto, ours = AutoTokenizer.from_pretrained(layouts / name), load_tokenizer(layouts / name)
    ours.save_hf(tmp_path)
    talk = [("user", "What is a statement?"), ("assistant", "A line with 12 words."), ("user", "And an expression?")]
    messages = [{"role": role, "content": text} for role, text in talk]
    theirs = auto.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    for tokenizer in (ours, load_tokenizer(tmp_path)):
        assert ChatTokenizer(tokenizer).continued(messages) == theirs


@pytest.mark.parametrize("flags", [{"add_bos_token": False}, {"add_eos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_flags_count_where_there_is_no_post_processor(flags: dict[str, bool], layouts: Path, tmp_path: Path) -> None:
    """That is for a .model alone; beside a tokenizer.json they say nothing."""
    for name in ("llama2", "mistral"):
        folder = changed(layouts / name, tmp_path / name, **flags)
        ours, auto = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        assert ours.encode_prompt("a statement") == auto("a statement")["input_ids"]
        ours.save_hf(tmp_path / "saved")
        assert AutoTokenizer.from_pretrained(tmp_path / "saved")("a statement") == auto("a statement")


def changed(folder: Path, copy: Path, **fields: object) -> Path:
    """A copy with other fields in tokenizer_config.json; None takes one out."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "tokenizer_config.json").read_text()) | fields
    (copy / "tokenizer_config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return copy


def test_a_model_alone_has_a_begin_token_unless_it_is_said(layouts: Path, tmp_path: Path) -> None:
    """As in Meta's own code; transformers cannot read such a folder."""
    for source in (layouts / "llama2", layouts / TIKTOKEN):
        folder = tmp_path / source.name
        folder.mkdir()
        shutil.copy(source / "tokenizer.model", folder)
        if source.name != "llama2":
            shutil.copy(source / "params.json", folder)
        tokenizer = load_tokenizer(folder)
        assert tokenizer.encode_prompt("a text") == [tokenizer.bos_id, *tokenizer.encode("a text")]
        assert tokenizer.encode_prompt("a</s>")[-1] == tokenizer.eos_id if source.name == "llama2" else True


@pytest.mark.parametrize("place", ["added_tokens.json", "added_tokens_decoder"])
def test_tokens_added_to_a_model_alone(place: str, layouts: Path, tmp_path: Path) -> None:
    """As fine-tunings of LLaMA 2 have them: ids behind the model's, one of which ends a message."""
    added = {"[PAD]": 600, "<|im_start|>": 601, "<|im_end|>": 602}
    if place == "added_tokens.json":
        folder = changed(layouts / "llama2", tmp_path / "made", eos_token="<|im_end|>")
        (folder / place).write_text(json.dumps(added))
        (folder / "special_tokens_map.json").unlink()
    else:
        spelt = {str(id): {"content": text, "special": True, "normalized": False} for text, id in added.items()}
        folder = changed(layouts / "llama2", tmp_path / "made", eos_token="<|im_end|>", **{place: spelt})
    auto, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert (ours.vocab_size, ours.eos_id) == (len(auto), auto.eos_token_id) == (603, 602)
    text = "<|im_start|>user\nA statement<|im_end|> [PAD]"
    ids = auto(text)["input_ids"]
    assert ours.encode_prompt(text) == ids and {600, 601, 602} < set(ids)
    assert max(ours.encode(text)) < 600, "in a corpus text stays text"
    assert ours.decode(ids) == auto.decode(ids, skip_special_tokens=True)
    ours.save_hf(tmp_path / "saved")
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "saved")(text)["input_ids"]
        == load_tokenizer(tmp_path / "saved").encode_prompt(text)
        == ids
    )


def test_added_tokens_with_a_gap_are_refused(layouts: Path, tmp_path: Path) -> None:
    folder = changed(layouts / "llama2", tmp_path / "made")
    (folder / "added_tokens.json").write_text('{"[PAD]": 601}')
    with pytest.raises(DataError, match=r"tokenizer_config\.json: got added tokens with the ids \[601\], expected all ids from 600 on"):
        load_tokenizer(folder)


def test_special_tokens_map_names_tokens_where_the_configuration_lists_none(layouts: Path, tmp_path: Path) -> None:
    """Older folders: the map wins, as in transformers."""
    folder = changed(layouts / "llama3", tmp_path / "made", added_tokens_decoder=None)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|eom_id|>"}')
    assert load_tokenizer(folder).eos_id == AutoTokenizer.from_pretrained(folder).eos_token_id == 608


def token(text: str, **properties: bool) -> dict[str, object]:
    return {"content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **properties}


def named_beside(kind: str, folder: Path) -> None:
    """Name ``<tool>`` in a file beside tokenizer.json, which lacks it."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    listed = config["added_tokens_decoder"]
    if kind == "listed":
        config["added_tokens_decoder"] = {**listed, "9000": token("<tool>")}
    elif kind == "listed as usual text":
        config["added_tokens_decoder"] = {**listed, "9000": token("<tool>", special=False, normalized=True)}
    elif kind == "listed with other properties":
        config["added_tokens_decoder"] = {**listed, "9000": token("<tool>", lstrip=True, single_word=True)}
    elif kind == "pad_token":
        config["pad_token"] = "<tool>"
    elif kind == "image_token":
        config["image_token"] = "<tool>"
    elif kind == "dictionary":
        config["extra_special_tokens"] = {"tool_token": "<tool>"}
    elif kind in ("additional_special_tokens", "extra_special_tokens"):
        config[kind] = [*config.get(kind, []), "<tool>"]
    else:
        del config["added_tokens_decoder"]
        (folder / "special_tokens_map.json").unlink(missing_ok=True)
        name, content = {
            "added_tokens.json": ("added_tokens.json", {"<tool>": 9000}),
            "special_tokens_map.json": ("special_tokens_map.json", {"sep_token": token("<tool>")}),
        }[kind]
        (folder / name).write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


PLACES = ["listed", "listed as usual text", "listed with other properties", "pad_token", "image_token", "dictionary", "added_tokens.json"]
PLACES += ["additional_special_tokens", "extra_special_tokens", "special_tokens_map.json"]
SPELT = ["call <tool> now", "<tool>", "a <tool>b", "<tool><tool> <tool>\n", "no tool", "x<tool>y"]


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", ["llama3", "tekken", "gemma"])
def test_tokens_that_only_settings_name(name: str, kind: str, layouts: Path, tmp_path: Path) -> None:
    """They are tokens with the ids of transformers, in a text, word by word, in a prompt and after an export."""
    folder = tmp_path / "made"
    shutil.copytree(layouts / name, folder)
    named_beside(kind, folder)
    auto, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    ids = [auto(text, add_special_tokens=False)["input_ids"] for text in SPELT]
    assert any(len(auto) - 1 in line for line in ids) and ours.vocab_size == len(auto)
    assert [ours.encode(text) for text in SPELT] == [*map(unpack, ours.encode_packed(SPELT))] == ids
    assert [ours.encode_prompt(text) for text in SPELT] == auto(SPELT)["input_ids"]
    assert ours.token(len(auto) - 1) == "<tool>" and [ours.decode(line) for line in ids] == auto.batch_decode(ids, skip_special_tokens=True)
    ours.save_hf(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(SPELT)["input_ids"] == auto(SPELT)["input_ids"]
    assert ("<tool>" in ours.special_texts) == (auto.added_tokens_decoder[len(auto) - 1].special is True)


@pytest.mark.parametrize("kind", ["pad_token", "additional_special_tokens", "special_tokens_map.json"])
def test_tokens_that_only_settings_name_beside_a_model(kind: str, layouts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    shutil.copytree(layouts / "llama2", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": {}}))
    named_beside(kind, folder)
    auto, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert ours.vocab_size == len(auto) == 601 and ours.token(600) == "<tool>"
    assert [ours.encode_prompt(text) for text in SPELT] == auto(SPELT)["input_ids"]
    assert max(ours.encode(SPELT[0])) < 600, "in a corpus text stays text"
    ours.save_hf(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(SPELT)["input_ids"] == auto(SPELT)["input_ids"]


def test_a_token_that_a_message_spells_is_refused_wherever_it_is_named(layouts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    shutil.copytree(layouts / "llama3", folder)
    named_beside("extra_special_tokens", folder)
    chat = ChatTokenizer(load_tokenizer(folder))
    with pytest.raises(UnusableError) as caught:
        chat.continued([{"role": "user", "content": "call <tool> now"}])
    assert "got the special token '<tool>' at character 5" in str(caught.value.at("pairs.jsonl:1"))


def test_a_token_without_a_text_is_refused(layouts: Path, tmp_path: Path) -> None:
    folder = changed(layouts / "llama3", tmp_path / "made", pad_token=3)
    with pytest.raises(DataError, match=r"tokenizer_config\.json pad_token: got 3, expected a token: a text, or an object with its content"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["llama2", "llama3"])
@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        *(("tokenizer_config.json", "added_tokens_decoder", value) for value in (None, [], {"x": {"content": "a"}}, {"5": "a"}, {"5": {}})),
        ("tokenizer_config.json", "extra_special_tokens", 5),
        ("special_tokens_map.json", "additional_special_tokens", "<a>"),
        ("added_tokens.json", "<a>", "5"),
        ("added_tokens.json", "<a>", None),
    ],
)
def test_tokens_in_another_form_are_refused(name: str, file: str, field: str, value: object, layouts: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(layouts / name, tmp_path / name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if file != "tokenizer_config.json":
        # These files count where the configuration lists no added tokens.
        config.pop("added_tokens_decoder", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        config = {}
    (folder / file).write_text(json.dumps({**config, field: value}))
    with pytest.raises(DataError, match=re.escape(f"{folder / file}: {field}: got ")):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["llama2", "llama3", "gpt2", "smollm2", "mistral", "tekken", "gemma", "unigram"])
def test_null_means_none(name: str, layouts: Path, tmp_path: Path) -> None:
    """No well-known name brings back a token that the settings deny."""
    folder = tmp_path / "made"
    shutil.copytree(layouts / name, folder)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**content, "bos_token": None, "eos_token": None}))
    auto, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert (ours.bos_id, ours.eos_id) == (auto.bos_token_id, auto.eos_token_id) == (None, None)


def test_a_well_known_name_counts_where_it_is_special(layouts: Path, tmp_path: Path) -> None:
    """``<s>`` and ``</s>`` as words of the vocabulary are text; without settings the special end token is another one."""
    content = json.loads((layouts / "gpt2" / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    for text, like in (("<s>", "Ġthe"), ("</s>", "ing")):
        vocabulary[text] = vocabulary.pop(like)
    content["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ours = load_tokenizer(tmp_path)
    assert (ours.bos_id, ours.token(ours.eos_id or 0)) == (None, "<|endoftext|>")
