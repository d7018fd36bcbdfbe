"""Reads and writes small files; a file is written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_llama.config import json_file
from megatron_llama.errors import DataError


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` under a temporary name beside ``path``, then replace ``path``. Its folder
    is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def to_json(value: object) -> bytes:
    """Return JSON in UTF-8 for people: indented, non-ASCII characters as they are."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``. Raises DataError if the file cannot be read or holds
    anything else."""
    return json_file.read_json_object(path, do="restore the file", error=DataError)
