"""The order of samples: a permutation per epoch and seed that looks uniform."""

from __future__ import annotations

import pytest

from megatron_llama.data.order import sample_index


def order(n: int, seed: int = 1234, epoch: int = 0) -> list[int]:
    return [sample_index(epoch * n + i, n, seed, True) for i in range(n)]


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 1000, 4095, 4096, 4097, 10007])
def test_every_sample_once_per_epoch(n: int) -> None:
    for epoch in (0, 1, 5):
        assert sorted(order(n, epoch=epoch)) == list(range(n))


def test_order_differs_between_epochs_and_seeds() -> None:
    orders = [order(1000, seed, epoch) for seed in (0, 1, 2, 2**40, -1) for epoch in (0, 1, 2)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            # Two random permutations agree in one place on average; 10 or more has probability 1e-7.
            assert sum(x == y for x, y in zip(a, b, strict=True)) < 10


def test_order_is_a_fixed_function() -> None:
    """Changing the function would silently reshuffle every run that is resumed."""
    assert order(10) == [1, 0, 9, 2, 5, 8, 7, 4, 6, 3]
    assert sample_index(10**12, 123_456_789, 7, True) == 118677720


def test_sequential_order() -> None:
    assert [sample_index(i, 5, 9, False) for i in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 13, 64])
def test_each_place_holds_each_sample_equally_often(n: int) -> None:
    epochs = 4000
    for place in (0, n // 2, n - 1):
        counts = [0] * n
        for epoch in range(epochs):
            counts[sample_index(epoch * n + place, n, 42, True)] += 1
        # Chi-square has mean n - 1 and variance 2 (n - 1): five standard deviations.
        assert chi_square(counts) < (n - 1) + 5 * (2 * (n - 1)) ** 0.5 + 5


def test_neighbours_are_independent() -> None:
    """The sample that follows sample 0 of an epoch is each of the others equally often."""
    n, counts = 16, [0] * 15
    for epoch in range(6000):
        samples = order(n, 7, epoch)
        at = samples.index(0)
        if at + 1 < n:
            counts[samples[at + 1] - 1] += 1
    assert chi_square(counts) < 14 + 5 * 28**0.5


def test_a_large_epoch_is_spread_evenly() -> None:
    n = 123_456_789
    counts = [0] * 100
    for position in range(20_000):
        counts[sample_index(position, n, 5, True) * 100 // n] += 1
    assert chi_square(counts) < 99 + 5 * 198**0.5
