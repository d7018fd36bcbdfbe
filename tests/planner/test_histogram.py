"""Bars of counts."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

from megatron_llama.planner.pictures.histogram import Bar, bars, page, quantiles, text_bars


def test_bars_hold_every_number_once() -> None:
    draw = random.Random(1)
    for size, largest in ((1, 5), (30, 19), (200, 21), (500, 12345), (2, 10**9)):
        numbers = [draw.randint(0, largest) for _ in range(size)]
        found = bars(Counter(numbers))
        assert 1 <= len(found) <= 20
        for bar in found:
            assert bar.count == sum(bar.low <= number <= bar.high for number in numbers)
        assert all(one.high + 1 == other.low for one, other in pairwise(found))
        assert sum(bar.count for bar in found) == size
    assert bars({3: 2, 5: 1}) == [Bar(3, 3, 2), Bar(4, 4, 0), Bar(5, 5, 1)] and bars({}) == []


def test_what_is_shown() -> None:
    assert list(text_bars({3: 10, 4: 1}, width=10)) == ["3       10 ##########", "4        1 #"]
    assert quantiles(dict.fromkeys(range(1, 101), 1)) == "least 1, median 50, 90 % 90, 99 % 99, most 100, mean 50.5"
    text = page("A & B", ["<line>"], [("Lengths", {3: 10, 4: 5}), ("None", {})])
    assert "<h1>A &amp; B</h1>" in text and "&lt;line&gt;" in text and text.count("<svg") == 1 and text.count("<rect") == 2
    assert "<title>3 to 3: 10</title>" in text and 'height="100.0"' in text
