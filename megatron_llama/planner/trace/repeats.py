"""What of a step need not be traced, because it repeats what was. Integers only; what is assumed is
looked for in the trace.

Two ways. ``composed``: where a pass does the same for every microbatch but the first and the last,
whatever lies between, the steps of all ranks with the same layers follow from one short one.
``lengthened``: where a pass depends on those before it (slots that are filled again and again), a
turn of the schedule that did exactly what the turn before it did is repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from megatron_llama.planner.traced import ActionSegment, TracedAction
from megatron_llama.plans.schedule import Action, Op

PERIODS = 4
"""So many equal turns a schedule has when others are left out. The first may hold the first
microbatch, the last one the last forward pass."""
Kind = tuple[Op, int]
"""An operation and its stage."""
FIRST, BETWEEN, LAST = range(3)


def composed(
    traced: Sequence[TracedAction],
    short: Sequence[Action],
    whole: Sequence[Action],
    stages: Mapping[int, int],
    segments: Sequence[ActionSegment],
) -> tuple[TracedAction, ...] | None:
    """The step of a rank whose schedule is ``whole`` from the one that was traced, whose schedule
    is ``short``. ``stages``: stages of the traced rank by those of the other. None where passes
    between the first and the last one of a kind differ, or where bytes would be left over."""
    known: dict[tuple[Kind, int], set[int]] = {}
    for done, place in zip(
        traced[1:-1], _places((action.op, action.stage) for action in short), strict=True
    ):
        known.setdefault(place, set()).add(done.segment)
    places = _places((action.op, stages[action.stage]) for action in whole)
    found = [known.get(place, set()) for place in places]
    if any(len(alike) != 1 for alike in found):
        return None
    chosen = [traced[0].segment, *(segment for (segment,) in found), traced[-1].segment]
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


def _places(kinds: Iterator[Kind]) -> list[tuple[Kind, int]]:
    """Every action as the first, the last or one between them of its kind."""
    listed = list(kinds)
    seen = Counter[Kind]()
    total = Counter(listed)
    places = []
    for kind in listed:
        seen[kind] += 1
        places.append(
            (kind, FIRST if seen[kind] == 1 else LAST if seen[kind] == total[kind] else BETWEEN)
        )
    return places


def period(short: Sequence[Action], whole: Sequence[Action], times: int) -> tuple[int, int] | None:
    """(size, end): ``whole`` is ``short`` with the ``size`` actions before ``end`` repeated
    ``times`` more, their microbatches apart. None where it is not, or where they are not there
    PERIODS times to begin with."""
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
    """The last ``size`` actions up to ``end`` that do exactly what those right before them did, and
    leave as many bytes: [start, stop). Where a list of actions repeats itself, any of its turns may
    be the one to be repeated."""
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
    """The step of ``whole``: what was traced, with the actions [start, stop) ``times`` more."""
    done = [*traced[:stop], *[*traced[start:stop]] * times, *traced[stop:]]
    words = [traced[0].action, *map(str, whole), traced[-1].action]
    return tuple(
        TracedAction(word, one.segment, one.live) for word, one in zip(words, done, strict=True)
    )
