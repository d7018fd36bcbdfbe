"""Batches: the same samples whatever the layout, and masks against their definition."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.config.schema import DataConfig
from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.data.loader import Batch, BatchLoader, BlendedSamples, StreamSamples
from megatron_llama.data.order import sample_index
from megatron_llama.data.stream import TokenStream
from megatron_llama.errors import DataError

SEQ, GLOBAL = 48, 16
NO_MASK = DataConfig()
EVERY_MASK = DataConfig(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)


@pytest.fixture(scope="module")
def stream(dataset: IndexedDataset) -> TokenStream:
    return TokenStream(dataset, (0, 20), SEQ, 2000)


def loader(stream: TokenStream, data: DataConfig = NO_MASK, *, mbs: int = 2, dp: tuple[int, int] = (0, 1), seed: int = 3) -> BatchLoader:
    samples, shuffled = StreamSamples(stream, data, 2), data.data_order == "shuffled"
    return BatchLoader(samples, shuffled=shuffled, micro_batch_size=mbs, global_batch_size=GLOBAL, seed=seed, dp_rank=dp[0], dp_size=dp[1])


def test_shapes_and_order(stream: TokenStream) -> None:
    batches = loader(stream).microbatches(32)
    assert len(batches) == 8
    for m, batch in enumerate(batches):
        assert batch.tokens.shape == batch.labels.shape == (SEQ, 2)
        assert batch.tokens.dtype == batch.labels.dtype == torch.int64
        assert batch.tokens.is_contiguous()
        assert (batch.loss_mask, batch.position_ids, batch.document_ids, batch.document_mask) == (None,) * 4
        for j in range(2):
            sample = torch.from_numpy(stream.sample(sample_index(32 + 2 * m + j, len(stream), 3, True)))
            assert torch.equal(batch.tokens[:, j], sample[:-1])
            assert torch.equal(batch.labels[:, j], sample[1:])


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("mbs", [1, 2, 4])
def test_a_step_holds_the_same_samples_in_any_layout(stream: TokenStream, dp_size: int, mbs: int) -> None:
    """Not only the set: position m * dp * mbs + r * mbs + j of the step, over the end of an epoch too."""
    consumed = len(stream) - 5
    reference = torch.cat([batch.tokens for batch in loader(stream, mbs=1).microbatches(consumed)], dim=1)
    ranks = [loader(stream, mbs=mbs, dp=(rank, dp_size)).microbatches(consumed) for rank in range(dp_size)]
    union = torch.cat([batch.tokens for step in zip(*ranks, strict=True) for batch in step], dim=1)
    assert torch.equal(union, reference)


@pytest.mark.parametrize(("dp_size", "mbs"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_what_is_behind_the_end_does_not_count(stream: TokenStream, dp_size: int, mbs: int) -> None:
    """Steps of 8 up to sample 13: the second has five samples, in whatever layout, each rank has a mask in it, and nobody in the first."""
    made = StreamSamples(stream, DataConfig(), None)
    ranks = [
        BatchLoader(
            made, shuffled=True, micro_batch_size=mbs, global_batch_size=BatchSizes(8, end=13), seed=3, dp_rank=rank, dp_size=dp_size
        )
        for rank in range(dp_size)
    ]
    assert all(batch.loss_mask is None for rank in ranks for start in (0, 13) for batch in rank.microbatches(start))
    steps = [batch for step in zip(*(rank.microbatches(8) for rank in ranks), strict=True) for batch in step]
    masks = [batch.loss_mask for batch in steps if batch.loss_mask is not None]
    assert len(masks) == len(steps) == 8 // mbs
    assert torch.cat(masks, dim=1).tolist() == [[1.0] * 5 + [0.0] * 3] * SEQ
    whole = torch.cat([batch.tokens for batch in loader(stream, mbs=mbs).microbatches(8)], dim=1)[:, :5]
    assert torch.equal(torch.cat([batch.tokens for batch in steps], dim=1)[:, :5], whole)


def test_an_end_keeps_the_mask_that_samples_have(dataset: IndexedDataset) -> None:
    made = StreamSamples(TokenStream(dataset, (0, 20), SEQ, 2000), EVERY_MASK, 2)
    plain, cut = (
        BatchLoader(made, shuffled=False, micro_batch_size=2, global_batch_size=sizes, seed=1).microbatches(0)
        for sizes in (BatchSizes(4), BatchSizes(4, end=3))
    )
    for index in range(2):
        ours, theirs = cut[index].loss_mask, plain[index].loss_mask
        assert ours is not None and theirs is not None
        assert torch.equal(ours[:, 0], theirs[:, 0]) and torch.equal(ours[:, 1], theirs[:, 1] * (index == 0))


@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_blend_holds_the_samples_of_its_parts_in_any_layout(dataset: IndexedDataset, dp_size: int) -> None:
    streams = [TokenStream(dataset, documents, SEQ, 2000) for documents in ((0, 20), (30, 36), (36, 60))]
    blend = BlendedSamples([StreamSamples(stream, EVERY_MASK, 2) for stream in streams], (5, 1, 2))
    assert Counter(blend.order.place(number)[0] for number in range(80)) == {0: 50, 1: 10, 2: 20}
    sizes = BatchSizes(16, (4, 4, 24))
    for consumed in (0, 4, 8, 1000):
        shares = [
            BatchLoader(blend, shuffled=True, micro_batch_size=2, global_batch_size=sizes, seed=7, dp_rank=rank, dp_size=dp_size)
            for rank in range(dp_size)
        ]
        batches = [batch for step in zip(*(share.microbatches(consumed) for share in shares), strict=True) for batch in step]
        assert len(batches) * 2 == sizes.at(consumed)
        for number, batch in enumerate(batches):
            check_masks(batch)
            for column in range(2):
                part, before = blend.order.place(consumed + 2 * number + column)
                own = sample_index(before, len(streams[part]), 7 + (part << 32), True)
                assert torch.equal(batch.tokens[:, column], torch.from_numpy(streams[part].sample(own)[:-1]))


def test_seed_and_order(stream: TokenStream) -> None:
    first = loader(stream).microbatches(0)[0].tokens
    assert not torch.equal(first, loader(stream, seed=4).microbatches(0)[0].tokens)
    sequential = loader(stream, DataConfig(data_order="sequential")).microbatches(0)[0].tokens
    assert torch.equal(sequential[:, 1], torch.from_numpy(stream.sample(1)[:-1]))


def test_masks_by_definition(stream: TokenStream) -> None:
    batches = [b for consumed in range(0, len(stream) - GLOBAL, GLOBAL) for b in loader(stream, EVERY_MASK).microbatches(consumed)]
    ends_seen = 0
    for batch in batches:
        check_masks(batch)
        ends_seen += int((batch.tokens[:-1] == 2).sum())
    assert ends_seen >= 5


def check_masks(batch: Batch) -> None:
    mask, positions, attend = batch.loss_mask, batch.position_ids, batch.document_mask
    assert mask is not None and positions is not None and attend is not None
    assert (mask.dtype, positions.dtype, attend.dtype) == (torch.float32, torch.int64, torch.bool)
    s, b = batch.tokens.shape
    assert mask.shape == positions.shape == (s, b)
    assert attend.shape == (b, 1, s, s)
    for j in range(b):
        column = batch.tokens[:, j].tolist()
        assert mask[:, j].tolist() == [float(id != 2) for id in column]
        position, expected_positions, document, documents = 0, [], 0, []
        for id in column:
            expected_positions.append(position)
            documents.append(document)
            position += 1
            if id == 2:
                position, document = 0, document + 1
        assert positions[:, j].tolist() == expected_positions
        expected = [[documents[q] == documents[k] and k <= q for k in range(s)] for q in range(s)]
        assert attend[j, 0].tolist() == expected


@pytest.mark.parametrize("name", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_each_option_gives_its_own_mask(stream: TokenStream, name: str) -> None:
    batch = loader(stream, DataConfig(**{name: True})).microbatches(0)[0]
    given = {"reset_position_ids": batch.position_ids, "reset_attention_mask": batch.document_mask, "eod_mask_loss": batch.loss_mask}
    assert [key for key, value in given.items() if value is not None] == [name]


def test_end_id_is_needed(stream: TokenStream) -> None:
    data = DataConfig(reset_position_ids=True, eod_mask_loss=True)
    with pytest.raises(DataError, match="reset_position_ids, eod_mask_loss: got no end-of-document id"):
        StreamSamples(stream, data, None)
    assert StreamSamples(stream, DataConfig(), None).batch([0]).loss_mask is None


def test_moving_to_a_device(stream: TokenStream) -> None:
    batch = loader(stream, EVERY_MASK).microbatches(0)[0].to(torch.device("meta"))
    assert {
        x.device.type for x in (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids, batch.document_mask) if x is not None
    } == {"meta"}
