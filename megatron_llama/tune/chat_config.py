"""The options of ``chat``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChatConfig:
    """Talk with a trained model: a line is a message, and /help lists the commands."""

    system: str | None = None
    """The system message in front of the conversation."""
    chat_template: str | None = None
    """File with the jinja template of a conversation. Default: the one in the tokenizer's
    folder."""
