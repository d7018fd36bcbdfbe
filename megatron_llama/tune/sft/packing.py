"""The division of examples into samples, and their places there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


def grouped(lengths: Sequence[int], capacity: int, *, packing: bool) -> list[list[int]]:
    """Return the indices of ``lengths`` in groups, one for each sample of ``capacity`` places: with
    ``packing`` as many as fit, else each alone."""
    if packing:
        return best_fit(lengths, capacity)
    return [[index] for index in range(len(lengths))]


class SideBySide(NamedTuple):
    """Texts that lie in samples one after the other."""

    places: list[list[slice]]
    """The places of each text of each sample."""
    positions: NDArray[np.int64]
    """[samples, places]."""
    documents: NDArray[np.int32]


def side_by_side(lengths: Sequence[Sequence[int]], capacity: int) -> SideBySide:
    """Lay texts of these ``lengths`` into samples of ``capacity`` places, from the first place on.
    Each is its own document: it attends only to itself, and its positions start at 0. So does the
    padding at the end."""
    positions = np.zeros((len(lengths), capacity), np.int64)
    documents = np.zeros((len(lengths), capacity), np.int32)
    places: list[list[slice]] = []
    for row, counts in enumerate(lengths):
        starts = np.cumsum([0, *counts]).tolist()
        taken = [slice(*ends) for ends in pairwise((*starts, capacity))]
        for document, place in enumerate(taken):
            positions[row, place] = np.arange(place.stop - place.start)
            documents[row, place] = document
        places.append(taken[:-1])
    return SideBySide(places, positions, documents)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put the indices of ``lengths`` into groups whose lengths sum up to at most ``capacity``. Each
    length is from 1 to ``capacity``.

    The longest example comes first, and each goes where it leaves the least room. This makes at
    most 11/9 of the fewest possible groups and 4 more (Johnson, 1973). The same lengths always give
    the same groups.
    """
    groups: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)
    """Groups by the room they have left."""
    rooms = 0
    """Bit r is set if some group has exactly room r left. The lowest bit from ``length`` on is then
    the best fit, found without a search over the groups."""
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        assert 1 <= length <= capacity
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            group = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room = capacity
            group = len(groups)
            groups.append([])
        groups[group].append(index)
        if room > length:
            with_room[room - length].append(group)
            rooms |= 1 << (room - length)
    return groups
