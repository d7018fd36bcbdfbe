"""What a conversation says beside its texts, compared with what the loss and the template make of
it: nothing of it is ignored."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import compress
from typing import Literal

from megatron_llama.sft.fields import REASONING, is_empty, is_harmless
from megatron_llama.sft.formats import ASSISTANT, Conversation
from megatron_llama.sft.problems import UnusableError
from megatron_llama.sft.template import ChatTemplate

LossOn = Literal["assistant", "last", "all"]


def refuse_contradictions(example: Conversation, loss_on: LossOn) -> None:
    """Raise UnusableError for a message that is marked as one to learn where the loss does not
    count it, and if all that the loss would count is marked as not to be learned."""
    if not example.learned:
        return
    last = len(example.messages) - 1
    counted = [
        loss_on == "all" or (message["role"] == ASSISTANT and (loss_on != "last" or index == last))
        for index, message in enumerate(example.messages)
    ]
    for place, learned, counts in zip(example.places, example.learned, counted, strict=True):
        if learned and not counts:
            raise UnusableError(
                "a mark that contradicts --loss-on",
                field=place,
                got="a mark that says that the message is learned",
                expected=f"marks of what --loss-on {loss_on} counts",
                do="remove the mark, or give another --loss-on, or --ignore-keys with its name",
            )
    if all(learned is False for learned in compress(example.learned, counted)):
        what = {"all": "message", "assistant": "answer", "last": "last answer"}[loss_on]
        raise UnusableError(
            f"every {what} is marked as not learned",
            got=f"{sum(mark is False for mark in example.learned)} marked messages",
            expected=f"one {what} or more to learn (--loss-on {loss_on})",
            do="leave the example out, or give --ignore-keys with the name of the mark",
        )


def refuse_unread(example: Conversation, template: ChatTemplate, text: str) -> None:
    """Raise UnusableError for a field that the template does not render: what it says would be
    missing in ``text``, and so in the training.

    A template is taken to read the tools, variables and reasonings that it names: that it leaves
    out the reasoning of earlier answers, for one, is its own affair. Of other fields the name
    says too little, as calls and tools have names, too. They are rendered if the text changes
    without them."""
    for keys, place, read in _beside_texts(example, template):
        if not read:
            _refuse_same(_without(example, keys), template, text, keys, place)
    for index, message in enumerate(example.messages):
        # A template may name calls and still have a case without them.
        if message.get("tool_calls"):
            less = _without(example, ("tool_calls",), only=index)
            place = f"{_place_of(example, index)}.tool_calls"
            _refuse_same(less, template, text, ("tool_calls",), place)


def _refuse_same(
    less: Conversation, template: ChatTemplate, text: str, keys: Collection[str], place: str
) -> None:
    """Raise UnusableError if a conversation has the same text as with the fields ``keys``."""
    try:
        rendered = template.render(less.messages, less.tools, variables=less.variables).text
    except UnusableError:
        # The template cannot do without them, so it has read them.
        return
    if rendered == text:
        raise UnusableError(
            "a field that the template does not render",
            field=place,
            got="a value",
            expected=f"a chat template that reads it, other than {template.name}",
            do="give --chat-template with one that does, or leave the field out with "
            f"--ignore-keys {' '.join(keys)}",
        )


def _place_of(example: Conversation, index: int) -> str:
    return example.places[index] if example.places else f"messages[{index}]"


def _beside_texts(
    example: Conversation, template: ChatTemplate
) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """Yield the fields beside roles and texts that have a value, each with the place where it
    stands first, and whether the template reads it for all that is known without rendering."""
    seen = {"role", "content", "tool_calls"}
    for index, message in enumerate(example.messages):
        # What a tool says follows the call that asked for it, also in templates without names.
        linked = ("name", "tool_call_id") if message["role"] == "tool" else ()
        for key, value in message.items():
            if key in seen or key in linked or is_empty(value) or is_harmless(key):
                continue
            keys = REASONING if key in REASONING else (key,)
            seen.update(keys)
            named = any(map(template.names_field, keys))
            # What is not there is false, too.
            read = named and (key in REASONING or not value)
            yield keys, f"{_place_of(example, index)}.{keys[0]}", read
    if example.tools:
        yield ("tools",), "tools", template.names_variable("tools")
    for key, value in example.variables.items():
        # What is not there is false, too.
        if value:
            place = f"chat_template_kwargs.{key}"
            yield ("chat_template_kwargs",), place, template.names_variable(key)


def _without(example: Conversation, keys: Collection[str], only: int | None = None) -> Conversation:
    """Return a conversation without fields of its messages, or of ``only`` one of them, and of
    the record."""
    return replace(
        example,
        messages=tuple(
            {key: value for key, value in message.items() if key not in keys}
            if only in (None, index)
            else message
            for index, message in enumerate(example.messages)
        ),
        tools=None if "tools" in keys else example.tools,
        variables={} if "chat_template_kwargs" in keys else example.variables,
    )
