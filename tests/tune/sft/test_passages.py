"""Examples without a template: what the tokenizer itself puts around a text, and the end token."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.formats import Passage
from transformers import AutoTokenizer

from tests.data.tokenizer.layouts import LAYOUTS


@pytest.mark.parametrize("name", LAYOUTS)
def test_ids_are_those_of_transformers_and_the_end_token(name: str, layouts: Path) -> None:
    """A tokenizer without an end token ends with what it adds itself, if it adds any."""
    auto, chat = AutoTokenizer.from_pretrained(layouts / name), ChatTokenizer(load_tokenizer(layouts / name))
    ids = auto("A statement is a line.")["input_ids"]
    end = [] if auto.eos_token_id is None else [auto.eos_token_id]
    text = chat.read(Passage("", "A statement is a line."), "assistant")
    assert text.ids == [*ids, *end] and all(text.loss_mask[1:])
    pair = chat.read(Passage("A statement is", " a line."), "assistant")
    known = len(auto("A statement is")["input_ids"]) - (name == "wordpiece")  # whose prompt alone has the end too
    assert pair.ids == text.ids and pair.loss_mask == [False] * known + [True] * (len(text.ids) - known)
    assert all(chat.read(Passage("A statement is", " a line."), "all").loss_mask)
