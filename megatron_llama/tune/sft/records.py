"""Files of examples as JSON objects with their places: JSON lines, JSON arrays, parquet, Arrow."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from megatron_llama.data.documents import files_below
from megatron_llama.data.tokenizer.files import read_json_object
from megatron_llama.errors import DataError, describe, listing
from megatron_llama.tune.sft import json_text
from megatron_llama.tune.sft.json_text import (
    BLANK,
    decoded,
    elements,
    is_array,
    json_object,
    parsed,
)
from megatron_llama.tune.sft.problems import UnusableError
from megatron_llama.tune.sft.tables import TABLES, table_rows

SUFFIXES = (".jsonl", ".json", *TABLES)
SAVED = "state.json"
"""The file that marks a folder of ``save_to_disk`` for ``datasets``. It lists data files."""
SPLITS = "dataset_dict.json"
"""The file that marks a folder with one such folder for each split."""
INFO = "dataset_info.json"
"""The file that ``datasets`` writes beside the data in all its folders."""


@dataclass(frozen=True)
class Record:
    """One example as it stands in its file."""

    where: str
    """``FILE:LINE``; for a JSON array ``FILE[N] (line L)``, of which the first element is number 0;
    for parquet and Arrow ``FILE:row N``."""
    value: Mapping[str, Any] | UnusableError
    """The object, or the error about other content."""


def example_files(paths: Sequence[str]) -> list[Path]:
    """Return the files of ``paths``, with folders walked in sorted order; of a folder that
    ``datasets`` has saved, the files that it names. Raises DataError naming every path without
    any."""
    files: list[Path] = []
    problems = []
    for path in map(Path, paths):
        try:
            listed = _folder_files(path) if path.is_dir() else [_single_file(path)]
        except DataError as problem:
            problems.append(str(problem))
            continue
        problems += [
            describe(str(file), got="an empty file", expected="examples", do="leave it out")
            for file in listed
            if file.stat().st_size == 0
        ]
        files += listed
    if problems:
        raise DataError(listing("These inputs cannot be read:", problems))
    return files


def _single_file(path: Path) -> Path:
    if not path.is_file():
        raise DataError(
            path, got="no such file", expected="a file or a folder", do="check the path"
        )
    if path.suffix not in SUFFIXES:
        got = f"a {path.suffix or 'nameless'} file"
        raise DataError(
            path, got=got, expected=" or ".join(SUFFIXES), do="convert or rename the file"
        )
    return path


def _saved_names(listed: Any, where: Path) -> list[str]:
    """Return the names of the data files that ``datasets`` lists."""
    entries = listed if isinstance(listed, list) else []
    given = [entry.get("filename") for entry in entries if isinstance(entry, dict)]
    names = [name for name in given if isinstance(name, str)]
    if not names or len(names) < len(entries):
        raise DataError(
            f"{where}: _data_files",
            got=f"{listed!r:.80}",
            expected="an array of objects with the filename of a data file",
            do="save the dataset again, or give the .arrow files themselves",
        )
    return names


def _folder_files(folder: Path) -> list[Path]:
    if (folder / SAVED).is_file():
        listed = read_json_object(folder / SAVED).get("_data_files")
        if listed is not None:
            return [_single_file(folder / name) for name in _saved_names(listed, folder / SAVED)]
    below = files_below(folder)
    # Such a folder holds splits, which are not to be mixed, and files about them.
    for file in below:
        if file.name in (SPLITS, INFO):
            raise DataError(
                file.parent,
                got=f"a folder that datasets has written ({file.name})",
                expected="the folder of one split, as save_to_disk writes it, or a file",
                do="give the folder of the split, or the .arrow files themselves",
            )
    files = [file for file in below if file.suffix in SUFFIXES]
    if not files:
        raise DataError(
            folder,
            got="a folder without examples",
            expected=f"files that end in {', '.join(SUFFIXES)}",
            do="check the path",
        )
    return files


def records(file: Path) -> Iterator[Record]:
    """Yield every example of a file, in order. Raises DataError if the file cannot be read."""
    read = {".json": _array, **dict.fromkeys(TABLES, _table)}.get(file.suffix, _lines)
    try:
        yield from read(file)
    except OSError as error:
        do = "mend the permissions, or copy the file again"
        raise DataError(
            describe(str(file), got=error.strerror or error, expected="a readable file", do=do)
        ) from error


def _lines(file: Path) -> Iterator[Record]:
    with file.open("rb") as stream:
        for number in count(1):
            raw = stream.readline(json_text.LARGEST + 1)
            if not raw:
                return
            where = f"{file}:{number}"
            try:
                if len(raw) > json_text.LARGEST:
                    _skip_line(stream)
                    got = f"a line of more than {json_text.LARGEST:,} bytes"
                    expected = "one example on each line"
                    raise UnusableError(
                        "gigantic line",
                        got=got,
                        expected=expected,
                        do="split the line or leave it out",
                    )
                text = decoded(raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).strip(
                    BLANK
                )
                if text:
                    yield Record(where, json_object(parsed(text)))
            except UnusableError as problem:
                yield Record(where, problem)


def _skip_line(stream: BinaryIO) -> None:
    while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
        pass


def _array(file: Path) -> Iterator[Record]:
    """Yield the elements of a JSON array. A file that does not begin as one is read as JSON
    lines."""
    if not is_array(file):
        yield from _lines(file)
        return
    for number, (line, value) in enumerate(elements(file)):
        # Many arrays are one line.
        where = f"{file}[{number}] (line {line})"
        try:
            if isinstance(value, UnusableError):
                raise value
            yield Record(where, json_object(value))
        except UnusableError as problem:
            yield Record(where, problem)


def _table(file: Path) -> Iterator[Record]:
    for row, value in table_rows(file):
        yield Record(f"{file}:row {row}", value)
