"""Sentencepiece BPE word by word: the same ids as for the whole text, and most words are looked up
instead of encoded again.

BPE joins two neighbouring pieces only into a piece of the vocabulary. Where two characters follow
each other that do so in no piece of two or more characters, nothing is ever joined across them, and
what is left and right of them is encoded independently. In a LLaMA model this holds before every
run of spaces (no piece has a space behind another character), and around characters that are in no
longer piece, such as digits and newlines. Words repeat: most of a corpus is a few thousand of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, pairwise

import sentencepiece

from megatron_llama.tokenizer import proto
from megatron_llama.tokenizer.export import SPACE
from megatron_llama.tokenizer.packed import pack
from megatron_llama.tokenizer.proto import SentencePieceModel

KEPT_WORDS = 1 << 18
KEPT_LENGTH = 64
"""Characters: longer words hardly repeat."""
_ALONE = "\n\t0123456789"
"""Characters that are tried for being in no longer piece."""
SPLIT_WORD = re.compile(
    # the usual word, which need not be looked at character by character
    r" *[!-~]+(?:\n+(?= *[!-~])|(?= ))"
    r"|[\s\S]+?(?:(?<=[!-~])(?= )|(?<=\n)(?= *[!-~])|\Z)"
)
"""What a text consists of that LLaMA 3's tokenizer can encode one by one; why is in
``hf_words``."""
_NO_PREFIX = b"\x1a\x02\x18\x00"
"""normalizer_spec { add_dummy_prefix: false }: behind a serialized model it overrides what the
model says, as protocol buffers merge."""


def splits(model: SentencePieceModel) -> bool:
    """Whether words of this model can be encoded one by one: an unnormalized BPE whose pieces have
    spaces only at their beginning."""
    plain = model.model_type == proto.BPE and model.byte_fallback and not model.charsmap
    plain = (
        plain
        and model.escape_whitespaces
        and not model.remove_extra_whitespaces
        and not model.whitespace_as_suffix
    )
    joined = [piece.text for piece in model.pieces if piece.type == proto.NORMAL]
    odd = any(piece.type in (proto.USER_DEFINED, proto.UNUSED) for piece in model.pieces)
    return (
        plain
        and not odd
        and not any(after == SPACE != before for text in joined for before, after in pairwise(text))
    )


def word_pattern(space: str, joined: Iterable[str]) -> re.Pattern[str]:
    """Words of a model that joins nothing to a ``space`` behind it; ``joined``: all its pieces of
    two or more characters."""
    used = set(chain.from_iterable(joined))
    alone = "".join(re.escape(char) for char in _ALONE if char not in used)
    return re.compile(
        f"[{alone}]|{space}*[^{space}{alone}]+|{space}+"
        if alone
        else f"{space}*[^{space}]+|{space}+"
    )


def sentencepiece_words(content: bytes, model: SentencePieceModel) -> Words:
    """For a model that ``splits``. ``content``: of its file."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=content + _NO_PREFIX)
    joined = (
        piece.text for piece in model.pieces if piece.type == proto.NORMAL and len(piece.text) > 1
    )
    prepare = partial(_unescaped, " " if model.add_dummy_prefix else "")
    return Words(word_pattern(" ", joined), partial(encode_pieces, processor), prepare)


def encode_pieces(
    processor: sentencepiece.SentencePieceProcessor, texts: Sequence[str]
) -> list[bytes]:
    """The packed ids of each text, on the calling thread."""
    return list(map(pack, processor.encode(list(texts), num_threads=1)))


def _unescaped(prefix: str, text: str) -> str:
    """A literal U+2581 is a space to sentencepiece."""
    return prefix + text.replace(SPACE, " ")


class Words:
    """Encodes texts whose words can be encoded one by one."""

    def __init__(
        self,
        pattern: re.Pattern[str],
        encode: Callable[[list[str]], Iterable[bytes]],
        prepare: Callable[[str], str] = str,
    ) -> None:
        """``prepare``: what is to be done to a text that is not empty before ``pattern`` finds its
        words, which ``encode`` gets."""
        self._pattern = pattern
        self._encode = encode
        self._prepare = prepare
        self._known: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, packed."""
        words = [self._pattern.findall(self._prepare(text)) if text else [] for text in texts]
        ids = [b""] * len(texts)
        waiting = []
        for at, line in enumerate(words):
            try:
                ids[at] = b"".join(map(self._known.__getitem__, line))
            except KeyError:
                waiting.append(at)
        if waiting:
            self._learn_and_join(words, waiting, ids)
        return ids

    def _learn_and_join(
        self, words: Sequence[Sequence[str]], waiting: Sequence[int], ids: list[bytes]
    ) -> None:
        """Fill in the ids of the texts that have new words."""
        known = self._known
        new = list(set(chain.from_iterable(words[at] for at in waiting)) - known.keys())
        known.update(zip(new, self._encode(new), strict=True))
        for at in waiting:
            ids[at] = b"".join(map(known.__getitem__, words[at]))
        for word in new:
            if len(word) > KEPT_LENGTH:
                del known[word]
        if len(known) > KEPT_WORDS:
            known.clear()
