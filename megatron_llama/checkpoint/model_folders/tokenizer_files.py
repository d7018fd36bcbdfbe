"""Files that go with a model whatever its format: tokenizer, chat template, generation config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_llama.checkpoint.carried import GENERATION, read_generation
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.folders import sync, write_synced
from megatron_llama.config.limits import LARGEST_TOKENIZER_FILE
from megatron_llama.config.model_files import is_there, read_model_file
from megatron_llama.config.schema import ModelConfig
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.data.tokenizer.load import USUAL_NAMES, load_tokenizer, require_named
from megatron_llama.data.tokenizer.settings import (
    CONFIG,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    template_files,
)
from megatron_llama.errors import CheckpointError, DataError
from megatron_llama.model.hf import TOKEN_IDS

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "generation_config.json",
)
TEMPLATES = (TEMPLATE_FILE, TEMPLATE_FOLDER)
"""File and folder with the chat templates of a tokenizer."""


def tokenizer_files_of(*folders: Path) -> tuple[Path, ...]:
    """Return the files of the first folder that holds any of them."""
    for folder in folders:
        try:
            names = [*TOKENIZER_FILES, *template_files(folder)]
        except DataError as error:
            raise CheckpointError(str(error)) from error
        present = tuple(folder / name for name in names if is_there(folder / name))
        if present:
            return present
    return ()


def copy_tokenizer_files(files: Sequence[Path], folder: Path) -> None:
    """Copy the files into the folder and sync them. Raises CheckpointError, also for a file that
    ``read_model_file`` does not open, since the copies may be published."""
    for path in files:
        content = read_model_file(path, limit=LARGEST_TOKENIZER_FILE)
        named = path.parent.name == TEMPLATE_FOLDER
        target = folder / TEMPLATE_FOLDER / path.name if named else folder / path.name
        with writing(target):
            target.parent.mkdir(exist_ok=True)
            write_synced(target, content)
            sync(target.parent)


def tokenizer_in(files: Sequence[Path]) -> Tokenizer | None:
    """Return the tokenizer among the files, or None if there is none. Raises CheckpointError when
    it cannot be read."""
    for name in USUAL_NAMES:
        for path in files:
            if path.name == name:
                try:
                    return load_tokenizer(path)
                except DataError as error:
                    raise CheckpointError(str(error)) from error
    for path in files:
        if path.name == CONFIG:
            try:
                require_named(path.parent)
            except DataError as error:
                raise CheckpointError(str(error)) from error
    return None


def with_end_tokens(
    model: ModelConfig, hf_config: Mapping[str, Any], tokenizer: Tokenizer
) -> ModelConfig:
    """Return the model with the begin and end tokens of its tokenizer if it names none: weights of
    Megatron and Meta do not name them, and a text without an end token never ends. A model whose
    ``hf_config`` names none has none."""
    if hf_config:
        return model
    bos = tokenizer.bos_id if model.bos_token_id is None else model.bos_token_id
    eos = tokenizer.eos_id if model.eos_token_id is None else model.eos_token_id
    return replace(model, bos_token_id=bos, eos_token_id=eos)


def unknown_tokens(
    model: ModelConfig, extra: Mapping[str, Any], files: Sequence[Path]
) -> Iterator[str]:
    """Yield a line for each special token in a model's own files for which the model has no row.
    ``extra`` has the fields of its config.json, or none; ``files`` go with it. Raises
    CheckpointError for a generation_config.json that cannot be read."""
    named: dict[str, Mapping[str, Any]] = {
        "config.json": {name: extra.get(name, getattr(model, name)) for name in TOKEN_IDS}
    }
    for path in files:
        if path.name == GENERATION:
            named[str(path)] = read_generation(path.parent)
    for where, fields in named.items():
        for name in TOKEN_IDS:
            value = fields.get(name)
            beyond = [
                token
                for token in (value if isinstance(value, list) else [value])
                if isinstance(token, int) and not -model.vocab_size <= token < model.vocab_size
            ]
            if beyond:
                yield (
                    f"{where} {name} has {', '.join(map(str, beyond))}, and the model knows no id "
                    f"from {model.vocab_size} on"
                )


def misfits(model: ModelConfig, extra: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the contradictions between a model and the tokenizer beside it. ``extra`` has the
    fields of a config.json, which say more than ``model``."""
    size = model.vocab_size
    if tokenizer.vocab_size > size:
        yield (
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {size}: the model "
            f"knows no id from {size} on"
        )
    named = extra.get("eos_token_id", model.eos_token_id)
    ends = named if isinstance(named, list) else [named]
    if named is not None and tokenizer.eos_id is not None and tokenizer.eos_id not in ends:
        yield f"eos_token_id is {named}, but the end token of the tokenizer is {tokenizer.eos_id}"
