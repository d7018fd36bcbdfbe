"""The order of samples: a permutation per epoch and seed that looks uniform."""

from __future__ import annotations

import math

import pytest
from megatron_llama.data.order import BlendedOrder, sample_index


def order(n: int, seed: int = 1234, epoch: int = 0) -> list[int]:
    return [sample_index(epoch * n + i, n, seed, True) for i in range(n)]


def test_every_sample_once_per_epoch() -> None:
    for n in (*range(1, 70), 127, 128, 129, 1000, 4095, 4096, 4097, 10007):
        for epoch in (0, 1, 5):
            assert sorted(order(n, epoch=epoch)) == list(range(n)), (n, epoch)


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


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 13, 64])
def test_each_place_holds_each_sample_equally_often(n: int) -> None:
    epochs = 4000
    for place in (0, n // 2, n - 1):
        counts = [0] * n
        for epoch in range(epochs):
            counts[sample_index(epoch * n + place, n, 42, True)] += 1
        chi_square = sum((count - epochs / n) ** 2 / (epochs / n) for count in counts)
        assert chi_square < (n - 1) + 5 * (2 * (n - 1)) ** 0.5 + 5, "its mean is n - 1, its variance 2 (n - 1): five standard deviations"


WEIGHTS = [(1, 1), (7, 3), (1, 99), (1, 2, 3), (5, 1, 1, 1, 2), (1,), (1, 1000, 1, 1000, 10, 3, 7)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_blend_is_what_its_weights_say_at_any_moment(weights: tuple[int, ...]) -> None:
    order, whole = BlendedOrder(weights, [10**6] * len(weights)), sum(weights)
    bound = math.ceil(math.log2(len(weights))) / 2
    counts = [0] * len(weights)
    for position in range(2 * whole + 3):
        part, before = order.place(position)
        assert before == counts[part], "each part goes through its own samples one by one"
        counts[part] += 1
        assert order.counts(position + 1) == counts
        assert all(abs(count - (position + 1) * weight / whole) <= bound for count, weight in zip(counts, weights, strict=True))
        if (position + 1) % whole == 0:
            assert counts == [(position + 1) // whole * weight for weight in weights]


def test_a_blend_needs_no_history() -> None:
    """The place of a position far away is computed, and a part has had as much as its place says."""
    order = BlendedOrder((700, 299, 1), (10, 20, 30))
    part, before = order.place(10**15 + 12345)
    assert before == order.counts(10**15 + 12345)[part] and sum(order.counts(10**15)) == 10**15


def test_each_part_of_a_blend_has_every_sample_once_per_epoch() -> None:
    sizes = (13, 40, 13)
    order = BlendedOrder((2, 1, 2), sizes)
    found: list[list[int]] = [[], [], []]
    for position in range(5 * 26):
        index = order.index(position, 1234, True)
        part = order.place(position)[0]
        found[part].append(index - order.starts[part])
    for part, size in ((0, 13), (2, 13)):
        assert all(sorted(found[part][at : at + size]) == list(range(size)) for at in range(0, 4 * size, size))
    assert len(set(found[1])) == len(found[1]) == 26
    assert found[0] != found[2], "parts of one size have orders of their own"
    assert [order.index(position, 1234, True) for position in range(8)] == [64, 1, 40, 0, 53, 59, 9, 34]


def test_a_blend_ends_when_a_part_begins_again() -> None:
    assert len(BlendedOrder((1,), (17,))) == 17
    for weights, sizes in (((7, 3), (70, 31)), ((1, 1), (5, 100)), ((1, 2, 3), (9, 9, 9))):
        order = BlendedOrder(weights, sizes)
        last = order.counts(len(order))
        assert all(count <= size for count, size in zip(last, sizes, strict=True))
        assert any(count > size for count, size in zip(order.counts(len(order) + 1), sizes, strict=True))
