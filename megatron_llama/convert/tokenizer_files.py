"""Files that go with a model whatever its format: tokenizer, chat template, generation config."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.folders import sync
from megatron_llama.errors import CheckpointError, DataError
from megatron_llama.tokenizer.load import load_tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def tokenizer_files_of(*folders: Path) -> tuple[Path, ...]:
    """Return the files that the first of the folders with any of them holds."""
    for folder in folders:
        found = tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
        if found:
            return found
    return ()


def copy_tokenizer_files(files: Sequence[Path], folder: Path) -> None:
    """Copy the files into the folder and sync them. Raises CheckpointError."""
    for path in files:
        with writing(folder / path.name):
            shutil.copyfile(path, folder / path.name)
            sync(folder / path.name)


def tokens_in(files: Sequence[Path]) -> int:
    """Return the vocabulary size of the tokenizer among the files, or 0 if there is none. Raises
    CheckpointError when it cannot be read."""
    for name in ("tokenizer.json", "tokenizer.model"):
        for path in files:
            if path.name == name:
                try:
                    return load_tokenizer(path).vocab_size
                except DataError as error:
                    raise CheckpointError(str(error)) from error
    return 0
