"""``PREFIX.meta.json`` says how a dataset was made, so that training finds its tokenizer and
vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    """Return tokenizer (an absolute path), fingerprint, vocab_size, eod, documents and tokens of a
    dataset, or None if it has no such file, as Megatron's datasets. Raises DataError if the file is
    damaged."""
    path = Path(f"{prefix}.meta.json")
    if not path.exists():
        return None
    values = read_json_object(path)
    if "tokenizer" in values:
        values["tokenizer"] = str(path.absolute().parent / values["tokenizer"])
    return values
