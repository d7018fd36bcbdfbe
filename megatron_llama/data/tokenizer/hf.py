"""HuggingFace ``tokenizer.json`` files: the tokenizers of LLaMA 3, and exported sentencepiece
models."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from megatron_llama.data.tokenizer.base import Token, Tokenizer
from megatron_llama.data.tokenizer.files import read_tokenizer_file
from megatron_llama.data.tokenizer.hf_words import HFWords, hf_words
from megatron_llama.data.tokenizer.library import encode_many, foreign_reader
from megatron_llama.data.tokenizer.settings import (
    CONFIG,
    denies,
    files_beside,
    read_settings,
    special_tokens,
    tokens_to_add,
)
from megatron_llama.errors import DataError
from megatron_llama.files import replace_file

BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>")
EOS_NAMES = ("</s>", "<|end_of_text|>", "<|eot_id|>", "<|endoftext|>", "<eos>")


class HFTokenizer:
    """A ``tokenizer.json``. Ids are those of ``AutoTokenizer`` with ``add_special_tokens=False``: a
    special token that a text spells becomes that token.

    Tokens that only the settings beside the file name are added, as in ``AutoTokenizer``. Begin and
    end tokens are those of the settings, or else the special token with the first well-known name.
    A token of this name that is not special is text: ``<s>`` and ``</s>`` are words of Qwen's.
    """

    def __init__(self, path: str | Path) -> None:
        """Load the file. Raises DataError if it is damaged."""
        self.path = Path(path)
        do = "restore the file or give a tokenizer.model"
        self._content = read_tokenizer_file(self.path, do=do)
        with foreign_reader(self.path, expected="a HuggingFace tokenizer.json", do=do):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self._content)
        # A file may carry padding or truncation from the batch it was saved after; neither belongs
        # in a corpus.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        _keep_spaces_in_places(self._tokenizer.post_processor)
        settings = read_settings(self.path)
        self._added = self._add_tokens(settings)
        self.vocab_size: int = (
            max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        self.base_vocab_size: int = (
            max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) + 1
        )
        self._named = special_tokens(settings)
        self.bos_id = self._special("bos_token", BOS_NAMES, settings)
        self.eos_id = self._special("eos_token", EOS_NAMES, settings)

    def encode(self, text: str) -> list[int]:
        with self._library():
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        with self._library():
            ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    @cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """Ids that ``encode_prompt`` puts before and behind those of a text."""
        # Some texts have no token of their own: then the ids in front cannot be told apart.
        probes = ("a", *self._tokenizer.get_vocab())
        encodings = (self._tokenizer.encode(text) for text in probes)
        encoding = next((encoding for encoding in encodings if 0 in encoding.sequence_ids), None)
        if encoding is None:
            return [], []
        first = encoding.sequence_ids.index(0)
        behind = encoding.sequence_ids[::-1].index(0)
        return encoding.ids[:first], encoding.ids[len(encoding.ids) - behind :]

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        with self._library():
            return (
                self._words.encode(texts)
                if self._words is not None
                else encode_many(self._tokenizer, texts)
            )

    def encode_long(self, text: str) -> Iterator[bytes]:
        with self._library():
            if self._words is not None:
                yield from self._words.encode_long(text)
            else:
                yield from encode_many(self._tokenizer, [text])

    @cached_property
    def _words(self) -> HFWords | None:
        """An encoder with the same ids in less time, or None if the tokenizer allows none."""
        return hf_words(self._tokenizer)

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of ``encode``, and for each the characters [start, stop) of the text that
        it stands for."""
        with self._library():
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def identity(self) -> list[Any]:
        """Return, for JSON, all that determines the ids of a text and the places of its special
        tokens."""
        digest = hashlib.sha256(self._content).hexdigest()
        known = [digest, self.special_names(), self.bos_id, self.eos_id]
        return [*known, [repr(token) for token in self._added]] if self._added else known

    @property
    def prefix_id(self) -> int | None:
        """The token behind which the first one of a text is scored: the begin token, or else the
        end token. As in transformers, there is a begin token if the settings name one; without
        settings a well-known one counts."""
        if self._named and "bos_token" not in self._named:
            return self.eos_id
        return self.eos_id if self.bos_id is None else self.bos_id

    @property
    def special_texts(self) -> list[str]:
        """Special tokens as text. A text that is to have none of them must not spell them."""
        return [
            token.content
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.special
        ]

    @property
    def added_texts(self) -> list[str]:
        """Tokens that were added to the learnt vocabulary, as text. A text that spells one of them
        has that token, special or not."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def token(self, id: int) -> str | None:
        spelt: str | None = self._tokenizer.id_to_token(id)
        return spelt

    def special_names(self) -> dict[str, str]:
        """Return ``bos_token`` and the like with the tokens that they name: those of the
        configuration, or else those that were found in the vocabulary."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        return {
            name: token
            for name, id in ids.items()
            if id is not None and (token := self.token(id)) is not None
        } | self._named

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def save_hf(self, folder: str | Path) -> None:
        """Write tokenizer.json as it was loaded, and copy the files beside it that belong to it
        (configuration, special tokens, chat template, end tokens)."""
        files = {**files_beside(self.path), "tokenizer.json": self._content}
        for name, content in files.items():
            replace_file(Path(folder) / name, content)

    def tokens(self) -> list[Token]:
        special = frozenset(self.special_texts)
        texts = map(self.token, range(self.vocab_size))
        return [Token(text, text in special) for text in texts]

    def _library(self) -> AbstractContextManager[None]:
        """A section that runs the library. A file may have an expression that tries without end,
        which the library gives up: that becomes a DataError."""
        expected = "a tokenizer.json that can encode every text"
        return foreign_reader(self.path, expected=expected, do="restore the file")

    def _add_tokens(self, settings: Mapping[str, Any]) -> list[AddedToken]:
        """Add the tokens that ``AutoTokenizer`` adds, with the next free ids, and return them.
        Raises DataError if the end or begin token is unknown."""
        with self._library():
            known = self._tokenizer.get_vocab(with_added_tokens=True)
        present = [*self._tokenizer.get_added_tokens_decoder().values()]
        added = tokens_to_add(settings, present, self.path)
        listed = {entry["content"] for entry in settings["added_tokens_decoder"].values()}
        for field in ("bos_token", "eos_token"):
            token = special_tokens(settings).get(field)
            if token and token not in known and token not in listed:
                raise DataError(
                    f"{self.path.with_name(CONFIG)}: {field}",
                    got=repr(token),
                    expected="a token of tokenizer.json",
                    do="restore the two files as a pair, or add the token with transformers, "
                    "save the tokenizer again and give --resize-embeddings",
                )
        with self._library():
            self._tokenizer.add_tokens(added)
        return added

    def _special(self, field: str, names: Sequence[str], settings: Mapping[str, Any]) -> int | None:
        """Return the id of the token that the settings name, None if they say that there is none,
        and otherwise the id of the first of ``names`` that is a special token."""
        if denies(settings, field):
            return None
        if field in self._named:
            return self._id(self._named[field])
        special = frozenset(self.special_texts)
        text = next((name for name in names if name in special), None)
        return None if text is None else self._id(text)

    def _id(self, text: str) -> int | None:
        id: int | None = self._tokenizer.token_to_id(text)
        return id


def _keep_spaces_in_places(processor: Any) -> None:
    """Let the place of a token contain its spaces, which some post-processors trim off.

    Otherwise a token of spaces alone would stand where the next token begins, and the last space of
    a header would count as part of the answer behind it."""
    steps: Any = processor if isinstance(processor, processors.Sequence) else [processor]
    for step in steps:
        if hasattr(step, "trim_offsets"):
            step.trim_offsets = False


def as_hf_tokenizer(tokenizer: Tokenizer) -> HFTokenizer:
    """Return a tokenizer that reads special tokens in a text, with the ids of an export: the same
    one, or its twin. Raises DataError if it has none."""
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_hf(folder)
        return HFTokenizer(Path(folder) / "tokenizer.json")
