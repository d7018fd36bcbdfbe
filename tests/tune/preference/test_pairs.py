"""Every format of preference files as pairs, and their tokens against those of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.preference.dataset import Pairs, pair_rounds, read_pairs
from megatron_llama.tune.preference.methods import CHOSEN, REJECTED
from megatron_llama.tune.preference.pairs import Pair, Unpaired, detect, encode_pair, read_preference
from megatron_llama.tune.sft.built_in_templates import BUILT_IN
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.formats import Conversation, Passage
from megatron_llama.tune.sft.sft_config import SFTConfig
from transformers import AutoTokenizer

SYSTEM = {"role": "system", "content": "Be kind."}
ASKED = {"role": "user", "content": "What is a list?"}
YES = {"role": "assistant", "content": "A mutable sequence."}
NO = {"role": "assistant", "content": "No idea."}
MORE = {"role": "user", "content": "And a tuple?"}
LAST = {"role": "assistant", "content": "An immutable one."}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
FOUND = {"role": "tool", "content": "3.11"}

# The format that is detected, the record, and the messages of prompt, chosen and rejected.
FORMATS: Mapping[str, tuple[str, dict[str, Any], list[Any], list[Any], list[Any]]] = {
    "trl": ("trl", {"prompt": [ASKED], "chosen": [YES], "rejected": [NO]}, [ASKED], [YES], [NO]),
    "trl with more": ("trl", {"prompt": [SYSTEM, ASKED, YES, MORE], "chosen": [LAST], "rejected": [NO], "id": 7, "source": "a book"}, [SYSTEM, ASKED, YES, MORE], [LAST], [NO]),
    "trl implicit": ("trl", {"chosen": [SYSTEM, ASKED, YES, MORE, LAST], "rejected": [SYSTEM, ASKED, YES, MORE, NO]}, [SYSTEM, ASKED, YES, MORE], [LAST], [NO]),
    "trl with a system field": ("trl", {"system": "Be kind.", "prompt": [ASKED], "chosen": [YES], "rejected": [NO]}, [SYSTEM, ASKED], [YES], [NO]),
    "several messages": ("trl", {"prompt": [ASKED], "chosen": [CALL, FOUND, YES], "rejected": [NO]}, [ASKED], [CALL, FOUND, YES], [NO]),
    "openai": ("openai", {"input": {"messages": [SYSTEM, ASKED], "tools": [], "parallel_tool_calls": True}, "preferred_output": [YES], "non_preferred_output": [NO]}, [SYSTEM, ASKED], [YES], [NO]),
    "alpaca": ("alpaca", {"instruction": "What is", "input": "a list?", "chosen": "A mutable sequence.", "rejected": "No idea."}, [{"role": "user", "content": "What is\n\na list?"}], [YES], [NO]),
    "alpaca with history": ("alpaca", {"system": "Be kind.", "history": [["What is a list?", "A mutable sequence."]], "instruction": "And a tuple?", "input": "", "chosen": "An immutable one.", "rejected": "No idea."}, [SYSTEM, ASKED, YES, MORE], [LAST], [NO]),
    "sharegpt": ("sharegpt", {"conversations": [{"from": "human", "value": "What is a list?"}], "system": "Be kind.", "chosen": {"from": "gpt", "value": "A mutable sequence."}, "rejected": {"from": "gpt", "value": "No idea."}}, [SYSTEM, ASKED], [YES], [NO]),
    "sharegpt by role": ("sharegpt", {"messages": [ASKED, YES, MORE], "chosen": LAST, "rejected": NO}, [ASKED, YES, MORE], [LAST], [NO]),
    "ultrafeedback": ("ultrafeedback", {"prompt": "What is a list?", "prompt_id": "x", "chosen": [ASKED, YES], "rejected": [ASKED, NO], "messages": [ASKED, YES], "score_chosen": 8.5, "score_rejected": 3.0}, [ASKED], [YES], [NO]),
}  # fmt: skip
JUDGED: Mapping[str, tuple[dict[str, Any], list[Any] | str, list[Any] | str, bool]] = {
    "messages": ({"prompt": [SYSTEM, ASKED], "completion": [YES], "label": True}, [SYSTEM, ASKED], [YES], True),
    "text": ({"prompt": "The sky is", "completion": " green.", "label": False}, "The sky is", " green.", False),
    "alpaca": ({"instruction": "What is a list?", "input": "", "output": "No idea.", "kto_tag": False}, [ASKED], [NO], False),
    "by role": ({"messages": [ASKED, YES, MORE, LAST], "kto_tag": True}, [ASKED, YES, MORE], [LAST], True),
    "sharegpt": ({"conversations": [{"from": "human", "value": "What is a list?"}, {"from": "gpt", "value": "No idea."}], "kto_tag": False}, [ASKED], [NO], False),
    "messages with a label": ({"messages": [ASKED, YES, MORE, LAST], "label": True}, [ASKED, YES, MORE], [LAST], True),
    "sharegpt with a label": ({"system": "Be kind.", "conversations": [{"from": "human", "value": "What is a list?"}, {"from": "gpt", "value": "No idea."}], "label": False}, [SYSTEM, ASKED], [NO], False),
    "alpaca with a label": ({"instruction": "What is a list?", "output": "No idea.", "label": False}, [ASKED], [NO], False),
}  # fmt: skip


def read(path: Path, tokenizer: ChatTokenizer, records: list[Any], method: str = "dpo", **options: Any) -> Pairs:
    path.write_text("\n".join(map(json.dumps, records)))
    return read_pairs([path], tokenizer, SFTConfig(**options), AlignConfig(method=method), 512)  # type: ignore[arg-type]


def test_formats() -> None:
    for kind, record, prompt, chosen, rejected in FORMATS.values():
        assert detect(record) == kind
        pair = read_preference(record, kind)
        assert isinstance(pair, Pair)
        for half, messages in ((pair.chosen, chosen), (pair.rejected, rejected)):
            assert isinstance(half.example, Conversation)
            assert list(half.example.messages) == [*prompt, *messages]
            assert half.prompt_messages == len(prompt) and isinstance(half.prompt, Conversation)
            assert list(half.prompt.messages) == prompt and half.example.tools is None
    explicit = read_preference({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, "trl")
    implicit = read_preference({"chosen": "The sky is blue.", "rejected": "The sky is green."}, "trl")
    assert explicit == implicit and isinstance(explicit, Pair)
    assert (explicit.chosen.example, explicit.rejected.example) == (Passage("The sky is", " blue."), Passage("The sky is", " green."))


@pytest.mark.parametrize("name", JUDGED)
def test_completions_that_were_judged(name: str, tmp_path: Path, chat: ChatTokenizer) -> None:
    record, prompt, completion, label = JUDGED[name]
    assert detect(record) == "completion_label"
    found = read_preference(record, "completion_label")
    assert isinstance(found, Unpaired) and found.desirable is label
    example = found.completion.example
    if isinstance(example, Passage):
        assert (example.prompt, example.completion) == (prompt, completion)
    else:
        assert list(example.messages) == [*prompt, *completion] and found.completion.prompt_messages == len(prompt)
    assert read(tmp_path / "a.jsonl", chat, [record], "kto").kinds == [CHOSEN if label else REJECTED]


def test_a_pair_is_a_good_and_a_bad_completion(tmp_path: Path, chat: ChatTokenizer) -> None:
    records = [FORMATS["trl"][1], FORMATS["trl implicit"][1]]
    pairs, alone = (read(tmp_path / "a.jsonl", chat, records, method) for method in ("dpo", "kto"))
    assert (len(pairs), pairs.per_example, len(alone), alone.per_example) == (2, 2, 4, 1)
    assert alone.kinds == pairs.kinds == [CHOSEN, REJECTED] * 2 and alone.numbers == [0, 0, 1, 1]
    assert [ids.tolist() for ids in alone.ids] == [ids.tolist() for ids in pairs.ids]


@pytest.mark.parametrize("template", BUILT_IN)
def test_ids_are_those_of_transformers(template: str, llama3: Path, tmp_path: Path) -> None:
    """The prompt is what transformers makes of it with the beginning of an answer, the completion what the answer adds."""
    theirs = AutoTokenizer.from_pretrained(llama3)
    theirs.chat_template = BUILT_IN[template]
    names = [name for name in FORMATS if name != "several messages"][:4]
    if template in ("gemma", "mistral"):  # which refuse system messages
        names = [name for name in names if FORMATS[name][2][0]["role"] != "system"]
    assert names
    pairs = read(
        tmp_path / "a.jsonl", ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), template), [FORMATS[name][1] for name in names]
    )
    assert not pairs.problems
    for k, name in enumerate(names):
        _, _, prompt, chosen, rejected = FORMATS[name]
        before = theirs.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
        for i, half in ((2 * k, chosen), (2 * k + 1, rejected)):
            whole = theirs.apply_chat_template([*prompt, *half], tokenize=True, return_dict=True)["input_ids"]
            assert pairs.ids[i].tolist() == whole and whole[: len(before)] == before
            assert pairs.prompts[i] == len(before) < len(whole)
            assert pairs.loss_mask[i].tolist() == [False] * len(before) + [True] * (len(whole) - len(before))


def test_texts_as_trl_has_them(chat: ChatTokenizer, llama3: Path, tmp_path: Path) -> None:
    """Both halves as transformers encodes them with the end token; the prompt ends where either differs from it alone."""
    theirs = AutoTokenizer.from_pretrained(llama3)
    for prompt, chosen, rejected in (
        ("The sky is", " blue.", " green."),
        ("An expression stat", "ement", " rejected"),
        ("a \n", "\nb", "\n\nc"),
    ):
        pair = read_preference({"prompt": prompt, "chosen": chosen, "rejected": rejected}, "trl")
        assert isinstance(pair, Pair)
        found = encode_pair(chat, pair)
        alone = theirs(prompt)["input_ids"]
        wholes = [theirs(prompt + half + "<|end_of_text|>")["input_ids"] for half in (chosen, rejected)]
        assert [one.ids for one in found] == wholes
        shared = next(n for n in range(len(alone), -1, -1) if all(whole[:n] == alone[:n] for whole in wholes))
        assert [(one.prompt, one.merged) for one in found] == [(shared, len(alone) - shared)] * 2
        assert all(one.loss_mask == [False] * shared + [True] * (len(one.ids) - shared) for one in found)
    records = [{"prompt": "An expression stat", "chosen": "ement", "rejected": "ion"}, FORMATS["trl"][1]]
    pairs = read(tmp_path / "a.jsonl", chat, records)
    assert pairs.merged == 1 and not pairs.problems, "joined tokens are counted"
    assert [line for line in pairs.report() if line.startswith("in 1 examples the tokenizer joins the end of the prompt")]


def calling(folder: Path, place: Path) -> ChatTokenizer:
    """LLaMA 3's template with calls of tools behind the text of an answer."""
    (place / "calls.jinja").write_text(
        BUILT_IN["llama3"].replace(
            "message['content'].strip() + '<|eot_id|>' }}{% endg",
            "message['content'] }}{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ '<|eot_id|>' }}{% endg",
        )
    )
    return ChatTokenizer(HFTokenizer(folder / "tokenizer.json"), str(place / "calls.jinja"))


