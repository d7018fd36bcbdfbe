"""The tokenizers of the tests of conversations."""

from __future__ import annotations

from tests.tune.sft.conftest import chat, llama2, llama3, texts

__all__ = ["chat", "llama2", "llama3", "texts"]
