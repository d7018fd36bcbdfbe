"""Files of ranks, the format of tiktoken: the ``tokenizer.model`` of LLaMA 3 and LLaMA 4, a line
for each token, base64 and rank.

The ``tokenizers`` library runs it. tiktoken joins the neighbours whose joint token has the lowest
rank; a byte-level BPE with every split of every token as a merge, in the order of ranks, does the
same. Where tiktoken is installed it encodes many texts at once: the ids are the same, in less time.

The file has neither the expression that cuts a text nor the special tokens. Both follow from the
ranks, and are unknown for ranks that are not LLaMA's.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from megatron_llama.data.tokenizer.base import Token
from megatron_llama.data.tokenizer.files import read_json_object, read_tokenizer_file, to_json
from megatron_llama.data.tokenizer.library import encode_many
from megatron_llama.data.tokenizer.packed import pack
from megatron_llama.data.tokenizer.words import (
    SPLIT_WORD,
    Cut,
    Words,
    cut_pieces,
    no_cut,
    space_cut,
    split_cut,
)
from megatron_llama.errors import DataError, describe, listing
from megatron_llama.files import replace_file

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Expression by which LLaMA 3 cuts a text before it looks for tokens. It is part of the format,
though it is not in the file."""
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
NAMED: Mapping[str, Mapping[int, str]] = MappingProxyType(
    {
        "3": MappingProxyType(
            {0: BOS, 1: EOS, 6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "<|eot_id|>"}
        ),
        "3.1": MappingProxyType(
            {
                **{
                    0: BOS,
                    1: EOS,
                    4: "<|finetune_right_pad_id|>",
                    6: "<|start_header_id|>",
                    7: "<|end_header_id|>",
                },
                **{8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>"},
            }
        ),
    }
)
"""Special tokens with a name, by version of LLaMA 3. The others are numbered."""
SPECIAL_TOKENS: Mapping[str, int] = MappingProxyType({"3": 256, "3.1": 256, "4": 2048})
"""Number of special tokens behind the vocabulary of each LLaMA."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_4 = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _CONTRACTIONS
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Expression of LLaMA 4: a word in capitals ends before the next one."""
SPLIT_TEKKEN = SPLIT_4.replace(_CONTRACTIONS, "").replace("{1,3}", "")
"""Expression of Mistral's tekken."""
CUTS: Mapping[str, Cut] = MappingProxyType(
    {
        SPLIT: split_cut,
        SPLIT.replace("{1,3}", ""): split_cut,  # Qwen's
        SPLIT_TEKKEN: split_cut,
        # A word includes its contraction, which an apostrophe begins.
        SPLIT_4: space_cut,
    }
)
"""Functions that cut a long text, by the expression that cuts it into words."""
LLAMA = MappingProxyType(
    {
        "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": "3",
        "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed": "4",
    }
)
"""LLaMA to which ranks belong, by the SHA-256 of their lines."""
_SHOWN = 10
_USUAL = 25_000
_LONGEST = 400_000
_RUN = re.compile(rf"\S{{{_USUAL}}}|\s{{{_USUAL}}}")
"""Runs of characters with or without white space that are too long for tiktoken, which also fails
on huge texts. Meta's own reader cuts texts at these lengths."""


@dataclass(frozen=True)
class Ranks:
    """The parts of a tokenizer of ranks."""

    tokens: Sequence[bytes]
    """Tokens in the order of their ranks."""
    special: Sequence[str]
    """Special tokens in the order of their ids."""
    split: str
    """Expression that cuts a text before tokens are searched."""
    bos: str
    eos: str
    special_first: bool = False
    """Whether the special tokens come before the others, or behind them."""

    @property
    def first_token(self) -> int:
        """Id of the first token that is not special."""
        return len(self.special) if self.special_first else 0

    @property
    def first_special(self) -> int:
        """Id of the first special token."""
        return 0 if self.special_first else len(self.tokens)


class TiktokenTokenizer:
    """A ``.model`` file of ranks. Ids are tiktoken's own, so a literal ``<|eot_id|>`` in a text
    stays text.

    The file is the same for every LLaMA 3. Its special tokens have the names of LLaMA 3.1 and
    later, unless a ``params.json`` beside it is LLaMA 3's (no ``use_scaled_rope``); ids and number
    are the same for both. Ranks that are not Meta's are those of a LLaMA if the ``vocab_size`` of
    that ``params.json`` says so.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._content = read_tokenizer_file(self.path, do="give the path of a tokenizer.model")
        ranks = self.read_ranks()
        self._ranks = ranks
        self.vocab_size: int = len(ranks.tokens) + len(ranks.special)
        self.base_vocab_size = self.vocab_size
        self.bos_id: int | None = ranks.first_special + ranks.special.index(ranks.bos)
        self.eos_id: int | None = ranks.first_special + ranks.special.index(ranks.eos)

    def read_ranks(self) -> Ranks:
        """Return the ranks in the file. Raises DataError."""
        tokens = parse_ranks(self._content, str(self.path))
        version = version_of(self.path, tokens)
        split = SPLIT_4 if version == "4" else SPLIT
        return Ranks(tokens, special_tokens(version), split, BOS, EOS)

    @cached_property
    def _twin(self) -> Tokenizer:
        """The twin in the ``tokenizers`` library, which takes more than a second to make."""
        return hf_tokenizer(self._ranks)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """A twin for which special tokens in a text stay text."""
        twin = hf_tokenizer(self._ranks)
        twin.encode_special_tokens = True
        return twin

    @cached_property
    def _words(self) -> Words | None:
        """An encoder with the same ids in less time, or None if words may not be independent."""
        if self._ranks.split != SPLIT:
            return None
        return Words(SPLIT_WORD, partial(encode_many, self._tokenizer), split_cut)

    @cached_property
    def _library(self) -> Any:
        """Encoding of tiktoken, or None if tiktoken is not installed."""
        try:
            import tiktoken
        except ImportError:
            return None
        ids = {token: id for id, token in enumerate(self._ranks.tokens, self._ranks.first_token)}
        return tiktoken.Encoding(
            self.path.name, pat_str=self._ranks.split, mergeable_ranks=ids, special_tokens={}
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        ids: list[int] = self._twin.encode(text).ids
        return ids

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        if self._library is None:
            return self._encode_alone(texts)
        return [
            pack(self._library.encode_ordinary(text))
            if _is_usual(text)
            else self._encode_alone([text])[0]
            for text in texts
        ]

    def encode_long(self, text: str) -> Iterator[bytes]:
        if self._words is not None:
            yield from self._words.encode_long(text)
            return
        for piece in cut_pieces(text, CUTS.get(self._ranks.split, no_cut)):
            yield from encode_many(self._tokenizer, [piece])

    def _encode_alone(self, texts: Sequence[str]) -> list[bytes]:
        """Return the packed ids of each text, encoded without tiktoken."""
        words = self._words
        return encode_many(self._tokenizer, texts) if words is None else words.encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._twin.decode(list(ids), skip_special_tokens=True)
        return text

    def token(self, id: int) -> str | None:
        spelt: str | None = self._twin.id_to_token(id)
        return spelt

    def tokens(self) -> list[Token]:
        ranks = self._ranks
        characters = dict(enumerate(byte_characters()))
        usual = [
            Token(token.decode("latin-1").translate(characters), False) for token in ranks.tokens
        ]
        special = [Token(text, True) for text in ranks.special]
        return [*special, *usual] if ranks.special_first else [*usual, *special]

    def save_hf(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json, and a .model file as it is."""
        folder = Path(folder)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self._ranks.bos,
            "eos_token": self._ranks.eos,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        }
        self.save_beside(folder)
        replace_file(folder / "tokenizer.json", self._twin.to_str().encode())
        replace_file(folder / "tokenizer_config.json", to_json(config))

    def save_beside(self, folder: Path) -> None:
        """Write the file itself beside tokenizer.json."""
        replace_file(folder / "tokenizer.model", self._content)


