"""HuggingFace ``tokenizer.json`` files: the tokenizers of LLaMA 3, and exported sentencepiece
models."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from megatron_llama.errors import DataError
from megatron_llama.tokenizer.base import Tokenizer
from megatron_llama.tokenizer.files import replace_file
from megatron_llama.tokenizer.hf_words import HFWords, hf_words
from megatron_llama.tokenizer.library import encode_many
from megatron_llama.tokenizer.settings import CONFIG, files_beside, read_settings, special_tokens

BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>")
EOS_NAMES = ("</s>", "<|end_of_text|>", "<|eot_id|>", "<|endoftext|>", "<eos>")


class HFTokenizer:
    """A ``tokenizer.json``. Ids are those of ``AutoTokenizer`` with ``add_special_tokens=False``: a
    special token that a text spells becomes that token.

    Begin and end tokens are those of the settings beside the file, or else the first well-known
    name in the vocabulary.
    """

    def __init__(self, path: str | Path) -> None:
        """Load the file. Raises DataError if it is damaged."""
        self.path = Path(path)
        try:
            self._content = self.path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self._content)
        except Exception as error:  # `tokenizers` raises bare Exception
            raise DataError(
                path,
                got=error,
                expected="a HuggingFace tokenizer.json",
                do="restore the file or give a tokenizer.model",
            ) from error
        # A file may carry padding or truncation from the batch it was saved after; neither belongs
        # in a corpus.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        _keep_spaces_in_places(self._tokenizer.post_processor)
        self.vocab_size: int = (
            max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        self.base_vocab_size: int = (
            max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) + 1
        )
        self._named = special_tokens(read_settings(self.path))
        self.bos_id = self._special("bos_token", BOS_NAMES)
        self.eos_id = self._special("eos_token", EOS_NAMES)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    @cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """The ids that ``encode_prompt`` puts before and behind those of a text."""
        # Some texts have no token of their own, and then nothing says which ids are in front.
        probes = ("a", *self._tokenizer.get_vocab())
        encodings = (self._tokenizer.encode(text) for text in probes)
        encoding = next((found for found in encodings if 0 in found.sequence_ids), None)
        if encoding is None:
            return [], []
        first = encoding.sequence_ids.index(0)
        behind = encoding.sequence_ids[::-1].index(0)
        return encoding.ids[:first], encoding.ids[len(encoding.ids) - behind :]

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        return (
            self._words.encode(texts)
            if self._words is not None
            else encode_many(self._tokenizer, texts)
        )

    @cached_property
    def _words(self) -> HFWords | None:
        """The same ids in less time, or None where the tokenizer does not allow it."""
        return hf_words(self._tokenizer)

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of ``encode``, and for each the characters [start, stop) of the text that
        it stands for."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def identity(self) -> list[Any]:
        """Return everything that the ids of a text, and the places of its special tokens, depend
        on, for JSON."""
        digest = hashlib.sha256(self._content).hexdigest()
        return [digest, self.special_names(), self.bos_id, self.eos_id]

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
        """The special tokens as text: what a text must not spell if it is to have none of them."""
        return [
            token.content
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.special
        ]

    def token(self, id: int) -> str | None:
        spelt: str | None = self._tokenizer.id_to_token(id)
        return spelt

    def special_names(self) -> dict[str, str]:
        """Return ``bos_token`` and the like with the tokens that they name: those of the
        configuration, or else those that were found in the vocabulary."""
        found = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        return {
            name: token
            for name, id in found.items()
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

    def _special(self, field: str, names: Sequence[str]) -> int | None:
        """Return the id of the configured token, or else of the first of ``names`` in the
        vocabulary, or else None."""
        token = self._named.get(field)
        if token is None:
            return next(
                (id for name in names if (id := self._tokenizer.token_to_id(name)) is not None),
                None,
            )
        id = self._tokenizer.token_to_id(token)
        if id is None:
            raise DataError(
                f"{self.path.with_name(CONFIG)}: {field}",
                got=repr(token),
                expected="a token of tokenizer.json",
                do="restore the two files as a pair",
            )
        return int(id)


def _keep_spaces_in_places(processor: Any) -> None:
    """Let the place of a token contain its spaces, which some post-processors trim off.

    A token of nothing but spaces would else stand where the next one begins: of a header's last
    space nobody could tell that it is no part of the answer behind it."""
    parts = processor if isinstance(processor, processors.Sequence) else [processor]
    for part in parts:
        if hasattr(part, "trim_offsets"):
            part.trim_offsets = False


def as_hf_tokenizer(tokenizer: Tokenizer) -> HFTokenizer:
    """Return the tokenizer that reads special tokens in a text, with the ids of an export: the same
    one, or its twin. Raises DataError if it has none."""
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_hf(folder)
        return HFTokenizer(Path(folder) / "tokenizer.json")
