"""Templates of many models, as TRL ships them and as their tokenizers have them, with ten conversations each: what transformers renders
is what is trained, and where it refuses, or leaves something out, so do we."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
import pytest
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.tune.sft.built_in_templates import BUILT_IN
from megatron_llama.tune.sft.chat import ChatTokenizer, Encoded, LossOn
from megatron_llama.tune.sft.formats import Conversation
from megatron_llama.tune.sft.problems import UnusableError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.data.tokenizer import layouts

[TRL] = importlib.util.find_spec("trl").submodule_search_locations  # only files of it are read, which needs no import
SHIPPED = {path.stem: path for path in sorted(Path(TRL, "chat_templates").glob("*.jinja"))}
OWN = {name.lower(): getattr(layouts, name) for name in ("LLAMA2_CHAT", "LLAMA3_CHAT", "MISTRAL_CHAT", "GEMMA_CHAT", "CHATML")}
REASONING = ("reasoning_content", "thinking", "reasoning")
Message = dict[str, Any]


def said(role: str, content: str | None, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call(name: str, **arguments: Any) -> Message:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = said("system", "You answer in a single line.")
ASKED, ANSWER = said("user", "How is the weather in Paris?"), said("assistant", "Rain, and 12 degrees.")
MORE, LAST = said("user", "And in Rome?"), said("assistant", "Dry.")
THOUGHT = said("assistant", "Rain, and 12 degrees.", reasoning_content="I recall what it was.")
TAGGED = said("assistant", "<think>\nI recall what it was.\n</think>\n\nRain, and 12 degrees.")
WEATHER = {"type": "object", "properties": {"city": {"type": "string", "description": "Its name."}}, "required": ["city"]}
TOOLS = ({"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": WEATHER}},)
CALLED = said("assistant", None, tool_calls=[call("weather", city="Paris")])
FOUND = said("tool", "rain 12", name="weather")
CONVERSATIONS: Mapping[str, tuple[Sequence[Message], Sequence[Message] | None]] = {
    "one turn": ([ASKED, ANSWER], None),
    "several turns": ([SYSTEM, ASKED, ANSWER, MORE, LAST], None),
    "developer": ([{**SYSTEM, "role": "developer"}, ASKED, ANSWER], None),
    "tools": ([ASKED, ANSWER], TOOLS),
    "call without content": ([SYSTEM, ASKED, CALLED, FOUND, ANSWER], TOOLS),
    "call with content": ([ASKED, {**CALLED, "content": "I look it up."}, FOUND, ANSWER, MORE, LAST], TOOLS),
    "reasoning": ([SYSTEM, ASKED, THOUGHT], None),
    "reasoning in all turns": ([ASKED, {**CALLED, "reasoning_content": "A tool knows."}, FOUND, THOUGHT, MORE, {**THOUGHT, **LAST}], TOOLS),
    "reasoning in the text": ([ASKED, TAGGED, MORE, LAST], None),
    "empty answer": ([ASKED, said("assistant", ""), MORE, LAST], None),
}


@pytest.fixture(scope="module")
def theirs(llama3: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(llama3)
    return tokenizer


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remember what was returned for messages of the same words."""
    known: dict[str, Any] = {}

    def remembering(*args: Any) -> Any:
        key = repr(args)
        if key not in known:
            known[key] = function(*args)
        return known[key]

    return remembering


