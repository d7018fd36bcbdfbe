"""Readers of the usual preference formats: pairs of completions, or completions that were judged
alone, and their problems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from megatron_llama.data.documents import json_type
from megatron_llama.tune.sft.chat import ChatTokenizer, Encoded
from megatron_llama.tune.sft.fields import refuse_unknown, without_keys
from megatron_llama.tune.sft.formats import (
    ALPACA_PROMPT,
    ASSISTANT,
    CONTEXT,
    LOSS_MARK,
    Conversation,
    Example,
    Passage,
    alpaca_prompt,
    checked,
    field_of,
    filled,
    message_of,
    messages_of,
    refuse_beside_text,
    repeating,
    system_of,
    text_of,
    tools_of,
    variables_of,
    with_types,
)
from megatron_llama.tune.sft.problems import UnusableError, unknown_format, wrong_kind
from megatron_llama.tune.sft.repair import INSTRUCTIONS, Placed, Repair, repaired

PREFERENCE_FIELDS = ("chosen", "rejected", "preferred_output", "non_preferred_output", "kto_tag")
"""Fields that distinguish a file of preferences from one of conversations."""
_SCORES = ("score_chosen", "score_rejected")
_LABELS = ("label", "kto_tag")
_PROMPTS = ("question", "query", "input", "instruction", "context", "history", "system", "messages")
"""Fields that hold a prompt, or a part of one, in some files without the field ``prompt``."""


@dataclass(frozen=True)
class Completion:
    """A prompt with one completion."""

    example: Example
    """Prompt and completion as one conversation or passage."""
    prompt_messages: int = 0
    """Number of messages of a conversation that are the prompt; the rest is the completion."""

    @property
    def prompt(self) -> Conversation | Passage:
        """The prompt alone."""
        if isinstance(self.example, Passage):
            return Passage(self.example.prompt, "")
        messages = self.example.messages[: self.prompt_messages]
        return Conversation(messages, self.example.tools, self.example.variables)

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """The repairs of the order of its messages."""
        return self.example.repairs if isinstance(self.example, Conversation) else ()


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt, of which one is preferred."""

    chosen: Completion
    rejected: Completion


@dataclass(frozen=True)
class Unpaired:
    """One completion that was judged good or bad."""

    completion: Completion
    desirable: bool


Preference = Pair | Unpaired


@dataclass(frozen=True)
class EncodedCompletion:
    """A prompt with one completion as tokens."""

    text: str
    ids: list[int]
    loss_mask: list[bool]
    """Whether each token belongs to the completion."""
    prompt: int
    """Number of first tokens that are the prompt's."""
    merged: int
    """Number of tokens at the end of the prompt alone that are missing before the completion,
    because the tokenizer joins their text with the completion's."""


def is_preference(record: Mapping[str, Any]) -> bool:
    """Whether a record has preferences rather than a conversation."""
    return _is_judged(record) or any(name in record for name in PREFERENCE_FIELDS)


def _is_judged(record: Mapping[str, Any]) -> bool:
    """Whether a record has a completion with a label that judges it good or bad."""
    return isinstance(record.get("label"), bool) and any(
        name in record for name in ("completion", "messages", "conversations", "output")
    )


def detect(record: Mapping[str, Any]) -> str:
    """Tell the format of a record by its fields. Raises UnusableError for an unknown one."""
    if "kto_tag" in record or ("label" in record and "completion" in record):
        return "completion_label"
    if "preferred_output" in record or "non_preferred_output" in record:
        return "openai"
    if "chosen" in record and "rejected" in record:
        chosen = record["chosen"]
        prompt = record.get("prompt")
        if "conversations" in record or ("messages" in record and isinstance(chosen, dict)):
            return "sharegpt"
        if "instruction" in record:
            return "alpaca"
        whole = isinstance(chosen, list) and not isinstance(prompt, list)
        return "ultrafeedback" if whole and prompt is not None else "trl"
    if _is_judged(record):
        return "completion_label"
    raise unknown_format(
        record,
        "chosen and rejected, preferred_output and non_preferred_output, or completion "
        "(or messages) and label",
    )


