"""The arrays of batches of pairs, against what each completion alone says they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
import torch
from megatron_llama.data.loader import Batch, BatchLoader
from megatron_llama.tune.preference.align_config import Method
from megatron_llama.tune.preference.dataset import Pairs, PairSamples, most_tokens, places_of
from megatron_llama.tune.preference.methods import CHOSEN, REJECTED

SEQ_LENGTH, VOCABULARY = 96, 160
METHODS: Sequence[Method] = ("dpo", "kto", "reward")


def made(sizes: Sequence[tuple[int, int, int]], method: Method, seed: int = 0) -> Pairs:
    """Random tokens: the prompt of each pair and its two completions have the given lengths."""
    draw = np.random.default_rng(seed)
    pairs = Pairs(1 if method == "kto" else 2)
    for number, (prompt, *halves) in enumerate(sizes):
        asked = draw.integers(0, VOCABULARY, prompt, np.int32)
        for kind, half in zip((CHOSEN, REJECTED), halves, strict=True):
            pairs.ids.append(np.concatenate([asked, draw.integers(0, VOCABULARY, half, np.int32)]))
            pairs.loss_mask.append(np.arange(prompt + half) >= prompt)
            pairs.prompts.append(prompt)
            pairs.kinds.append(kind)
        pairs.numbers += [number] * (2 // pairs.per_example)
    return pairs


SIZES = [(7, 20, 31), (12, 5, 5), (30, 10, 11), (3, 1, 1), (20, 28, 24), (5, 9, 2), (4, 4, 4)]


def documents(batch: Batch, row: int) -> list[tuple[list[int], list[int], list[int], list[int]]]:
    """Tokens, labels, positions and completion ids of each document of a sample, padding last."""
    assert batch.document_ids is not None and batch.position_ids is not None and batch.completion_ids is not None
    ids = batch.document_ids[:, row]
    assert (ids.diff() >= 0).all()
    columns = (batch.tokens, batch.labels, batch.position_ids, batch.completion_ids)
    return [tuple(column[ids == one, row].tolist() for column in columns) for one in ids.unique()]  # type: ignore[misc]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_sample_by_its_completions(method: Method, packing: bool) -> None:
    pairs = made(SIZES, method)
    samples = PairSamples(pairs, range(len(pairs)), SEQ_LENGTH, packing=packing, method=method)
    assert packing or len(samples) == len(pairs)
    seen: list[int] = []
    widest = max(len(samples.numbers(index)) for index in range(len(samples)))
    for index in range(len(samples)):
        batch = samples.batch([index])
        numbers = samples.numbers(index)
        seen += numbers
        *halves, padding = [*documents(batch, 0), ([], [], [], [])][: len(numbers) + 1]
        assert batch.loss_mask is None and batch.reference_logps is None and batch.completion_kinds is not None
        assert batch.completion_kinds[:, 0].tolist() == [pairs.kinds[n] for n in numbers] + [0] * (widest - len(numbers))
        assert not any(padding[3])
        for place, (number, (tokens, labels, positions, owners)) in enumerate(zip(numbers, halves, strict=True)):
            ids = pairs.ids[number].tolist()
            prompt = pairs.prompts[number]
            assert positions == list(range(len(tokens)))
            if method == "reward":
                assert tokens == ids and owners == [0] * (len(ids) - 1) + [place + 1]
            else:
                assert tokens == ids[:-1] and labels == ids[1:]
                assert owners == [0] * (prompt - 1) + [place + 1] * (len(ids) - prompt)
        if method != "kto":
            assert [n // 2 for n in numbers[::2]] == [n // 2 for n in numbers[1::2]], "both halves of a pair"
            assert all(n % 2 == place % 2 for place, n in enumerate(numbers)), "the chosen one first"
    assert sorted(seen) == list(range(2 * len(SIZES))) and samples.completions == len(seen)
    places = sum(places_of(len(ids), method) for ids in pairs.ids)
    assert samples.filled == places / (len(samples) * SEQ_LENGTH)


@pytest.mark.parametrize("packing", [True, False])
def test_mismatched_completions(packing: bool) -> None:
    """Each prompt of a sample has, in the sample's mismatched one, the completion of another example: always the same distance away."""
    pairs = made(SIZES, "kto")
    samples = PairSamples(pairs, range(len(pairs)), SEQ_LENGTH, packing=packing, method="kto")
    assert samples.shift == 2, "both completions of a pair have one prompt"
    taken: list[int] = []
    for index in range(len(samples)):
        batch = samples.batch([index]).mismatched
        assert batch is not None and batch.completion_kinds is not None and batch.mismatched is None
        numbers = samples.numbers(index)
        assert batch.completion_kinds[: len(numbers), 0].tolist() == [1] * len(numbers)
        for place, (number, (tokens, labels, positions, owners)) in enumerate(zip(numbers, documents(batch, 0), strict=False)):
            other = (number - 2) % len(pairs)
            taken.append(other)
            ids = [*pairs.ids[number][: pairs.prompts[number]].tolist(), *pairs.ids[other][pairs.prompts[other] :].tolist()]
            assert tokens == ids[:-1] and labels == ids[1:] and positions == list(range(len(tokens)))
            assert owners == [0] * (pairs.prompts[number] - 1) + [place + 1] * (len(ids) - pairs.prompts[number])
    assert sorted(taken) == list(range(len(pairs))), "each completion is taken once"


