"""``PREFIX.meta.json`` says how a dataset was made, so that training finds its tokenizer and
vocabulary, and what its files were when they were written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_llama.config.fields import Fields, read_fields, shown
from megatron_llama.config.json_file import parse_json_object
from megatron_llama.config.limits import LARGEST_SIZE, LARGEST_SMALL_FILE
from megatron_llama.config.model_files import read_bounded
from megatron_llama.data.sums import DatasetSums
from megatron_llama.data.tokenizer.files import to_json
from megatron_llama.data.tokenizer.fingerprint import VERSION, Fingerprint
from megatron_llama.data.words import is_url
from megatron_llama.errors import DataError
from megatron_llama.files import replace_file

SUMS = "sums"
_RESTORE = "restore the file, or preprocess the text again"
_HASH = re.compile("[0-9a-f]{64}")


def write_meta(
    prefix: str,
    *,
    tokenizer: Path,
    fingerprint: Fingerprint,
    vocab_size: int,
    eod: int | None,
    documents: int,
    tokens: int,
    sums: DatasetSums,
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
        SUMS: sums.entry(),
    }
    replace_file(Path(prefix + ".meta.json"), to_json(values))


def read_meta(prefix: str | Path) -> dict[str, Any] | None:
    """Return tokenizer (an absolute path, or a URL), fingerprint, vocab_size, eod, documents,
    tokens and sums (``DatasetSums``) of a dataset, as far as the file has them, or None if the
    dataset has no such file, as Megatron's datasets. Raises DataError with every field that is of
    another kind, and if the file is damaged or cannot be read from its server."""
    if is_url(str(prefix)):
        return _remote_meta(str(prefix))
    path = Path(f"{prefix}.meta.json")
    if not path.exists():
        return None
    # Datasets are linked together from several places, and nothing of this file is published: it
    # may be a link.
    data = read_bounded(path, limit=LARGEST_SMALL_FILE, do=_RESTORE, error=DataError)
    values = _checked(parse_json_object(data, path, do=_RESTORE, error=DataError), path)
    if "tokenizer" in values:
        values["tokenizer"] = str(path.absolute().parent / values["tokenizer"])
    return values


def _remote_meta(prefix: str) -> dict[str, Any] | None:
    # Readers of URLs are loaded where a dataset is behind one.
    from megatron_llama.data.byte_ranges import find_file, read_range

    file = find_file(f"{prefix}.meta.json")
    if file is None:
        return None
    data = read_range(file, 0, file.size)
    content = parse_json_object(data, file.path, do="restore the file", error=DataError)
    values = _checked(content, file.path)
    if not Path(values.get("tokenizer", "/")).is_absolute():
        values["tokenizer"] = f"{prefix.rpartition('/')[0]}/{values['tokenizer']}"
    return values


def _checked(content: Mapping[str, Any], where: str | Path) -> dict[str, Any]:
    """Return the fields of a file, with its sums read. Raises DataError with all that are of
    another kind."""
    values = dict(content)
    with read_fields(content, where, do=_RESTORE, error=DataError) as fields:
        if "tokenizer" in content:
            fields.text("tokenizer")
        size = LARGEST_SIZE
        if "vocab_size" in content:
            size = fields.integer("vocab_size", low=1, high=LARGEST_SIZE)
        fields.integer("eod", high=size - 1, default=None, null=True)
        fields.integer("documents", default=0)
        fields.integer("tokens", default=0)
        _check_fingerprint(fields)
        if SUMS in content:
            values[SUMS] = DatasetSums.read(fields.inner(SUMS))
    return values


def _check_fingerprint(fields: Fields) -> None:
    """Add the problems of a fingerprint of this version; one of another version says nothing."""
    entry = fields.mapping("fingerprint", default=None, null=True)
    if entry is None:
        return
    inner = fields.inner("fingerprint")
    if inner.integer("version") != VERSION:
        return
    for name in ("tokens", "probe"):
        value = inner.text(name)
        if not _HASH.fullmatch(value):
            inner.problem(name, shown(value), "a hash of 64 hexadecimal digits")
