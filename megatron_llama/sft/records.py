"""Files of examples as JSON objects with their places: JSON lines, JSON arrays and parquet."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from megatron_llama.data.documents import files_below
from megatron_llama.errors import DataError, describe, listing
from megatron_llama.sft import json_text
from megatron_llama.sft.json_text import BLANK, decoded, elements, is_array, json_object, parsed
from megatron_llama.sft.problems import UnusableError

SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Record:
    """One example as it stands in its file."""

    where: str
    """``FILE:LINE``; for a JSON array ``FILE[N] (line L)``, of which the first element is number 0;
    for parquet ``FILE:row N``."""
    value: Mapping[str, Any] | UnusableError
    """The object, or the error that says what is there instead."""


def example_files(paths: Sequence[str]) -> list[Path]:
    """List the files of ``paths``, with folders walked in sorted order. Raises DataError naming
    every path that gives none."""
    files: list[Path] = []
    problems = []
    for path in map(Path, paths):
        found = (
            [file for file in files_below(path) if file.suffix in SUFFIXES]
            if path.is_dir()
            else [path]
        )
        if not found:
            expected = f"files that end in {', '.join(SUFFIXES)}"
            problems.append(
                describe(
                    str(path),
                    got="a folder without examples",
                    expected=expected,
                    do="check the path",
                )
            )
        elif not found[0].is_file():
            problems.append(
                describe(
                    str(path),
                    got="no such file",
                    expected="a file or a folder",
                    do="check the path",
                )
            )
        elif found[0].suffix not in SUFFIXES:
            got = f"a {found[0].suffix or 'nameless'} file"
            problems.append(
                describe(
                    str(path),
                    got=got,
                    expected=" or ".join(SUFFIXES),
                    do="convert or rename the file",
                )
            )
        else:
            empty = [file for file in found if file.stat().st_size == 0]
            problems += [
                describe(str(file), got="an empty file", expected="examples", do="leave it out")
                for file in empty
            ]
        files += found
    if problems:
        raise DataError(listing("These inputs cannot be read:", problems))
    return files


def records(file: Path) -> Iterator[Record]:
    """Yield every example of a file, in order. Raises DataError if the file cannot be read."""
    read = {".parquet": _parquet, ".json": _array}.get(file.suffix, _lines)
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


def _parquet(file: Path) -> Iterator[Record]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        do = "pip install '.[parquet]' in the clone"
        raise DataError(
            describe(str(file), got="no pyarrow", expected="pyarrow, which reads parquet", do=do)
        ) from error
    row = 0
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    row += 1
                    # A table has every column in every row: null is what JSON would leave out.
                    yield Record(
                        f"{file}:row {row}",
                        {name: cell for name, cell in value.items() if cell is not None},
                    )
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0]
        problem = UnusableError(
            "damaged parquet", got=cause, expected="a parquet file", do="copy the file again"
        )
        yield Record(f"{file}:row {row + 1}", problem)
