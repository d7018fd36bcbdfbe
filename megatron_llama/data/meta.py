"""``PREFIX.meta.json`` says how a dataset was made, so that training finds its tokenizer and
vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_llama.config.json_file import parse_json_object
from megatron_llama.data.byte_ranges import find_file, is_url, read_range
from megatron_llama.errors import DataError
from megatron_llama.tokenizer.files import read_json_object, replace_file, to_json
from megatron_llama.tokenizer.fingerprint import Fingerprint


def write_meta(
    prefix: str,
    *,
    tokenizer: Path,
    fingerprint: Fingerprint,
    vocab_size: int,
    eod: int | None,
    documents: int,
    tokens: int,
) -> None:
    """Write PREFIX.meta.json. A tokenizer in the dataset's folder, or below it, is named relative
    to that folder, so that both can be moved together."""
    folder = Path(prefix).absolute().parent
    tokenizer = tokenizer.absolute()
    name = tokenizer.relative_to(folder) if tokenizer.is_relative_to(folder) else tokenizer
    values = {
        "tokenizer": str(name),
        "fingerprint": fingerprint.entry(),
        "vocab_size": vocab_size,
        "eod": eod,
        "documents": documents,
        "tokens": tokens,
    }
    replace_file(Path(prefix + ".meta.json"), to_json(values))


def read_meta(prefix: str | Path) -> dict[str, Any] | None:
    """Return tokenizer (an absolute path, or a URL), fingerprint, vocab_size, eod, documents and
    tokens of a dataset, or None if it has no such file, as Megatron's datasets. Raises DataError if
    the file is damaged, or cannot be read from its server."""
    if is_url(str(prefix)):
        return _remote_meta(str(prefix))
    path = Path(f"{prefix}.meta.json")
    if not path.exists():
        return None
    values = read_json_object(path)
    if "tokenizer" in values:
        values["tokenizer"] = str(path.absolute().parent / values["tokenizer"])
    return values


def _remote_meta(prefix: str) -> dict[str, Any] | None:
    file = find_file(f"{prefix}.meta.json")
    if file is None:
        return None
    data = read_range(file, 0, file.size)
    values = parse_json_object(data, file.path, do="restore the file", error=DataError)
    if not Path(values.get("tokenizer", "/")).is_absolute():
        values["tokenizer"] = f"{prefix.rpartition('/')[0]}/{values['tokenizer']}"
    return values
