"""The order of samples in a run. It is a pure function of the position, so a resume needs one
integer, and any layout reads the same samples.

Inside an epoch the order is a keyed permutation of range(n) that is computed, not stored: a Feistel
network over the next power of two (Luby and Rackoff 1988), applied until the result lies in
range(n) (Black and Rogaway 2002, "cycle walking": fewer than two rounds on average, since the power
of two is less than 2n).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8  # four suffice for large domains; halves of one bit need more to look uniform


def sample_index(position: int, num_samples: int, seed: int, shuffled: bool) -> int:
    """Return the sample at ``position`` of the run, in [0, num_samples). The position is the number
    of samples that were consumed before.

    Each epoch of ``num_samples`` positions holds every sample once. If they are ``shuffled``, each
    seed and epoch has an order of its own.
    """
    epoch, index = divmod(position, num_samples)
    if not shuffled or num_samples == 1:
        return index
    key = _mix(_mix(seed & _MASK) + epoch)
    bits = max(2, (num_samples - 1).bit_length())
    index = _feistel(index, bits, key)
    while index >= num_samples:
        index = _feistel(index, bits, key)
    return index


class BlendedOrder:
    """The order of samples in a run that blends several parts, which is a pure function too.

    A position goes down a binary tree. A node gives its first n samples to its two halves in
    proportion to their weights, rounded, so the share of a half is known for every n without
    counting. At any moment a part among k has had what its weight says to within ceil(log2(k)) / 2
    samples, and exactly that at multiples of the sum of all weights (whole numbers without a common
    divisor). Each part runs through its samples as if it were alone, each epoch in an order of its
    own.
    """

    def __init__(self, weights: Sequence[int], sizes: Sequence[int]) -> None:
        """``weights`` holds the weight of each part, above 0, and ``sizes`` its number of
        samples."""
        assert len(weights) == len(sizes) > 0 and min(weights) > 0
        self._sums = (0, *accumulate(weights))
        self._sizes = tuple(sizes)
        self.starts = (0, *accumulate(sizes))

    def __len__(self) -> int:
        """Return the number of positions until some part begins again."""
        if len(self._sizes) == 1:
            return self._sizes[0]
        low = 0
        high = self.starts[-1]
        while low < high:  # counts never fall
            middle = (low + high + 1) // 2
            fits = all(
                had <= size for had, size in zip(self.counts(middle), self._sizes, strict=True)
            )
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def counts(self, positions: int) -> list[int]:
        """Return the number of samples of each part among the first positions."""
        return self._counts(0, len(self._sizes), positions)

    def _counts(self, first: int, last: int, samples: int) -> list[int]:
        if last - first == 1:
            return [samples]
        middle = (first + last) // 2
        left = self._left(first, middle, last, samples)
        return self._counts(first, middle, left) + self._counts(middle, last, samples - left)

    def _left(self, first: int, middle: int, last: int, samples: int) -> int:
        """Return how many of the first samples of the parts [first, last) are of the parts [first,
        middle)."""
        total = self._sums[last] - self._sums[first]
        return (2 * samples * (self._sums[middle] - self._sums[first]) + total) // (2 * total)

    def place(self, position: int) -> tuple[int, int]:
        """Return the part at a position, and how many of its samples came before."""
        first = 0
        last = len(self._sizes)
        while last - first > 1:
            middle = (first + last) // 2
            left = self._left(first, middle, last, position)
            if self._left(first, middle, last, position + 1) > left:
                last = middle
                position = left
            else:
                first = middle
                position = position - left
        return first, position

    def index(self, position: int, seed: int, shuffled: bool) -> int:
        """Return the sample at ``position`` of the run, counted over all parts laid end to end."""
        part, own = self.place(position)
        return self.starts[part] + sample_index(
            own, self._sizes[part], seed + (part << 32), shuffled
        )


def _feistel(value: int, bits: int, key: int) -> int:
    """Apply a keyed permutation of range(2 ** bits), bits >= 2. The halves may differ by a bit, and
    swap widths each round."""
    low_bits = bits // 2
    high_bits = bits - bits // 2
    low = value & ((1 << low_bits) - 1)
    high = value >> low_bits
    for _ in range(_ROUNDS):
        key = (key + _GOLDEN) & _MASK
        low, high = high ^ (_mix(key ^ low) & ((1 << high_bits) - 1)), low
        low_bits, high_bits = high_bits, low_bits
    return high << low_bits | low


def mixed(seed: int, number: int) -> int:
    """Return a seed of its own for each number, 63 bits."""
    return _mix(_mix(seed & _MASK) + number) >> 1


def _mix(value: int) -> int:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every
    output bit."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
