"""Token ids and masks against those of transformers, and what a template must not be able to do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest
from megatron_llama.cli import main
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.errors import DataError
from megatron_llama.tune.sft.chat import ChatTokenizer, Encoded
from megatron_llama.tune.sft.formats import Conversation, read_example
from megatron_llama.tune.sft.problems import UnusableError
from megatron_llama.tune.sft.template import BUILT_IN, ChatTemplate
from transformers import AutoTokenizer

Message = Mapping[str, Any]
SYSTEM = {"role": "system", "content": "Answer in one line.\n  Be kind."}
CONVERSATIONS: Sequence[Sequence[Message]] = (
    ({"role": "user", "content": "What is a list?"}, {"role": "assistant", "content": "A mutable sequence of objects."}),
    (SYSTEM, {"role": "user", "content": "  spaces \n"}, {"role": "assistant", "content": " \tkept or stripped?  "}),
    (
        SYSTEM,
        {"role": "user", "content": "Größe \U0001f600?"},
        {"role": "assistant", "content": "naïve 漢字 \U0001f600"},
        {"role": "user", "content": "x = [i for i in range(10)]"},
        {"role": "assistant", "content": "    return x\n\n\n# done"},
        {"role": "user", "content": "1234567890"},
        {"role": "assistant", "content": "!"},
    ),
)
UNMARKED = {name: source.replace("{% generation %}", "").replace("{% endgeneration %}", "") for name, source in BUILT_IN.items()}


def theirs(folder: Path, template: str, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = tokenizer.apply_chat_template(
        [dict(message) for message in messages], chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return found["input_ids"], [bool(mark) for mark in found["assistant_masks"]]


def ours(folder: Path, template: str | None, messages: Sequence[Message], loss_on: Any = "assistant") -> Encoded:
    return ChatTokenizer(HFTokenizer(folder / "tokenizer.json"), template).read(Conversation(tuple(messages)), loss_on)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("kind", ["llama2", "llama3"])
def test_ids_and_masks_are_those_of_transformers(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    for messages in CONVERSATIONS:
        if name in ("gemma", "mistral") and messages[0] == SYSTEM:
            with pytest.raises(jinja2.TemplateError):
                theirs(folder, BUILT_IN[name], messages)
            with pytest.raises(UnusableError, match="template error"):
                ours(folder, name, messages)
            continue
        ids, mask = theirs(folder, BUILT_IN[name], messages)
        encoded = ours(folder, name, messages)
        assert encoded.ids == ids
        assert encoded.loss_mask == mask
        assert 0 < sum(mask) < len(mask)


def test_sentencepiece_reads_special_tokens_in_templates(llama2: Path, tmp_path: Path) -> None:
    """The model file alone spells them as text; its twin does not."""
    (tmp_path / "tokenizer.model").write_bytes((llama2 / "tokenizer.model").read_bytes())
    encoded = ChatTokenizer(load_tokenizer(tmp_path), "llama2").read(Conversation(tuple(CONVERSATIONS[0])), "assistant")
    assert encoded.ids == theirs(llama2, BUILT_IN["llama2"], CONVERSATIONS[0])[0]
    assert encoded.ids[0] == 1 and encoded.ids[-1] == 2 and encoded.loss_mask[-1]


def test_where_a_template_is_found(llama3: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((llama3 / "tokenizer.json").read_bytes())
    tokenizer = HFTokenizer(tmp_path / "tokenizer.json")
    assert ChatTokenizer(tokenizer).template.name == "built-in template plain, since the tokenizer has none"
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": [{"name": "rag", "template": "t"}, {"name": "default", "template": "{{ 1 }}"}]}')
    assert (ChatTokenizer(tokenizer).template.name, ChatTokenizer(tokenizer).template.source) == (f"{config}: chat_template", "{{ 1 }}")
    (tmp_path / "chat_template.jinja").write_text("{{ 2 }}")
    assert ChatTokenizer(tokenizer).template.source == "{{ 2 }}"
    assert ChatTokenizer(tokenizer, "chatml").template.source == BUILT_IN["chatml"]
    with pytest.raises(
        DataError,
        match=r"--chat-template nowhere: got .*expected a jinja file in UTF-8, or one of plain, chatml, llama2, llama3, qwen2.5, ",
    ):
        ChatTokenizer(tokenizer, "nowhere")
    (tmp_path / "chat_template.jinja").unlink()
    ChatTokenizer(tokenizer, "chatml").save_hf(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == BUILT_IN["chatml"]
    assert ours(tmp_path, None, CONVERSATIONS[0]) == ours(llama3, "chatml", CONVERSATIONS[0])
    (tmp_path / "chat_template.jinja").write_text("fine\n{% if %}")
    with pytest.raises(DataError, match=r"chat_template.jinja:2: got .*expected a jinja template"):
        ChatTokenizer(tokenizer)


def test_generation_ends_where_answers_do(llama3: Path, tmp_path: Path) -> None:
    """Else the exported model would go on behind its answer. What is there already stays."""
    tokenizer = HFTokenizer(llama3 / "tokenizer.json")
    token = {name: tokenizer.encode(name)[0] for name in ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>")}
    file = tmp_path / "generation_config.json"
    ChatTokenizer(tokenizer, "plain").save_hf(tmp_path)
    assert not file.exists(), "the end token is the tokenizer's own"
    ChatTokenizer(tokenizer, "llama3").save_hf(tmp_path)
    ended = [token["<|end_of_text|>"], token["<|eot_id|>"]]
    assert json.loads(file.read_text()) == {"bos_token_id": token["<|begin_of_text|>"], "eos_token_id": ended}
    file.write_text(json.dumps({"temperature": 0.6, "eos_token_id": ended}))
    ChatTokenizer(tokenizer, "chatml").save_hf(tmp_path)
    assert json.loads(file.read_text()) == {"temperature": 0.6, "eos_token_id": [*ended, token["<|im_end|>"]]}


def test_what_ends_an_answer(llama2: Path, tmp_path: Path) -> None:
    """Not the space before a word, which alone decodes to no text, as a special token does; but a built-in template's marker, whatever the
    tokenizer calls it."""
    tokenizer = HFTokenizer(llama2 / "tokenizer.json")
    assert ChatTokenizer(tokenizer, "llama2").ends() == {tokenizer.eos_id}
    (tmp_path / "text.jinja").write_text(UNMARKED["chatml"])
    assert ChatTokenizer(tokenizer, str(tmp_path / "text.jinja")).ends() == frozenset()
    content = json.loads((llama2 / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 800, "content": "<|im_end|>", "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    marked = ChatTokenizer(HFTokenizer(tmp_path / "tokenizer.json"), "chatml")
    assert marked.require_end() == () and marked.ends() == {800}


@pytest.mark.parametrize("name", ["chatml", "llama3"])
@pytest.mark.parametrize("action", ["check", "preview"])
def test_a_marker_in_ordinary_tokens_is_refused(
    name: str, action: str, llama2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the tuned model would never stop: its end token is in no example."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": CONVERSATIONS[0]}))
    command = ["data", action, str(tmp_path / "data.jsonl"), "--tokenizer-model", str(llama2), "--chat-template"]
    assert main([*command, name]) == 1
    marker = "<|im_end|>" if name == "chatml" else "<|eot_id|>"
    said = capsys.readouterr().err
    assert said.startswith(f"error: --chat-template {name}: got answers that end with {marker!r}, which {llama2}/tokenizer.json spells")
    assert "ordinary tokens, expected a special token or the end token" in said
    assert "plain needs only an end token" in said and "--resize-embeddings" in said
    assert main([*command, "plain"]) == main([*command, "llama2"]) == 0
    (tmp_path / "eos.jinja").write_text(UNMARKED["chatml"].replace("'<|im_end|>'", "eos_token"))
    assert main([*command, str(tmp_path / "eos.jinja")]) == 0
    assert capsys.readouterr().err == "", "the end token ends its answers"
    (tmp_path / "text.jinja").write_text(UNMARKED["chatml"])
    assert main([*command, str(tmp_path / "text.jinja")]) == 0
    assert f"warning: {tmp_path}/text.jinja: got answers that end with '<|im_end|>'" in capsys.readouterr().err


ESCAPES = (
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{% set n = namespace(__init__=1) %}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}{{ n }}",
    "{{ dict.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__'] }}",
    "{{ range(1000000000) }}",
    "{% include '/etc/passwd' %}",
    "{{ tojson.__code__ }}{{ strftime_now.__globals__ }}",
)


def test_a_template_cannot_leave_its_sandbox() -> None:
    for source in ESCAPES:
        try:
            text = ChatTemplate(source, "evil", {}).render(CONVERSATIONS[0]).text
        except UnusableError as error:
            assert error.reason == "template error", source
        else:
            assert text == "", (source, text)


def test_helpers_of_templates() -> None:
    source = "{{ messages | tojson }}{{ dict(a=1) }}{{ dict.fromkeys([3]) }}{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}{{ strftime_now('%Y') | length }}"
    text = ChatTemplate(source, "fine", {}).render([{"role": "user", "content": "<ä>"}]).text
    assert text == '[{"role": "user", "content": "<ä>"}]' + "{'a': 1}{3: None}24"
    assert ChatTemplate("{% for m in messages %}{% break %}{% endfor %}{{ tools }}", "fine", {}).render([{}], [1]).text == "[1]"


CALLS = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("first", "second")]
TOOLS = [{"type": "function", "function": {"name": "first", "description": "The first of them."}}]
CALLING = "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}{% generation %}ANSWER{% endgeneration %}"
CALLING += "{% else %}{{ m.content }}{% endif %}{% endfor %}"
WHOLE = "{{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls }}"
LEFT_OUT = {
    "all calls": ("{{ m.content or '' }}", "tool_calls[0] of message 2 of 4 (assistant)"),
    "all but the first call": ("{{ m.content or '' }}{{ m.tool_calls[0] | tojson if m.tool_calls }}", "tool_calls[1] of message 2 of 4"),
    "what is said beside calls": ("{{ m.tool_calls | tojson if m.tool_calls else m.content }}", "content of message 2 of 4 (assistant)"),
    "calls from the loss": (
        "{{ m.content or '' }}{% endgeneration %}{{ m.tool_calls | tojson if m.tool_calls }}{% generation %}.",
        "a template that leaves it outside {% generation %}",
    ),
    "the reasoning": (WHOLE, "reasoning of message 4 of 4 (assistant)"),
    "the tools": (WHOLE + "{{ m.reasoning_content }}", "got tools, and a template that leaves it out"),
    "nothing": (WHOLE + "{{ m.reasoning_content }}{{ tools | tojson }}", ""),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_a_template_leaves_out_is_refused(what: str, llama3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With file and line: else the text without it would be trained, and nobody would know."""
    source, words = LEFT_OUT[what]
    (tmp_path / "chat.jinja").write_text(CALLING.replace("ANSWER", source))
    messages = [
        CONVERSATIONS[0][0],
        {"role": "assistant", "content": "Two calls." if "said" in what or what == "nothing" else None, "tool_calls": CALLS},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "Done.", "reasoning": "They are done."},
    ]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages, "tools": TOOLS}) + "\n")
    command = ["data", "check", str(tmp_path / "data.jsonl"), "--tokenizer-model", str(llama3)]
    assert main([*command, "--chat-template", str(tmp_path / "chat.jinja")]) == (1 if words else 0)
    said = capsys.readouterr()
    assert (f"{tmp_path}/data.jsonl:1: field " in said.out + said.err) == bool(words) and words in said.out + said.err
    auto = AutoTokenizer.from_pretrained(llama3)
    text = auto.apply_chat_template(messages, tools=TOOLS, chat_template=(tmp_path / "chat.jinja").read_text(), tokenize=False)
    assert "found" in text, "transformers renders it"


