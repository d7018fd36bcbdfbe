"""Tells whether two tokenizers give text the same ids, whatever files they come from.

A dataset keeps a fingerprint of its tokenizer: two hashes, one of the tokens by id and one of the
ids of a probe text. Tokens alone do not say in which order they are merged, nor how text is
normalized before. Where both tokenizers are at hand, ``difference`` names what differs.
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
"""To be raised when PROBE or the hashes change: then older fingerprints say nothing."""
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
"""Several scripts, digits, runs of spaces, newlines, code: what tokenizers treat differently. No
line begins with a space, of which transformers makes one less than sentencepiece for some LLaMA 2
tokenizers (``legacy: false``), though the files belong together."""
SHOWN = 12


@dataclass(frozen=True)
class Fingerprint:
    """Two hashes that are equal where two tokenizers give the same ids."""

    tokens: str
    """The hash of the tokens, in the order of their ids."""
    probe: str
    """The hash of the ids of PROBE."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> Self:
        """Return the fingerprint of a tokenizer, as if it had the first ``size`` tokens alone."""
        tokens = hashlib.sha256()
        for token in tokenizer.tokens()[:size]:
            text = b"" if token.text is None else token.text.encode("utf-8", "surrogatepass")
            tokens.update(len(text).to_bytes(4, "little") + text)
        probe = hashlib.sha256(repr(_probe_ids(tokenizer)).encode())
        return cls(tokens.hexdigest(), probe.hexdigest())

    def entry(self) -> dict[str, Any]:
        """Return it as JSON keeps it."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def read(cls, entry: object) -> Self | None:
        """Return what ``entry`` wrote; None for nothing, and for what another version wrote."""
        if not isinstance(entry, Mapping) or entry.get("version") != VERSION:
            return None
        return cls(str(entry.get("tokens")), str(entry.get("probe")))


def difference(here: Tokenizer, there: Tokenizer) -> str:
    """Return the first difference between the ids of two tokenizers, in the words of an error
    (``token 17 is 'the' here, 'de' there``). It is empty where they have the same ids, or where one
    of them only has more tokens behind those of the other.

    Special tokens may have other names: a text does not contain them."""
    for id, (ours, theirs) in enumerate(zip(here.tokens(), there.tokens(), strict=False)):
        if ours.text != theirs.text and not (ours.special and theirs.special):
            return f"token {id} is {ours.text!r} here, {theirs.text!r} there"
    for line, our_ids, their_ids in zip(PROBE, _probe_ids(here), _probe_ids(there), strict=True):
        if our_ids != their_ids:
            one, other = (tokenizer.encode(line) for tokenizer in (here, there))
            pairs = zip(one, other, strict=False)
            at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
            return (
                f"the text {line[:24]!r}... has as its ids, from the {at + 1}th on, "
                f"{one[at : at + SHOWN]} here, {other[at : at + SHOWN]} there"
            )
    return ""


def require_same_ids(
    tokenizer: Tokenizer, own: Tokenizer, *, where: str, owner: object, do: str
) -> None:
    """Raise DataError if a tokenizer, which ``where`` names, gives text other ids than ``own``,
    that of ``owner``."""
    found = difference(tokenizer, own)
    if found:
        got = f"a tokenizer in which {found}"
        raise DataError(where, got=got, expected=f"the ids of {owner}", do=do)


def _probe_ids(tokenizer: Tokenizer) -> Sequence[Sequence[int]]:
    """Return the ids of each line of PROBE, sorted: two implementations of a unigram model may put
    pieces that make up a run of one character in another order."""
    return [sorted(unpack(ids)) for ids in tokenizer.encode_packed(PROBE)]
