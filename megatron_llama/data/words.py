"""Kinds of the words of --data-path: text, or prefixes of indexed datasets; on a disk, or behind a
URL. Only an .idx behind a URL is opened."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from urllib.parse import urlparse

JSON_LINES = (".jsonl", ".json")
PARQUET = ".parquet"
COMPRESSED = (".gz", ".zst")
WILD = re.compile(r"[*?\[]")
"""A character that makes a word a pattern."""


def is_url(name: str) -> bool:
    """Whether a name is a URL, and not a path."""
    return "://" in name


def is_stream(word: str) -> bool:
    """Whether a word of --data-path names text, and not the prefix of an indexed dataset: a URL, a
    pattern, a folder, or a file of text. For a URL that may be either, the server is asked for its
    .idx. Raises DataError if the server does not say."""
    if is_url(word):
        # Readers of URLs are loaded where --data-path has one.
        from megatron_llama.data.byte_ranges import find_file

        place = urlparse(word)
        patterned = WILD.search(place.path) is not None or bool(place.query)
        host = place.scheme in ("http", "https") and place.path in ("", "/")
        sure = host or patterned or word.endswith("/") or is_text(word)
        return sure or find_file(f"{word}.idx") is None
    if Path(f"{word}.idx").is_file():
        return False
    return (
        WILD.search(word) is not None
        or Path(word).is_dir()
        or (Path(word).is_file() and is_text(word))
    )


def is_text(name: str) -> bool:
    """Whether the name of a file says that it has text."""
    return kind(Path(PurePosixPath(name).name)) in (*JSON_LINES, PARQUET)


def kind(file: Path) -> str:
    """Return the suffix that tells the kind of a file, compressed or not."""
    return Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix
