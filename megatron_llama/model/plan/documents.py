"""Which queries see which keys where sequences are packed documents: plain integers, no torch.

``bounds`` are the first tokens of all documents, and last the number of tokens, counted through the
sequences of a batch one after the other. No document crosses from one sequence into the next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

Span = tuple[int, int]
"""Tokens [start, stop)."""


def places_within(bounds: Sequence[int], length: int, tokens: Span) -> Iterator[Span]:
    """Yield, for each sequence of ``length`` tokens, which of ``bounds`` delimit the documents of
    its ``tokens``, [first, last]: the outer two may lie beyond these tokens."""
    for start in range(0, bounds[-1], length):
        first = bisect_right(bounds, start + tokens[0]) - 1
        yield first, bisect_left(bounds, start + tokens[1])


def bounds_within(bounds: Sequence[int], length: int, tokens: Span) -> tuple[int, ...]:
    """Return the bounds of the documents of only these ``tokens`` of each sequence: a document that
    reaches beyond them is cut."""
    count = tokens[1] - tokens[0]
    found = [0]
    for sample, (first, last) in enumerate(places_within(bounds, length, tokens)):
        inner = (bound - sample * length - tokens[0] for bound in bounds[first + 1 : last])
        found += [sample * count + place for place in (*inner, count)]
    return tuple(found)


def seen_before(
    bounds: Sequence[int], start: int, queries: Span, keys: Span, window: int = 0
) -> list[tuple[Span, Span]]:
    """Return which of a sequence's ``queries`` see which of its ``keys``, all of which come before
    all queries: no pair, or those of the one document that has tokens of both.

    ``start`` is the first token of the sequence. With a window each of the ``queries`` reaches the
    last key at least; then there may be two pairs of spans, the first one without masked scores,
    because flash attention takes no window with more queries than keys and one."""
    place = bisect_right(bounds, start + queries[0])
    first = max(keys[0], bounds[place - 1] - start)
    last = min(queries[1], bounds[place] - start)
    if first >= keys[1]:
        return []
    seen = first, keys[1]
    # From this query on the first key is out of the window.
    turn = first + window
    if not window or turn >= last or last - queries[0] <= seen[1] - seen[0] + 1:
        return [((queries[0], last), seen)]
    return [((queries[0], turn), seen), ((turn, last), seen)]