def test_of_several_messages_the_assistants_count(chat: ChatTokenizer, llama3: Path, tmp_path: Path) -> None:
    """The answers in front of the completion are prompt, and what a tool says is nobody's choice."""
    record = {"prompt": [ASKED, YES, MORE], "chosen": [turn := {**CALL, "content": "look!"}, FOUND, LAST], "rejected": [NO]}
    [problem] = read(tmp_path / "a.jsonl", chat, [record]).problems
    assert problem.reason == "tool_calls not rendered" and "field 'chosen[0].tool_calls[0]'" in str(problem)
    chat = calling(llama3, tmp_path)
    pairs = read(tmp_path / "a.jsonl", chat, [record])
    assert not pairs.problems
    learned = chat.decode([int(id) for id, counts in zip(pairs.ids[0], pairs.loss_mask[0], strict=True) if counts])
    assert learned.replace("<|eot_id|>", "") == turn["content"] + '{"name": "look", "arguments": {}}' + LAST["content"]
    assert pairs.prompts[0] == pairs.prompts[1] and not pairs.loss_mask[0][: pairs.prompts[0]].any()


def test_tools(tmp_path: Path, llama3: Path) -> None:
    """Arrays, or their text as TRL takes it, reach the template."""
    (tmp_path / "tools.jinja").write_text("{{ tools | tojson }}" + BUILT_IN["llama3"])
    tokenizer = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), str(tmp_path / "tools.jinja"))
    openai = {"input": {"messages": [ASKED], "tools": TOOLS}, "preferred_output": [CALL], "non_preferred_output": [NO]}
    trl = [{"prompt": [ASKED], "chosen": [CALL], "rejected": [NO], "tools": tools} for tools in (TOOLS, json.dumps(TOOLS))]
    one = read_preference(openai, "openai")
    assert isinstance(one, Pair) and isinstance(one.chosen.example, Conversation)
    assert one.chosen.example.tools == tuple(TOOLS) and all(read_preference(record, "trl") == one for record in trl)
    (tmp_path / "plain.jinja").write_text("{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}")  # fmt: skip
    tokenizer = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), str(tmp_path / "plain.jinja"))
    chosen, _ = encode_pair(tokenizer, one)
    assert chosen.text.startswith('[{"type": "function"') and chosen.text.endswith('"arguments": {}}}]')


