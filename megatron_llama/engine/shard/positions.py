"""Where the ranks of an engine are, and which of them can never meet.

Ranks *meet* before everything that no plan has: each says what it is about to do, and goes on if
all say the same (``order.py``). A rank that waits in a meeting publishes its position, and so do
its peers. Between the same two meetings all ranks do the same. So a rank that has done more since
the last meeting than this one had done before it came to the next is on another way. That is true
whatever either of them computes meanwhile, and however old what it has published is: counts only
grow, and the rank that waits stays where it is. A rank that has done less may still come.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Counts(NamedTuple):
    """What a rank has done: since the beginning, or between two meetings."""

    made: int = 0
    """Planned accesses, and ends of steps."""
    steps: int = 0
    launched: int = 0
    """Gathers of parameters."""
    reduced: int = 0
    """Reductions of gradients."""

    def since(self, earlier: Counts) -> Counts:
        """Return what has been done since then."""
        return Counts(*(now - then for now, then in zip(self, earlier, strict=True)))


NOTHING = Counts()


@dataclass(frozen=True)
class Meeting:
    """A meeting to which this rank has come."""

    number: int = 0
    """How many it has come to, this one included."""
    at: Counts = NOTHING
    """What it had done when it came."""
    before: Counts = NOTHING
    """What of that it had done since the meeting before."""
    said: tuple[int, int] = (0, 0)
    """What it says there that it is about to do."""
    waits: bool = False
    """Whether it waits for the others."""
    discards: bool = False
    """Whether its peers may have gone further: ``engine.discard`` brings them together."""


@dataclass(frozen=True)
class Position:
    """Where a rank is, as it publishes it."""

    meeting: int
    """How many meetings it has come to."""
    said: tuple[int, int]
    """What it has said in the last of them."""
    since: Counts
    """What it has done since the last of them."""
    awaited: int
    """The gather for which it waits, by its number since the last meeting; 0 or less: none."""
    waits: bool
    """Whether it waits for other ranks."""
    words: str
    closed: bool = False
    """Whether it has closed its engine."""

    def text(self) -> str:
        """Return it as text for the store."""
        return json.dumps(vars(self))

    @staticmethod
    def read(text: str) -> Position:
        """Return what ``text`` has written."""
        fields = json.loads(text)
        since, said = Counts(*fields["since"]), tuple(fields["said"])
        return Position(**{**fields, "since": since, "said": said})


def never_comes(meeting: Meeting, other: Position) -> bool:
    """Whether a rank will never come to the meeting in which this one waits."""
    if not meeting.waits or other.meeting >= meeting.number:
        return False
    if other.closed:
        return True
    if other.meeting < meeting.number - 1:
        return False  # what it has published is older than the last meeting
    since, before = other.since, meeting.before
    if not meeting.discards:
        return since.made > before.made
    # After an error on one rank the others may run on to the end of their passes, if they wait for
    # nothing that it will not send. Gradients that it does not have cannot be taken back.
    return (
        since.steps > before.steps
        or since.reduced > before.reduced
        or other.awaited > before.launched
    )


def differs(meeting: Meeting, other: Position) -> bool:
    """Whether a rank has said something else in the last meeting than this one."""
    return other.meeting == meeting.number and other.said != meeting.said


def in_words(words_by_rank: Mapping[int, str]) -> str:
    """Return who is where; ranks at one place are named together."""
    ranks_by_words: dict[str, list[int]] = {}
    for rank, words in words_by_rank.items():
        ranks_by_words.setdefault(words, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {words}"
        for words, ranks in ranks_by_words.items()
    )