def read_preference(
    record: Mapping[str, Any],
    name: str,
    repairs: Collection[Repair] = (),
    ignored: Collection[str] = (),
) -> Preference:
    """Read a record of the format ``name``, with the ``repairs`` that the user asks for in its
    prompt and without the keys that are to be ``ignored``. Raises UnusableError, also for a field
    that would be ignored although it may change what is to be learned."""
    record = without_keys(record, ignored)
    if name != "completion_label":
        _refuse_label(record)
    preference = _READERS[name](record, repairs)
    if isinstance(preference, Pair):
        _refuse_contradiction(record)
        if preference.chosen.example == preference.rejected.example:
            raise UnusableError(
                "identical completions",
                got="the same chosen and rejected",
                expected="two different completions",
                do="leave the example out: there is nothing to prefer",
            )
    return preference


def unpaired(found: Preference) -> tuple[Unpaired, ...]:
    """Return the completions of a record, each with its label: the chosen of a pair is good, the
    rejected bad."""
    if isinstance(found, Unpaired):
        return (found,)
    return Unpaired(found.chosen, True), Unpaired(found.rejected, False)


def has_null(found: Preference) -> bool:
    """Whether something in the tools of a record, or in calls of them, is null."""
    examples = (single.completion.example for single in unpaired(found))
    return any(isinstance(example, Conversation) and example.has_null for example in examples)


def paired(found: Preference) -> Pair:
    """Return the pair. Raises UnusableError for a completion that was judged alone."""
    if isinstance(found, Unpaired):
        raise UnusableError(
            "no pair",
            got="a single completion with a label",
            expected="a chosen and a rejected completion",
            do="give --method kto, which learns from single completions",
        )
    return found


def refuse_marks(found: Preference, method: str) -> None:
    """Raise UnusableError for a message that is not to be learned, where a method counts whole
    conversations."""
    for single in unpaired(found):
        example = single.completion.example
        if isinstance(example, Conversation) and example.unlearned:
            raise UnusableError(
                "a mark that the method cannot obey",
                field=example.places[min(example.unlearned)],
                got="a message that is marked as not learned",
                expected=f"no such mark: --method {method} counts whole conversations",
                do="leave the example out, or give --ignore-keys with the name of the mark",
            )


def encode_pair(tokenizer: ChatTokenizer, pair: Pair) -> list[EncodedCompletion]:
    """Encode chosen and rejected. The common beginning of both, and of the prompt alone, is the
    prompt. Raises UnusableError."""
    encoded = _encode(tokenizer, (pair.chosen, pair.rejected))
    if encoded[0].ids == encoded[1].ids:
        raise UnusableError(
            "identical completions",
            got="the same tokens for chosen and rejected",
            expected="two different completions",
            do="leave the example out, or give another --chat-template",
        )
    return encoded


def encode_unpaired(tokenizer: ChatTokenizer, one: Unpaired) -> EncodedCompletion:
    """Encode a completion that was judged alone. Raises UnusableError."""
    return _encode(tokenizer, (one.completion,))[0]


def _encode(tokenizer: ChatTokenizer, completions: Sequence[Completion]) -> list[EncodedCompletion]:
    """Encode completions of one prompt."""
    prompt = tokenizer.read_prompt(completions[0].prompt)
    whole = [tokenizer.read(_unmarked(completion.example), "all") for completion in completions]
    for encoded in whole:
        if not encoded.text.startswith(prompt.text):
            at = _common(prompt.text, encoded.text)
            raise UnusableError(
                "prompt rendered differently",
                got=f"a template that changes the prompt from character {at} on when an answer "
                f"follows ({prompt.text[at : at + 20]!r} becomes {encoded.text[at : at + 20]!r})",
                expected="a text that only grows with the answer",
                do=f"give --chat-template, or mend {tokenizer.template.name}",
            )
    shared = min(_common(prompt.ids, encoded.ids) for encoded in whole)
    if shared == 0:
        raise UnusableError(
            "nothing before the completion",
            got="a completion that begins with the first token",
            expected="a prompt of one token or more, or a tokenizer that begins texts with one",
            do="add a prompt",
        )
    return [
        _completed(tokenizer, completion, encoded, shared, len(prompt.ids) - shared)
        for completion, encoded in zip(completions, whole, strict=True)
    ]


