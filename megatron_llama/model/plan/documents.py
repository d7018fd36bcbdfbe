"""Which queries see which keys where sequences are packed documents: integers, no torch.

``bounds`` are the first tokens of all documents, and last the number of tokens, counted through the
sequences of a batch one after the other. No document crosses from one sequence into the next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_llama.model.nn.documents import Bounds

Span = tuple[int, int]
"""Tokens [start, stop)."""


def places_within(bounds: Bounds, length: int, tokens: Span) -> Iterator[Span]:
    """Yield, for each sequence of ``length`` tokens, which of ``bounds`` delimit the documents of
    its ``tokens``, [first, last]: the outer two may lie beyond these tokens."""
    for start in range(0, int(bounds[-1]), length):
        first = bisect_right(bounds, start + tokens[0]) - 1
        yield first, bisect_left(bounds, start + tokens[1])


def seen_before(
    bounds: Bounds, start: int, queries: Span, keys: Span, window: int = 0
) -> list[tuple[Span, Span]]:
    """Return which of a sequence's ``queries`` see which of its ``keys``, all of which come before
    all queries: no pair, or those of the one document that has tokens of both.

    ``start`` is the first token of the sequence. With a window each of the ``queries`` reaches the
    last key at least; then there may be two pairs of spans, the first one without masked scores,
    because flash attention takes no window with more queries than keys and one."""
    place = bisect_right(bounds, start + queries[0])
    first = max(keys[0], int(bounds[place - 1]) - start)
    last = min(queries[1], int(bounds[place]) - start)
    if first >= keys[1]:
        return []
    seen = first, keys[1]
    # From this query on the first key is out of the window.
    turn = first + window
    if not window or turn >= last or last - queries[0] <= seen[1] - seen[0] + 1:
        return [((queries[0], last), seen)]
    return [((queries[0], turn), seen), ((turn, last), seen)]


def chunk_bounds(bounds: Sequence[int], length: int, size: int, *, restarts: bool) -> list[int]:
    """Return the ``bounds`` of documents, and between them those of chunks of ``size`` tokens: they
    are counted from the start of each sequence of ``length`` tokens, or of each document if
    positions ``restarts`` there."""
    cut = []
    for start, stop in pairwise(bounds):
        counted = 0 if restarts else start % length % size
        cut += [start, *range(start - counted + size, stop, size)]
    return [*cut, bounds[-1]]
