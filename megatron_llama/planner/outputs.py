"""Files that ``plan`` and ``schedule`` write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_llama.errors import ConfigError
from megatron_llama.files import replacing


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """Write the file of --json. Raises ConfigError."""
    write_text("--json", path, json.dumps(content, indent=1) + "\n")


def write_page(path: str, content: str) -> None:
    """Write the file of --html. Raises ConfigError."""
    write_text("--html", path, content)


def write_drawing(path: str, content: str) -> None:
    """Write the file of --svg. Raises ConfigError."""
    write_text("--svg", path, content)


def write_text(option: str, path: str, text: str) -> None:
    """Write the file that ``option`` names, whole or not at all. Raises ConfigError."""
    target = Path(path)
    # The operating system's error message contains this name, so it has to be readable.
    writing = target.with_name(f"{target.name}.writing")
    try:
        with replacing(target, temporary=writing):
            writing.write_text(text, encoding="utf-8")
    except OSError as error:
        expected = "a file that can be written"
        raise ConfigError(option, got=error, expected=expected, do="check the path") from None