def test_repairs_leave_the_completions(tmp_path: Path, chat: ChatTokenizer) -> None:
    record = {"prompt": [YES, ASKED, MORE], "chosen": [LAST], "rejected": [NO]}
    repairs = ("drop-leading-answers", "merge-repeated-roles", "drop-unanswered-end")
    assert read(tmp_path / "a.jsonl", chat, [record]).problems
    mended = read(tmp_path / "a.jsonl", chat, [record], repair_conversations=repairs)
    joined = {"role": "user", "content": "What is a list?\n\nAnd a tuple?"}
    expected = read(tmp_path / "a.jsonl", chat, [{"prompt": [joined], "chosen": [LAST], "rejected": [NO]}])
    assert [ids.tolist() for ids in mended.ids] == [ids.tolist() for ids in expected.ids] and not mended.problems
    assert "repaired prompts: drop-leading-answers 1, merge-repeated-roles 1" in list(mended.report())


def test_shares_of_ranks_are_the_whole(tmp_path: Path, chat: ChatTokenizer) -> None:
    records = [FORMATS[name][1] for name in ("trl", "trl implicit", "trl with more", "trl with a system field")]
    for method in ("dpo", "kto"):
        whole = read(tmp_path / "a.jsonl", chat, [*records[:2], {"chosen": 1, "rejected": 2}, *records[2:]], method)
        parts = [
            part
            for rank in range(3)
            for part in pair_rounds([tmp_path / "a.jsonl"], chat, SFTConfig(), AlignConfig(method=method), 512, share=(rank, 3))  # type: ignore[arg-type]
        ]
        assert len(parts) == 3
        merged = Pairs(whole.per_example)
        merged.merge(parts)
        assert [ids.tolist() for ids in merged.ids] == [ids.tolist() for ids in whole.ids]
        assert (merged.kinds, merged.prompts, merged.numbers) == (whole.kinds, whole.prompts, whole.numbers)
        assert list(merged.report()) == list(whole.report()) and len(whole.problems) == 1


