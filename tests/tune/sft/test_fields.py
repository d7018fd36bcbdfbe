"""What stands in records and messages beside their texts is rendered as transformers renders it, known to change nothing, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.cli import main
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.fields import REASONING
from megatron_llama.tune.sft.formats import detect, read_example
from megatron_llama.tune.sft.template import BUILT_IN, ChatTemplate, Rendered
from transformers import AutoTokenizer

from tests.tune.sft.test_marks import TEMPLATES, refusal

USER, ANSWER = {"role": "user", "content": "What is a list?"}, {"role": "assistant", "content": "A mutable sequence."}
TALK = {"messages": [USER, ANSWER]}
FORMATS: dict[str, dict[str, Any]] = {
    "messages": TALK,
    "sharegpt": {"conversations": [{"from": "human", "value": "What is a list?"}, {"from": "gpt", "value": "A mutable sequence."}]},
    "alpaca": {"instruction": "What is a list?", "output": "A mutable sequence."},
    "prompt": {"prompt": "A list is", "completion": " a mutable sequence."},
    "prompt of messages": {"prompt": [USER], "completion": [ANSWER]},
    "text": {"text": "A list is a mutable sequence."},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Look it up.", "parameters": {"type": "object", "properties": {"topic": {"type": "string"}}}}}
    for name in ("look", "find")
]  # fmt: skip
CALL = {"type": "function", "function": {"name": "look", "arguments": {"topic": "lists"}}}
CALLING = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "mutable"}, ANSWER]


@pytest.fixture(scope="module")
def templated(llama3: Path) -> Callable[[str], ChatTokenizer]:
    """A tokenizer with one of TRL's templates."""
    return lambda name: ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), str(TEMPLATES / f"{name}.jinja"))


@pytest.fixture(scope="module")
def theirs(llama3: Path) -> Callable[..., tuple[list[int], list[bool]]]:
    """Ids and mask of transformers."""
    auto = AutoTokenizer.from_pretrained(llama3)

    def encoded(name: str, messages: list[Any], **more: Any) -> tuple[list[int], list[bool]]:
        source = BUILT_IN.get(name) or (TEMPLATES / f"{name}.jinja").read_text()
        result = auto.apply_chat_template(
            messages, chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **more
        )
        return result["input_ids"], [bool(mark) for mark in result["assistant_masks"]]

    return encoded


def read(chat: ChatTokenizer, record: dict[str, Any], kind: str | None = None, **options: Any) -> tuple[list[int], list[bool]]:
    encoded = chat.read(read_example(record, kind or detect(record), **options), "assistant")
    return encoded.ids, encoded.loss_mask


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("field", ["image", "images", "videos", "audio", "audios", "functions", "label", "reward", "context"])
def test_fields_that_would_be_ignored_are_refused(name: str, field: str, chat: ChatTokenizer) -> None:
    record = {**FORMATS[name], field: ["a"]}
    said = refusal(chat, record, kind=detect(record))
    assert f"field {field!r}: got a value" in said
    learned = read(chat, FORMATS[name])
    assert read(chat, {**FORMATS[name], field: []}) == learned, "a column of a table that is empty in this row"
    assert read(chat, record, ignored=(field,)) == learned


@pytest.mark.parametrize("field", ["images", "audio", "function_call", "content_type", "refusal"])
def test_fields_of_messages_that_would_be_ignored_are_refused(field: str, chat: ChatTokenizer) -> None:
    for index, message in enumerate(TALK["messages"]):
        messages = [*TALK["messages"]]
        messages[index] = {**message, field: "x"}
        assert f"field 'messages[{index}].{field}': got " in refusal(chat, {"messages": messages})
        assert read(chat, {"messages": messages}, ignored=(field,)) == read(chat, TALK)
    turns = [{**turn, field: "x"} for turn in FORMATS["sharegpt"]["conversations"]]
    assert f"field 'conversations[0].{field}'" in refusal(chat, {"conversations": turns}, kind="sharegpt")


def test_pictures_in_texts(chat: ChatTokenizer) -> None:
    """Where a record has pictures, their places in the text are no words."""
    for record in (
        {"messages": [{"role": "user", "content": "<image>What is this?"}, ANSWER], "images": ["a.png"]},
        {"instruction": "<image>What is this?", "output": "A list.", "images": ["a.png"]},
        {"conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A list."}], "images": ["a.png"]},
    ):
        assert "leave the example out: images and sound cannot be learned" in refusal(chat, record, kind=detect(record))


