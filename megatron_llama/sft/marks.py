"""What a file says of the messages that are learned, compared with what --loss-on counts."""

from __future__ import annotations

from itertools import compress
from typing import Literal

from megatron_llama.sft.formats import ASSISTANT, Conversation
from megatron_llama.sft.problems import UnusableError

LossOn = Literal["assistant", "last", "all"]


def is_counted(example: Conversation, index: int, loss_on: LossOn) -> bool:
    """Return whether the loss counts the message of an index, by the option and by its mark."""
    marked = example.learned and example.learned[index] is False
    return _is_counted_unmarked(example, index, loss_on) and not marked


def _is_counted_unmarked(example: Conversation, index: int, loss_on: LossOn) -> bool:
    if loss_on == "all":
        return True
    if example.messages[index]["role"] != ASSISTANT or index < example.prompt_messages:
        return False
    return loss_on == "assistant" or index == len(example.messages) - 1


def refuse_contradictions(example: Conversation, loss_on: LossOn) -> None:
    """Raise UnusableError for a message that is marked as one to learn where the loss does not
    count it, and if all that the loss would count is marked as not to be learned."""
    if not example.learned:
        return
    counted = [
        _is_counted_unmarked(example, index, loss_on) for index in range(len(example.messages))
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
