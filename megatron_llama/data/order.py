"""Which sample stands at which position of a run: a pure function, so that a resume needs one integer.

Inside an epoch the order is a keyed permutation of range(n) that is computed, not stored: a Feistel network over the
next power of two (Luby and Rackoff 1988), walked until it lands inside range(n) (Black and Rogaway 2002, "cycle
walking": fewer than two rounds on average, since the power of two is less than 2n).
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8  # four suffice for large domains; halves of one bit need more to look uniform


def sample_index(position: int, num_samples: int, seed: int, shuffled: bool) -> int:
    """Sample at ``position`` of the run (samples consumed before it), in [0, num_samples).

    Each epoch of ``num_samples`` positions holds every sample once; shuffled, in an order of its own per seed and epoch.
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


def _feistel(value: int, bits: int, key: int) -> int:
    """A keyed permutation of range(2 ** bits), bits >= 2. The halves may differ by a bit and swap widths each round."""
    low_bits, high_bits = bits // 2, bits - bits // 2
    low, high = value & ((1 << low_bits) - 1), value >> low_bits
    for _ in range(_ROUNDS):
        key = (key + _GOLDEN) & _MASK
        low, high = high ^ (_mix(key ^ low) & ((1 << high_bits) - 1)), low
        low_bits, high_bits = high_bits, low_bits
    return high << low_bits | low


def _mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
