"""Encodes texts with a ``tokenizer.json`` word by word. The ids are those of the whole text, for
the two kinds of tokenizer that LLaMA models have.

The first kind is an exported sentencepiece model (see ``words``): its spaces are escaped by a
normalizer, or by a pre-tokenizer (Metaspace). The second is LLaMA 3's: it cuts a text by a regular
expression (``tiktoken.SPLIT``) and encodes each part between two cuts by itself, so a word may be
any run of such parts. Two cuts can be found without that expression, from the characters around
them:

- Before a space that follows a printed ASCII character. No alternative of the expression takes a
  space anywhere but in front of something else, or among white space, and none looks across it.
- Behind a newline which only spaces separate from a printed ASCII character. The alternative that
  takes that newline takes all of the white space up to it and ends there, since alternatives with
  newlines are tried before those with other white space, which look ahead.

A long text is cut into pieces as well. For that the expressions of GPT-2, Qwen and Mistral's tekken
are known, too. All of them take a space only in front of something else or among white space, and a
run of letters to its end. So a piece may end before a space behind a printed ASCII character, and
between a letter and a mark of punctuation. NFC, with which some of them begin, joins nothing to
such a space or mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from megatron_llama.data.tokenizer.export import SPACE
from megatron_llama.data.tokenizer.library import encode_many
from megatron_llama.data.tokenizer.tiktoken import CUTS, SPLIT
from megatron_llama.data.tokenizer.words import (
    PIECE,
    SPLIT_WORD,
    Cut,
    Words,
    cut_pieces,
    pair_cut,
    split_cut,
    word_pattern,
)

_BYTES = frozenset(f"<0x{high}{low}>" for high, low in product("0123456789ABCDEF", repeat=2))
_REPLACE = MappingProxyType({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
_PREPEND = MappingProxyType({"type": "Prepend", "prepend": SPACE})
_BYTE_LEVEL = MappingProxyType({"type": "ByteLevel", "add_prefix_space": False, "use_regex": False})
_SPACED = re.compile(f"{SPACE}?[^{SPACE}]+|{SPACE}")
"""Words of a pre-tokenizer that splits before each escaped space."""
_SPLIT = MappingProxyType(
    {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
)

_GPT2 = MappingProxyType({**_BYTE_LEVEL, "use_regex": True})
_DIGITS = MappingProxyType({"type": "Digits", "individual_digits": True})
_NFC = MappingProxyType({"type": "NFC"})


class HFWords:
    """Encodes texts with the ids of ``encode_many``: a text without an added token word by word,
    any other with the library. Long texts are encoded piece by piece."""

    def __init__(self, tokenizer: Tokenizer, words: Words | None, cut: Cut) -> None:
        """Without ``words`` the library encodes all texts. ``cut`` is the tokenizer's, for text
        without added tokens."""
        self._tokenizer = tokenizer
        self._words = words
        self._cut = cut
        added = [*tokenizer.get_added_tokens_decoder().values()]
        # Of several tokens that begin at one character the library takes the longest.
        self._contents = sorted((token.content for token in added), key=len, reverse=True)
        self._added = re.compile(
            "|".join(map(re.escape, self._contents)) if self._contents else r"(?!)"
        )
        self._plain = not any(
            token.lstrip
            or token.rstrip
            or token.single_word
            or (token.normalized and tokenizer.normalizer is not None)
            for token in added
        )
        """Whether an added token is found wherever it is spelt, and takes nothing around it."""

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Return the packed ids of each text."""
        if any(len(text) > PIECE for text in texts):
            return [b"".join(self.encode_long(text)) for text in texts]
        if self._words is None:
            return encode_many(self._tokenizer, texts)
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

    def encode_long(self, text: str) -> Iterator[bytes]:
        """Yield the packed ids of a text piece by piece. An added token, with some text behind it,
        is encoded by the library, which begins a part of the text there; the rest by words."""
        if not self._plain and self._added.search(text) is not None:
            yield from encode_many(self._tokenizer, [text])
            return
        at = 0
        while (match := self._added.search(text, at)) is not None:
            yield from self._without_added(text[at : match.start()], at == 0)
            at = self._cut_beside_added(text, match.end() + _BEHIND_ADDED)
            yield from encode_many(self._tokenizer, [text[match.start() : at]])
        yield from self._without_added(text[at:] if at else text, at == 0)

    def _without_added(self, text: str, first: bool) -> Iterator[bytes]:
        if self._words is not None:
            yield from self._words.encode_long(text, first)
            return
        for piece in cut_pieces(text, self._cut):
            yield from encode_many(self._tokenizer, [piece])

    def _cut_beside_added(self, text: str, least: int) -> int:
        """Return the first cut from ``least`` on that touches no added token."""
        most = len(self._contents[0])
        while (at := self._cut(text, least)) < len(text):
            around = text[max(0, at - most) : at + most]
            place = min(at, most)
            if not any(
                around.find(content, max(0, place - len(content)), place + len(content)) >= 0
                for content in self._contents
            ):
                return at
            least = at + 1
        return len(text)