def _is_usual(text: str) -> bool:
    return len(text) < _USUAL or (len(text) <= _LONGEST and _RUN.search(text) is None)


def parse_ranks(content: bytes, name: str) -> list[bytes]:
    """Return the tokens in the order of their ranks; ``name`` is for messages. Raises DataError
    with all problems, line by line."""
    tokens: list[bytes] = []
    seen: set[bytes] = set()
    problems = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            encoded, rank = line.split()
            token = b64decode(encoded, validate=True)
            expected = len(tokens)
            problem = "" if int(rank) == expected else f"rank {int(rank)}, expected {expected}"
        except ValueError as error:
            token = b""
            problem = f"got {line[:40]!r} ({error}), expected a base64 token and its rank"
        if not problem and (not token or token in seen):
            problem = f"token {token!r} again" if token else "an empty token"
        if problem:
            problems.append(f"line {number}: {problem}")
        seen.add(token)
        tokens.append(token)
    problems += [
        f"no token for the byte {byte:#04x}" for byte in range(256) if bytes([byte]) not in seen
    ]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        title = describe(
            name,
            got="damaged content",
            expected="a line for each token, by rank",
            do="copy the file again",
        )
        raise DataError(listing(title, [*problems[:_SHOWN], *more]))
    return tokens


def special_tokens(version: str) -> list[str]:
    """Return the special tokens of LLaMA ``3``, ``3.1`` or ``4``, which follow the vocabulary, in
    the order of their ids."""
    named = _named_4() if version == "4" else NAMED[version]
    numbers = count()
    return [
        named[at] if at in named else f"<|reserved_special_token_{next(numbers)}|>"
        for at in range(SPECIAL_TOKENS[version])
    ]


