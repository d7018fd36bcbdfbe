"""The search for parts of a conversation that a template leaves out, and that would silently be
missing from training.

A part was not rendered if no character of the text changes when it is removed or changed. For a
learned answer only the text in the loss counts. Most parts are found at once, by a mark after each:
rendering a long conversation once for each part takes minutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_llama.tune.sft.fields import REASONING, is_empty, is_harmless
from megatron_llama.tune.sft.formats import Conversation
from megatron_llama.tune.sft.marks import LossOn, counted_messages
from megatron_llama.tune.sft.problems import UnusableError
from megatron_llama.tune.sft.template import ChatTemplate, Rendered


def refuse_unrendered(
    template: ChatTemplate, example: Conversation, whole: Rendered, loss_on: LossOn
) -> None:
    """Raise UnusableError for a part of the conversation that is not in ``whole``, its rendered
    text."""
    messages = example.messages
    standing, learned = _standing_parts(template, example, whole)
    # If the loss is on all, parts of earlier answers that a template leaves out are its own style.
    strict = counted_messages(example, "last" if loss_on == "all" else loss_on)
    for index, message in enumerate(messages):
        counted = strict[index] and index not in example.unlearned
        if counted and _says_nothing(message):
            raise UnusableError(
                "empty answer",
                field=_field(example, index),
                got=f"nothing but spaces in {_place(example, index)}",
                expected="text, or calls of tools",
                do="leave the example out",
            )
        for name, less in _without_parts(message, counted=counted):
            if (index, name) in (learned if counted else standing):
                continue
            others = (*messages[:index], less, *messages[index + 1 :])
            shortened = _rendered(template, replace(example, messages=others))
            if shortened is None:
                continue
            if counted and template.marks_answers:
                same = shortened.answer_texts() == whole.answer_texts()
            else:
                same = shortened.text == whole.text
            if same:
                outside = counted and shortened.text != whole.text
                part = f"{name} of {_place(example, index)}"
                raise _unrendered(template, part, _field(example, index, name), outside=outside)
    for part, field, less_of_it in _without_fields(template, example):
        shortened = _rendered(template, less_of_it)
        if shortened is not None and shortened.text == whole.text:
            raise _unrendered(template, part, field)


def _says_nothing(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    blank = content is None or (isinstance(content, str) and not content.strip())
    return blank and not any(message.get(name) for name in ("tool_calls", *REASONING))


def _without_parts(
    message: Mapping[str, Any], *, counted: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the parts of a message by name, each with the message without it, or with a changed
    one."""
    content = message.get("content")
    calls = message.get("tool_calls") or ()
    # An earlier answer beside calls may be only reasoning, which some templates leave out there.
    if isinstance(content, str) and content.strip() and (counted or not calls):
        yield "content", {**message, "content": ""}
        # The content is changed, not removed: some templates refuse empty content.
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


def _standing_parts(
    template: ChatTemplate, example: Conversation, whole: Rendered
) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
    """Return the parts of messages, by index and name, whose words stand in the text before a mark
    that was put after them, and those that do so in answers that the template marks."""
    mark = "part"
    while mark in whole.text:
        mark += "t"
    messages = []
    known = {}
    for index, message in enumerate(example.messages):
        words = _parts(message)
        marks = {name: f"{mark}{index} {name}{mark}" for name in words}
        known.update({marks[name]: (index, name, words[name]) for name in words})
        messages.append(_with_marks(message, words, marks))
    rendered = _rendered(template, replace(example, messages=tuple(messages)))
    if rendered is None:
        return set(), set()

    def standing(text: str) -> set[tuple[int, str]]:
        present = set()
        for match in re.finditer(rf"{mark}\d+ \S+?{mark}", text):
            entry = known.get(match[0])
            if entry is not None and text.endswith(entry[2], 0, match.start()):
                present.add(entry[:2])
        return present

    everywhere = standing(rendered.text)
    answers = "\n".join(rendered.answer_texts())
    return everywhere, standing(answers) if template.marks_answers else everywhere


