"""Problems of unusable examples: place, field, reason and number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_llama.data.documents import json_type
from megatron_llama.errors import describe

LISTED = 10


@dataclass(frozen=True)
class Problem:
    """One unusable example."""

    where: str
    """File and line, for parquet the row, for an array the element."""
    reason: str
    """A few words that are the same for all examples with this problem, to count them by."""
    message: str
    """The whole sentence."""
    number: int = 0
    """The position of the example among all files, from 0."""

    def __str__(self) -> str:
        return self.message


class UnusableError(Exception):
    """The error of an unusable example. A caller that knows its place turns it into a Problem with
    ``at``."""

    def __init__(
        self, reason: str, *, got: object, expected: object, do: str, field: str | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self._field = field
        self._words = (got, expected, do)

    def at(self, where: str, number: int = 0) -> Problem:
        """Make a Problem of it."""
        got, expected, do = self._words
        place = where if self._field is None else f"{where}: field {self._field!r}"
        return Problem(
            where, self.reason, describe(place, got=got, expected=expected, do=do), number
        )

    def followed(self, words: str) -> UnusableError:
        """Return the same error with more words after its remedy."""
        got, expected, do = self._words
        return UnusableError(
            self.reason, got=got, expected=expected, do=f"{do}; {words}", field=self._field
        )


def wrong_kind(reason: str, field: str, value: Any, expected: str) -> UnusableError:
    """Return the error for a value of a field of another kind than ``expected``."""
    got = f"a JSON {json_type(value)}"
    return UnusableError(reason, field=field, got=got, expected=expected, do="mend the example")


def unknown_format(record: Mapping[str, Any], expected: str) -> UnusableError:
    """Return the error for a record without the fields by which a format is known."""
    got = f"the fields {field_names(record)}"
    return UnusableError("unknown format", got=got, expected=expected, do="rename the fields")


def field_names(record: Mapping[str, Any]) -> str:
    """Return the first names of fields of a record, for messages."""
    return ", ".join(map(repr, list(record)[:10])) or "none"


def count_by_reason(problems: Sequence[Problem]) -> list[tuple[str, int]]:
    """Return the number of problems of each reason, the most frequent first."""
    return Counter(problem.reason for problem in problems).most_common()


def problem_lines(problems: Sequence[Problem], most: int | None = LISTED) -> Iterator[str]:
    """Yield the first ``most`` sentences, and then the number of problems of each kind."""
    yield from map(str, problems[:most])
    if most is not None and len(problems) > most:
        yield f"and {len(problems) - most:,} more"
    if len(problems) > 1:
        yield "by reason: " + ", ".join(
            f"{reason} {count:,}" for reason, count in count_by_reason(problems)
        )
