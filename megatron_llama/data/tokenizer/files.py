"""The files of a tokenizer's folder, and JSON as it is written there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_llama.config import json_file
from megatron_llama.config.limits import LARGEST_SMALL_FILE, LARGEST_TOKENIZER_FILE
from megatron_llama.config.model_files import read_model_file
from megatron_llama.errors import DataError

CONFIG = "tokenizer_config.json"
"""Transformers' settings of a tokenizer, beside its file."""


def to_json(value: object) -> bytes:
    """Return JSON in UTF-8 for people: indented, non-ASCII characters as they are."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def read_json_object(path: Path, *, limit: int = LARGEST_SMALL_FILE) -> dict[str, Any]:
    """Return the JSON object in ``path``. Raises DataError if the file cannot be read or holds
    anything else."""
    return json_file.read_json_object(path, do="restore the file", error=DataError, limit=limit)


def read_tokenizer_file(path: Path, *, do: str = "restore the file") -> bytes:
    """Return the content of a file of a tokenizer's folder, opened as by ``read_model_file``.
    Raises DataError with the remedy ``do``."""
    return read_model_file(path, limit=LARGEST_TOKENIZER_FILE, do=do, error=DataError)