def test_fields_that_tell_about_an_example_are_not(chat: ChatTokenizer) -> None:
    more = {"id": "7", "Source": "a book", "prompt-id": 3, "metadata": {"images": ["a.png"]}, "score": 0.5, "num_turns": 1, "category": "x"}
    for record in FORMATS.values():
        assert read(chat, {**record, **more}) == read(chat, record)
    messages = [{**message, "id": 3, "timestamp": "now"} for message in TALK["messages"]]
    assert read(chat, {"messages": messages, "parallel_tool_calls": False}) == read(chat, TALK)


def test_two_conversations_in_one_record_and_one_that_was_judged(chat: ChatTokenizer) -> None:
    for name in ("label", "kto_tag"):
        said = refusal(chat, {**TALK, name: False})
        assert f"field {name!r}: got a value" in said and "give the file to align (--method kto)" in said
    said = refusal(chat, {**TALK, "conversations": [USER, ANSWER, USER, ANSWER]})
    assert "field 'conversations': got a value in a field that is not read" in said and "or give --ignore-keys conversations" in said
    assert "field 'messages[0].role'" not in said
    turns = [{"from": "human", "value": "x", "role": "assistant"}, {"from": "gpt", "value": "y"}]
    assert "field 'conversations[0].role': got a value" in refusal(chat, {"conversations": turns}, kind="sharegpt")


def test_files_that_repeat_a_text(chat: ChatTokenizer) -> None:
    """UltraChat has the first question as a prompt, and Stanford's Alpaca has everything as a text, too."""
    assert read(chat, {**TALK, "prompt": "What is a list?", "prompt_id": "x"}) == read(chat, TALK)
    assert "field 'prompt'" in refusal(chat, {**TALK, "prompt": "Another one?"})
    alpaca = FORMATS["alpaca"]
    whole = "Below is an instruction.\n\n### Instruction:\nWhat is a list?\n\n### Response:\nA mutable sequence."
    for name in ("text", "prompt"):
        assert read(chat, {**alpaca, name: whole}) == read(chat, alpaca)
        assert f"field {name!r}" in refusal(chat, {**alpaca, name: "Another one."}, kind="alpaca")


def test_files_that_repeat_messages(chat: ChatTokenizer) -> None:
    """no_robots has the system message as a prompt, NuminaMath question and answer, OpenThoughts 2 the question."""
    guided = [{"role": "system", "content": "Be kind."}, *TALK["messages"]]
    assert read(chat, {"prompt": "Be kind.", "messages": guided}) == read(chat, {"messages": guided})
    assert read(chat, {**TALK, "problem": "What is a list?", "solution": "A mutable sequence."}) == read(chat, TALK)
    sharegpt = FORMATS["sharegpt"]
    assert read(chat, {**sharegpt, "question": "What is a list? "}) == read(chat, sharegpt)
    assert "field 'solution'" in refusal(chat, {**TALK, "solution": "A sequence."})
    assert "field 'reward'" in refusal(chat, {**TALK, "reward": "What is a list?"}), "only fields that are known to repeat a message"


def test_all_fields_that_are_not_read_are_said_at_once(chat: ChatTokenizer) -> None:
    """Infinity-Instruct's label says what an example is about, and not that it was judged."""
    more = {"label": {"ability": ["x"]}, "langdetect": "en", "reward": 1.5, "id": 3, "mood": None}
    said = refusal(chat, {**TALK, **more})
    assert "field 'label': got a value in a field that is not read, and in reward, expected" in said
    assert said.endswith("remove or rename the fields, or give --ignore-keys label reward if they change nothing")
    assert read(chat, {**TALK, **more}, ignored=("label", "reward")) == read(chat, TALK)
    said = refusal(chat, {"text": "A list.", "role": "user", "rank": 0}, kind="text")
    assert said.endswith("remove or rename the fields"), "--ignore-keys takes no role"


def test_what_only_a_template_could_render(chat: ChatTokenizer) -> None:
    for name, value in (("system", "Be kind."), ("tools", TOOLS), ("chat_template_kwargs", {"a": 1})):
        said = refusal(chat, {**FORMATS["prompt"], name: value}, kind="prompt")
        assert f"field {name!r}: got a value beside texts that no template touches" in said
        assert f"field {name!r}: got a value" in refusal(chat, {**FORMATS["text"], name: value}, kind="text")