def test_a_long_mismatched_completion_is_cut() -> None:
    pairs = made([(90, 5, 6), (2, 80, 70)], "kto")
    samples = PairSamples(pairs, range(4), SEQ_LENGTH, packing=True, method="kto")
    assert len(samples) == 4, "neither a sample nor its mismatched one holds more"
    for index in range(4):
        [number] = samples.numbers(index)
        batch = samples.batch([index]).mismatched
        assert batch is not None and batch.completion_ids is not None
        learned = int((batch.completion_ids > 0).sum())
        assert learned == (SEQ_LENGTH + 1 - 90 if number < 2 else len(pairs.ids[number - 2]) - 90)


def test_runs_of_a_prompt_set_the_distance() -> None:
    """Prompts with several completions, also over the end to the beginning, never meet their own."""
    for runs in ([1, 1, 1], [3, 1, 2, 4], [2, 5, 1, 1, 1], [1, 4, 2, 1, 4]):
        for wrap in (False, True):
            prompts = [n for n, length in enumerate(runs) for _ in range(length)]
            if wrap:
                prompts.append(0)
            pairs = Pairs(1)
            for number, prompt in enumerate(prompts):
                pairs.ids.append(np.array([prompt, 100 + number], np.int32))
                pairs.loss_mask.append(np.array([False, True]))
                pairs.prompts.append(1)
                pairs.kinds.append(CHOSEN)
                pairs.numbers.append(number)
            samples = PairSamples(pairs, range(len(prompts)), 8, packing=False, method="kto")
            assert samples.shift == max([*runs, runs[0] + wrap])
            assert all(prompts[n] != prompts[n - samples.shift] for n in range(len(prompts)))


Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]


def scored(samples: PairSamples, mismatched: bool = False) -> list[Numbers]:
    """A number for each completion of each sample that only its own tokens give."""
    found = []
    for index in range(len(samples)):
        batch = samples.batch([index])
        inner = batch.mismatched if mismatched else batch
        assert inner is not None and inner.completion_ids is not None and inner.completion_kinds is not None
        width = len(inner.completion_kinds)
        found.append(np.array([float((inner.labels * (inner.completion_ids == n + 1)).sum()) for n in range(width)]))
    return found


