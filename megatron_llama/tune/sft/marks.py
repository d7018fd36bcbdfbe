"""A file's marks of learned messages, compared with --loss-on."""

from __future__ import annotations

from itertools import compress
from typing import Literal

from megatron_llama.tune.sft.formats import ASSISTANT, Conversation
from megatron_llama.tune.sft.problems import UnusableError

LossOn = Literal["assistant", "last", "all"]


def counted_messages(example: Conversation, loss_on: LossOn) -> list[bool]:
    """Return whether --loss-on counts each message, whatever its mark."""
    if loss_on == "all":
        return [True] * len(example.messages)
    answers = [
        message["role"] == ASSISTANT and index not in example.answers_in_prompt
        for index, message in enumerate(example.messages)
    ]
    return answers if loss_on == "assistant" else [*[False] * (len(answers) - 1), answers[-1]]


def refuse_contradictions(example: Conversation, loss_on: LossOn) -> None:
    """Raise UnusableError for a message that is marked to be learned but not in the loss, and if
    all messages in the loss are marked as not to be learned."""
    if not example.learned:
        return
    counted = counted_messages(example, loss_on)
    for place, learned, counts in zip(example.places, example.learned, counted, strict=True):
        if learned and not counts:
            raise UnusableError(
                "a mark that contradicts --loss-on",
                field=place,
                got="a mark that says that the message is learned",
                expected=f"marks of what --loss-on {loss_on} counts",
                do="remove the mark, or give another --loss-on, or --ignore-keys with its name",
            )
    if example.unlearned.issuperset(compress(range(len(counted)), counted)):
        what = {"all": "message", "assistant": "answer", "last": "last answer"}[loss_on]
        raise UnusableError(
            f"every {what} is marked as not learned",
            got=f"{len(example.unlearned)} marked messages",
            expected=f"one {what} or more to learn (--loss-on {loss_on})",
            do="leave the example out, or give --ignore-keys with the name of the mark",
        )
