"""JSON that says where it is broken: one value, or the elements of an array of any size.

The decoder is the standard library's. This file adds a window that moves over the file, so that
little of an array is in memory at a time, and errors with line, column and field.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megatron_llama.data.documents import json_type
from megatron_llama.tune.sft.problems import UnusableError

LARGEST = 64 << 20
"""Bytes of a line, characters of an element: far more than any conversation. A file of another kind
must not fill the memory."""
DEEPEST = 200
"""Levels of nested arrays and objects. The decoder has no limit but Python's stack, whose depth
other libraries change while the program runs."""
BLOCK = 1 << 20
"""Bytes of a file that are read at a time, at least."""
BLANK = " \t\r\n"


def decoded(raw: bytes) -> str:
    """Decode UTF-8. Raises UnusableError with the first byte that is invalid."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _no_utf8(raw[error.start], error.start) from error


def _no_utf8(byte: int, place: int) -> UnusableError:
    got = f"byte 0x{byte:02x} at byte {place}"
    return UnusableError(
        "bad UTF-8", got=got, expected="UTF-8", do="convert the file or leave the example out"
    )


def parsed(text: str) -> Any:
    """Read the one value of a text. Raises UnusableError."""
    try:
        _refuse_deep(text, "one JSON object per line")
        return _decoder().decode(text)
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg}, column {error.colno}", "one JSON object per line") from error
    except (ValueError, RecursionError) as error:
        raise _other(error, "one JSON object per line") from error


def json_object(value: Any) -> dict[str, Any]:
    """Return the value if it is an object. Raises UnusableError otherwise."""
    if not isinstance(value, dict):
        raise UnusableError(
            "not an object",
            got=f"a JSON {json_type(value)}",
            expected="a JSON object",
            do="mend the example",
        )
    return value


def _refuse_deep(text: str, expected: str) -> None:
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    depth = 0
    for token in re.finditer(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', text, re.DOTALL):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if depth > DEEPEST:
            raise _too_deep(expected)


def _too_deep(expected: str) -> UnusableError:
    return UnusableError(
        "too deeply nested",
        got="JSON nested too deeply to be read",
        expected=f"{expected}, at most {DEEPEST} levels deep",
        do="leave the example out",
    )


def _other(error: Exception, expected: str) -> UnusableError:
    if isinstance(error, RecursionError):
        return _too_deep(expected)
    return _invalid(str(error), expected)


def _invalid(reason: str, expected: str) -> UnusableError:
    return UnusableError(
        "invalid JSON", got=f"invalid JSON ({reason})", expected=expected, do="mend the example"
    )


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_without_repetition, parse_constant=_no_number)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no JSON number")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object, or raise an error for two equal keys: Python would keep the last, though
    either may be meant."""
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        again = next(key for key, count in counts.items() if count > 1)
        raise UnusableError(
            "repeated key",
            field=again,
            got="the key twice in one object",
            expected="each key once",
            do="mend the example",
        )
    return value


def is_array(file: Path) -> bool:
    """Whether the first character of a file that is not blank opens an array."""
    with file.open("rb") as stream:
        if stream.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            stream.seek(0)
        while block := stream.read(BLOCK):
            if begin := block.lstrip(BLANK.encode())[:1]:
                return begin == b"["
    return False


def elements(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the line of each element of an array, and its value or an UnusableError. After broken
    JSON nothing is known of the rest, so it ends the array."""
    with file.open("rb") as stream:
        window = _Window(stream)
        try:
            window.next_character()
            window.at += 1
            first = True
            while (character := window.next_character()) != "]":
                if not first:
                    if character != ",":
                        got = (
                            repr(window.text[window.at : window.at + 10])
                            if character
                            else "the end of the file"
                        )
                        expected = "a comma or the closing bracket after an example"
                        do = "mend the file: it may be cut off"
                        raise UnusableError("broken array", got=got, expected=expected, do=do)
                    window.at += 1
                    if window.next_character() == "]":
                        break
                first = False
                line = window.line
                yield line, window.value()
            window.at += 1
            if window.next_character():
                got = repr(window.text[window.at : window.at + 10])
                do = "put all examples into one array"
                raise UnusableError(
                    "broken array", got=got, expected="nothing after the closing bracket", do=do
                )
        except UnusableError as problem:
            yield window.line, problem.followed("nothing after it was read")


class _Window:
    """The part of a file's text that is being read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._bytes = 0
        self.text = ""
        self.at = 0
        self.line = 1
        """The line of the character ``at``."""
        self._counted = self._column = 0
        """The end of the counted lines, and the number of dropped characters of the first line."""
        self._ended = False

    def next_character(self) -> str:
        """Move to the next character that is not blank and return it; empty at the end of the file.
        Raises UnusableError."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in BLANK:
                self.at += 1
            if self.at < len(self.text) or self._ended:
                self._count(self.at)
                return self.text[self.at : self.at + 1]
            self._more()

    def value(self) -> Any:
        """Read the value that begins here and move to its end. Raises UnusableError."""
        while True:
            try:
                value, end = _decoder().raw_decode(self.text, self.at)
                if end < len(self.text) or self._ended:  # a number may go on after what is here
                    _refuse_deep(self.text[self.at : end], "an array of objects")
                    self.at = end
                    return value
            except json.JSONDecodeError as error:
                if self._ended or len(self.text) - self.at > LARGEST:
                    _refuse_deep(self.text[self.at :], "an array of objects")
                    column = error.colno + (self._column if error.lineno == 1 else 0)
                    self._count(error.pos)
                    raise _invalid(
                        f"{error.msg}, column {column}", "an array of objects"
                    ) from error
            except (ValueError, RecursionError) as error:
                raise _other(error, "an array of objects") from error
            self._more()

    def _count(self, place: int) -> None:
        self.line += self.text.count("\n", self._counted, place)
        self._counted = max(place, self._counted)

    def _more(self) -> None:
        """Read on. The window doubles, so that a large element is not decoded from its beginning
        again for every block."""
        self._count(self.at)
        newline = self.text.rfind("\n", 0, self.at)
        self._column = self.at - newline - 1 if newline >= 0 else self._column + self.at
        self.text = self.text[self.at :]
        self.at = 0
        self._counted = 0
        raw = self._stream.read(max(BLOCK, len(self.text)))
        try:
            self.text += self._decode.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            held = len(error.object) - len(raw)  # of a character that was cut
            good = error.object[: error.start].decode("utf-8", errors="replace")
            self._count(len(self.text))
            self.line += good.count("\n")
            raise _no_utf8(error.object[error.start], self._bytes - held + error.start) from error
        self._bytes += len(raw)
        self._ended = not raw