def in_order(samples: PairSamples, mismatched: bool = False) -> Numbers:
    """The same in the order of the completions."""
    found = np.full(samples.completions, np.nan)
    for index, sample in enumerate(scored(samples, mismatched)):
        numbers = samples.numbers(index)
        found[numbers] = sample[: len(numbers)]
    return found


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_references_stand_beside_their_completions(method: Method) -> None:
    """Scores in the order of the files, gathered from samples in any packing, come back in their places."""
    pairs = made(SIZES, method)
    chosen = range(1, len(pairs) - 2)
    packed, alone = (PairSamples(pairs, chosen, SEQ_LENGTH, packing=packing, method=method) for packing in (True, False))
    assert packed.digest() == alone.digest() and packed.identity()["digest"] != alone.identity()["digest"]
    logps = in_order(packed)
    assert np.array_equal(logps, in_order(alone))
    per = pairs.per_example
    assert logps.tolist() == [float(pairs.ids[i][pairs.prompts[i] :].sum()) for i in range(per * chosen.start, per * chosen.stop)]
    kl_logps = in_order(packed, mismatched=True) if method == "kto" else None
    for samples in (packed, alone):
        known = samples.with_references(logps, kl_logps)
        assert samples.batch([0]).reference_logps is None and known.identity() == samples.identity()
        for index, (own, twins) in enumerate(zip(scored(samples), scored(samples, method == "kto"), strict=True)):
            batch = known.batch([index])
            assert batch.reference_logps is not None and batch.reference_logps.dtype == torch.float64
            assert batch.reference_logps[:, 0].tolist() == own.tolist()
            if batch.mismatched is not None:
                assert batch.mismatched.reference_logps is not None
                assert batch.mismatched.reference_logps[:, 0].tolist() == twins.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_layouts_do_not_matter(method: Method) -> None:
    """Whatever the ranks and the microbatches, a step has the same samples with the same mismatched ones."""
    pairs = made(SIZES, method)
    samples = PairSamples(pairs, range(len(pairs)), SEQ_LENGTH, packing=True, method=method)

    def columns(size: int, ranks: int) -> Counter[bytes]:
        found: Counter[bytes] = Counter()
        for rank in range(ranks):
            loader = BatchLoader(samples, shuffled=True, micro_batch_size=size, global_batch_size=4, seed=3, dp_rank=rank, dp_size=ranks)
            for batch in loader.microbatches(4):
                for at in range(size):
                    found[b"".join(tensor[:, at].numpy().tobytes() for tensor in batch.tensors().values())] += 1
        return found

    whole = columns(4, 1)
    assert sum(whole.values()) == 4
    assert whole == columns(1, 4) == columns(2, 2) == columns(2, 1)


def test_identity_tells_every_change() -> None:
    def identity(pairs: Pairs, method: Method = "dpo", packing: bool = True, chosen: range = range(7)) -> object:
        return PairSamples(pairs, chosen, SEQ_LENGTH, packing=packing, method=method, rendered="2026-01-01").identity()

    first = identity(made(SIZES, "dpo"))
    assert identity(made(SIZES, "dpo"), "ipo") == first, "the same samples"
    token, mask, kind = (made(SIZES, "dpo") for _ in range(3))
    token.ids[3][2] += 1
    mask.loss_mask[3][-1] = False
    kind.kinds[:2] = [REJECTED, CHOSEN]
    others = [identity(changed) for changed in (token, mask, kind)]
    others += [
        identity(made(SIZES, "dpo"), "reward"),
        identity(made(SIZES, "dpo"), packing=False),
        identity(made(SIZES, "dpo"), chosen=range(6)),
    ]
    assert first not in others and len({str(other) for other in others}) == len(others)
    assert str(first).startswith("{'pairs': 7, 'tokens': ") and "'rendered': '2026-01-01'" in str(first)


def test_most_tokens_by_search() -> None:
    """The largest limit with which an example fits."""
    for method in get_args(Method):
        for room in (5, 12, 13):
            for lengths in [(a, b) for a in range(2, 16) for b in range(2, 16)] + [(a,) for a in range(2, 20)]:
                fitting = [most for most in range(1, 40) if sum(places_of(min(length, most), method) for length in lengths) <= room]
                found = most_tokens(lengths, room, method)
                assert found in fitting
                if max(lengths) > found:
                    assert found == max(fitting)
