"""Encodes texts with a ``tokenizer.json`` word by word. The ids are those of the whole text, for
the two kinds of tokenizer that LLaMA models have.

The first kind is an exported sentencepiece model (see ``words``): its spaces are escaped by a
normalizer, or by a pre-tokenizer (Metaspace). The second is LLaMA 3's: it cuts a text by a regular
expression (``tiktoken.SPLIT``) and encodes what lies between two cuts by itself, so a word may be
any run of such parts. Two cuts can be found without that expression, from the characters around
them:

- Before a space that follows a printed ASCII character. No alternative of the expression takes a
  space anywhere but in front of something else, or among white space, and none looks across it.
- Behind a newline which only spaces separate from a printed ASCII character. The alternative that
  takes that newline takes all of the white space up to it and ends there, since alternatives with
  newlines are tried before those with other white space, which look ahead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from megatron_llama.tokenizer.export import SPACE
from megatron_llama.tokenizer.library import encode_many
from megatron_llama.tokenizer.tiktoken import SPLIT
from megatron_llama.tokenizer.words import SPLIT_WORD, Words, word_pattern

_BYTES = frozenset(f"<0x{high}{low}>" for high, low in product("0123456789ABCDEF", repeat=2))
_REPLACE = MappingProxyType({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
_PREPEND = MappingProxyType({"type": "Prepend", "prepend": SPACE})
_BYTE_LEVEL = MappingProxyType({"type": "ByteLevel", "add_prefix_space": False, "use_regex": False})
_SPACED = re.compile(f"{SPACE}?[^{SPACE}]+|{SPACE}")
"""The words of a pre-tokenizer that splits before each escaped space."""
_SPLIT = MappingProxyType(
    {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
)


class HFWords:
    """Encodes texts with the ids of ``encode_many``: word by word those that spell no added token,
    and with the library the others."""

    def __init__(self, tokenizer: Tokenizer, words: Words) -> None:
        self._tokenizer = tokenizer
        self._words = words
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        self._added = re.compile("|".join(map(re.escape, added)) if added else r"(?!)")

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Return the packed ids of each text."""
        spelt = [self._added.search(text) is not None for text in texts]
        whole = iter(
            encode_many(
                self._tokenizer, [text for text, has in zip(texts, spelt, strict=True) if has]
            )
        )
        by_word = iter(
            self._words.encode([text for text, has in zip(texts, spelt, strict=True) if not has])
        )
        return [next(whole if has else by_word) for has in spelt]


def hf_words(tokenizer: Tokenizer) -> HFWords | None:
    """Return the word by word encoder of a tokenizer, or None unless words of it are known to be
    independent."""
    if not isinstance(tokenizer.model, BPE) or tokenizer.model.dropout is not None:
        return None
    # Only this part is serialized: the whole of LLaMA 3's tokenizer takes half a second to be
    # written and read.
    steps = (
        json.loads(tokenizer.pre_tokenizer.__getstate__())
        if tokenizer.pre_tokenizer is not None
        else None
    )
    if steps is None or steps["type"] == "Metaspace":
        words = _sentencepiece_words(json.loads(tokenizer.to_str()))
        return None if words is None else HFWords(tokenizer, words)
    parts = steps["pretokenizers"] if steps["type"] == "Sequence" else []
    # trim_offsets only changes positions in the text.
    known = [{key: part[key] for key in part if key != "trim_offsets"} for part in parts]
    if tokenizer.normalizer is not None or known != [_SPLIT, _BYTE_LEVEL]:
        return None
    return HFWords(tokenizer, Words(SPLIT_WORD, partial(encode_many, tokenizer)))


def _sentencepiece_words(content: Mapping[str, Any]) -> Words | None:
    """Return the words of a model whose spaces are escaped, and that joins nothing to a space
    behind it or gets each word by itself; None for another one."""
    model = content["model"]
    joins = content["model"]["merges"]
    escape = _escape(content["normalizer"], content["pre_tokenizer"])
    added = "".join(token["content"] for token in content["added_tokens"])
    if escape is None or " " in added or SPACE in added:
        return None
    bare = partial(
        encode_many,
        Tokenizer.from_str(json.dumps({**content, "normalizer": None, "pre_tokenizer": None})),
    )
    if content["pre_tokenizer"] is not None and content["pre_tokenizer"]["split"]:
        return Words(_SPACED, bare, escape)
    plain = (
        model["byte_fallback"] and not model["ignore_merges"] and model["vocab"].keys() >= _BYTES
    )
    plain = plain and not model["continuing_subword_prefix"] and not model["end_of_word_suffix"]
    if not plain or any(
        left in _BYTES or right in _BYTES or left[-1] != SPACE == right[0] for left, right in joins
    ):
        return None
    return Words(word_pattern(SPACE, (left + right for left, right in joins)), bare, escape)


def _escape(
    normalizer: Mapping[str, Any] | None, steps: Mapping[str, Any] | None
) -> Callable[[str], str] | None:
    """Return the function that escapes the spaces of a text as the normalizer or pre-tokenizer
    does; None where these do something else as well."""
    if steps is not None:
        if normalizer is not None or steps["replacement"] != SPACE:
            return None
        # Without added tokens a text is one part: "first" and "always" mean the same.
        return partial(_metaspaced, steps["prepend_scheme"] != "never")
    normalizer = normalizer or {}
    parts = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    return (
        partial(_escaped, SPACE if _PREPEND in parts else "")
        if parts in ([_REPLACE], [_PREPEND, _REPLACE])
        else None
    )


def _escaped(prefix: str, text: str) -> str:
    return prefix + text.replace(" ", SPACE)


def _metaspaced(prepends: bool, text: str) -> str:
    """Escape spaces as Metaspace does, which adds no second space in front."""
    escaped = text.replace(" ", SPACE)
    return SPACE + escaped if prepends and not escaped.startswith(SPACE) else escaped
