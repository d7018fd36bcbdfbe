"""Sentencepiece models: the tokenizers of LLaMA 1 and 2, and those that ``train_tokenizer``
makes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, pre_tokenizers, processors

from megatron_llama.data.tokenizer.base import Token
from megatron_llama.data.tokenizer.export import SPACE, SPECIAL, hf_tokenizer, special_token
from megatron_llama.data.tokenizer.files import read_json_object, read_tokenizer_file, to_json
from megatron_llama.data.tokenizer.library import foreign_reader
from megatron_llama.data.tokenizer.proto import parse_model
from megatron_llama.data.tokenizer.settings import (
    CONFIG,
    denies,
    files_beside,
    read_settings,
    require_listed_ids,
    special_tokens,
    tokens_to_add,
)
from megatron_llama.data.tokenizer.words import Words, encode_pieces, sentencepiece_words, splits
from megatron_llama.errors import DataError, describe
from megatron_llama.files import replace_file

FIRST_FREE_ID = 3 + 256  # unknown, begin, end, and one piece per byte


class SentencePieceTokenizer:
    """A ``.model`` file. Ids are sentencepiece's own, so a literal ``</s>`` in a text stays text;
    only ``encode_prompt`` reads it as the token.

    Begin and end tokens, and tokens that were added behind the model's, are those of the settings
    beside the file.

    ``decode(encode(text)) == text`` holds for models with identity normalization, except that
    sentencepiece spells a space as U+2581 and so gives a literal U+2581 back as a space.
    """

    def __init__(self, path: str | Path) -> None:
        """Load the file. Raises DataError if it is damaged."""
        self.path = Path(path)
        do = "give the path of a tokenizer.model"
        self._model = read_tokenizer_file(self.path, do=do)
        with foreign_reader(self.path, expected="a sentencepiece model", do=do):
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self._model)
        self._settings = read_settings(self.path)
        self._parsed = parse_model(self._model, str(self.path))
        self._pieces = self._parsed.pieces
        self.base_vocab_size: int = self._processor.get_piece_size()
        special = [piece.text for piece in self._pieces if piece.type in SPECIAL]
        self._to_add = tokens_to_add(self._settings, [*map(special_token, special)], self.path)
        """Tokens behind the model's that ``AutoTokenizer`` adds, and pieces that are special."""
        pieces = frozenset(piece.text for piece in self._pieces)
        self._added = [token for token in self._to_add if token.content not in pieces]
        self._ids_behind = {
            token.content: id for id, token in enumerate(self._added, self.base_vocab_size)
        }
        require_listed_ids(self._settings, self._ids_behind, self.path)
        self.vocab_size = self.base_vocab_size + len(self._added)
        self.bos_id = self._named("bos_token", self._processor.bos_id())
        self.eos_id = self._named("eos_token", self._processor.eos_id())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        ids: list[int] = self._twin.encode(text).ids
        return ids

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        if self._words is not None:
            return self._words.encode(texts)
        return encode_pieces(self._processor, texts)

    def encode_long(self, text: str) -> Iterator[bytes]:
        if self._words is not None:
            return self._words.encode_long(text)
        return iter(encode_pieces(self._processor, [text]))

    def tokens(self) -> list[Token]:
        return [
            *(Token(piece.text, piece.type in SPECIAL) for piece in self._pieces),
            *(Token(token.content, token.special) for token in self._added),
        ]

    @cached_property
    def _words(self) -> Words | None:
        """An encoder with the same ids in less time, or None if the model allows none."""
        model = self._parsed
        return sentencepiece_words(self._model, model) if splits(model) else None

    @cached_property
    def _twin(self) -> Tokenizer:
        """The tokenizer that ``transformers`` makes of the file and its settings. Raises DataError
        if there is no such tokenizer."""
        model = self._parsed
        twin = hf_tokenizer(model, str(self.path), None)
        if self._settings.get("legacy") is False and model.add_dummy_prefix:
            # Then no word begins behind a special token: "[INST]" behind "<s>" has no space.
            twin.normalizer = None
            twin.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
        twin.add_tokens(self._to_add)
        bos = self._piece(self.bos_id) if self._settings.get("add_bos_token", True) else None
        eos = self._piece(self.eos_id) if self._settings.get("add_eos_token", False) else None
        in_front = [] if bos is None else [bos]
        behind = [] if eos is None else [eos]
        single = [*in_front, "$A", *behind]
        second = [f"{text}:1" for text in (*in_front, "$B", *behind)]
        twin.post_processor = processors.TemplateProcessing(
            single=" ".join(single),
            pair=" ".join([*single, *second]),
            special_tokens=[(text, twin.token_to_id(text)) for text in {*in_front, *behind}],
        )
        return twin

    def decode(self, ids: Sequence[int]) -> str:
        if self._added and any(id >= self.base_vocab_size for id in ids):
            added: str = self._twin.decode(list(ids), skip_special_tokens=True)
            return added
        text: str = self._processor.decode(list(ids))
        return text

    def token(self, id: int) -> str | None:
        if not 0 <= id < self.vocab_size:
            return None
        behind = id - self.base_vocab_size
        return str(self._added[behind].content if behind >= 0 else self._processor.id_to_piece(id))

    def save_hf(self, folder: str | Path) -> None:
        """Write tokenizer.model, tokenizer.json and tokenizer_config.json, and copy the other files
        beside the model that belong to it. Raises DataError if there is no such tokenizer.json."""
        folder = Path(folder)
        own = self.path.with_name(CONFIG)
        given = read_json_object(own) if own.is_file() else {}
        config = {
            "bos_token": self._piece(self.bos_id),
            "eos_token": self._piece(self.eos_id),
            "unk_token": self._piece(_known(self._processor.unk_id())),
            "add_bos_token": self.bos_id is not None,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            **{name: value for name, value in given.items() if name != "auto_map"},
            # Other classes make their own tokenizer from the vocabulary in tokenizer.json.
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        files = {
            **files_beside(self.path),
            "tokenizer.model": self._model,
            "tokenizer.json": self._twin.to_str().encode(),
            CONFIG: to_json(config),
        }
        for name, content in files.items():
            replace_file(folder / name, content)

    def _named(self, field: str, own: int) -> int | None:
        """Return the id of the token that the settings name, None if they say that there is none,
        and otherwise the model's own."""
        if denies(self._settings, field):
            return None
        text = special_tokens(self._settings).get(field)
        if text is None:
            return _known(own)
        listed = [entry["content"] for entry in self._settings["added_tokens_decoder"].values()]
        if text in listed and text in self._ids_behind:
            return self._ids_behind[text]
        id: int = self._processor.piece_to_id(text)
        if self._processor.id_to_piece(id) != text:
            raise DataError(
                f"{self.path.with_name(CONFIG)}: {field}",
                got=repr(text),
                expected=f"a token of {self.path.name}",
                do="restore the two files as a pair, or add the token with transformers, "
                "save the tokenizer again and give --resize-embeddings",
            )
        return id

    def _piece(self, id: int | None) -> str | None:
        return None if id is None else self.token(id)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, path: str | Path
) -> SentencePieceTokenizer:
    """Train a BPE as LLaMA's, with byte fallback and exactly ``vocab_size`` pieces, and write it to
    ``path`` (a ``.model`` file).

    Pieces 0, 1, 2 are ``<unk>``, ``<s>``, ``</s>``. Digits stand alone, a newline is its byte
    piece, and text is not normalized. The same texts give the same pieces. Raises DataError if the
    texts are too few for ``vocab_size``.
    """
    if vocab_size <= FIRST_FREE_ID:
        expected = f"more than {FIRST_FREE_ID} (three special pieces and one per byte)"
        raise DataError("vocab_size", got=vocab_size, expected=expected, do="raise --vocab-size")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=0.99995,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=2**30,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(_training_problem(str(error), vocab_size)) from error
    replace_file(Path(path), model.getvalue())
    return SentencePieceTokenizer(path)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from filter(None, text.split("\n"))


def _training_problem(error: str, vocab_size: int) -> str:
    where = "training a tokenizer"
    if most := re.search(r"too high .*<= (\d+)", error):
        got = f"too little text for vocab_size {vocab_size}"
        expected = f"a vocab_size of at most {most[1]} for this text"
        return describe(
            where, got=got, expected=expected, do="lower --vocab-size or give more text"
        )
    if least := re.search(r"required_chars\. \d+ vs (\d+)", error):
        got = f"more distinct characters than vocab_size {vocab_size} holds"
        return describe(
            where,
            got=got,
            expected=f"a vocab_size of at least {least[1]} for this text",
            do="raise --vocab-size",
        )
    if "sentences_.empty()" in error:
        return describe(
            where, got="no text", expected="at least one line of text", do="check the input files"
        )
    return describe(
        where,
        got=f"a sentencepiece error ({error})",
        expected="a trained model",
        do="check the text and --vocab-size",
    )


def _known(id: int) -> int | None:
    """Return None for -1, sentencepiece's id of a token that the model lacks."""
    return id if id >= 0 else None
