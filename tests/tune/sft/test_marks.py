"""Messages that a file marks as not to be learned are rendered, and left out of the loss."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
from megatron_llama.cli import main
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.tune.sft.chat import ChatTokenizer, Encoded
from megatron_llama.tune.sft.dataset import read_examples
from megatron_llama.tune.sft.formats import read_example
from megatron_llama.tune.sft.problems import UnusableError
from megatron_llama.tune.sft.sft_config import SFTConfig
from megatron_llama.tune.sft.template import BUILT_IN
from transformers import AutoTokenizer

found = find_spec("trl")
assert found is not None and found.origin is not None
TEMPLATES = Path(found.origin).parent / "chat_templates"
"""The templates of many models, with marks of answers, as TRL has them."""
TRAINED = [f"{name}_training" for name in ("qwen2_5", "qwen3", "llama3", "deepseekv3", "gptoss", "phi3", "gemma3", "glm4moe")]
MARKS: Sequence[tuple[str, Any, Any]] = (
    ("weight", 0, 1),
    ("weight", 0.0, 1.0),
    ("train", False, True),
    ("training", False, True),
    ("trainable", False, True),
    ("loss", False, True),
    ("loss_weight", 0.0, 1.0),
)
"""Names of marks with what says that a message is not to be learned, and that it is."""
TALK = (
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "A mutable sequence."},
    {"role": "user", "content": "And a tuple?"},
    {"role": "assistant", "content": "A wrong answer."},
    {"role": "user", "content": "Really?"},
    {"role": "assistant", "content": "An immutable one."},
)


def marked(marks: Mapping[int, Mapping[str, Any]], first: int = 0) -> dict[str, Any]:
    """The conversation from its message ``first`` on, with fields in some of its messages."""
    return {"messages": [{**message, **marks.get(index, {})} for index, message in enumerate(TALK)][first:]}


def ours(folder: Path, template: str | Path, record: dict[str, Any], loss_on: Any = "assistant") -> Encoded:
    return ChatTokenizer(HFTokenizer(folder / "tokenizer.json"), str(template)).read(read_example(record, "messages"), loss_on)


def refusal(chat: ChatTokenizer, record: dict[str, Any], loss_on: Any = "assistant", kind: str = "messages", **options: Any) -> str:
    """What is said of a record that is refused."""
    with pytest.raises(UnusableError) as error:
        chat.read(read_example(record, kind, **options), loss_on)
    return str(error.value.at("file"))


def theirs(auto: Any, source: str, without: int, first: int) -> tuple[list[int], list[bool]]:
    """Ids of transformers, and its mask without the answer with this number."""
    encoded = auto.apply_chat_template(
        list(TALK[first:]), chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    mask: list[bool] = []
    answers = 0
    for counts, run in groupby(encoded["assistant_masks"]):
        mask += [bool(counts) and answers != without for _ in run]
        answers += bool(counts)
    assert answers == 3
    return encoded["input_ids"], mask


@pytest.mark.parametrize("template", [*BUILT_IN, *TRAINED])
def test_masks_are_those_of_transformers_without_the_answer(template: str, llama3: Path) -> None:
    source = BUILT_IN.get(template) or (TEMPLATES / f"{template}.jinja").read_text()
    wanted = template if template in BUILT_IN else str(TEMPLATES / f"{template}.jinja")
    chat = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), wanted)
    auto = AutoTokenizer.from_pretrained(llama3)
    first = 1 if template in ("gemma", "mistral") else 0  # they have no system message
    for without in range(3):
        ids, mask = theirs(auto, source, without, first)
        index = 2 + 2 * without
        for name, no, yes in MARKS:
            others = {at: {name: yes} for at in (2, 4, 6) if at != index}
            for record in (marked({index: {name: no}}, first), marked({index: {name: no}, **others}, first)):
                encoded = chat.read(read_example(record, "messages"), "assistant")
                assert encoded.ids == ids and encoded.loss_mask == mask and any(mask), (name, without)
        unmarked = chat.read(read_example(marked({index: {"weight": None}}, first), "messages"), "assistant")
        assert unmarked.loss_mask != mask, "null says nothing"


@pytest.mark.parametrize("template", ["chatml", "llama3", "plain"])
def test_templates_without_marks_of_answers(template: str, llama3: Path, tmp_path: Path) -> None:
    source = BUILT_IN[template].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (tmp_path / "t.jinja").write_text(source)
    tokenizer = HFTokenizer(llama3 / "tokenizer.json")
    encoded = ours(llama3, tmp_path / "t.jinja", marked({4: {"weight": 0}}))
    learned = tokenizer.decode([id for id, counts in zip(encoded.ids, encoded.loss_mask, strict=True) if counts])
    assert "mutable sequence" in learned and "immutable one" in learned and "wrong" not in learned
    whole = ours(llama3, tmp_path / "t.jinja", marked({}))
    assert encoded.ids == whole.ids and sum(encoded.loss_mask) < sum(whole.loss_mask)


@pytest.mark.parametrize("index", range(len(TALK)))
def test_of_everything_each_marked_message_is_left_out(index: int, llama3: Path) -> None:
    """The tokens that transformers renders for the message: all but those before it and behind it."""
    auto = AutoTokenizer.from_pretrained(llama3)
    auto.chat_template = BUILT_IN["llama3"]
    before, until = (
        len(auto.apply_chat_template(list(TALK[:end]), tokenize=True, return_dict=True)["input_ids"]) if end else 0
        for end in (index, index + 1)
    )
    encoded = ours(llama3, "llama3", marked({index: {"train": False}}), "all")
    assert encoded.loss_mask == [not before <= place < until for place in range(len(encoded.ids))]
    assert 0 < until - before < len(encoded.ids)


def test_the_last_answer(llama3: Path, chat: ChatTokenizer) -> None:
    assert ours(llama3, "llama3", marked({4: {"weight": 0}}), "last") == ours(llama3, "llama3", marked({}), "last")
    said = refusal(chat, marked({6: {"weight": 0}}), "last")
    assert "expected one last answer or more to learn (--loss-on last)" in said
    # An answer before the last one is not what the option counts: mark and option contradict each other.
    assert "field 'messages[4]': got a mark that says that the message is learned" in refusal(chat, marked({4: {"weight": 1}}), "last")
    assert ours(llama3, "llama3", marked({6: {"weight": 1}}), "last").loss_mask == ours(llama3, "llama3", marked({}), "last").loss_mask


def test_questions_are_learned_with_everything_or_not_at_all(llama3: Path, chat: ChatTokenizer) -> None:
    for index in (0, 1):
        for name, no, yes in MARKS:
            assert ours(llama3, "llama3", marked({index: {name: no}})) == ours(llama3, "llama3", marked({}))
            said = refusal(chat, marked({index: {name: yes}}))
            assert f"field 'messages[{index}]'" in said and "expected marks of what --loss-on assistant counts" in said
            assert ours(llama3, "llama3", marked({index: {name: yes}}), "all") == ours(llama3, "llama3", marked({}), "all")


def test_what_is_neither_0_nor_1(chat: ChatTokenizer) -> None:
    for name, value in product(("weight", "loss_weight", "train", "loss"), (0.5, 2, -1, "0", "false", [0], {"a": 0}, float("nan"))):
        said = refusal(chat, marked({4: {name: value}}))
        assert said.startswith(f"file: field 'messages[4].{name}': got ") and "expected 0 or false (not learned), 1 or true" in said
    for loss_on, marks in (("assistant", (2, 4, 6)), ("last", (6,)), ("all", range(7))):
        said = refusal(chat, marked({index: {"loss": False} for index in marks}), loss_on)
        assert f"{len(marks)} marked messages, expected one" in said, "nothing is left"


def test_contradictions(chat: ChatTokenizer, llama3: Path) -> None:
    said = refusal(chat, marked({4: {"weight": 0, "train": True}}))
    assert "field 'messages[4]': got weight false, train true, expected marks that say the same" in said
    assert ours(llama3, "llama3", marked({4: {"weight": 0, "train": False}})) == ours(llama3, "llama3", marked({4: {"weight": 0}}))
    ignored = read_example(marked({4: {"weight": 0, "train": True}}), "messages", ignored=("train",))
    assert chat.read(ignored, "assistant") == ours(llama3, "llama3", marked({4: {"weight": 0}}))


def test_marks_of_records(chat: ChatTokenizer, llama3: Path) -> None:
    whole = ours(llama3, "llama3", marked({}))
    for name, no, yes in (*MARKS, ("sample_weight", 0.1, 1)):
        assert ours(llama3, "llama3", {**marked({}), name: yes}) == whole
        assert f"field '{name}': got {no!r}, expected 1, or no such field" in refusal(chat, {**marked({}), name: no})


def test_marks_of_other_formats(chat: ChatTokenizer, llama3: Path) -> None:
    expected = ours(llama3, "llama3", marked({4: {"weight": 0}}))
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in TALK]
    turns[4]["train"] = False  # type: ignore[assignment]
    assert chat.read(read_example({"conversations": turns}, "sharegpt"), "assistant") == expected
    messages = marked({4: {"weight": 0}})["messages"]
    assert chat.read(read_example({"prompt": messages[:2], "completion": messages[2:]}, "prompt"), "assistant") == expected


def test_repairs_keep_marks(chat: ChatTokenizer, llama3: Path) -> None:
    ways: Any = ("merge-repeated-roles", "drop-leading-answers", "drop-unanswered-end")
    user, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
    no = {**answer, "weight": 0}
    joined = {"role": "assistant", "content": "Because.\n\nBecause.", "weight": 0}
    tail = [user, {**answer, "weight": 1}]
    mended = chat.read(read_example({"messages": [answer, user, no, no, *tail, user]}, "messages", ways), "assistant")
    assert mended == ours(llama3, "llama3", {"messages": [user, joined, *tail]})
    # Of two answers one is to be learned and one is not: they are no single message.
    said = refusal(chat, {"messages": [user, no, answer]}, repairs=ways)
    assert "field 'messages[2]': got assistant after assistant" in said


def test_tables_and_preview(llama3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A column of weights has null where there is none."""
    rows = [marked({4: {"weight": 0.0}}), marked({})]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chat = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), "llama3")
    table, lines = (read_examples([tmp_path / name], chat, SFTConfig(), 512) for name in ("a.parquet", "a.jsonl"))
    assert not table.problems and [list(mask) for mask in table.loss_mask] == [list(mask) for mask in lines.loss_mask]
    assert sum(lines.loss_mask[0]) < sum(lines.loss_mask[1])
    common = [str(tmp_path / "a.jsonl"), "--tokenizer-model", str(llama3), "--chat-template", "llama3"]
    assert main(["data", "preview", *common]) == 0
    shown = capsys.readouterr().out
    assert "in the loss; 1 message marked as not learned\n" in shown and shown.count("[[") == 2
    assert main(["data", "preview", *common, "--example", "2"]) == 0
    shown = capsys.readouterr().out
    assert "marked as not learned" not in shown and shown.count("[[") == 3
