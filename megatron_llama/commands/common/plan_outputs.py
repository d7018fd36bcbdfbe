"""Files that the actions of ``plan`` write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_llama.errors import ConfigError, describe


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """What --json asks for. Raises ConfigError."""
    _write("--json", path, json.dumps(content, indent=1) + "\n")


def write_page(path: str, content: str) -> None:
    """What --html asks for. Raises ConfigError."""
    _write("--html", path, content)


def _write(option: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            describe(option, got=error, expected="a file that can be written", do="check the path")
        ) from None