_BEHIND_ADDED = 1 << 10
"""Characters behind an added token that the library gets with it, at least, if there are so
many."""


def hf_words(tokenizer: Tokenizer) -> HFWords | None:
    """Return the word by word encoder of a tokenizer, or None unless its words are known to be
    independent."""
    if not isinstance(tokenizer.model, BPE) or tokenizer.model.dropout is not None:
        return None
    # Only this part is serialized: writing and reading the whole of LLaMA 3's tokenizer takes half
    # a second.
    steps = (
        json.loads(tokenizer.pre_tokenizer.__getstate__())
        if tokenizer.pre_tokenizer is not None
        else None
    )
    if steps is None or steps["type"] == "Metaspace":
        words_and_cut = _sentencepiece_words(json.loads(tokenizer.to_str()))
        return None if words_and_cut is None else HFWords(tokenizer, *words_and_cut)
    entries = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    # trim_offsets only changes positions in the text.
    known = [{key: entry[key] for key in entry if key != "trim_offsets"} for entry in entries]
    normalizer = (
        json.loads(tokenizer.normalizer.__getstate__())
        if tokenizer.normalizer is not None
        else None
    )
    if normalizer is None and known == [_SPLIT, _BYTE_LEVEL]:
        words = Words(SPLIT_WORD, partial(encode_many, tokenizer), split_cut)
        return HFWords(tokenizer, words, split_cut)
    if normalizer in (None, _NFC):
        if known in ([_GPT2], [_DIGITS, _GPT2]):
            return HFWords(tokenizer, None, split_cut)
        for split, cut in CUTS.items():
            if known == [{**_SPLIT, "pattern": {"Regex": split}}, _BYTE_LEVEL]:
                return HFWords(tokenizer, None, cut)
    return None


def _sentencepiece_words(content: Mapping[str, Any]) -> tuple[Words, Cut] | None:
    """Return the words and the cut of a model whose spaces are escaped, and that joins nothing to a
    space behind it or gets each word by itself; None for another model."""
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
        return Words(_SPACED, bare, _cut_at_space, escape), _cut_at_space
    plain = (
        model["byte_fallback"] and not model["ignore_merges"] and model["vocab"].keys() >= _BYTES
    )
    plain = plain and not model["continuing_subword_prefix"] and not model["end_of_word_suffix"]
    if not plain or any(
        left in _BYTES or right in _BYTES or left[-1] != SPACE == right[0] for left, right in joins
    ):
        return None
    joined = [left + right for left, right in joins]
    cut = pair_cut(joined)
    return Words(word_pattern(SPACE, joined), bare, cut, escape), cut


def _cut_at_space(text: str, least: int) -> int:
    match = re.compile(f"[ {SPACE}]").search(text, least)
    return len(text) if match is None else match.start()


def _escape(
    normalizer: Mapping[str, Any] | None, steps: Mapping[str, Any] | None
) -> Callable[[str, bool], str] | None:
    """Return the function that escapes the spaces of a text as the normalizer or pre-tokenizer
    does; None if these do more than that."""
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


def _escaped(prefix: str, text: str, first: bool) -> str:
    return (prefix if first else "") + text.replace(" ", SPACE)


def _metaspaced(prepends: bool, text: str, first: bool) -> str:
    """Escape spaces as Metaspace does, which adds no second space in front."""
    escaped = text.replace(" ", SPACE)
    return SPACE + escaped if first and prepends and not escaped.startswith(SPACE) else escaped
