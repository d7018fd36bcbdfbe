"""Which tokens of packed documents see which, against a mask of all pairs; and what an accelerator is sent of a chunk."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.engine.mesh import Axis
from megatron_llama.model.nn.attention import ScoreRule
from megatron_llama.model.nn.documents import Bounds, Documents, Part, SplitDocuments
from megatron_llama.model.plan.documents import Span, seen_before
from megatron_llama.model.plan.zigzag import reached

from tests.model.nn.dispatch import Dispatched

LENGTH = 12
CUTS = [(), (1,), (6,), (11,), (3, 4, 5), (2, 6, 9), (4, 6, 8), tuple(range(1, LENGTH)), (5, 10)]
"""Where a new document begins inside a sequence: one document, of one token first and last, at the borders of chunks and beside them."""


def bounds_of(*cuts: tuple[int, ...]) -> Bounds:
    """Of sequences with these cuts."""
    inner = [sample * LENGTH + place for sample, places in enumerate(cuts) for place in (0, *places)]
    return np.array([*inner, len(cuts) * LENGTH])


def numbers(bounds: Bounds) -> list[int]:
    """The number of each token's document, through all sequences."""
    return [number for number, (start, stop) in enumerate(pairwise(bounds)) for _ in range(start, stop)]


def pairs(spans: tuple[Span, Span]) -> Iterator[tuple[int, int]]:
    return product(range(*spans[0]), range(*spans[1]))


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_rectangles_cover_what_is_seen_of_earlier_tokens(cuts: tuple[int, ...]) -> None:
    """Of any tokens and any before them, in the second sequence of two: each pair once, and none that a document hides."""
    bounds = bounds_of((3, 7), cuts)
    ids = numbers(bounds)[LENGTH:]
    spans = [(start, stop) for start in range(LENGTH) for stop in range(start + 1, LENGTH + 1)]
    for keys, queries in ((keys, queries) for keys, queries in product(spans, spans) if keys[1] <= queries[0]):
        seen = [pair for spans in seen_before(bounds, LENGTH, queries, keys) for pair in pairs(spans)]
        assert sorted(seen) == [(q, k) for q, k in pairs((queries, keys)) if ids[q] == ids[k]]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("chunk", [2, 3, 4, 6])
def test_rectangles_follow_the_window(chunk: int, cuts: tuple[int, ...]) -> None:
    """Of two chunks of a sequence: all that a window and the documents leave is covered once; each query sees a key; and what has a mask has
    hardly more queries than keys, which flash attention needs."""
    bounds = bounds_of(cuts)
    ids = numbers(bounds)
    for window in range(1, LENGTH + 1):
        for before, own in product(range(LENGTH // chunk), repeat=2):
            tokens = reached(before, own, chunk, window)
            if not tokens:
                continue
            first, end = own * chunk, (before + 1) * chunk
            found = seen_before(bounds, 0, (first, first + tokens), (end - tokens, end), window)
            seen = [pair for spans in found for pair in pairs(spans)]
            near = [(q, k) for q, k in seen if q - k < window]
            chunks = (first, first + chunk), (end - chunk, end)
            assert sorted(near) == [(q, k) for q, k in pairs(chunks) if ids[q] == ids[k] and q - k < window]
            for (start, stop), (left, right) in found:
                assert stop - right < window, "the last query sees no key"
                assert stop - left <= window or stop - start <= right - left + 1


@pytest.mark.parametrize("tokens", [(0, 12), (0, 3), (3, 6), (5, 7), (9, 12)])
def test_documents_are_cut_to_some_tokens(tokens: Span) -> None:
    """On the host and, without being asked, on the device."""
    for cuts in zip(CUTS, reversed(CUTS), strict=True):
        bounds = bounds_of(*cuts)
        ids = numbers(bounds)
        inside = [ids[sample * LENGTH + place] for sample in range(2) for place in range(*tokens)]
        begins = [place for place, number in enumerate(inside) if place == 0 or number != inside[place - 1]]
        expected = (*begins, len(inside))
        within = Documents(torch.from_numpy(bounds).int(), bounds).within(LENGTH, tokens)
        assert tuple(within.bounds) == expected == tuple(within.starts.tolist()) and within.starts.dtype is torch.int32
        assert within.longest == max(stop - start for start, stop in pairwise(expected))


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(("cuts", "window", "inside"), [((2, 4, 8), 0, (0, 1)), ((2, 8), 2, (0,))])
def test_a_chunk_is_sent_as_it_lies(cuts: tuple[int, ...], window: int, inside: tuple[int, ...], samples: int) -> None:
    """Key and value heads are not repeated, nothing is copied for one sequence, and no number is read from the device, which computes nothing."""
    bounds = bounds_of(*[cuts] * samples)
    axis = Axis("cp", 1, (0, 1), None, Recorder())
    starts = torch.empty(len(bounds), dtype=torch.int32, device="meta")
    query, key = (torch.empty(6, samples, n, 16, dtype=torch.bfloat16, device="meta").permute(1, 2, 0, 3) for n in (4, 2))
    reach = window - 1 if window else 3
    with Dispatched() as seen:
        split = SplitDocuments.of(Documents(starts, bounds), LENGTH, axis)
        parts = [*split.square(1, 0, 0, at_once=True), *split.rectangles((3, 3 + reach), (3 - reach, 3), 0, 3 - reach, window)]
        outs = [part.attend(query, key, key, ScoreRule(window=window), "flash") for part in parts]
    assert [out.shape for out, _ in outs] == [(samples, 4, 3, 16), *[(1, 4, 1, 16)] * samples]
    assert [lse.shape for _, lse in outs] == [(samples, 4, 3), *[(1, 4, 1)] * samples]
    assert [part.columns for part in parts[1:]] == [slice(2, 3)] * samples
    (name, sent, options), *others = seen.named("flash_attention_forward" if window else "flash_attention")
    assert name == "_flash_attention_forward" and len(others) == samples
    assert options == ({"window_size_left": 1, "window_size_right": 0} if window else {})
    own_query, own_key, own_value, own_starts, _, longest, *_ = sent
    assert own_query.shape == (3 * samples, 4, 16) and own_key.shape == own_value.shape == (3 * samples, 2, 16)
    # The documents that have some of tokens 3 to 5.
    own_bounds = (*(3 * sample + place for sample in range(samples) for place in inside), 3 * samples)
    assert tuple(split.own[1].bounds) == own_bounds and own_starts.shape == (len(own_bounds),)
    assert longest == max(stop - start for start, stop in pairwise(own_bounds))
    if samples == 1:
        assert own_query.stride() == (64, 16, 1) and own_key.stride() == (32, 16, 1)


def test_a_part_has_gradients_in_the_shapes_of_its_tokens() -> None:
    """Through torch's own functions of the backward operator, on the device that computes nothing."""
    bounds = bounds_of((2, 7, 8), (1,))
    documents = Documents(torch.empty(len(bounds), dtype=torch.int32, device="meta"), bounds).within(LENGTH, (3, 9))
    query, key = (torch.empty(9, 2, n, 16, dtype=torch.bfloat16, device="meta").permute(1, 2, 0, 3) for n in (4, 2))
    part = Part(slice(None), slice(3, 9), slice(0, 6), 0, documents)
    lse = torch.empty(2, 4, 9, device="meta")
    grads = part.attend_backward((query, query, query), lse, key, key, ScoreRule(), "auto")
    assert [grad.shape for grad in grads] == [(2, 4, 6, 16), (2, 2, 6, 16), (2, 2, 6, 16)]
