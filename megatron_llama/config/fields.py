"""A reader of the typed fields of an object in a file. It checks kind, range and finiteness of
each, and reports all problems at once. Every number that comes from a file goes through here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_llama.config.json_file import COPY_AGAIN
from megatron_llama.config.limits import LARGEST_INTEGER, SHOWN_CHARACTERS
from megatron_llama.errors import CheckpointError, UserError, describe, listing

REQUIRED: Any = object()
"""The default of a field that must be there."""


class Fields:
    """The fields of one object. ``problems`` collects all that is wrong with them. A refused field
    has a value of its kind that must not be used."""

    def __init__(
        self, content: Mapping[str, Any], where: str | Path, *, do: str = COPY_AGAIN
    ) -> None:
        """``where`` names the file and the object in it, ``do`` is the remedy, for messages."""
        self.content = content
        self.where = where
        self.problems: list[str] = []
        self.seen: set[str] = set()
        """Names that were asked for, whether the file has these fields or not."""
        self._do = do
        self._refused: set[str] = set()

    def problem(self, name: str, got: object, expected: object, do: str | None = None) -> None:
        """Add a problem, unless this field has one already."""
        if name not in self._refused:
            where = f"{self.where} {name}"
            self.problems.append(describe(where, got=got, expected=expected, do=do or self._do))
        self._refused.add(name)

    def value(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a field as it is. An absent one without a default is a problem, and None."""
        self.seen.add(name)
        if name in self.content:
            return self.content[name]
        if default is REQUIRED:
            self.problem(name, "no such field", "one")
            return None
        return default

    def integer(
        self,
        name: str,
        *,
        low: int = 0,
        high: int = LARGEST_INTEGER,
        default: int | None = REQUIRED,
        null: bool = False,
    ) -> Any:
        """Return an integer between ``low`` and ``high``, both allowed. With ``null`` the file may
        have null, which gives None. 2.0 is no integer, and neither is true."""
        value = self.value(name, default)
        if name in self._refused:
            return low
        if self._is_null(name, value, default, null):
            return None
        expected = f"an integer of at least {low}"
        if high != LARGEST_INTEGER:
            expected = f"an integer from {low} to {high}"
        if type(value) is not int or not low <= value <= high:
            self.problem(name, shown(value), expected)
            return low
        return value

    def number(
        self,
        name: str,
        *,
        low: float = -math.inf,
        high: float = math.inf,
        above: float | None = None,
        default: float | None = REQUIRED,
        null: bool = False,
    ) -> Any:
        """Return a finite number between ``low`` and ``high``, both allowed, and greater than
        ``above``, as a float."""
        value = self.value(name, default)
        if name in self._refused:
            return 1.0
        if self._is_null(name, value, default, null):
            return None
        number = finite_number(value)
        if number is None or not low <= number <= high or (above is not None and number <= above):
            limits = [
                *([f"above {above:g}"] if above is not None else []),
                *([f"of at least {low:g}"] if low > -math.inf else []),
                *([f"of at most {high:g}"] if high < math.inf else []),
            ]
            self.problem(
                name, shown(value), " ".join(["a finite number", " and ".join(limits)]).strip()
            )
            return 1.0
        return number

    def switch(self, name: str, *, default: bool = REQUIRED) -> bool:
        """Return true or false."""
        value = self.value(name, default)
        if name in self._refused:
            return False
        if not isinstance(value, bool):
            self.problem(name, shown(value), "true or false")
            return False
        return value

    def text(
        self,
        name: str,
        *,
        choices: Sequence[str] = (),
        default: str | None = REQUIRED,
        null: bool = False,
    ) -> Any:
        """Return a string, one of the ``choices`` if there are any."""
        value = self.value(name, default)
        if name in self._refused:
            return choices[0] if choices else ""
        if self._is_null(name, value, default, null):
            return None
        if not isinstance(value, str) or (choices and value not in choices):
            self.problem(name, shown(value), " or ".join(choices) or "a string")
            return choices[0] if choices else ""
        return value

    def mapping(
        self, name: str, *, default: Mapping[str, Any] | None = REQUIRED, null: bool = False
    ) -> Any:
        """Return an object, as a dict with strings for keys."""
        value = self.value(name, default)
        if name in self._refused:
            return {}
        if self._is_null(name, value, default, null):
            return None
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            self.problem(name, shown(value), "an object")
            return {}
        return dict(value)

    def sequence(
        self,
        name: str,
        kind: type | tuple[type, ...] = object,
        *,
        length: int | None = None,
        default: Sequence[Any] | None = REQUIRED,
        null: bool = False,
    ) -> Any:
        """Return an array of so many values of one kind, as a list. A number must be finite; true
        is no number."""
        value = self.value(name, default)
        if name in self._refused:
            return []
        if self._is_null(name, value, default, null):
            return None
        right = isinstance(value, list | tuple) and all(_is(entry, kind) for entry in value)
        if not right or (length is not None and len(value) != length):
            self.problem(name, shown(value), _expected_array(kind, length))
            return []
        return list(value)

    def inner(self, name: str, *, default: Mapping[str, Any] = REQUIRED) -> Fields:
        """Return the reader of an object within this one. Its problems count among these."""
        reader = Fields(self.mapping(name, default=default), f"{self.where} {name}", do=self._do)
        # The fields of a refused object have no problems of their own.
        reader.problems = [] if name in self._refused else self.problems
        return reader

    def entries(self, name: str) -> list[Fields]:
        """Return a reader for each object of an array. Their problems count among these."""
        objects = self.sequence(name, dict)
        readers = [
            Fields(entry, f"{self.where} {name}[{number}]", do=self._do)
            for number, entry in enumerate(objects)
        ]
        for reader in readers:
            reader.problems = self.problems
        return readers

    def _is_null(self, name: str, value: Any, default: Any, null: bool) -> bool:
        """Whether a field is null and may be: in the file with ``null``, or as its default if
        absent."""
        return value is None and (null or (default is None and name not in self.content))


@contextmanager
def read_fields(
    content: Mapping[str, Any],
    where: str | Path,
    *,
    do: str = COPY_AGAIN,
    error: type[UserError] = CheckpointError,
) -> Iterator[Fields]:
    """Yield the reader of an object's fields. The end of the section raises ``error`` with all
    problems, also if the section failed on the value of a refused field."""
    fields = Fields(content, where, do=do)
    try:
        yield fields
    except Exception:
        if not fields.problems:
            raise
    if len(fields.problems) == 1:
        raise error(fields.problems[0])
    if fields.problems:
        raise error(listing(f"{where} cannot be used:", fields.problems))


def finite_number(value: object) -> float | None:
    """Return a value as a float; None unless it is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shown(value: object) -> str:
    """Return a value for a message, cut where it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _is(entry: object, kind: type | tuple[type, ...]) -> bool:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(entry, bool):
        return bool in kinds or object in kinds
    if isinstance(entry, int | float) and (float in kinds or int in kinds):
        return finite_number(entry) is not None and (isinstance(entry, int) or float in kinds)
    return isinstance(entry, kinds)


def _expected_array(kind: type | tuple[type, ...], length: int | None) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = {str: "strings", int: "integers", float: "finite numbers", bool: "booleans"}
    names |= {dict: "objects", list: "arrays", object: "values"}
    count = "" if length is None else f"{length} "
    return f"an array of {count}{' or '.join(names[entry] for entry in kinds)}"
