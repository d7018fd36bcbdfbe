"""Encodes text with a sentencepiece BPE word by word. The ids are those of the whole text, but most
words are looked up instead of encoded again.

BPE joins two neighbouring pieces only into a piece of the vocabulary. If two characters follow each
other in no piece, nothing is ever joined across them, and the texts left and right of them are
encoded independently. In a LLaMA model this holds before every run of spaces (no piece has a space
behind another character), and around characters that are in no longer piece, such as digits and
newlines. Words repeat: most of a corpus is a few thousand of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise

import sentencepiece

from megatron_llama.data.tokenizer import proto
from megatron_llama.data.tokenizer.export import SPACE
from megatron_llama.data.tokenizer.packed import pack
from megatron_llama.data.tokenizer.proto import SentencePieceModel

KEPT_WORDS = 1 << 18
"""Number of words that are remembered before all are forgotten."""
KEPT_LENGTH = 64
"""Words of more characters are not remembered: they hardly repeat."""
_ALONE = "\n\t0123456789"
"""Characters that may be in no longer piece; the model tells whether they are in none."""
SPLIT_WORD = re.compile(
    # the usual word, which is not matched character by character
    r" *[!-~]+(?:\n+(?= *[!-~])|(?= ))"
    r"|[\s\S]+?(?:(?<=[!-~])(?= )|(?<=\n)(?= *[!-~])|\Z)"
)
"""Words that LLaMA 3's tokenizer can encode one by one; ``hf_words`` gives the reason."""
PIECE = 1 << 18
"""Characters above which a text is encoded in pieces, each of at least so many. Its words would
take a multiple of the memory of the text, since each is a Python object."""
Cut = Callable[[str, int], int]
"""Returns the first place, from a given one on, at which a text can be cut without changing ids;
the text's end if there is none."""
SPLIT_CUT = re.compile(
    r"(?<=[!-~])(?= )"
    r"|(?<=[A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3])"
    r"(?=[!-/:-@\[-`{-~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
)
"""Places where the expressions of byte-level tokenizers end a word whatever surrounds it, in text
of any kind; ``hf_words`` gives the reason."""
_SPACE_CUT = re.compile("(?<=[!-~])(?= )")
_NO_PREFIX = b"\x1a\x02\x18\x00"
"""The field normalizer_spec { add_dummy_prefix: false }. Appended to a serialized model it
overrides the model's own field, since protocol buffers merge."""


def splits(model: SentencePieceModel) -> bool:
    """Whether words of this model can be encoded one by one: whether it is a BPE that does not
    normalize text, and whose pieces have spaces only at their beginning."""
    plain = (
        model.model_type == proto.BPE
        and model.byte_fallback
        and model.escape_whitespaces
        and not model.charsmap
        and not model.remove_extra_whitespaces
        and not model.whitespace_as_suffix
    )
    odd = any(piece.type in (proto.USER_DEFINED, proto.UNUSED) for piece in model.pieces)
    joined = (piece.text for piece in model.pieces if piece.type == proto.NORMAL)
    pairs = (pair for text in joined for pair in pairwise(text))
    return plain and not odd and not any(after == SPACE != before for before, after in pairs)


def word_pattern(space: str, joined: Iterable[str]) -> re.Pattern[str]:
    """Return the expression of the words of a model that joins nothing to a ``space`` behind it.
    ``joined`` holds all its pieces of two or more characters."""
    used = set(chain.from_iterable(joined))
    alone = "".join(re.escape(char) for char in _ALONE if char not in used)
    single = f"[{alone}]|" if alone else ""
    return re.compile(f"{single}{space}*[^{space}{alone}]+|{space}+")


def sentencepiece_words(content: bytes, model: SentencePieceModel) -> Words:
    """Return the encoder of a model that ``splits``; ``content`` is its file's."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=content + _NO_PREFIX)
    joined = [
        piece.text for piece in model.pieces if piece.type == proto.NORMAL and len(piece.text) > 1
    ]
    prepare = partial(_unescaped, " " if model.add_dummy_prefix else "")
    cut = pair_cut(joined)
    return Words(word_pattern(" ", joined), partial(encode_pieces, processor), cut, prepare)


def pair_cut(joined: Iterable[str]) -> Cut:
    """Return the cut of a model that joins characters only into its pieces: between two characters
    that follow each other in no piece. ``joined`` has all pieces of two or more characters."""
    pairs = {left + right for text in joined for left, right in pairwise(text)}

    def cut(text: str, least: int) -> int:
        for at in range(max(least, 1), len(text)):
            if text[at - 1 : at + 1].replace(" ", SPACE) not in pairs:
                return at
        return len(text)

    return cut


def split_cut(text: str, least: int) -> int:
    """Return the cut of byte-level tokenizers (``SPLIT_CUT``)."""
    match = SPLIT_CUT.search(text, least)
    return len(text) if match is None else match.start()


def space_cut(text: str, least: int) -> int:
    """Return the cut before a space behind a printed ASCII character, where each of these
    expressions ends a word."""
    match = _SPACE_CUT.search(text, least)
    return len(text) if match is None else match.start()


def no_cut(text: str, least: int) -> int:
    """Return the text's end, the cut of tokenizers for which no other place is known."""
    return len(text)


def cut_pieces(text: str, cut: Cut) -> Iterator[str]:
    """Yield a text piece by piece."""
    at = 0
    while len(text) - at > PIECE:
        end = cut(text, at + PIECE)
        yield text[at:end]
        at = end
    if at < len(text):
        yield text[at:]


def encode_pieces(
    processor: sentencepiece.SentencePieceProcessor, texts: Sequence[str]
) -> list[bytes]:
    """Return the packed ids of each text, encoded on the calling thread."""
    return list(map(pack, processor.encode(list(texts), num_threads=1)))


def _unescaped(prefix: str, text: str, first: bool) -> str:
    """Replace a literal U+2581, which is a space to sentencepiece."""
    return (prefix if first else "") + text.replace(SPACE, " ")


def _as_it_is(text: str, first: bool) -> str:
    return text


class Words:
    """Encodes texts whose words can be encoded one by one, and remembers the words."""

    def __init__(
        self,
        pattern: re.Pattern[str],
        encode: Callable[[list[str]], Iterable[bytes]],
        cut: Cut,
        prepare: Callable[[str, bool], str] = _as_it_is,
    ) -> None:
        """``prepare`` is applied to a text that is not empty, or to a piece of it, and gets whether
        that is the first. Then ``pattern`` finds its words, and ``encode`` returns the packed ids
        of the new ones."""
        self._pattern = pattern
        self._encode = encode
        self._cut = cut
        self._prepare = prepare
        self._known: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Return the packed ids of each text."""
        if any(len(text) > PIECE for text in texts):
            return [b"".join(self.encode_long(text)) for text in texts]
        return self._encode_texts(texts, True)

    def encode_long(self, text: str, first: bool = True) -> Iterator[bytes]:
        """Yield the packed ids of a text piece by piece. ``first`` is false for a part of a text
        that began before."""
        for piece in cut_pieces(text, self._cut):
            yield self._encode_texts([piece], first)[0]
            first = False

    def _encode_texts(self, texts: Sequence[str], first: bool) -> list[bytes]:
        words = [
            self._pattern.findall(self._prepare(text, first)) if text else [] for text in texts
        ]
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
