"""Readers of the usual formats: examples as conversations, or as a prompt with its completion, and
their problems."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from megatron_llama.data.documents import json_type
from megatron_llama.tune.sft.fields import (
    LOSS_MARKS,
    REPEATING,
    check_reasoning,
    is_empty,
    refuse_unknown,
    refuse_unobeyed,
    take_mark,
    without_keys,
)
from megatron_llama.tune.sft.problems import UnusableError, field_names, unknown_format, wrong_kind
from megatron_llama.tune.sft.repair import INSTRUCTIONS, Placed, Repair, repaired

ASSISTANT = "assistant"
ROLES: Mapping[str, str] = MappingProxyType(
    {
        **{role: role for role in ("system", "developer", "user", ASSISTANT, "tool")},
        **{
            "human": "user",
            "gpt": ASSISTANT,
            "chatgpt": ASSISTANT,
            "model": ASSISTANT,
            "bot": ASSISTANT,
        },
        **dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool"),
        **dict.fromkeys(("function_call", "tool_call"), ASSISTANT),
    }
)
"""Names of roles in files, sharegpt's among them, and the role of each."""
MARKS = ("\ufdd0", "\ufdd1")
"""Characters to which Unicode gives no meaning. ``template.py`` marks answers with them, so no
message may contain one."""
LOSS_MARK = LOSS_MARKS[0]
_CALLS = ("function_call", "tool_call")
"""Roles of messages whose text is the JSON of calls, as in LLaMA-Factory and ms-swift."""
CONTEXT = ("system", "tools", "chat_template_kwargs")
"""Fields beside messages that a template renders."""
_NO_VARIABLES = (
    "messages conversation chat_template tools add_generation_prompt continue_final_message "
    "tokenize padding truncation max_length return_tensors return_dict tokenizer_kwargs "
    "return_assistant_tokens_mask"
)
_RESERVED = frozenset(_NO_VARIABLES.split())
"""Names in ``chat_template_kwargs`` that control the rendering, and are no variables."""
_FOLLOWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "": (*INSTRUCTIONS, "user"),
        "system": ("developer", "user"),
        "developer": ("user",),
        "user": (ASSISTANT,),
        ASSISTANT: ("user", "tool"),
        "tool": ("tool", ASSISTANT),
    }
)


@dataclass(frozen=True)
class Conversation:
    """Messages in the order of the conversation; the last one is the assistant's."""

    messages: tuple[Mapping[str, Any], ...]
    """Each with ``role`` and ``content``, a string; the assistant's may have ``tool_calls``, and
    then content that is None."""
    tools: tuple[Any, ...] | None = field(default=None)
    variables: Mapping[str, Any] = field(default_factory=dict)
    """The template's variables beside messages and tools: ``chat_template_kwargs``."""
    learned: tuple[bool | None, ...] = ()
    """The file's mark of whether each message is learned; None: no mark. Empty if no message is
    marked."""
    places: tuple[str, ...] = field(default=(), compare=False)
    """The place of each message in its example, for errors."""
    repairs: tuple[Repair, ...] = ()
    """The repairs of the order of its messages."""
    prompt_messages: int = 0
    """Number of first messages that are the prompt of a completion: answers among them are not
    learned."""

    @property
    def unlearned(self) -> frozenset[int]:
        """The indices of the messages that the file marks as not to be learned."""
        return frozenset(index for index, mark in enumerate(self.learned) if mark is False)

    @property
    def answers_in_prompt(self) -> frozenset[int]:
        """The indices of the answers that are part of a completion's prompt."""
        prompt = enumerate(self.messages[: self.prompt_messages])
        return frozenset(index for index, message in prompt if message["role"] == ASSISTANT)

    @property
    def texts(self) -> Iterator[str]:
        """Yield all text from the file: contents of the messages, the texts in tools and calls of
        them, and those in the template's variables."""
        for message in self.messages:
            yield from _strings({key: value for key, value in message.items() if key != "role"})
        yield from _strings(self.tools)
        yield from _strings(self.variables)

    @property
    def has_null(self) -> bool:
        """Whether something in the tools, or in calls of them, is null."""
        waiting: list[Any] = [self.tools or (), *(turn.get("tool_calls") for turn in self.messages)]
        while waiting:
            value = waiting.pop()
            elements = value.values() if isinstance(value, Mapping) else value
            if isinstance(value, Mapping | list | tuple):
                if any(element is None for element in elements):
                    return True
                waiting += elements
        return False


