"""The reader of the JSON files beside a model or a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_llama.config.limits import LARGEST_SMALL_FILE, SHOWN_CHARACTERS
from megatron_llama.config.lines import parse_json
from megatron_llama.errors import CheckpointError, UserError

COPY_AGAIN = "copy the file again"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
KINDS: Mapping[type, str] = MappingProxyType(
    {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
)


def read_json_object(
    path: str | Path,
    *,
    do: str = COPY_AGAIN,
    error: type[UserError] = CheckpointError,
    limit: int = LARGEST_SMALL_FILE,
) -> dict[str, Any]:
    """Return the JSON object in a file, which ``read_model_file`` opens. ``do`` is the remedy, for
    messages.

    As in transformers, a byte-order mark, an encoding other than UTF-8, and any value but an object
    are refused. Raises ``error`` with the file, and with the line where there is one."""
    # Models that are built from options, and steps, open no such file.
    from megatron_llama.config.model_files import read_model_file

    data = read_model_file(
        Path(path) if isinstance(path, str) else path, limit=limit, do=do, error=error
    )
    return parse_json_object(data, path, do=do, error=error)


def parse_json_object(
    data: bytes, path: str | Path, *, do: str = COPY_AGAIN, error: type[UserError] = CheckpointError
) -> dict[str, Any]:
    """Return the JSON object in the content of a file, as ``read_json_object`` does."""
    if data.startswith(BYTE_ORDER_MARK):
        got = "a byte-order mark"
        remedy = "save the file as UTF-8 without one: transformers does not read it either"
        raise error(path, got=got, expected="a JSON object", do=remedy)
    if not data.strip():
        raise error(path, got="an empty file", expected="a JSON object", do=do)
    try:
        value = parse_json(data.decode())
    except UnicodeDecodeError as problem:
        line = 1 + data.count(b"\n", 0, problem.start)
        got = f"the byte {data[problem.start]:#04x}, which is not UTF-8"
        raise error(f"{path}:{line}", got=got, expected="valid JSON in UTF-8", do=do) from problem
    except json.JSONDecodeError as problem:
        where = f"{path}:{problem.lineno}"
        raise error(where, got=problem, expected="valid JSON", do=do) from problem
    except ValueError as problem:  # a number of too many digits, deep nesting
        raise error(path, got=problem, expected="valid JSON", do=do) from problem
    if not isinstance(value, dict):
        got = "null" if value is None else f"a JSON {KINDS[type(value)]}"
        raise error(path, got=got, expected="a JSON object", do=do)
    return value


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the name of the file of each tensor, from an index of weights. Raises
    CheckpointError."""
    from megatron_llama.config.model_files import is_name_within

    files = read_json_object(path).get("weight_map")
    is_map = isinstance(files, dict) and all(isinstance(name, str) for name in files.values())
    if not files or not is_map:
        expected = "a weight_map with the file of each tensor"
        raise CheckpointError(path, got="none", expected=expected, do=COPY_AGAIN)
    outside = [name for name in files.values() if not is_name_within(name)]
    if outside:
        expected = f"names of files in {path.parent}"
        raise CheckpointError(
            f"{path} weight_map",
            got=repr(outside[0][:SHOWN_CHARACTERS]),
            expected=expected,
            do=COPY_AGAIN,
        )
    return dict(files)
