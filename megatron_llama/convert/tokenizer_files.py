"""What travels with a model whatever its format: tokenizer, chat template, generation config,
fields of the config."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.folders import sync
from megatron_llama.config.hf import model_config_from_hf, read_config_json
from megatron_llama.config.schema import ModelConfig
from megatron_llama.errors import CheckpointError, DataError
from megatron_llama.tokenizer.load import load_tokenizer

GENERATION = "generation_config.json"
TOKENIZER = (
    *(
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
TOKENIZER_FILES = (*TOKENIZER, GENERATION)
OPTIMIZER_LEFT_OUT = "the optimizer state of the source is left out: it does not cross formats"
EXTRA = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of a config.json that are no numbers of the model, or say more than a ModelConfig holds:
written as they were read."""


def tokenizer_files_of(*folders: Path) -> tuple[Path, ...]:
    """Those in the first of the folders that has any."""
    for folder in folders:
        found = tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
        if found:
            return found
    return ()


def extra_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are written as they were read."""
    return {name: config_json[name] for name in EXTRA if name in config_json}


def read_config(
    path: str | Path | None, own: Mapping[str, Any] | None = None
) -> tuple[ModelConfig | None, dict[str, Any]]:
    """The model and the extra fields of a user's ``config.json``, or else of the one within a file;
    (None, none) without either.

    Raises CheckpointError."""
    if path is None and own is None:
        return None, {}
    config_json = own if path is None else read_config_json(path)
    assert config_json is not None
    return model_config_from_hf(config_json, where=str(path or "hf_config")), extra_fields(
        config_json
    )


def copy_tokenizer_files(files: Sequence[Path], folder: Path) -> None:
    """Copy and sync them. Raises CheckpointError."""
    for path in files:
        with writing(folder / path.name):
            shutil.copyfile(path, folder / path.name)
            sync(folder / path.name)


def tokens_in(files: Sequence[Path]) -> int:
    """Ids of the tokenizer among the companions; 0: there is none. Raises CheckpointError when it
    cannot be read."""
    for name in ("tokenizer.json", "tokenizer.model"):
        for path in files:
            if path.name == name:
                try:
                    return load_tokenizer(path).vocab_size
                except DataError as error:
                    raise CheckpointError(str(error)) from error
    return 0


def vocabulary(
    where: str, stored: int, *, given: int, known: int, tokens: int, exact: bool = False
) -> int:
    """The number of token ids of a model that stores ``stored`` rows, padding included.

    ``given``: the user's word. ``known``: the file's. ``tokens``: the tokenizer's, which counts
    where nothing else is known and ``exact`` says that padding it gives ``stored``. 0: not known.
    Raises CheckpointError rather than take padding for tokens."""
    size = given or known or (tokens if exact else 0)
    do = "give the number of token ids: --vocab-size"
    if size == 0:
        got = f"{stored} rows, and no word on how many are padding" + (
            f" (the tokenizer has {tokens})" if tokens else ""
        )
        raise CheckpointError(f"{where} vocabulary", got=got, expected="its true size", do=do)
    if given and known and given != known:
        raise CheckpointError(
            "--vocab-size", got=given, expected=f"{known}, by {where}", do="leave it out"
        )
    if not tokens <= size <= stored:
        expected = f"at most the {stored} stored rows" + (
            f" and at least the tokenizer's {tokens}" if tokens else ""
        )
        raise CheckpointError(f"{where} vocabulary", got=size, expected=expected, do=do)
    return size