def _unmarked(example: Example) -> Example:
    """Return an example without its file's marks of the loss."""
    return example if isinstance(example, Passage) else replace(example, learned=())


def _completed(
    tokenizer: ChatTokenizer, completion: Completion, encoded: Encoded, shared: int, merged: int
) -> EncodedCompletion:
    """Mark the text after the prompt: all of it if it is one answer, as TRL does; of several
    messages those of the assistant."""
    example = completion.example
    counts = [True] * len(encoded.ids)
    if isinstance(example, Conversation):
        behind = range(completion.prompt_messages, len(example.messages))
        answers = [index for index in behind if example.messages[index]["role"] == ASSISTANT]
        if example.unlearned.issuperset(answers):
            raise UnusableError(
                "every answer is marked as not learned",
                field=example.places[-1],
                got="a completion without an answer to learn",
                expected="one or more",
                do="leave the example out, or give --ignore-keys with the name of the mark",
            )
        if len(behind) > 1:
            counts = tokenizer.read(example, "assistant").loss_mask
    mask = [index >= shared and count for index, count in enumerate(counts)]
    if not any(mask):
        raise UnusableError(
            "zero target tokens",
            got="a completion without a token of its own",
            expected="one or more to learn",
            do="leave the example out, or mend the template",
        )
    return EncodedCompletion(encoded.text, encoded.ids, mask, shared, merged)


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the longest common beginning."""
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))


def _trl(record: Mapping[str, Any], repairs: Collection[Repair]) -> Pair:
    """Read TRL's preference format: texts or messages, with the prompt in a field or as the common
    beginning of both halves."""
    chosen = field_of(record, "chosen")
    rejected = field_of(record, "rejected")
    prompt = record.get("prompt")
    given = [chosen, rejected] if prompt is None else [prompt, chosen, rejected]
    kinds = [json_type(value) for value in given]
    if len(set(kinds)) > 1:
        names = ("chosen", "rejected") if prompt is None else ("prompt", "chosen", "rejected")
        got = ", ".join(f"{name} a JSON {kind}" for name, kind in zip(names, kinds, strict=True))
        raise UnusableError(
            "halves differ in kind",
            field=names[0],
            got=got,
            expected="all text or all messages",
            do="mend the example",
        )
    if isinstance(chosen, list):
        if prompt is None:
            return _whole_conversations(record, repairs)
        refuse_unknown(record, ("prompt", "chosen", "rejected", *CONTEXT, *_SCORES))
        before = [*system_of(record), *messages_of(prompt, "prompt")]
        return _halves(
            before,
            messages_of(chosen, "chosen"),
            messages_of(rejected, "rejected"),
            record,
            repairs,
        )
    return _texts(record, chosen, rejected, prompt)


def _texts(record: Mapping[str, Any], chosen: Any, rejected: Any, prompt: Any) -> Pair:
    texts = [
        filled(text_of(value, name), name)
        for name, value in (("chosen", chosen), ("rejected", rejected))
    ]
    beside = (*CONTEXT, *(("history",) if prompt is not None else _PROMPTS))
    refuse_beside_text(record, beside, "prompt, chosen and rejected")
    refuse_unknown(record, ("prompt", "chosen", "rejected", *_SCORES))
    if prompt is not None:
        before = text_of(prompt, "prompt")
        return Pair(*(Completion(Passage(before, text)) for text in texts))
    at = _common(*texts)
    # A space belongs to the word after it, as in most tokenizers.
    if 0 < at < min(map(len, texts)) and texts[0][at - 1] == " ":
        at -= 1
    if at == 0:
        raise UnusableError(
            "differing prompts",
            field="chosen",
            got="texts that share no beginning",
            expected="a field 'prompt', or texts that begin with the same prompt",
            do="add the prompt",
        )
    if any(not text[at:].strip() for text in texts) and texts[0] != texts[1]:
        raise UnusableError(
            "no telling where the prompt ends",
            field="chosen",
            got="one text that begins with the other",
            expected="texts that differ behind their prompt",
            do="give the prompt in a field 'prompt'",
        )
    return Pair(*(Completion(Passage(text[:at], text[at:])) for text in texts))


def _ultrafeedback(record: Mapping[str, Any], repairs: Collection[Repair]) -> Pair:
    """Read whole conversations as chosen and rejected; the field ``prompt``, if present, is a text
    that repeats a question."""
    pair = _whole_conversations(record, repairs)
    if record.get("prompt") is None:
        return pair
    prompt = text_of(record["prompt"], "prompt")
    asked = [
        message["content"].strip()
        for message in pair.chosen.prompt.messages  # type: ignore[union-attr]
        if message["role"] == "user"
    ]
    if not any(prompt.strip() in question for question in asked):
        raise UnusableError(
            "differing prompts",
            field="prompt",
            got=f"{prompt[:40]!r}, which no question of the conversations is",
            expected="the question to which both halves answer",
            do="mend the example",
        )
    return pair


def _whole_conversations(record: Mapping[str, Any], repairs: Collection[Repair]) -> Pair:
    """Read whole conversations, whose common beginning is the prompt."""
    known = ("prompt", "chosen", "rejected", *CONTEXT, *_SCORES)
    chosen = messages_of(field_of(record, "chosen"), "chosen")
    rejected = messages_of(field_of(record, "rejected"), "rejected")
    # UltraFeedback's files have the chosen conversation a second time.
    copied = ["messages"] if record.get("messages") == record["chosen"] else []
    refuse_unknown(record, (*known, *copied, *repeating(record, chosen)))
    halves = [
        [{key: value for key, value in message.items() if key != LOSS_MARK} for _, message in half]
        for half in (chosen, rejected)
    ]
    shared = _common(*halves)
    if shared == 0:
        raise UnusableError(
            "differing prompts",
            field="rejected[0]",
            got="another first message than that of chosen",
            expected="two conversations that begin with one prompt",
            do="mend the example",
        )
    if halves[0] == halves[1]:
        # read_preference reports it as identical completions.
        shared -= 1
    for name, half in (("chosen", halves[0]), ("rejected", halves[1])):
        if len(half) == shared:
            raise UnusableError(
                "no telling where the prompt ends",
                field=name,
                got="a conversation with which the other one begins",
                expected="conversations that differ behind their prompt",
                do="give the prompt in a field 'prompt'",
            )
        if half[shared]["role"] in ("user", *INSTRUCTIONS):
            raise UnusableError(
                "differing prompts",
                field=f"{name}[{shared}]",
                got=f"a {half[shared]['role']} message that the other half has not",
                expected="conversations that differ in answers alone",
                do="mend the example",
            )
    for (where, turn), (_, twin) in zip(chosen[:shared], rejected[:shared], strict=True):
        if turn.get(LOSS_MARK) != twin.get(LOSS_MARK):
            raise UnusableError(
                "differing prompts",
                field=where,
                got="another mark of whether it is learned than in rejected",
                expected="two conversations that begin with one prompt",
                do="mend the example",
            )
    before = [*system_of(record), *chosen[:shared]]
    return _halves(before, chosen[shared:], rejected[shared:], record, repairs)


def _openai(record: Mapping[str, Any], repairs: Collection[Repair]) -> Pair:
    given = field_of(record, "input")
    if not isinstance(given, dict):
        raise wrong_kind("input is no object", "input", given, "an object with 'messages'")
    # parallel_tool_calls tells a service how to answer, and nothing about these answers.
    unknown = sorted(given.keys() - {"messages", "tools", "parallel_tool_calls"})
    if unknown:
        raise UnusableError(
            "unknown meaning",
            field=f"input.{unknown[0]}",
            got="a value",
            expected="messages, tools and parallel_tool_calls",
            do="remove the field",
        )
    if "messages" not in given:
        raise UnusableError(
            "missing field messages",
            field="input.messages",
            got="no such field",
            expected="messages",
            do="mend the example",
        )
    before = messages_of(given["messages"], "input.messages")
    chosen, rejected = (
        messages_of(field_of(record, name), name)
        for name in ("preferred_output", "non_preferred_output")
    )
    refuse_unknown(record, ("input", "preferred_output", "non_preferred_output", *_SCORES))
    return _halves(before, chosen, rejected, given, repairs, place="input.tools")


def _alpaca(record: Mapping[str, Any], repairs: Collection[Repair]) -> Pair:
    before = alpaca_prompt(record)
    chosen, rejected = (
        [(name, _answer(text_of(field_of(record, name), name), name))]
        for name in ("chosen", "rejected")
    )
    refuse_unknown(record, (*ALPACA_PROMPT, "chosen", "rejected", *_SCORES))
    return _halves(before, chosen, rejected, _with_typed_tools(record), repairs)


def _sharegpt(record: Mapping[str, Any], repairs: Collection[Repair]) -> Pair:
    """Read LLaMA-Factory's format: a conversation, and two messages that may follow it."""
    keys, before = _turns(record, ("chosen", "rejected", *_SCORES))
    chosen, rejected = (
        [(name, message_of(field_of(record, name), name, *keys))] for name in ("chosen", "rejected")
    )
    before = [*system_of(record), *before]
    return _halves(before, chosen, rejected, _with_typed_tools(record), repairs)


