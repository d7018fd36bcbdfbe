"""Byte-level BPEs: every text has ids, whatever they have learnt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
"""GPT-2's words."""


def all_bytes() -> Tokenizer:
    """A token for each byte, and no others."""
    return _byte_level(models.BPE(vocab={byte: id for id, byte in enumerate(sorted(WORDS.alphabet()))}, merges=[]), WORDS)


def learnt(
    texts: Iterable[str], size: int, *, words: pre_tokenizers.PreTokenizer = WORDS, special: Sequence[str] = ()
) -> Tokenizer:
    """A vocabulary of ``size`` tokens, the special ones first, then the bytes."""
    tokenizer = _byte_level(models.BPE(), words)
    alphabet = WORDS.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Words by another pattern than GPT-2's."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _byte_level(model: models.BPE, words: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