def test_tables(tmp_path: Path, chat: ChatTokenizer) -> None:
    """Parquet, as data sets come from the hub; each file has its own format."""
    rows = [FORMATS["ultrafeedback"][1], {**FORMATS["ultrafeedback"][1], "score_rejected": 9.0}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps([FORMATS["alpaca"][1], FORMATS["openai"][1]]))
    files = [tmp_path / "a.parquet", tmp_path / "b.json"]
    pairs = read_pairs(files, chat, SFTConfig(), AlignConfig(), 512)
    assert pairs.formats == {str(files[0]): "ultrafeedback", str(files[1]): "alpaca"} and len(pairs) == 2
    assert [problem.where for problem in pairs.problems] == [f"{files[0]}:row 2", f"{files[1]}[1] (line 1)"]
    few = read_pairs(files[1:], chat, SFTConfig(), AlignConfig(), 512, vocab_size=800)
    assert few.problems[0].reason == "a token that the model does not have"


def learned(chat: ChatTokenizer, pairs: Pairs, index: int) -> str:
    """The text of the tokens that count."""
    return chat.decode([int(id) for id, counts in zip(pairs.ids[index], pairs.loss_mask[index], strict=True) if counts])


@pytest.mark.parametrize("name, no", [("weight", 0), ("train", False), ("loss", False), ("loss_weight", 0.0)])
def test_marked_messages_are_left_out(name: str, no: Any, tmp_path: Path, chat: ChatTokenizer) -> None:
    """Of a completion of several messages; the tokens stay, and so does the prompt."""
    record = {"prompt": [ASKED], "chosen": [YES, MORE, LAST], "rejected": [NO]}
    for index, others in ((0, LAST), (2, YES)):
        chosen = [YES, MORE, LAST]
        chosen[index] = {**chosen[index], name: no}
        pairs, whole = (read(tmp_path / "a.jsonl", chat, [one]) for one in ({**record, "chosen": chosen}, record))
        assert not pairs.problems and [ids.tolist() for ids in pairs.ids] == [ids.tolist() for ids in whole.ids]
        assert learned(chat, pairs, 0).replace("<|eot_id|>", "") == others["content"] and pairs.prompts == whole.prompts
        assert pairs.loss_mask[1].tolist() == whole.loss_mask[1].tolist()
    marked = {**record, "prompt": [{**ASKED, name: no}, {**YES, name: no}, MORE], "chosen": [LAST]}
    plain = {**record, "prompt": [ASKED, YES, MORE], "chosen": [LAST]}
    found, expected = (read(tmp_path / "a.jsonl", chat, [one]) for one in (marked, plain))
    assert [mask.tolist() for mask in found.loss_mask] == [mask.tolist() for mask in expected.loss_mask], "no prompt is learned anyway"