def _with_typed_tools(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record of LLaMA-Factory's with its tools as templates expect them."""
    return {**record, "tools": with_types(tools_of(record.get("tools")))}


def _turns(
    record: Mapping[str, Any], beside: Sequence[str]
) -> tuple[tuple[str, str], list[Placed]]:
    """Return the names of role and content in a record's messages, and the messages. Raises
    UnusableError for a field that is neither these, nor ``beside`` them, nor rendered with them."""
    name = "conversations" if "conversations" in record or "messages" not in record else "messages"
    turns = field_of(record, name)
    refuse_unknown(record, (name, *beside, *CONTEXT))
    first = turns[0] if isinstance(turns, list) and turns else None
    by_role = isinstance(first, dict) and "role" in first
    keys = ("role", "content") if by_role or name == "messages" else ("from", "value")
    return keys, messages_of(turns, name, *keys)


def _completion_label(record: Mapping[str, Any], repairs: Collection[Repair]) -> Unpaired:
    """Read TRL's unpaired preferences and LLaMA-Factory's KTO files."""
    label = _label(record)
    if "prompt" in record or "completion" in record:
        return Unpaired(_prompt_completion(record, repairs), label)
    if "instruction" in record:
        before = alpaca_prompt(record)
        answer = _answer(text_of(field_of(record, "output"), "output"), "output")
        refuse_unknown(record, (*ALPACA_PROMPT, "output", *_LABELS))
        completion = _one(before, [("output", answer)], _with_typed_tools(record), repairs)
        return Unpaired(completion, label)
    keys, placed = _turns(record, _LABELS)
    if placed[-1][1]["role"] != ASSISTANT:
        raise UnusableError(
            "no answer at the end",
            field=placed[-1][0],
            got=f"a last message of role {placed[-1][1]['role']}",
            expected=ASSISTANT,
            do="add the answer that was judged",
        )
    before = [*system_of(record), *placed[:-1]]
    given = _with_typed_tools(record) if keys[0] == "from" else record
    return Unpaired(_one(before, placed[-1:], given, repairs), label)


def _prompt_completion(record: Mapping[str, Any], repairs: Collection[Repair]) -> Completion:
    prompt = field_of(record, "prompt")
    completion = field_of(record, "completion")
    if isinstance(prompt, list) != isinstance(completion, list):
        raise UnusableError(
            "halves differ in kind",
            field="prompt",
            got=f"prompt a JSON {json_type(prompt)}, completion a JSON {json_type(completion)}",
            expected="both text or both messages",
            do="mend the example",
        )
    if isinstance(prompt, list):
        refuse_unknown(record, ("prompt", "completion", *_LABELS, *CONTEXT))
        before = [*system_of(record), *messages_of(prompt, "prompt")]
        return _one(before, messages_of(completion, "completion"), record, repairs)
    refuse_beside_text(record, (*CONTEXT, "history"), "prompt and completion")
    refuse_unknown(record, ("prompt", "completion", *_LABELS))
    text = filled(text_of(completion, "completion"), "completion")
    return Completion(Passage(text_of(prompt, "prompt"), text))


def _label(record: Mapping[str, Any]) -> bool:
    if "label" in record and "kto_tag" in record:
        raise UnusableError(
            "two labels",
            field="label",
            got="label and kto_tag",
            expected="one of them",
            do="remove one",
        )
    if "chosen" in record or "rejected" in record:
        raise UnusableError(
            "a pair with a label",
            field="chosen" if "chosen" in record else "rejected",
            got="a pair in a file of single completions",
            expected="completion and label",
            do="put pairs into a file of their own",
        )
    name = "kto_tag" if "kto_tag" in record else "label"
    label = field_of(record, name)
    if not isinstance(label, bool):
        raise UnusableError(
            "label is no boolean",
            field=name,
            got=f"{label!r:.40}, a JSON {json_type(label)}",
            expected="true (good) or false (bad)",
            do="mend the example",
        )
    return label


def _answer(text: str, name: str) -> dict[str, Any]:
    return {"role": ASSISTANT, "content": filled(text, name)}


def _halves(
    before: Sequence[Placed],
    chosen: Sequence[Placed],
    rejected: Sequence[Placed],
    record: Mapping[str, Any],
    repairs: Collection[Repair],
    place: str = "tools",
) -> Pair:
    return Pair(
        _one(before, chosen, record, repairs, place), _one(before, rejected, record, repairs, place)
    )


def _one(
    before: Sequence[Placed],
    completion: Sequence[Placed],
    record: Mapping[str, Any],
    repairs: Collection[Repair],
    place: str = "tools",
) -> Completion:
    """Make a completion of messages. Only the prompt is repaired: the completion was judged as it
    is."""
    wanted = [repair for repair in repairs if repair != "drop-unanswered-end"]
    mended, done = repaired(before, wanted)
    where, first = completion[0]
    if not any(message["role"] not in INSTRUCTIONS for _, message in mended):
        raise UnusableError(
            "no prompt",
            field=where,
            got="an answer without a question",
            expected="a prompt that ends with a user's or a tool's message",
            do="add the prompt",
        )
    if first["role"] != ASSISTANT:
        raise UnusableError(
            "completion is no answer",
            field=where,
            got=f"a message of role {first['role']}",
            expected=ASSISTANT,
            do="move what is no answer into the prompt",
        )
    for place_of, message in mended:
        if message.get(LOSS_MARK):
            raise UnusableError(
                "a prompt that is marked as learned",
                field=place_of,
                got="a mark that says that the message is learned",
                expected="completions alone to be learned",
                do="remove the mark, or give --ignore-keys with its name",
            )
    tools = tools_of(record.get("tools"), place)
    variables = variables_of(record)
    whole = checked([*mended, *completion], completion[-1][0], tools, (), variables)
    return Completion(replace(whole, repairs=done), len(mended))


def _refuse_label(record: Mapping[str, Any]) -> None:
    """Refuse a label beside a pair, whose halves are already good and bad: its meaning is
    unknown."""
    name = next((name for name in ("kto_tag", "label") if name in record), None)
    if name is not None and (name == "kto_tag" or isinstance(record[name], bool)):
        raise UnusableError(
            "a pair with a label",
            field=name,
            got="a label beside chosen and rejected",
            expected="either a pair or a completion with a label",
            do="remove the field",
        )


def _refuse_contradiction(record: Mapping[str, Any]) -> None:
    """Refuse a rejected half with the higher score: the halves are swapped, or the scores are."""
    scores = [record.get(name) for name in ("score_chosen", "score_rejected")]
    for name, score in zip(("score_chosen", "score_rejected"), scores, strict=True):
        if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
            raise wrong_kind("score is no number", name, score, "a number")
    chosen, rejected = scores
    if chosen is not None and rejected is not None and chosen < rejected:
        raise UnusableError(
            "scores contradict the pair",
            field="score_chosen",
            got=f"{chosen}, less than score_rejected, {rejected}",
            expected="chosen to have the higher score",
            do="swap the halves, or remove the scores",
        )


_READERS: Mapping[str, Callable[[Mapping[str, Any], Collection[Repair]], Preference]] = (
    MappingProxyType(
        {
            "trl": _trl,
            "openai": _openai,
            "alpaca": _alpaca,
            "sharegpt": _sharegpt,
            "ultrafeedback": _ultrafeedback,
            "completion_label": _completion_label,
        }
    )
)
