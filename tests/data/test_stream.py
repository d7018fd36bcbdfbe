from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from megatron_llama.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron_llama.data.stream import TokenStream, split_documents
from megatron_llama.errors import DataError


@pytest.mark.parametrize(
    ("split", "n", "ranges"),
    [
        ("969,30,1", 1000, ((0, 969), (969, 999), (999, 1000))),
        ("969,30,1", 10, ((0, 10), (10, 10), (10, 10))),
        ("100,0,0", 7, ((0, 7), (7, 7), (7, 7))),
        ("1,1,1", 10, ((0, 3), (3, 7), (7, 10))),
        ("0.9, 0.1", 20, ((0, 18), (18, 20), (20, 20))),
        ("5", 4, ((0, 4), (4, 4), (4, 4))),
        ("0,0,1", 4, ((0, 0), (0, 0), (0, 4))),
    ],
)
def test_split(split: str, n: int, ranges: object) -> None:
    assert split_documents(split, n) == ranges


@pytest.mark.parametrize("split", ["", "a,b,c", "1,2,3,4", "-1,2,3", "0,0,0", "nan,1,1", "inf,1,1", "1,,1", "1;2"])
def test_malformed_split(split: str) -> None:
    with pytest.raises(DataError, match=r"split: got .* expected one to three weights"):
        split_documents(split, 10)


@pytest.mark.parametrize("seq_length", [1, 7, 64, 1000])
def test_samples_tile_the_stream(dataset: IndexedDataset, documents: list[np.ndarray], seq_length: int) -> None:
    whole = np.concatenate(documents[5:40]).astype(np.int64)
    stream = TokenStream(dataset, (5, 40), seq_length, 2000)
    assert stream.num_tokens == whole.size
    assert len(stream) == (whole.size - 1) // seq_length
    for index in {0, 1, len(stream) // 2, len(stream) - 1}:
        sample = stream.sample(index)
        assert sample.dtype == np.int64
        assert np.array_equal(sample, whole[index * seq_length : index * seq_length + seq_length + 1])


def test_too_few_tokens_for_training(dataset: IndexedDataset) -> None:
    stream = TokenStream(dataset, (3, 3), 128, 2000)
    assert len(stream) == 0
    with pytest.raises(DataError, match=r"got 0 tokens in the validation split, expected at least 129 tokens \(seq_length \+ 1\)"):
        stream.require_samples("validation")
    TokenStream(dataset, (0, 3), 128, 2000).require_samples("training")


@pytest.mark.parametrize(("dtype", "bad"), [(np.int32, 50), (np.int32, -3), (np.int64, 2**40), (np.uint16, 65535)])
def test_id_outside_the_vocabulary(dtype: type, bad: int, tmp_path: Path) -> None:
    documents = [np.arange(10), np.arange(20), np.array([1, 2, 3, bad, 4])]
    with IndexedDatasetWriter(tmp_path / "c", dtype) as writer:
        for document in documents:
            writer.add(document)
    stream = TokenStream(IndexedDataset(tmp_path / "c"), (1, 3), 8, 50)
    assert stream.sample(1).max() < 50
    with pytest.raises(DataError, match=rf"c\.bin: document 2, token 3: got id {bad}, expected 0 to 49"):
        stream.sample(2)