class Reference:
    """What transformers makes of one template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.marks = "endgeneration" in source
        self.text = cached(self._text)
        self.encoded = cached(self._encoded)

    def _text(self, messages: Sequence[Message], tools: Sequence[Message] | None, prompt: bool = False) -> str | None:
        """The text, or None where the template refuses."""
        given = {"chat_template": self.source, "tools": None if tools is None else [*tools]}
        try:
            text: str = self.tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=prompt, **given)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError):
            return None
        return text

    def _encoded(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> tuple[list[int], list[bool]]:
        """Ids, and which of them are marked."""
        given = {"chat_template": self.source, "tools": None if tools is None else [*tools]}
        found = self.tokenizer.apply_chat_template(
            [*messages], tokenize=True, return_dict=True, return_assistant_tokens_mask=self.marks, **given
        )
        return found["input_ids"], [bool(mark) for mark in found.get("assistant_masks", ())]

    def learnt(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str | None:
        """What is learnt of a text: that of marked answers, or all of it."""
        if not self.marks or self.text(messages, tools) is None:
            return self.text(messages, tools)
        ids, mask = self.encoded(messages, tools)
        return "\n".join(self.tokenizer.decode([id for id, one in zip(ids, mask, strict=True) if one]))

    def left_out(self, messages: Sequence[Message], tools: Sequence[Message] | None, counted: Sequence[int]) -> Iterator[str]:
        """Yield what changes nothing when it is taken away; of ``counted`` answers, nothing of what is learnt."""
        whole, learnt = self.text(messages, tools), self.learnt(messages, tools)
        for index, message in enumerate(messages):
            for part, less in without(message, counted=index in counted):
                other = [*messages[:index], less, *messages[index + 1 :]]
                if self.text(other, tools) is None:
                    continue
                if (self.learnt(other, tools) == learnt) if index in counted else (self.text(other, tools) == whole):
                    yield f"{part} of message {index + 1}"
        if tools and self.text(messages, None) == whole:
            yield "tools"


def without(message: Message, *, counted: bool) -> Iterator[tuple[str, Message]]:
    if message["content"] and (counted or not message.get("tool_calls")):
        yield "content", {**message, "content": ""}
        yield "content", {**message, "content": message["content"] + "?"}
    if message.get("tool_calls"):
        yield "tool_calls", {name: value for name, value in message.items() if name != "tool_calls"}
    if counted and "reasoning_content" in message:
        yield "reasoning_content", {name: value for name, value in message.items() if name not in REASONING}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [*SHIPPED, *OWN, *(f"built-in {name}" for name in BUILT_IN)])
def test_what_transformers_renders_is_trained(name: str, theirs: PreTrainedTokenizerBase, llama3: Path, tmp_path: Path) -> None:
    wanted = name.removeprefix("built-in ")
    if name in OWN or name in SHIPPED:
        source = OWN[name] if name in OWN else SHIPPED[name].read_text()
        (tmp_path / "chat.jinja").write_text(source)
        wanted = str(tmp_path / "chat.jinja")
    else:
        source = BUILT_IN[wanted]
    reference = Reference(theirs, source)
    chat = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), wanted)
    modes: Sequence[LossOn] = ("assistant", "last", "all")
    for title, loss_on in product(CONVERSATIONS, modes):
        check(title, chat, reference, *CONVERSATIONS[title], loss_on)


def check(
    title: str, chat: ChatTokenizer, reference: Reference, messages: Sequence[Message], tools: Sequence[Message] | None, loss_on: LossOn
) -> None:
    try:
        found: Encoded | UnusableError = chat.read(Conversation(tuple(messages), tools and tuple(tools)), loss_on)
    except UnusableError as error:
        found = error
    text = reference.text(messages, tools)
    if text is None:
        assert isinstance(found, UnusableError) and found.reason == "template error", title
        return
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    counted = answers if loss_on == "assistant" else answers[-1:]
    missing = [*reference.left_out(messages, tools, counted)]
    missing += ["an empty answer" for index in counted if messages[index]["content"] == ""]
    if missing:
        said = str(found.at("here")) if isinstance(found, UnusableError) else found
        assert isinstance(found, UnusableError) and found.reason.endswith(("not rendered", "empty answer")), (title, missing, said)
        return
    befores = [reference.text(messages[:index], tools, True) for index in counted]
    untils = [reference.text(messages[: index + 1], tools) for index in counted]
    grows = all(
        before and until and until.startswith(before) and text.startswith(until) for before, until in zip(befores, untils, strict=True)
    )
    if isinstance(found, UnusableError):
        assert found.reason == "answers cannot be told apart" and loss_on != "all" and not reference.marks and not grows, (
            title,
            found.at("here"),
        )
        return
    ids, mask = reference.encoded(messages, tools)
    assert (found.text, found.ids) == (text, ids), title
    if loss_on == "all":
        assert all(found.loss_mask)
        return
    if reference.marks and loss_on == "assistant":
        assert found.loss_mask == mask, title
    if not reference.marks:
        assert grows, title
    learnt = reference.tokenizer.decode([id for id, one in zip(found.ids, found.loss_mask, strict=True) if one])
    for index, message in enumerate(messages):
        words = (message["content"] or "").rpartition("</think>")[2].strip()
        assert (words in learnt) == (index in counted) or not words, (title, index, learnt)
