"""Which examples share a sample: best fit of lengths that are known, longest first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of ``lengths`` in groups whose sum is at most ``capacity``; each length is from 1 to
    ``capacity``.

    The longest first, each where it leaves least room, as in best-fit-decreasing bin packing: at
    most 11/9 of the fewest groups and 4 more (Johnson, 1973). The same lengths give the same
    groups. Time is that of a search for the next free room: a bit of one integer per room.
    """
    groups: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)
    """Groups by the room they have left."""
    rooms = 0
    """Bit r: some group has room for r."""
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
