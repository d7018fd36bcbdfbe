"""Finds what a template leaves out of a conversation, which would be missing from training in
silence.

What changes no character of the text when it is taken away, or is another, has not been rendered.
Of an answer that is learnt, that text is what the loss counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_llama.sft.formats import ASSISTANT, Conversation
from megatron_llama.sft.problems import UnusableError
from megatron_llama.sft.template import REASONING, ChatTemplate, Rendered

TELLING = 16
"""Words of so many characters that stand in a text as often as in the messages have come from
there. Of fewer, a template may have them in its own words."""


def refuse_unrendered(
    template: ChatTemplate, example: Conversation, whole: Rendered, learnt: Callable[[int], bool]
) -> None:
    """Raise UnusableError for a part of the conversation that is not in ``whole``, which the
    template has made of it. ``learnt``: whether the loss counts the message of an index."""
    messages = example.messages
    marked = "\n".join(whole.answer_texts()) if template.marks_answers else whole.text
    for index, message in enumerate(messages):
        counted = message["role"] == ASSISTANT and learnt(index)
        if counted and _says_nothing(message):
            raise UnusableError(
                "empty answer",
                got=f"nothing but spaces in {_place(example, index)}",
                expected="text, or calls of tools",
                do="leave the example out",
            )
        text = marked if counted else whole.text
        for name, less in _without_parts(message, counted=counted):
            if name == "content" and _stands_in(text, message["content"].strip(), messages):
                continue
            other = _rendered(
                template, [*messages[:index], less, *messages[index + 1 :]], example.tools
            )
            if other is None:
                continue
            if counted and template.marks_answers:
                same = other.answer_texts() == whole.answer_texts()
            else:
                same = other.text == whole.text
            if same:
                outside = counted and other.text != whole.text
                raise _unrendered(template, f"{name} of {_place(example, index)}", outside=outside)
    if example.tools:
        other = _rendered(template, messages, None)
        if other is not None and other.text == whole.text:
            raise _unrendered(template, "tools", outside=False)


def _says_nothing(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    blank = content is None or (isinstance(content, str) and not content.strip())
    return blank and not any(message.get(name) for name in ("tool_calls", *REASONING))


def _without_parts(
    message: Mapping[str, Any], *, counted: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the parts of a message by name, each with the message without it, or with another."""
    content = message.get("content")
    calls = message.get("tool_calls") or ()
    # An earlier answer beside calls may be reasoning alone, which some templates leave out there.
    if isinstance(content, str) and content.strip() and (counted or not calls):
        yield "content", {**message, "content": ""}
        # Some templates refuse empty content, whatever they make of other.
        yield "content", {**message, "content": f"{content}x"}
    for at in range(len(calls)):
        rest = [*calls[:at], *calls[at + 1 :]]
        less = {name: value for name, value in message.items() if name != "tool_calls"}
        yield f"tool_calls[{at}]", {**less, "tool_calls": rest} if rest else less
    if counted and any(message.get(name) for name in REASONING):
        yield (
            next(name for name in REASONING if message.get(name)),
            {name: value for name, value in message.items() if name not in REASONING},
        )


def _stands_in(text: str, words: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a text has the words of a message as often as all messages have them."""
    if len(words) < TELLING:
        return False
    contents = (message.get("content") for message in messages)
    said = sum(content.count(words) for content in contents if isinstance(content, str))
    return text.count(words) >= said


def _rendered(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
) -> Rendered | None:
    """Render messages; None where the template refuses them, and so has looked at what is
    missing."""
    try:
        return template.render(messages, tools)
    except UnusableError:
        return None


def _place(example: Conversation, index: int) -> str:
    return f"message {index + 1} of {len(example.messages)} ({example.messages[index]['role']})"


def _unrendered(template: ChatTemplate, part: str, *, outside: bool) -> UnusableError:
    where = "leaves it outside {% generation %}" if outside else "leaves it out"
    kind = part.partition("[")[0].partition(" ")[0]
    return UnusableError(
        f"{kind} not rendered",
        got=f"{part}, and a template that {where} (from {template.name})",
        expected="a template that renders all of the conversation",
        do=f"give another --chat-template, or remove the {kind}",
    )