def _named_4() -> dict[int, str]:
    """Return the special tokens of LLaMA 4 that have a name. Each of their kinds has reserved ones
    of its own."""
    fill_in = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    headers = ["<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>"]
    tools = ["<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"]
    text = _reserved("text_post_train")
    images = _reserved("vision")
    thoughts = _reserved("reasoning")
    names = [BOS, EOS, *fill_in, *headers, *islice(text, 6), *tools]
    # The numbers of two reserved tokens are left out.
    names += [*islice(text, 2, 63)]
    names += ["<|image_start|>", "<|image_end|>", *islice(images, 2)]
    names += ["<|tile_x_separator|>", "<|tile_y_separator|>", *islice(images, 4)]
    names += ["<|image|>", *islice(images, 1), "<|patch|>", *islice(images, 1041)]
    names += [*islice(thoughts, 8), "<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"]
    return dict(enumerate(names))


def _reserved(kind: str) -> Iterator[str]:
    return (f"<|{kind}_reserved_special_token_{number}|>" for number in count())


def hf_tokenizer(ranks: Ranks) -> Tokenizer:
    """Return a tokenizer of the ``tokenizers`` library with the ids of tiktoken. Encoding with
    special tokens puts the begin token in front."""
    table = dict(enumerate(byte_characters()))
    spelt = [token.decode("latin-1").translate(table) for token in ranks.tokens]
    merges = [(spelt[left], spelt[right]) for left, right in _merges(ranks.tokens)]
    vocabulary = {text: id for id, text in enumerate(spelt, ranks.first_token)}
    if ranks.special_first:
        # The library can give ids in front of others only to tokens in the vocabulary.
        vocabulary |= {text: id for id, text in enumerate(ranks.special)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(ranks.split), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ranks.special]
    )
    bos = ranks.bos
    template = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template]
    )
    return tokenizer


def byte_characters() -> tuple[str, ...]:
    """Return the character that stands for each byte in a byte-level vocabulary: the byte's own if
    it can be printed, or else one from U+0100 on (Radford et al., 2019)."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return tuple(chr(byte if byte in printed else next(others)) for byte in range(256))


def _merges(tokens: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield every pair of tokens, as ranks, whose concatenation is a token, in the order of that
    token's rank: tiktoken joins them however they were built."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for token in tokens:
        halves = ((ranks.get(token[:at]), ranks.get(token[at:])) for at in range(1, len(token)))
        yield from sorted(
            (left, right) for left, right in halves if left is not None and right is not None
        )


def version_of(path: Path, tokens: Sequence[bytes]) -> str:
    """Return ``3``, ``3.1`` or ``4``: the LLaMA of the ranks in a file. Raises DataError for other
    ranks, whose expression and special tokens are not known."""
    beside = path.with_name("params.json")
    params = read_json_object(beside) if beside.is_file() else {}
    lines = b"".join(b"%s %d\n" % (b64encode(token), rank) for rank, token in enumerate(tokens))
    known = LLAMA.get(hashlib.sha256(lines).hexdigest())
    size = params.get("vocab_size")
    if known is None and isinstance(size, int):
        numbers = {SPECIAL_TOKENS["3"]: "3", SPECIAL_TOKENS["4"]: "4"}
        known = numbers.get(size - len(tokens))
    if known is None:
        three, four = (len(tokens) + SPECIAL_TOKENS[version] for version in ("3", "4"))
        raise DataError(
            path,
            got=f"a file of {len(tokens)} ranks that are neither LLaMA 3's nor LLaMA 4's",
            expected="theirs: no file says how a text is cut for others, nor their special tokens",
            do="give this model's tokenizer.json; if the ranks are of a LLaMA of your own, say its "
            f'"vocab_size" in a params.json beside them: {three} as LLaMA 3, {four} as LLaMA 4',
        )
    return "3.1" if known == "3" and (not params or params.get("use_scaled_rope")) else known
