"""Finds the documents in a chunk of a file, and what is wrong with a line."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_llama.data.readers import CHUNK_BYTES, LONG_BYTES, Chunk
from megatron_llama.errors import DataError, describe, listing

LISTED = 10
_BEYOND_ASCII = re.compile(rb"(?<!\\)(?:\\\\)*\\u(?!00[0-7])")
"""Escape of a character that takes more than one byte in UTF-8; a backslash before a u is none."""


@dataclass
class Problems:
    """Documents of the input that cannot be used: the first few in full, all counted."""

    count: int = 0
    listed: list[str] = field(default_factory=list)
    unreadable: bool = False
    """Whether a file could not be read to its end, so that the number of problems is not known."""

    def add(self, *problems: str) -> None:
        """Add a document, with all that is wrong with it."""
        self.extend(Problems(1, list(problems)))

    def add_file(self, problem: str) -> None:
        """Add a file that cannot be read to its end."""
        self.extend(Problems(1, [problem], unreadable=True))

    def extend(self, other: Problems) -> None:
        """Add the problems of another part of the input."""
        self.count += other.count
        self.listed = (self.listed + other.listed)[:LISTED]
        self.unreadable |= other.unreadable

    def raise_if_more_than(self, skipped: int) -> None:
        """Raise DataError with the problems, unless there are at most so many documents that may be
        skipped."""
        if self.unreadable or self.count > skipped:
            more = f" (the first {LISTED} follow)" if self.count > LISTED else ""
            least = f", more than --skip-bad-documents {skipped}" if skipped else ""
            raise DataError(
                listing(
                    f"The input has {self.count} unusable documents{least}{more}; "
                    "nothing was written:",
                    self.listed,
                )
            )


def input_files(paths: Sequence[str]) -> list[Path]:
    """Return the files of ``paths``; folders are walked in sorted order. Raises DataError with
    every path that gives none."""
    files: list[Path] = []
    problems: list[str] = []
    for path in map(Path, paths):
        below = files_below(path) if path.is_dir() else [path]
        if not below:
            problems.append(
                describe(path, got="an empty folder", expected="text files", do="check the path")
            )
        elif not below[0].is_file():
            problems.append(
                describe(
                    path, got="no such file", expected="a file or a folder", do="check the path"
                )
            )
        files += below
    if problems:
        raise DataError(listing("These inputs cannot be read:", problems))
    return files


def files_below(folder: Path) -> list[Path]:
    """Return all files in a folder and the folders in it, sorted, without hidden ones."""
    seen = (
        file
        for file in folder.rglob("*")
        if not any(name.startswith(".") for name in file.relative_to(folder).parts)
    )
    return sorted(file for file in seen if file.is_file())


def texts(chunk: Chunk, keys: Sequence[str], problems: Problems) -> dict[str, list[str]]:
    """Return the chunk's documents for each key, in order, empty ones included. Blank lines are no
    documents. Problems are added to ``problems``; a document with a problem is left out."""
    documents: dict[str, list[str]] = {key: [] for key in keys}
    if chunk.problem is not None:
        problems.add_file(chunk.problem)
    if chunk.columns is not None:
        _read_rows(chunk, documents, problems)
    for offset, raw in enumerate(chunk.lines):
        where = chunk.path if chunk.first is None else f"{chunk.path}:{chunk.first + offset}"
        if offset == 0 and chunk.first in (None, 1):
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if chunk.first is not None and len(raw) > LONG_BYTES:
            long = _long_texts(raw, keys)
            if long is not None:
                for key, text in zip(keys, long, strict=True):
                    documents[key].append(text)
                continue
        if chunk.first is not None:
            raw = raw.rstrip()  # of the bytes: a text would be copied for it
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            got = f"byte 0x{raw[error.start]:02x} at byte {error.start}"
            problems.add(
                describe(where, got=got, expected="UTF-8", do="convert the file or leave it out")
            )
            continue
        if chunk.first is None:
            documents[keys[0]].append(text)
        elif text and not text.isspace():
            _read_line(text, where, documents, problems)
    return documents


def _long_texts(raw: bytes, keys: Sequence[str]) -> list[str] | None:
    """Return the texts that ``_read_line`` would read from a long line, in less memory. Python
    takes four bytes for each character of a text with a single emoji, and both the line and its
    text would be one. Here each byte is read as a character, and only the texts are decoded. None
    if that is not possible, or if something is wrong with the line."""
    if _BEYOND_ASCII.search(raw) is not None:
        return None
    try:
        decoder = codecs.getincrementaldecoder("utf-8")()
        for at in range(0, len(raw), CHUNK_BYTES):
            decoder.decode(raw[at : at + CHUNK_BYTES])
        decoder.decode(b"", final=True)
        record = json.loads(raw.decode("latin-1"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    values = [record.get(key.encode().decode("latin-1")) for key in keys]
    strings = [value for value in values if isinstance(value, str)]
    if len(strings) < len(keys):
        return None
    encoded = [text.encode("latin-1") for text in strings]
    del record, values, strings  # while texts are decoded they are in memory twice
    return [text.decode("utf-8") for text in encoded]


def _read_rows(chunk: Chunk, documents: dict[str, list[str]], problems: Problems) -> None:
    assert chunk.columns is not None and chunk.first is not None
    do = "mend the row or change --json-keys"
    for row, values in enumerate(zip(*chunk.columns.values(), strict=True), chunk.first):
        record = dict(zip(chunk.columns, values, strict=True))
        wrong = [
            describe(
                f"{chunk.path}: row {row}, column {key!r}", got="null", expected="a string", do=do
            )
            for key, text in record.items()
            if text is None
        ]
        if wrong:
            problems.add(*wrong)
            continue
        for key, text in record.items():
            assert text is not None
            documents[key].append(text)


def _read_line(line: str, where: str, documents: dict[str, list[str]], problems: Problems) -> None:
    try:
        record = json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        reason: object = error
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg}, column {error.colno}"
        array = "write the array's objects one to a line, as jq -c '.[]' does"
        do = array if line.startswith("[") else "mend the line"
        got = f"invalid JSON ({reason})"
        problems.add(describe(where, got=got, expected="one JSON object per line", do=do))
        return
    if not isinstance(record, dict):
        got = f"a JSON {json_type(record)}"
        problems.add(
            describe(where, got=got, expected="one JSON object per line", do="mend the line")
        )
        return
    wrong = []
    for key in documents:
        value = record.get(key)
        expected = "a string"
        do = "mend the line or change --json-keys"
        if key not in record:
            names = ", ".join(map(repr, list(record)[:LISTED])) or "none"
            got = f"no such field (fields: {names})"
        elif not isinstance(value, str):
            got = f"{json_type(value)} {json.dumps(value)[:40]}"
        elif _has_surrogate(value):
            got = "half a surrogate pair"
            expected = "Unicode text"
            do = "mend the escape"
        else:
            continue
        where_field = f"{where}: field {key!r}"
        wrong.append(describe(where_field, got=got, expected=expected, do=do))
    if wrong:
        problems.add(*wrong)
        return
    for key, of_key in documents.items():
        of_key.append(record[key])


def _has_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def json_type(value: object) -> str:
    """Return JSON's name for the type of a value, or Python's for a type that JSON does not
    have."""
    names = {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