@pytest.mark.parametrize("given", [{"reasoning_effort": "high"}, {"model_identity": "You are a snake.", "reasoning_effort": "low"}])
def test_variables_of_templates(given: dict[str, Any], templated: Any, theirs: Any) -> None:
    chat = templated("gptoss_training")
    expected = theirs("gptoss_training", TALK["messages"], **given)
    assert expected[0] != theirs("gptoss_training", TALK["messages"])[0]
    for record in ({**TALK}, {"prompt": [USER], "completion": [ANSWER]}, FORMATS["sharegpt"], FORMATS["alpaca"]):
        assert read(chat, {**record, "chat_template_kwargs": given}) == expected


def test_variables_that_nothing_reads(chat: ChatTokenizer, templated: Any) -> None:
    plain = read(chat, TALK)
    for given in ({}, None, {"enable_thinking": False}, {"enable_thinking": None, "xml_tools": []}):
        assert read(chat, {**TALK, "chat_template_kwargs": given}) == plain, "what is not there is false, too"
    said = refusal(templated("gptoss_training"), {**TALK, "chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": True}})
    assert "field 'chat_template_kwargs.enable_thinking'" in said, "beside one that is rendered"
    said = refusal(chat, {**TALK, "chat_template_kwargs": {"enable_thinking": True}})
    place = "chat_template_kwargs.enable_thinking"
    assert f"field {place!r}: got {place}, and a template that leaves it out" in said
    assert "field 'chat_template_kwargs': got a JSON string" in refusal(chat, {**TALK, "chat_template_kwargs": "x"})
    for name in ("tools", "messages", "add_generation_prompt", "chat_template", "tokenize"):
        said = refusal(chat, {**TALK, "chat_template_kwargs": {name: True}})
        assert f"field 'chat_template_kwargs.{name}': got a value, expected variables of the template alone" in said


@pytest.mark.parametrize("name", REASONING)
@pytest.mark.parametrize("template", ["qwen3_training", "gptoss_training", "glm4moe_training"])
def test_reasoning_under_each_of_its_names(name: str, template: str, templated: Any, theirs: Any) -> None:
    messages = [USER, {**ANSWER, name: "Think of sequences."}]
    expected = theirs(template, messages)
    assert expected[0] != theirs(template, TALK["messages"])[0]
    assert read(templated(template), {"messages": messages}) == expected
    same = [USER, {**ANSWER, **dict.fromkeys(REASONING, "Think of sequences.")}]
    assert read(templated(template), {"messages": same}) == expected


@pytest.mark.parametrize("asked", REASONING)
def test_templates_that_know_one_name_of_reasoning(asked: str, llama3: Path, tmp_path: Path) -> None:
    source = BUILT_IN["llama3"].replace("{% generation %}", f"{{% generation %}}{{{{ message.{asked} }}}}")
    (tmp_path / "t.jinja").write_text(source)
    tokenizer = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), str(tmp_path / "t.jinja"))
    records = {name: {"messages": [USER, {**ANSWER, name: "Think."}]} for name in REASONING}
    if asked == "reasoning":
        # transformers shows this name to templates only where the message has it.
        for other in ("reasoning_content", "thinking"):
            assert f"field 'messages[1].{other}': got {other} of message 2 of 2" in refusal(tokenizer, records.pop(other))
    given = [read(tokenizer, record) for record in records.values()]
    assert all(each == given[0] for each in given)
    assert "Think.A mutable" in tokenizer.decode([id for id, counts in zip(*given[0], strict=True) if counts])
    said = refusal(tokenizer, {"messages": [USER, {**ANSWER, "reasoning": "a", "thinking": "b"}]})
    assert "field 'messages[1]': got different texts in thinking and reasoning" in said
    assert "got a value of type list, expected a string" in refusal(tokenizer, {"messages": [USER, {**ANSWER, "reasoning": ["a"]}]})
    assert "special token '<|eot_id|>'" in refusal(tokenizer, {"messages": [USER, {**ANSWER, "reasoning": "<|eot_id|>"}]})


def test_what_a_template_does_not_render(chat: ChatTokenizer) -> None:
    """LLaMA 3's built-in template has nothing but roles and texts."""
    cases: dict[str, dict[str, Any]] = {
        "tools": {**TALK, "tools": TOOLS},
        "messages[1].tool_calls[0]": {"messages": CALLING},
        "messages[1].thinking": {"messages": [USER, {**ANSWER, "thinking": "Think."}]},
        "messages[0].name": {"messages": [{**USER, "name": "Ada"}, ANSWER]},
    }
    for place, record in cases.items():
        said = refusal(chat, record)
        assert f"field {place!r}: got " in said and "a template that leaves it out (from built-in template llama3)" in said
    for record in ({**TALK, "tools": []}, {**TALK, "tools": ""}, {"messages": [{**USER, "name": ""}, ANSWER]}):
        assert read(chat, record) == read(chat, TALK)


