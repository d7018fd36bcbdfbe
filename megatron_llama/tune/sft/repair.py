"""Repairs of conversations whose messages are in a wrong order. Each is made only if the user asks
for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from megatron_llama.tune.sft.fields import LOSS_MARKS

Repair = Literal["drop-leading-answers", "merge-repeated-roles", "drop-unanswered-end"]
Placed = tuple[str, Mapping[str, Any]]
"""The place of a message in its example, for errors, and the message."""
INSTRUCTIONS = ("system", "developer")
"""Roles that tell the model how to answer, before the first question. Templates see the role of the
file, as in transformers."""


def repaired(
    messages: Sequence[Placed], wanted: Collection[Repair]
) -> tuple[Sequence[Placed], tuple[Repair, ...]]:
    """Return the messages with the ``wanted`` repairs, and the repairs that have changed
    something."""
    done: list[Repair] = []
    for name, repair in _REPAIRS.items():
        if name in wanted:
            changed = repair(messages)
            if len(changed) < len(messages):
                done.append(name)
            messages = changed
    return messages, tuple(done)


def _without_leading_answers(messages: Sequence[Placed]) -> Sequence[Placed]:
    """Leave out messages before the first question, except instructions."""
    roles = [message["role"] for _, message in messages]
    first = roles.index("user") if "user" in roles else len(roles)
    return [
        placed
        for index, placed in enumerate(messages)
        if index >= first or placed[1]["role"] in INSTRUCTIONS
    ]


def _merged(messages: Sequence[Placed]) -> Sequence[Placed]:
    """Join neighbours of one role by an empty line. Messages with more than a text, such as calls
    of tools, stay apart, and so do empty ones, and neighbours with different marks of learning."""
    merged: list[Placed] = []
    for where, message in messages:
        before = merged[-1][1] if merged else {}
        plain = all(
            turn.keys() - {LOSS_MARKS[0]} == {"role", "content"} and turn["content"].strip()
            for turn in (before, message)
        )
        alike = before.get(LOSS_MARKS[0]) == message.get(LOSS_MARKS[0])
        if plain and alike and before["role"] == message["role"] != "tool":
            text = f"{before['content']}\n\n{message['content']}"
            merged[-1] = (merged[-1][0], {**before, "content": text})
        else:
            merged.append((where, message))
    return merged


def _without_unanswered_end(messages: Sequence[Placed]) -> Sequence[Placed]:
    """Leave out messages after the last answer."""
    answers = [i for i, (_, message) in enumerate(messages) if message["role"] == "assistant"]
    return messages[: answers[-1] + 1] if answers else messages


_REPAIRS: Mapping[Repair, Callable[[Sequence[Placed]], Sequence[Placed]]] = MappingProxyType(
    {
        "drop-leading-answers": _without_leading_answers,
        "merge-repeated-roles": _merged,
        "drop-unanswered-end": _without_unanswered_end,
    }
)
