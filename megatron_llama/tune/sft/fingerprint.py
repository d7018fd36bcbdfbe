"""Digests of everything on which the tokens of examples depend: if all are the same, so are the
tokens."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import megatron_llama
from megatron_llama.errors import DataError, describe

BYTES = 16
ROOMS = ("data/tokenizer", "tune/sft", "tune/preference")
"""The rooms whose code makes tokens of examples."""
LIBRARIES = ("jinja2", "pyarrow", "sentencepiece", "tiktoken", "tokenizers")
"""The libraries that those rooms use for it."""


def text_digest(*parts: object) -> str:
    """Return a digest of values for JSON, hexadecimal."""
    content = json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(content, digest_size=BYTES).hexdigest()


def file_digests(files: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the path and the digest of the content of each file. Raises DataError if one cannot be
    read."""
    return [(str(file), _file_digest(file)) for file in files]


def _file_digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "blake2b").hexdigest()[: 2 * BYTES]
    except OSError as error:
        raise DataError(
            describe(
                str(file),
                got=error.strerror or error,
                expected="a readable file",
                do="mend the permissions, or copy the file again",
            )
        ) from error


def code_digest() -> str:
    """Return the digest of the code that encodes examples, and of the versions of its libraries: a
    fault that is mended must not live on in stored tokens."""
    package = Path(megatron_llama.__file__).parent
    sources = [
        (str(file.relative_to(package)), file.read_text(encoding="utf-8"))
        for room in ROOMS
        for file in sorted((package / room).glob("*.py"))
    ]
    return text_digest(platform.python_version(), [*map(_version, LIBRARIES)], sources)


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