def test_marks_that_cannot_be_obeyed(tmp_path: Path, chat: ChatTokenizer) -> None:
    no, yes = {**YES, "weight": 0}, {**YES, "weight": 1}
    pair = {"prompt": [ASKED], "chosen": [YES], "rejected": [NO]}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("dpo", {**pair, "chosen": [no]}, "field 'chosen[0]': got a completion without an answer to learn"),
        ("kto", {"messages": [ASKED, no], "label": True}, "field 'messages[1]': got a completion without an answer to learn"),
        ("dpo", {**pair, "prompt": [ASKED, yes, MORE]}, "field 'prompt[1]': got a mark that says that the message is learned"),
        ("dpo", {**pair, "chosen": [YES, {**MORE, "train": True}, LAST]}, "field 'chosen[1]': got a mark that says that the message is"),
        ("dpo", {**pair, "chosen": [{**YES, "weight": 0.5}]}, "field 'chosen[0].weight': got 0.5"),
        ("dpo", {**pair, "weight": 0.5}, "field 'weight': got 0.5, expected 1, or no such field"),
        ("dpo", {"chosen": [ASKED, no, MORE, LAST], "rejected": [ASKED, YES, MORE, NO]}, "field 'chosen[1]': got another mark of whether"),
        *((method, {**pair, "chosen": [no, MORE, LAST]}, f"field 'chosen[0]': got a message that is marked as not learned, expected no such mark: --method {method} counts whole conversations") for method in ("orpo", "reward")),
    ]  # fmt: skip
    for method, record, words in cases:
        [problem] = read(tmp_path / "a.jsonl", chat, [record], method).problems
        assert words in str(problem), str(problem)
        assert not read(tmp_path / "a.jsonl", chat, [record], method, ignore_keys=("weight", "train")).problems
    assert not read(tmp_path / "a.jsonl", chat, [{**pair, "chosen": [yes]}]).problems


@pytest.mark.few(4)
@pytest.mark.parametrize("name", FORMATS)
def test_fields_that_would_be_ignored_are_refused(name: str, tmp_path: Path, chat: ChatTokenizer, llama3: Path) -> None:
    record = FORMATS[name][1]
    chat = calling(llama3, tmp_path) if name == "several messages" else chat
    known = read(tmp_path / "a.jsonl", chat, [record])
    for field in ("images", "audio", "functions", "margin", "reward", "ref_chosen_logps"):
        [problem] = read(tmp_path / "a.jsonl", chat, [{**record, field: 0.5}]).problems
        assert f"field {field!r}: got a value" in str(problem), str(problem)
        less = read(tmp_path / "a.jsonl", chat, [{**record, field: 0.5}], ignore_keys=(field,))
        assert [ids.tolist() for ids in less.ids] == [ids.tolist() for ids in known.ids] and not less.problems
        assert not read(tmp_path / "a.jsonl", chat, [{**record, field: []}]).problems