@dataclass(frozen=True)
class Passage:
    """Text without a template. Only the completion is in the loss; a plain text is all
    completion."""

    prompt: str
    completion: str


Example = Conversation | Passage


def _strings(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, keys of objects included. Raises UnusableError for other
    values, such as a date in a column of a table."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
        elif not (
            value is None
            or isinstance(value, int)
            or (isinstance(value, float) and math.isfinite(value))
        ):
            raise UnusableError(
                "no JSON value",
                got=f"the {type(value).__name__} {str(value)[:40]}",
                expected="a text, a number, true, false or null",
                do="write it as text",
            )


def detect(record: Mapping[str, Any]) -> str:
    """Tell the format of an example by its fields. Raises UnusableError for an unknown one."""
    turns = record.get("conversations")
    if "messages" in record or (
        isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" in turns[0]
    ):
        return "messages"
    for name, format_name in (
        ("conversations", "sharegpt"),
        ("instruction", "alpaca"),
        ("prompt", "prompt"),
        ("text", "text"),
    ):
        if name in record:
            return format_name
    raise unknown_format(record, "messages, conversations, instruction, prompt or text")


def read_example(
    record: Mapping[str, Any],
    name: str,
    repairs: Collection[Repair] = (),
    ignored: Collection[str] = (),
) -> Example:
    """Read an example of the format ``name``, with the ``repairs`` that the user asks for and
    without the keys that are to be ``ignored``. Raises UnusableError, also for a field that would
    be ignored although it may change what is to be learned."""
    return _READERS[name](without_keys(record, ignored), repairs)


def _messages(record: Mapping[str, Any], repairs: Collection[Repair]) -> Conversation:
    name = "messages" if "messages" in record or "conversations" not in record else "conversations"
    placed = [*system_of(record), *messages_of(field_of(record, name), name)]
    refuse_unknown(record, (name, *CONTEXT, *repeating(record, placed)))
    return checked(placed, name, tools_of(record.get("tools")), repairs, variables_of(record))


def _sharegpt(record: Mapping[str, Any], repairs: Collection[Repair]) -> Conversation:
    name = "conversations"
    placed = [*system_of(record), *messages_of(field_of(record, name), name, "from", "value")]
    refuse_unknown(record, (name, *CONTEXT, *repeating(record, placed)))
    tools = with_types(tools_of(record.get("tools")))
    return checked(placed, name, tools, repairs, variables_of(record))


def repeating(record: Mapping[str, Any], placed: Sequence[Placed]) -> list[str]:
    """Return the fields beside messages that repeat one of them, as the question in UltraChat's
    files, and question and answer in NuminaMath's."""
    said = {text.strip() for _, message in placed if (text := message["content"])}
    return [
        name
        for name in REPEATING
        if isinstance(text := record.get(name), str) and text.strip() in said
    ]


def messages_of(
    turns: Any, name: str, role: str = "role", content: str = "content"
) -> list[Placed]:
    """Read the messages of the field ``name``. Raises UnusableError; their order is not checked."""
    if not isinstance(turns, list):
        raise wrong_kind("messages are no array", name, turns, "an array")
    if not turns:
        raise UnusableError(
            "no messages",
            field=name,
            got="an empty array",
            expected="messages",
            do="leave the example out",
        )
    places = [f"{name}[{index}]" for index in range(len(turns))]
    return [
        (where, message_of(turn, where, role, content))
        for where, turn in zip(places, turns, strict=True)
    ]


def system_of(record: Mapping[str, Any]) -> list[Placed]:
    """Read the system message that stands in a field of its own, if there is one. Raises
    UnusableError."""
    system = record.get("system")
    if system is None or not (text := text_of(system, "system")):
        return []
    return [("system", {"role": "system", "content": text})]


def tools_of(tools: Any, name: str = "tools") -> list[Any] | None:
    """Return the tools of a conversation, given as an array or as the text of one, which tables
    need. An empty array means no tools, as in TRL: some templates would write about tools for it.
    Raises UnusableError for anything else."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise UnusableError(
                "tools are no array",
                field=name,
                got=f"a text that is no JSON ({error.msg})",
                expected="an array, or the text of one",
                do="mend the example",
            ) from error
    if tools is not None and not isinstance(tools, list):
        raise wrong_kind("tools are no array", name, tools, "an array, or the text of one")
    for text in _strings(tools):
        text_of(text, name)
    return tools or None


def with_types(tools: list[Any] | None) -> list[Any] | None:
    """Return tools as templates expect them: LLaMA-Factory's files have bare functions."""
    return tools and [
        {"type": "function", "function": tool}
        if isinstance(tool, dict) and "name" in tool and not {"type", "function"} & tool.keys()
        else tool
        for tool in tools
    ]


def variables_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables beside messages and tools. Raises UnusableError if they are
    no object, or if one controls the rendering."""
    name = "chat_template_kwargs"
    given = record.get(name)
    if is_empty(given):
        return {}
    if not isinstance(given, dict):
        raise wrong_kind("variables of the template are no object", name, given, "an object")
    if reserved := sorted(_RESERVED & given.keys()):
        raise UnusableError(
            "unknown meaning",
            field=f"{name}.{reserved[0]}",
            got="a value",
            expected="variables of the template alone",
            do="remove it; messages and tools have fields of their own",
        )
    for text in _strings(given):
        text_of(text, name)
    return given


def refuse_beside_text(record: Mapping[str, Any], names: Sequence[str], text: str) -> None:
    """Raise UnusableError for fields that only a template could put into the prompt. ``text``: the
    fields of the text."""
    for name in names:
        if not is_empty(record.get(name)):
            raise UnusableError(
                "unknown meaning",
                field=name,
                got="a value beside texts that no template touches",
                expected="the whole prompt in the field 'prompt'",
                do=f"put it into prompt, or give {text} as messages",
            )


def message_of(
    turn: Any, name: str, role: str = "role", content: str = "content"
) -> dict[str, Any]:
    """Read one message, which stands at ``name``. Raises UnusableError."""
    if not isinstance(turn, dict):
        expected = f"an object with {role!r} and {content!r}"
        raise wrong_kind("message is no object", name, turn, expected)
    if role not in turn:
        names = ", ".join(map(repr, turn)) or "no fields"
        raise UnusableError(
            "message without role",
            field=name,
            got=names,
            expected=f"a field {role!r}",
            do="say who speaks",
        )
    who = turn[role]
    if not isinstance(who, str):
        raise wrong_kind("role is no string", f"{name}.{role}", who, "a string")
    if who not in ROLES:
        expected = f"one of {', '.join(ROLES)}"
        raise UnusableError(
            "unknown role",
            field=f"{name}.{role}",
            got=repr(who),
            expected=expected,
            do="rename the role",
        )
    kept = {
        key: value
        for key, value in turn.items()
        if key not in (role, content) and value is not None
    }
    refuse_unobeyed(kept, name)
    learned = take_mark(kept, name)
    check_reasoning(kept, name)
    if who in _CALLS:
        return {
            **kept,
            "role": ROLES[who],
            "content": "",
            "tool_calls": _calls_of(turn, f"{name}.{content}", content),
            **({} if learned is None else {LOSS_MARK: learned}),
        }
    calls = turn.get("tool_calls")
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    ):
        expected = "an array of objects"
        raise UnusableError(
            "broken tool calls",
            field=f"{name}.tool_calls",
            got=str(calls)[:40],
            expected=expected,
            do="mend the example",
        )
    if calls and ROLES[who] != ASSISTANT:
        raise UnusableError(
            "broken tool calls",
            field=f"{name}.tool_calls",
            got=f"calls in a message of role {who}",
            expected="calls of the assistant alone",
            do="mend the example",
        )
    for text in _strings(kept):
        text_of(text, name)
    if content not in turn and not calls:
        raise UnusableError(
            "message without content",
            field=name,
            got=", ".join(map(repr, turn)),
            expected=f"{content!r}",
            do="add it",
        )
    # As in transformers, a template does not see content that is null, and may refuse the message.
    hidden = calls and turn.get(content) is None
    said = None if hidden else _content(turn[content], f"{name}.{content}")
    if learned is not None:
        kept[LOSS_MARK] = learned
    return {"role": ROLES[who], "content": said, **kept}


def _calls_of(turn: Mapping[str, Any], name: str, content: str) -> list[dict[str, Any]]:
    """Read the calls of a message whose text is their JSON: one object, or an array of them."""
    expected = "the JSON of {'name': ..., 'arguments': {...}}, or an array of them"
    text = text_of(turn.get(content), name)
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnusableError(
            "broken tool calls",
            field=name,
            got=f"a text that is no JSON ({error.msg})",
            expected=expected,
            do="mend the example",
        ) from error
    calls = []
    for call in given if isinstance(given, list) and given else [given]:
        arguments = call.get("arguments") if isinstance(call, dict) else None
        if isinstance(arguments, str):
            with suppress(json.JSONDecodeError):
                arguments = json.loads(arguments)
        if (
            not isinstance(arguments, dict)
            or call.keys() != {"name", "arguments"}
            or not isinstance(call["name"], str)
        ):
            raise UnusableError(
                "broken tool calls",
                field=name,
                got=text[:40],
                expected=expected,
                do="mend the example",
            )
        calls.append(
            {"type": "function", "function": {"name": call["name"], "arguments": arguments}}
        )
    for string in _strings(calls):
        text_of(string, name)
    return calls


def _content(value: Any, name: str) -> str:
    """Return the content of a message: a string, or OpenAI's array of parts."""
    if not isinstance(value, list):
        return text_of(value, name)
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            got = (
                f"a part of type {part.get('type')!r}"
                if isinstance(part, dict)
                else f"a JSON {json_type(part)}"
            )
            do = "leave the example out: images and sound cannot be learned"
            raise UnusableError(
                "content is no text",
                field=f"{name}[{index}]",
                got=got,
                expected="parts of type 'text'",
                do=do,
            )
    return "".join(
        text_of(part.get("text"), f"{name}[{index}].text") for index, part in enumerate(value)
    )


def checked(
    placed: Sequence[Placed],
    name: str,
    tools: list[Any] | None,
    repairs: Collection[Repair],
    variables: Mapping[str, Any],
) -> Conversation:
    """Make a conversation of messages, repaired, with a correct order of roles and without an empty
    question or answer. An empty system message is left to the template. Raises UnusableError."""
    placed, done = repaired(placed, repairs)
    before = ""
    for where, message in placed:
        role = message["role"]
        if role not in _FOLLOWS[before]:
            got = f"{role} {f'after {before}' if before else 'first'}"
            expected = " or ".join(_FOLLOWS[before])
            first = before in ("", *INSTRUCTIONS) and role == ASSISTANT
            mend = "drop-leading-answers" if first else "merge-repeated-roles"
            do = "mend the order of the messages"
            if first or role == before:
                do += f", or give --repair-conversations {mend}"
            reason = (
                "conversation begins with an answer"
                if not before and role == ASSISTANT
                else "wrong role order"
            )
            raise UnusableError(reason, field=where, got=got, expected=expected, do=do)
        empty = not message.get("tool_calls") and not message["content"].strip()
        if empty and role not in INSTRUCTIONS:
            word = {ASSISTANT: "answer", "user": "question"}.get(role, f"{role} message")
            do = "leave the example out"
            raise UnusableError(
                f"empty {word}", field=where, got="nothing but spaces", expected="text", do=do
            )
        before = role
    if before != ASSISTANT:
        do = "add the answer, or give --repair-conversations drop-unanswered-end"
        raise UnusableError(
            "no answer at the end",
            field=name,
            got=f"a last message of role {before}" if before else "no message",
            expected=ASSISTANT,
            do=do,
        )
    learned = tuple(message.get(LOSS_MARK) for _, message in placed)
    return Conversation(
        tuple(
            {key: value for key, value in message.items() if key != LOSS_MARK}
            for _, message in placed
        ),
        None if tools is None else tuple(tools),
        variables,
        learned if any(mark is not None for mark in learned) else (),
        tuple(where for where, _ in placed),
        done,
    )


ALPACA_PROMPT = ("instruction", "input", "history", *CONTEXT)
"""Fields of the prompt of an alpaca-style example."""


def alpaca_prompt(record: Mapping[str, Any]) -> list[Placed]:
    """Read the system message, the history and the question of an alpaca-style example. Raises
    UnusableError."""
    messages = [message for _, message in system_of(record)]
    history = record.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        expected = "an array of [instruction, answer]"
        raise UnusableError(
            "broken history",
            field="history",
            got=str(history)[:40],
            expected=expected,
            do="mend the example",
        )
    for index, pair in enumerate(history):
        for role, text in zip(("user", ASSISTANT), pair, strict=True):
            messages.append({"role": role, "content": text_of(text, f"history[{index}]")})
    instruction = text_of(field_of(record, "instruction"), "instruction")
    more = record.get("input")
    question = "\n\n".join(
        paragraph
        for paragraph in (instruction, "" if more is None else text_of(more, "input"))
        if paragraph.strip()
    )
    messages.append({"role": "user", "content": filled(question, "instruction")})
    return [(f"instruction[{index}]", message) for index, message in enumerate(messages)]


def _alpaca(record: Mapping[str, Any], repairs: Collection[Repair]) -> Conversation:
    prompt = alpaca_prompt(record)
    answer = filled(text_of(field_of(record, "output"), "output"), "output")
    # Stanford's file repeats everything as a text, and some files modelled on it as a prompt.
    repeats = [
        name
        for name in ("text", "prompt")
        if isinstance(whole := record.get(name), str)
        and record["instruction"] in whole
        and answer in whole
    ]
    refuse_unknown(record, (*ALPACA_PROMPT, "output", *repeats))
    placed = [*prompt, (f"instruction[{len(prompt)}]", {"role": ASSISTANT, "content": answer})]
    tools = with_types(tools_of(record.get("tools")))
    return checked(placed, "instruction", tools, repairs, variables_of(record))


def filled(text: str, name: str) -> str:
    """Return the text of a field. Raises UnusableError if nothing is in it."""
    if not text.strip():
        raise UnusableError(
            f"empty {name}",
            field=name,
            got="nothing but spaces",
            expected="text",
            do="leave the example out",
        )
    return text


def _prompt(record: Mapping[str, Any], repairs: Collection[Repair]) -> Example:
    prompt = field_of(record, "prompt")
    completion = field_of(record, "completion")
    if isinstance(prompt, list) != isinstance(completion, list):
        got = f"a JSON {json_type(prompt)} with a completion that is a JSON {json_type(completion)}"
        expected = "both text or both messages"
        raise UnusableError(
            "prompt and completion differ in kind",
            field="prompt",
            got=got,
            expected=expected,
            do="mend the example",
        )
    if isinstance(prompt, list):
        refuse_unknown(record, ("prompt", "completion", *CONTEXT))
        before = [*system_of(record), *(messages_of(prompt, "prompt") if prompt else ())]
        placed = [*before, *messages_of(completion, "completion")]
        tools, variables = tools_of(record.get("tools")), variables_of(record)
        whole = checked(placed, "completion", tools, repairs, variables)
        places = {where for where, _ in before}
        return replace(whole, prompt_messages=sum(where in places for where in whole.places))
    refuse_beside_text(record, (*CONTEXT, "history"), "prompt and completion")
    refuse_unknown(record, ("prompt", "completion"))
    text = text_of(prompt, "prompt")
    return Passage(text, filled(text_of(completion, "completion"), "completion"))


def _plain(record: Mapping[str, Any], repairs: Collection[Repair]) -> Passage:
    text = filled(text_of(field_of(record, "text"), "text"), "text")
    refuse_unknown(record, ("text",))
    return Passage("", text)


def field_of(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field. Raises UnusableError if it is missing."""
    if name not in record:
        got = f"no such field (fields: {field_names(record)})"
        do = "mend the example or change --data-format"
        raise UnusableError(f"missing field {name}", field=name, got=got, expected="a value", do=do)
    return record[name]


def text_of(value: Any, name: str) -> str:
    """Return a text that can be encoded. Raises UnusableError for anything else in ``name``."""
    if not isinstance(value, str):
        raise wrong_kind("no string", name, value, "a string")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            got = f"half a surrogate pair at character {error.start}"
            raise UnusableError(
                "half a surrogate pair",
                field=name,
                got=got,
                expected="Unicode text",
                do="mend the escape",
            ) from error
        if any(mark in value for mark in MARKS):
            got = f"the noncharacter U+{ord(next(mark for mark in MARKS if mark in value)):04X}"
            raise UnusableError(
                "noncharacter", field=name, got=got, expected="text", do="remove it"
            )
    if "\0" in value:
        raise UnusableError(
            "null character",
            field=name,
            got=f"U+0000 at character {value.index(chr(0))}",
            expected="text",
            do="remove it",
        )
    return value


_READERS: Mapping[str, Callable[[Mapping[str, Any], Collection[Repair]], Example]] = (
    MappingProxyType(
        {
            "messages": _messages,
            "sharegpt": _sharegpt,
            "alpaca": _alpaca,
            "prompt": _prompt,
            "text": _plain,
        }
    )
)