def test_a_name_that_a_template_has_for_something_else(templated: Any, theirs: Any) -> None:
    """Qwen's template asks tools and calls for their names, and nobody who speaks."""
    chat = templated("qwen2_5_training")
    messages = [{**USER, "name": "Ada"}, *CALLING[1:]]
    messages[2] = {**messages[2], "name": "look", "tool_call_id": "1"}
    assert "field 'messages[0].name': got name of message 1 of 4 (user)" in refusal(chat, {"messages": messages, "tools": TOOLS})
    messages[0] = USER
    assert read(chat, {"messages": messages, "tools": TOOLS}) == theirs("qwen2_5_training", CALLING, tools=TOOLS), (
        "links of calls are not said"
    )


def test_templates_that_render_whole_messages(llama3: Path, tmp_path: Path) -> None:
    """They name no field and render all of them."""
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}")
    chat = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), str(tmp_path / "t.jinja"))
    text = chat.read(read_example({"messages": [{**USER, "mood": "kind"}, {**ANSWER, "tool_calls": [CALL]}]}, "messages"), "assistant").text
    assert '"mood": "kind"' in text and '"topic": "lists"' in text


@pytest.mark.parametrize("kind", ["calls in one case", "a name that is read elsewhere"])
def test_calls_that_are_named_and_not_rendered(kind: str, llama3: Path, tmp_path: Path) -> None:
    """A template that renders calls of the last message alone would leave those before it out."""
    condition = {"calls in one case": "loop.last and message.tool_calls", "a name that is read elsewhere": "message.tool_calls is string"}[
        kind
    ]
    source = BUILT_IN["chatml"].replace(
        "{% generation %}", f"{{% generation %}}{{% if {condition} %}}{{{{ message.tool_calls }}}}{{% endif %}}"
    )
    (tmp_path / "t.jinja").write_text(source)
    chat = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), str(tmp_path / "t.jinja"))
    assert "field 'messages[1].tool_calls[0]'" in refusal(chat, {"messages": CALLING})


