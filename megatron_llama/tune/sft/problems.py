"""An example that cannot be used: where it is, which field is wrong, why, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_llama.errors import describe

LISTED = 10


@dataclass(frozen=True)
class Problem:
    """One example that cannot be used."""

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
    """An example cannot be used. Whoever knows its place turns this into a Problem with ``at``."""

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
        """The same error with more words after its remedy."""
        got, expected, do = self._words
        return UnusableError(
            self.reason, got=got, expected=expected, do=f"{do}; {words}", field=self._field
        )


def count_by_reason(problems: Sequence[Problem]) -> list[tuple[str, int]]:
    """How many there are for each reason, the most frequent first."""
    return Counter(problem.reason for problem in problems).most_common()


def problem_lines(problems: Sequence[Problem], most: int | None = LISTED) -> Iterator[str]:
    """The sentences, the first ``most`` of them, and then how many there are of each kind."""
    yield from map(str, problems[:most])
    if most is not None and len(problems) > most:
        yield f"and {len(problems) - most:,} more"
    if len(problems) > 1:
        yield "by reason: " + ", ".join(
            f"{reason} {count:,}" for reason, count in count_by_reason(problems)
        )
