"""Repetitions in a step, which need not be traced. Integers only; all assumptions are checked in
the trace.

There are two ways. ``composed``: if a pass does the same for every microbatch but the first and the
last, the steps of all ranks with the same layers follow from one short step. ``lengthened``: if a
pass depends on earlier passes (slots that are filled again and again), a turn of the schedule that
did exactly the same as the turn before it is repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from megatron_llama.planner.traced import ActionSegment, TracedAction
from megatron_llama.schedule import Action, Op

PERIODS = 4
"""Fewest equal turns of a shortened schedule. The first turn may contain the first microbatch, and
the last turn the last forward pass."""
PassKind = tuple[Op, int]
"""An operation and its stage."""
FIRST, BETWEEN, LAST = range(3)


def composed(
    traced: Sequence[TracedAction],
    short: Sequence[Action],
    whole: Sequence[Action],
    stages: Mapping[int, int],
    segments: Sequence[ActionSegment],
) -> tuple[TracedAction, ...] | None:
    """Return the step of a rank with the schedule ``whole``, from a traced step with the schedule
    ``short``. ``stages`` maps stages of that rank to those of the traced rank. None if passes
    between the first and the last of a kind differ, or if bytes would be left over."""
    known: dict[tuple[PassKind, int], set[int]] = {}
    for done, place in zip(
        traced[1:-1], _places((action.op, action.stage) for action in short), strict=True
    ):
        known.setdefault(place, set()).add(done.segment)
    places = _places((action.op, stages[action.stage]) for action in whole)
    segment_sets = [known.get(place, set()) for place in places]
    if any(len(alike) != 1 for alike in segment_sets):
        return None
    chosen = [traced[0].segment, *(segment for (segment,) in segment_sets), traced[-1].segment]
    live = list(
        accumulate(
            (segments[segment].allocated - segments[segment].freed for segment in chosen),
            initial=traced[0].live,
        )
    )
    if live[-2] != traced[-1].live:
        return None
    words = [traced[0].action, *map(str, whole), traced[-1].action]
    return tuple(map(TracedAction, words, chosen, live))


def _places(kinds: Iterator[PassKind]) -> list[tuple[PassKind, int]]:
    """Return each action's kind, and whether it is the FIRST, the LAST or BETWEEN in its kind."""
    listed = list(kinds)
    seen = Counter[PassKind]()
    total = Counter(listed)
    places = []
    for kind in listed:
        seen[kind] += 1
        places.append(
            (kind, FIRST if seen[kind] == 1 else LAST if seen[kind] == total[kind] else BETWEEN)
        )
    return places


def period(short: Sequence[Action], whole: Sequence[Action], times: int) -> tuple[int, int] | None:
    """Return (size, end) if ``whole`` is ``short`` with the ``size`` actions before ``end``
    repeated ``times`` more, apart from microbatches. None if not, or if ``short`` has them fewer
    than PERIODS times."""
    few, many = ([(action.op, action.stage) for action in actions] for actions in (short, whole))
    size, rest = divmod(len(many) - len(few), times)
    end = next(
        (place for place, pair in enumerate(zip(few, many, strict=False)) if pair[0] != pair[1]),
        len(few),
    )
    turn = few[end - size : end]
    if rest or end < PERIODS * size or few[end - PERIODS * size : end] != turn * PERIODS:
        return None
    return (size, end) if many == few[:end] + turn * times + few[end:] else None


def steady(traced: Sequence[TracedAction], size: int, end: int) -> tuple[int, int] | None:
    """Return as [start, stop) the last ``size`` actions up to ``end`` that did exactly the same as
    the ``size`` actions before them, and left as many bytes. None if there are none. Any turn of
    a repeating list of actions may be the one to repeat."""
    did = [(done.segment, done.live) for done in traced]
    for stop in range(end, end - size * (PERIODS - 2) - 1, -1):
        start = stop - size
        if (
            start >= size
            and did[start:stop] == did[start - size : start]
            and traced[stop].live == traced[start].live
        ):
            return start, stop
    return None


def lengthened(
    traced: Sequence[TracedAction], start: int, stop: int, times: int, whole: Sequence[Action]
) -> tuple[TracedAction, ...]:
    """Return the step of ``whole``: the traced actions, with [start, stop) ``times`` more."""
    done = [*traced[:stop], *[*traced[start:stop]] * times, *traced[stop:]]
    words = [traced[0].action, *map(str, whole), traced[-1].action]
    return tuple(
        TracedAction(word, action.segment, action.live)
        for word, action in zip(words, done, strict=True)
    )