def test_long_conversations_are_rendered_as_often_as_short_ones(templated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = templated("qwen3_training")
    read(chat, {"messages": CALLING, "tools": TOOLS})  # what a template makes of calls is asked once
    counts = []
    for turns in (1, 2, 50):
        texts: list[str] = []
        render = ChatTemplate.render

        def counted(*given: Any, **more: Any) -> Rendered:
            texts.append(render(*given, **more).text)  # noqa: B023
            return render(*given, **more)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(ChatTemplate, "render", counted)
            answer = {**ANSWER, "reasoning_content": "Think."}
            read(chat, {"messages": [{**USER, "content": "no"}, *CALLING[1:3], {**answer, "content": "a"}] * turns, "tools": TOOLS})
        counts.append(len(texts))
    assert counts[1:] == counts[:1] * 2, "a text is not rendered for each message"


@pytest.mark.parametrize("template", ["qwen2_5_training", "qwen3_training", "llama3_training"])
def test_tools_as_an_array_and_as_its_text(template: str, templated: Any, theirs: Any) -> None:
    if template == "llama3_training":
        assert "field 'tools'" in refusal(templated(template), {**TALK, "tools": TOOLS})
        return
    expected = theirs(template, CALLING, tools=TOOLS)
    for tools in (TOOLS, json.dumps(TOOLS)):
        assert read(templated(template), {"messages": CALLING, "tools": tools}) == expected
    assert "field 'tools': got a text that is no JSON" in refusal(templated(template), {"messages": CALLING, "tools": "[{"})
    assert "field 'tools': got a JSON object" in refusal(templated(template), {"messages": CALLING, "tools": json.dumps(TOOLS[0])})


def test_calls_as_llama_factory_has_them(templated: Any, theirs: Any) -> None:
    """glaive_toolcall: calls in turns of their own, and bare functions as a text."""
    bare = json.dumps([tool["function"] for tool in TOOLS])
    call = json.dumps(CALL["function"])
    turns = [("human", USER["content"]), ("function_call", call), ("observation", "mutable"), ("gpt", ANSWER["content"])]
    record = {"conversations": [{"from": role, "value": text} for role, text in turns], "tools": bare}
    chat = templated("qwen2_5_training")
    assert read(chat, record) == theirs("qwen2_5_training", CALLING, tools=TOOLS)
    assert detect(record) == "sharegpt"
    # Several calls at once, arguments as a text, and the roles of ms-swift.
    two = [CALL, {"type": "function", "function": {"name": "find", "arguments": {}}}]
    text = json.dumps([{"name": "look", "arguments": json.dumps({"topic": "lists"})}, {"name": "find", "arguments": {}}])
    messages = [USER, {"role": "tool_call", "content": text}, {"role": "tool_response", "content": "mutable"}, ANSWER]
    expected = [USER, {"role": "assistant", "content": "", "tool_calls": two}, *CALLING[2:]]
    assert read(chat, {"messages": messages, "tools": TOOLS}) == theirs("qwen2_5_training", expected, tools=TOOLS)
    # A call that is marked is rendered and not learned.
    record["conversations"][1]["weight"] = 0
    ids, mask = read(chat, record)
    learned = chat.decode([id for id, counts in zip(ids, mask, strict=True) if counts])
    assert ids == theirs("qwen2_5_training", CALLING, tools=TOOLS)[0] and "mutable sequence" in learned and "tool_call" not in learned


NO_CALLS = ("look()", "{}", "[]", '{"name": "look"}', '{"name": "look", "arguments": "x"}', '{"name": 1, "arguments": {}}')


def test_calls_that_are_none(chat: ChatTokenizer) -> None:
    for text in (*NO_CALLS, '"look"', "null", '{"name": "a", "arguments": {}, "id": 1}'):
        turns = [{"from": "human", "value": "x"}, {"from": "function_call", "value": text}]
        said = refusal(chat, {"conversations": turns}, kind="sharegpt")
        assert said.startswith("file: field 'conversations[1].value': got ") and "expected the JSON of {'name': ..., 'arguments'" in said, text


@pytest.mark.parametrize("template", ["plain", "chatml", "llama3", "qwen2_5_training", "qwen3_training"])
@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_system_message_is_what_the_template_makes_of_it(
    template: str, text: str, theirs: Any, templated: Any, llama3: Path
) -> None:
    """Without it some templates would write a system message of their own."""
    chat = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), template) if template in BUILT_IN else templated(template)
    messages = [{"role": "system", "content": text}, *TALK["messages"]]
    assert read(chat, {"messages": messages}) == theirs(template, messages)
    turns = [{"from": "system", "value": text}, *FORMATS["sharegpt"]["conversations"]]
    assert read(chat, {"conversations": turns}) == theirs(template, messages)
    if not text:
        assert read(chat, {**TALK, "system": text}) == theirs(template, TALK["messages"]), (
            "a field is a column, empty where there is no message"
        )


@pytest.mark.parametrize("template", ["llama3", "chatml", "gptoss_training", "qwen3_training"])
def test_a_developers_message_is_what_the_template_makes_of_it(template: str, theirs: Any, templated: Any, llama3: Path) -> None:
    """Behind a system message, too. It is not renamed: a template may render another role, or refuse this one."""
    chat = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), template) if template in BUILT_IN else templated(template)
    told = {"role": "developer", "content": "Answer in one word."}
    for before in ([told], [{"role": "system", "content": "Be kind."}, told]):
        messages = [*before, *TALK["messages"]]
        if template == "qwen3_training" or (template == "gptoss_training" and len(before) == 2):
            assert "got content of message" in refusal(chat, {"messages": messages}), "the template leaves it out"
        else:
            assert read(chat, {"messages": messages}) == theirs(template, messages)
            renamed = [{**message, "role": "system"} if message is told else message for message in messages]
            assert template == "gptoss_training" or theirs(template, renamed) != theirs(template, messages)


def test_keys_that_cannot_be_ignored(llama3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({**TALK, "reward": 1.0}))
    common = [str(tmp_path / "a.jsonl"), "--tokenizer-model", str(llama3), "--chat-template", "llama3"]
    assert main(["data", "check", *common]) == 1
    assert "field 'reward': got a value in a field that is not read" in capsys.readouterr().out
    assert main(["data", "check", *common, "--ignore-keys", "reward", "other"]) == 0
    capsys.readouterr()
    for command in (["data", "check", *common], *([name, "--train-data", common[0]] for name in ("sft", "align"))):
        assert main([*command, "--ignore-keys", "images", "content"]) != 0
        said = capsys.readouterr().err
        assert "--ignore-keys: got images, expected fields that change nothing" in said and "--ignore-keys: got content" in said
