"""Tells whether two tokenizers give text the same ids, whatever their files.

A dataset keeps a fingerprint of its tokenizer: two hashes, one of the tokens by id and one of the
ids of a probe text. Tokens alone do not determine the order of merges, nor the normalization of
text. If both tokenizers are at hand, ``difference`` names their first difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.data.tokenizer.packed import unpack
from megatron_llama.errors import DataError

VERSION = 1
"""Version, to be raised when PROBE or the hashes change: older fingerprints then mean nothing."""
PROBE = (
    "The quick brown fox jumps over the lazy dog, and it's 12,345.678 kilometres from 1999 on!",
    "one  two   three    four     five\ttab\t\ttabs\n\nlines\r\n    indented\n\n\n  end",
    "def f(x, *args): return {'a': [x**2 - 1e-9, 0xFF], \"b\": x != y or not z}  # comment\n",
    "UPPER lower Title camelCase snake_case kebab-case I'LL you're it\u2019s \u201cquoted\u201d",
    "Größe, señor, œuvre, naïve café e\u0301, İstanbul, Ελληνικά, русский язык, עברית, العربية",
    "हिन्दी, ไทย, 中文分词\uff0c日本語テキスト。한국어 문장 \ufb01 \u2460 \uff46\uff55\u3000",
    "😀👍🏽 \u00a0 \u200b \u2026 \u2014 \u00bd \U00010348 internationalization antidisestablish",
    "aaaaaaa ====== ------ 0000000 !!!??? ...",
)
"""Text that tokenizers treat differently: several scripts, digits, runs of spaces, newlines, code.
No line begins with a space: for some LLaMA 2 tokenizers (``legacy: false``) transformers makes one
space less of it than sentencepiece, though the files belong together."""
SHOWN = 12


@dataclass(frozen=True)
class Fingerprint:
    """Two hashes that are equal if two tokenizers give the same ids."""

    tokens: str
    """Hash of the tokens, in the order of their ids."""
    probe: str
    """Hash of the ids of PROBE."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> Self:
        """Return the fingerprint of a tokenizer, as if it had only the first ``size`` tokens."""
        tokens = hashlib.sha256()
        for token in tokenizer.tokens()[:size]:
            text = b"" if token.text is None else token.text.encode("utf-8", "surrogatepass")
            tokens.update(len(text).to_bytes(4, "little") + text)
        probe = hashlib.sha256(repr(_probe_ids(tokenizer)).encode())
        return cls(tokens.hexdigest(), probe.hexdigest())

    def entry(self) -> dict[str, Any]:
        """Return the fingerprint as JSON keeps it."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def read(cls, entry: object) -> Self | None:
        """Return the fingerprint of an ``entry``; None without one, or of another version."""
        if not isinstance(entry, Mapping) or entry.get("version") != VERSION:
            return None
        return cls(str(entry.get("tokens")), str(entry.get("probe")))


def difference(here: Tokenizer, there: Tokenizer) -> str:
    """Return the first difference between the ids of two tokenizers, in the words of an error
    (``token 17 is 'the' here, 'de' there``). It is empty if they have the same ids, or if one of
    them only has more tokens behind those of the other.

    Special tokens may have other names: a text does not contain them."""
    for id, (ours, theirs) in enumerate(zip(here.tokens(), there.tokens(), strict=False)):
        if ours.text != theirs.text and not (ours.special and theirs.special):
            return f"token {id} is {ours.text!r} here, {theirs.text!r} there"
    for line, our_ids, their_ids in zip(PROBE, _probe_ids(here), _probe_ids(there), strict=True):
        if our_ids != their_ids:
            left, right = (tokenizer.encode(line) for tokenizer in (here, there))
            pairs = zip(left, right, strict=False)
            at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
            return (
                f"the text {line[:24]!r}... has as its ids, from the {at + 1}th on, "
                f"{left[at : at + SHOWN]} here, {right[at : at + SHOWN]} there"
            )
    return ""


def require_same_ids(
    tokenizer: Tokenizer, own: Tokenizer, *, where: str, owner: object, do: str
) -> None:
    """Raise DataError if a tokenizer, which ``where`` names, gives text other ids than ``own``,
    that of ``owner``."""
    words = difference(tokenizer, own)
    if words:
        got = f"a tokenizer in which {words}"
        raise DataError(where, got=got, expected=f"the ids of {owner}", do=do)


def _probe_ids(tokenizer: Tokenizer) -> Sequence[Sequence[int]]:
    """Return the ids of each line of PROBE, sorted: two implementations of a unigram model may put
    the pieces of a run of one character in different orders."""
    return [sorted(unpack(ids)) for ids in tokenizer.encode_packed(PROBE)]