def _parts(message: Mapping[str, Any]) -> dict[str, str]:
    """Return the words of a message's content and reasoning, and the names of its calls, by
    part."""
    parts = {
        f"tool_calls[{at}]": name
        for at, call in enumerate(message.get("tool_calls") or ())
        if isinstance(function := call.get("function"), Mapping)
        and isinstance(name := function.get("name"), str)
    }
    for name in ("content", *REASONING):
        if isinstance(text := message.get(name), str) and text.strip():
            parts[name] = text.strip()
    return parts


def _with_marks(
    message: Mapping[str, Any], words: Mapping[str, str], marks: Mapping[str, str]
) -> dict[str, Any]:
    """Return a message with a mark after the words of each part."""
    marked = dict(message)
    # Reasoning is one text under each of its names, and known by the first.
    reasoning = next((name for name in REASONING if name in words), "")
    for name in words.keys() & message.keys():
        marked[name] = words[name] + marks[reasoning if name in REASONING else name]
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": words[name] + marks[name]}}
            if (name := f"tool_calls[{at}]") in words
            else call
            for at, call in enumerate(calls)
        ]
    return marked


def _without_fields(
    template: ChatTemplate, example: Conversation
) -> Iterator[tuple[str, str, Conversation]]:
    """Yield the fields of a conversation beside roles, texts and calls: name, first place, and the
    conversation without the field."""
    if example.tools:
        yield "tools", "tools", replace(example, tools=None)
    for name, value in example.variables.items():
        # A missing field is false too.
        if value and not template.names_variable(name):
            place = f"chat_template_kwargs.{name}"
            others = {key: given for key, given in example.variables.items() if key != name}
            yield place, place, replace(example, variables=others)
    seen = {"role", "content", "tool_calls"}
    for index, message in enumerate(example.messages):
        # A tool's message follows the call that asked for it, also in templates without names.
        linked = ("name", "tool_call_id") if message["role"] == "tool" else ()
        for name, value in message.items():
            if name in seen or name in linked or is_empty(value) or is_harmless(name):
                continue
            names = REASONING if name in REASONING else (name,)
            seen.update(names)
            # A missing field is false too. A template may leave out the reasoning of earlier
            # answers.
            named = any(map(template.names_field, names))
            if named and (name in REASONING or not value):
                continue
            messages = tuple(
                {key: value for key, value in turn.items() if key not in names}
                for turn in example.messages
            )
            part = f"{name} of {_place(example, index)}"
            yield part, _field(example, index, name), replace(example, messages=messages)


def _rendered(template: ChatTemplate, example: Conversation) -> Rendered | None:
    """Render a conversation; None if the template refuses it, and so reads the missing part."""
    try:
        return template.render(example.messages, example.tools, variables=example.variables)
    except UnusableError:
        return None


def _place(example: Conversation, index: int) -> str:
    return f"message {index + 1} of {len(example.messages)} ({example.messages[index]['role']})"


def _field(example: Conversation, index: int, name: str = "") -> str:
    """Return the place of a message, or of a part of it, in the file."""
    message = example.places[index] if example.places else f"messages[{index}]"
    return f"{message}.{name}" if name else message


def _unrendered(
    template: ChatTemplate, part: str, field: str, *, outside: bool = False
) -> UnusableError:
    where = "leaves it outside {% generation %}" if outside else "leaves it out"
    kind = part.partition("[")[0].partition(" ")[0].partition(".")[0]
    return UnusableError(
        f"{kind} not rendered",
        field=field,
        got=f"{part}, and a template that {where} (from {template.name})",
        expected="a template that renders all of the conversation",
        do="give another --chat-template, or "
        + ("leave the example out" if kind == "content" else f"--ignore-keys {kind}"),
    )