BESIDE: list[dict[str, Any]] = [
    {"chosen_rating": 5.0, "rejected_rating": 2.0, "chosen_model": "x", "rejected_model": "y"},
    {"chosen-rating": 5.0, "rejected-rating": 2.0, "chosen-model": "x", "rejected-model": "y"},
    {"rating_chosen": 5, "rating_rejected": 2, "source": "x"},
    {"chosen_score": 5.0, "rejected_score": 2.0},
    {"question": "What is a list?"},
]


def test_what_known_files_have_beside_pairs(tmp_path: Path, chat: ChatTokenizer) -> None:
    """Tulu's and argilla's preferences say who answered and what was judged; orpo-dpo-mix repeats the question."""
    record = FORMATS["ultrafeedback"][1]
    plain = read(tmp_path / "a.jsonl", chat, [record])
    found = read(tmp_path / "b.jsonl", chat, [{**record, **more} for more in BESIDE])
    assert not found.problems and [ids.tolist() for ids in found.ids] == [ids.tolist() for ids in plain.ids] * len(BESIDE)


def test_variables_and_reasoning_as_trl_renders_them(tmp_path: Path, llama3: Path) -> None:
    """TRL renders prompt and completion with chat_template_kwargs; an answer's reasoning has several names."""
    source = (
        "{% if mood %}{{ mood }}{% endif %}{% for m in messages %}{{ m.role }}<|end_header_id|>{{ m.reasoning_content }}{{ m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}assistant<|end_header_id|>{% endif %}"
    )
    (tmp_path / "t.jinja").write_text(source)
    chat = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), str(tmp_path / "t.jinja"))
    theirs = AutoTokenizer.from_pretrained(llama3)
    theirs.chat_template = source
    for name in ("reasoning_content", "thinking", "reasoning"):
        chosen = {**YES, name: "Think of lists. "}
        record = {"prompt": [ASKED], "chosen": [chosen], "rejected": [NO], "chat_template_kwargs": {"mood": "Kind."}}
        pairs = read(tmp_path / "a.jsonl", chat, [record])
        assert not pairs.problems
        for index, half in enumerate((chosen, NO)):
            whole = theirs.apply_chat_template([ASKED, half], tokenize=True, return_dict=True, mood="Kind.")
            assert pairs.ids[index].tolist() == whole["input_ids"]
        before = theirs.apply_chat_template([ASKED], tokenize=True, return_dict=True, mood="Kind.", add_generation_prompt=True)
        assert pairs.prompts == [len(before["input_ids"])] * 2


def test_calls_as_llama_factory_has_them(tmp_path: Path, llama3: Path) -> None:
    """A conversation before two halves, and one that was judged: both with calls in turns of their own."""
    chat = calling(llama3, tmp_path)
    text = json.dumps({"name": "look", "arguments": {}})
    turns = (("human", "What is a list?"), ("function_call", text), ("observation", "3.11"))
    before = [{"from": role, "value": value} for role, value in turns]
    chosen, rejected = ({"from": "gpt", "value": answer["content"]} for answer in (YES, NO))
    half = {"conversations": before, "chosen": chosen, "rejected": rejected}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}]}
    plain = {"prompt": [ASKED, call, FOUND], "chosen": [YES], "rejected": [NO]}
    found, expected = (read(tmp_path / "a.jsonl", chat, [record]) for record in (half, plain))
    assert not found.problems and [ids.tolist() for ids in found.ids] == [ids.tolist() for ids in expected.ids]
    judged = {"conversations": [*before, {"from": "gpt", "value": YES["content"]}], "label": True}
    alone = read(tmp_path / "a.jsonl", chat, [judged], "kto")
    assert [ids.tolist() for ids in alone.ids] == [expected.ids[0].tolist()] and not alone.problems
