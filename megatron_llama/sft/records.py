"""Files of examples as JSON objects with their places: JSON lines, JSON arrays, parquet."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from megatron_llama.errors import DataError, describe, listing
from megatron_llama.sft.problems import UnusableError

SUFFIXES = (".jsonl", ".json", ".parquet")
LONGEST_LINE = 64 << 20
"""Bytes. Far beyond any conversation: a file of another kind, or one that lost its newlines, must not fill the memory."""
_BLANK = " \t\r\n"


@dataclass(frozen=True)
class Record:
    """One example as it stands in its file."""

    where: str
    """``FILE:LINE``; of parquet ``FILE:row N``."""
    value: Mapping[str, Any] | UnusableError
    """An error: what stands there instead."""


def example_files(paths: Sequence[str]) -> list[Path]:
    """The files of ``paths``, folders walked in sorted order. Raises DataError naming every path that gives none."""
    files: list[Path] = []
    problems = []
    for path in map(Path, paths):
        found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path]
        if not found:
            expected = f"files that end in {', '.join(SUFFIXES)}"
            problems.append(describe(str(path), got="a folder without examples", expected=expected, do="check the path"))
        elif not found[0].is_file():
            problems.append(describe(str(path), got="no such file", expected="a file or a folder", do="check the path"))
        elif found[0].suffix not in SUFFIXES:
            got = f"a {found[0].suffix or 'nameless'} file"
            problems.append(describe(str(path), got=got, expected=" or ".join(SUFFIXES), do="convert or rename the file"))
        elif found[0].stat().st_size == 0:
            problems.append(describe(str(path), got="an empty file", expected="examples", do="leave it out"))
        files += found
    if problems:
        raise DataError(listing("These inputs cannot be read:", problems))
    return files


def records(file: Path) -> Iterator[Record]:
    """Every example of a file, in order. Raises DataError if parquet cannot be read here."""
    if file.suffix == ".parquet":
        yield from _parquet(file)
    elif file.suffix == ".json":
        yield from _array(file)
    else:
        yield from _lines(file)


def _lines(file: Path) -> Iterator[Record]:
    with file.open("rb") as stream:
        for number in count(1):
            raw = stream.readline(LONGEST_LINE + 1)
            if not raw:
                return
            where = f"{file}:{number}"
            try:
                if len(raw) > LONGEST_LINE:
                    _skip_line(stream)
                    got, expected = f"a line of more than {LONGEST_LINE:,} bytes", "one example on each line"
                    raise UnusableError("gigantic line", got=got, expected=expected, do="split the line or leave it out")
                text = _decoded(raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw)
                if not text.strip(_BLANK):
                    continue
                yield Record(where, _object(_parsed(text.strip(_BLANK))))
            except UnusableError as problem:
                yield Record(where, problem)


def _skip_line(stream: BinaryIO) -> None:
    while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
        pass


def _array(file: Path) -> Iterator[Record]:
    """A JSON array element by element, so that each has its line. A file that does not begin as an array is read as JSON lines."""
    raw = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        text = _decoded(raw)
    except _NotUTF8Error as problem:
        line = raw.count(b"\n", 0, problem.byte) + 1
        yield Record(f"{file}:{line}", problem)
        return
    at = _past_blanks(text, 0)
    if text[at : at + 1] != "[":
        yield from _lines(file)
        return
    line, counted, at = 1, 0, _past_blanks(text, at + 1)
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        where = f"{file}:{line}"
        try:
            value, end = _decoder().raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            line = error.lineno if isinstance(error, json.JSONDecodeError) else line
            yield Record(f"{file}:{line}", _invalid(error, "an array of objects"))
            return
        except UnusableError as problem:  # where the next example begins is not known
            yield Record(where, problem)
            return
        try:
            yield Record(where, _object(value))
        except UnusableError as problem:
            yield Record(where, problem)
        at = _past_blanks(text, end)
        if text[at : at + 1] == ",":
            at = _past_blanks(text, at + 1)
        elif text[at : at + 1] != "]":
            line += text.count("\n", counted, at)
            got = "the end of the file" if at == len(text) else repr(text[at : at + 10])
            expected, do = "a comma or the closing bracket behind an example", "mend the file: it may be cut off"
            yield Record(f"{file}:{line}", UnusableError("broken array", got=got, expected=expected, do=do))
            return


def _past_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANK:
        at += 1
    return at


class _NotUTF8Error(UnusableError):
    """``byte``: where."""

    byte: int


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte 0x{raw[error.start]:02x} at byte {error.start}"
        problem = _NotUTF8Error("bad UTF-8", got=got, expected="UTF-8", do="convert the file or leave the line out")
        problem.byte = error.start
        raise problem from error


def _parsed(text: str) -> Any:
    try:
        return _decoder().decode(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(error, "one JSON object per line") from error


def _invalid(error: Exception, expected: str) -> UnusableError:
    if isinstance(error, RecursionError):
        return UnusableError("too deeply nested", got="JSON nested too deeply to be read", expected=expected, do="leave the line out")
    reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
    return UnusableError("invalid JSON", got=f"invalid JSON ({reason})", expected=expected, do="mend the line")


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_without_repetition, parse_constant=_no_number)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no JSON number")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python keeps the last of two equal keys; nobody can know which one was meant."""
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise UnusableError("repeated key", field=again, got="the key twice in one object", expected="each key once", do="mend the line")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnusableError("not an object", got=f"a JSON {json_type(value)}", expected="a JSON object", do="mend the line")
    return value


def json_type(value: object) -> str:
    """JSON's name for the type of a value."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _parquet(file: Path) -> Iterator[Record]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        do = "pip install 'megatron-llama[parquet]'"
        raise DataError(describe(str(file), got="no pyarrow", expected="pyarrow, which reads parquet", do=do)) from error
    row = 0
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    row += 1
                    yield Record(f"{file}:row {row}", value)
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0]
        problem = UnusableError("damaged parquet", got=cause, expected="a parquet file", do="copy the file again")
        yield Record(f"{file}:row {row + 1}", problem)