def test_content_that_is_null_is_not_there_for_a_template(llama3: Path, tmp_path: Path) -> None:
    """As in transformers 5: one that asks for it fails, and is refused; one that does not, renders the same."""
    record = {"messages": [CONVERSATIONS[0][0], {"role": "assistant", "content": None, "tool_calls": CALLS}], "tools": TOOLS}
    auto = AutoTokenizer.from_pretrained(llama3)
    calls = "{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}{{ tools }}"
    sources = ("{% for m in messages %}{{ m['content'] + '!' }}" + calls, "{% for m in messages %}{{ m.content is defined }}{{ m.content }}" + calls)
    for fails, source in zip((True, False), sources, strict=True):
        (tmp_path / "chat.jinja").write_text(source)
        tokenizer = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), str(tmp_path / "chat.jinja"))
        if fails:
            with pytest.raises(jinja2.TemplateError, match="no attribute 'content'"):
                auto.apply_chat_template(record["messages"], tools=TOOLS, chat_template=source, tokenize=False)
            with pytest.raises(UnusableError, match="template error") as refused:
                tokenizer.read(read_example(record, "messages"), "all")
            assert "data.jsonl:7: got 'dict object' has no attribute 'content'" in str(refused.value.at("data.jsonl:7"))
        else:
            text = auto.apply_chat_template(record["messages"], tools=TOOLS, chat_template=source, tokenize=False)
            assert tokenizer.read(read_example(record, "messages"), "all").text == text and "False[{" in text


def test_marks_inside_marks_are_refused() -> None:
    source = "{% generation %}a{% generation %}b{% endgeneration %}c{% endgeneration %}"
    with pytest.raises(UnusableError, match="template error") as refused:
        ChatTemplate(source, "own", {}).render(CONVERSATIONS[0])
    assert "got one {% generation %} inside another (from own)" in str(refused.value.at("here"))
