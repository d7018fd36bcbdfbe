"""A prompt of real text that is long enough to reveal a wrong rotary scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.checkpoint.model_folders.formats import ModelReader
from megatron_llama.config.schema import ModelConfig
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.data.tokenizer.load import USUAL_NAMES, load_tokenizer
from megatron_llama.errors import DataError
from megatron_llama.model.rope import ORIGINAL

BEYOND = 64
"""Tokens behind the context that a rotary scaling stretches, or that a window reaches: there a
wrong one shows."""
PLAIN = 128
"""Tokens of a prompt if no scaling stretches a context."""


@dataclass(frozen=True)
class Prompt:
    """Token ids [s] of a text, and the kind of text that they are made of."""

    tokens: Tensor
    made_of: str


def telling_context(models: Sequence[ModelConfig]) -> int:
    """Return the length up to which a prompt shows no rotary scaling, window or chunk of the
    models; 0 if they have none. A window as long as the longest sequence never shows."""
    lengths = [0]
    for model in models:
        scaling = model.rope_scaling or {}
        longest = model.max_position_embeddings
        lengths.append(int(scaling.get(ORIGINAL, 0)))
        if scaling.get("rope_type") == "dynamic":
            lengths.append(longest)
        lengths += [
            size for size in (model.sliding_window, model.attention_chunk_size) if size < longest
        ]
    return max(lengths)


def make_prompt(
    sources: Sequence[ModelReader], vocab_size: int, length: int, texts: Callable[[], Iterable[str]]
) -> Prompt:
    """Return ``length`` tokens of the texts, which begin again if they are too short. The tokens
    are those of the first tokenizer beside the sources that fits the vocabulary, or else one for
    each byte."""
    tokenizer = next(filter(None, (_tokenizer(source, vocab_size) for source in sources)), None)
    ids: list[int] = []
    while len(ids) < length:
        for text in texts():
            ids += (
                tokenizer.encode(text)
                if tokenizer is not None
                else [byte % vocab_size for byte in text.encode()]
            )
            if len(ids) >= length:
                break
    made_of = "text" if tokenizer is not None else "the bytes of a text, for want of a tokenizer"
    return Prompt(torch.tensor(ids[:length]), made_of)


def _tokenizer(source: ModelReader, vocab_size: int) -> Tokenizer | None:
    for path in sorted(path for path in source.tokenizer_files if path.name in USUAL_NAMES):
        try:
            tokenizer = load_tokenizer(path)
        except DataError:  # a damaged tokenizer is no difference between models
            continue
        if tokenizer.vocab_size <= vocab_size:
            return tokenizer
    return None
