"""LLaMA 3's ``tokenizer.model``, the format of tiktoken: a line for each token, base64 and rank.

The ``tokenizers`` library runs it. tiktoken joins the neighbours whose joint token has the lowest
rank; a byte-level BPE with every split of every token as a merge, in the order of ranks, does the
same. Where tiktoken is installed it encodes many texts at once: the ids are the same, in less time.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from megatron_llama.errors import DataError, describe, listing
from megatron_llama.tokenizer.files import read_json_object, replace_file, to_json
from megatron_llama.tokenizer.library import encode_many
from megatron_llama.tokenizer.packed import pack
from megatron_llama.tokenizer.words import SPLIT_WORD, Words, split_cut

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The expression by which LLaMA 3 cuts a text before it looks for tokens. It is part of the format,
though the file does not hold it."""
SPECIAL_TOKENS = 256
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
"""The special tokens that have a name, by version of LLaMA. The others are numbered."""
_SHOWN = 10
_USUAL = 25_000
_LONGEST = 400_000
_RUN = re.compile(rf"\S{{{_USUAL}}}|\s{{{_USUAL}}}")
"""tiktoken fails on long runs of characters with or without white space, and on huge texts. Meta's
own reader cuts texts at these lengths."""


class TiktokenTokenizer:
    """A ``.model`` file of ranks. Ids are tiktoken's own, so a literal ``<|eot_id|>`` in a text
    stays text.

    The file is the same for every LLaMA 3. Its special tokens have the names of LLaMA 3.1 and
    later, unless a ``params.json`` beside it is LLaMA 3's (no ``use_scaled_rope``); ids and number
    are the same for both.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._model = self.path.read_bytes()
        except OSError as error:
            raise DataError(
                path,
                got=error,
                expected="a tokenizer.model",
                do="give the path of a tokenizer.model",
            ) from error
        self._tokens = parse_ranks(self._model, str(path))
        self.vocab_size: int = len(self._tokens) + SPECIAL_TOKENS
        self.base_vocab_size = self.vocab_size
        self.bos_id: int | None = len(self._tokens)
        self.eos_id: int | None = len(self._tokens) + 1

    @cached_property
    def _twin(self) -> Tokenizer:
        """The twin in the ``tokenizers`` library, which takes more than a second to make."""
        return hf_tokenizer(self._tokens, special_tokens(version_of(self.path)))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """A twin for which special tokens in a text stay text."""
        twin = hf_tokenizer(self._tokens, special_tokens(version_of(self.path)))
        twin.encode_special_tokens = True
        return twin

    @cached_property
    def _words(self) -> Words:
        return Words(SPLIT_WORD, partial(encode_many, self._tokenizer), split_cut)

    @cached_property
    def _library(self) -> Any:
        """tiktoken's encoding, or None where tiktoken is not installed."""
        try:
            import tiktoken
        except ImportError:
            return None
        ranks = {token: rank for rank, token in enumerate(self._tokens)}
        return tiktoken.Encoding(
            self.path.name, pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={}
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        ids: list[int] = self._twin.encode(text).ids
        return ids

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        if self._library is None:
            return self._words.encode(texts)
        return [
            pack(self._library.encode_ordinary(text))
            if _is_usual(text)
            else self._words.encode([text])[0]
            for text in texts
        ]

    def encode_long(self, text: str) -> Iterator[bytes]:
        return self._words.encode_long(text)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._twin.decode(list(ids), skip_special_tokens=True)
        return text

    def token(self, id: int) -> str | None:
        spelt: str | None = self._twin.id_to_token(id)
        return spelt

    def save_hf(self, folder: str | Path) -> None:
        """Write tokenizer.model, tokenizer.json and tokenizer_config.json."""
        folder = Path(folder)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        }
        replace_file(folder / "tokenizer.model", self._model)
        replace_file(folder / "tokenizer.json", self._twin.to_str().encode())
        replace_file(folder / "tokenizer_config.json", to_json(config))


def _is_usual(text: str) -> bool:
    return len(text) < _USUAL or (len(text) <= _LONGEST and _RUN.search(text) is None)


def parse_ranks(content: bytes, name: str) -> list[bytes]:
    """Return the tokens in the order of their ranks; ``name`` is for messages. Raises DataError
    with what is wrong, line by line."""
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
    """Return the 256 special tokens of LLaMA ``3`` or ``3.1``, which follow the vocabulary, in the
    order of their ids."""
    named = NAMED[version]
    numbers = count()
    return [
        named[at] if at in named else f"<|reserved_special_token_{next(numbers)}|>"
        for at in range(SPECIAL_TOKENS)
    ]


def hf_tokenizer(tokens: Sequence[bytes], special: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of the ``tokenizers`` library with the ids of tiktoken. Encoding with
    special tokens puts the first of them in front."""
    table = dict(enumerate(byte_characters()))
    spelt = [token.decode("latin-1").translate(table) for token in tokens]
    merges = [(spelt[left], spelt[right]) for left, right in _merges(tokens)]
    bpe = models.BPE(
        vocab={text: rank for rank, text in enumerate(spelt)}, merges=merges, ignore_merges=True
    )
    tokenizer = Tokenizer(bpe)
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
    )
    bos = special[0]
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
    """Return the character that stands for each byte in a byte-level vocabulary: the byte's own
    where that can be printed, or else one from U+0100 on (Radford et al., 2019)."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return tuple(chr(byte if byte in printed else next(others)) for byte in range(256))


def _merges(tokens: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield every pair of tokens, as ranks, whose concatenation is a token, in the order of that
    token's rank: tiktoken does not ask how the parts were built."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for token in tokens:
        halves = ((ranks.get(token[:at]), ranks.get(token[at:])) for at in range(1, len(token)))
        yield from sorted(
            (left, right) for left, right in halves if left is not None and right is not None
        )


def version_of(path: Path) -> str:
    """Return ``3`` or ``3.1``: the LLaMA whose names the special tokens of a file have."""
    params = path.with_name("params.json")
    return (
        "3" if params.is_file() and not read_json_object(params).get("use_scaled_rope") else "3.1"
    )
