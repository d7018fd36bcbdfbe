"""The tokens of --sample-prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_llama.config.schema import Config
from megatron_llama.data.tokenizer.base import Tokenizer, beyond_vocabulary
from megatron_llama.errors import ConfigError

Prompt = Callable[[str], Sequence[int]]
"""A function from a text to the tokens that the model continues."""


def encoded_prompts(
    config: Config, tokenizer: Tokenizer | None, prompt: Prompt | None
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each --sample-prompt; none in a run that prints no continuations.
    ``prompt`` makes them, by default from the plain text.

    Raises ConfigError without a tokenizer, or for a prompt that leaves no room within --seq-length
    or has a token that the model does not have."""
    log = config.log
    if log.sample_interval == 0:
        return ()
    if tokenizer is None:
        do = "give --tokenizer-model"
        raise ConfigError(
            "--sample-interval", got="no tokenizer", expected="one, for the prompts", do=do
        )
    prompts = tuple(tuple((prompt or tokenizer.encode_prompt)(text)) for text in log.sample_prompt)
    do = "change --sample-prompt, or give --resize-embeddings to add rows to trained weights"
    for ids in prompts:
        beyond = beyond_vocabulary(
            "--sample-prompt", ids, config.model.vocab_size, tokenizer, do=do
        )
        if beyond is not None:
            raise ConfigError(beyond)
    longest = max(map(len, prompts)) + log.sample_tokens
    room = config.training.seq_length
    if longest > room or not all(prompts):
        raise ConfigError(
            "--sample-prompt",
            got=f"{longest} tokens with their continuation",
            expected=f"1 to {room}, which is seq_length",
            do="shorten --sample-prompt or lower --sample-tokens",
        )
    return prompts
