"""Which examples share a sample: best-fit-decreasing bin packing of their lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put the indices of ``lengths`` into groups whose lengths sum up to at most ``capacity``. Each
    length is from 1 to ``capacity``.

    The longest example comes first, and each goes where it leaves the least room. That gives at
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
