"""The indexed dataset is Megatron's, both ways, and damage is told apart."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets import indexed_dataset as megatron
from megatron_llama.data.indexed import IndexedDataset, IndexedDatasetWriter, token_dtype
from megatron_llama.errors import DataError

HEADER = 34  # bytes before the lengths


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_megatron_reads_what_we_write(dtype: type, tmp_path: Path) -> None:
    documents = [np.array(ids, dtype) for ids in ([5, 6, 7], [], [127], range(100))]
    with IndexedDatasetWriter(tmp_path / "corpus", dtype) as writer:
        writer.add(documents[0])
        writer.add_many(np.concatenate(documents[1:]), np.array([0, 1, 100]))
    read = megatron.IndexedDataset(str(tmp_path / "corpus"))
    assert read.index.dtype == dtype
    assert len(read) == 4
    assert all(np.array_equal(read[i], documents[i]) for i in range(4))
    assert read.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_both_write_the_same_bytes(dtype: type, documents: list[np.ndarray], tmp_path: Path) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype)
    for document in documents:
        builder.add_document(torch.from_numpy(document.astype(np.int64)), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    with IndexedDatasetWriter(tmp_path / "ours", dtype) as writer:
        for document in documents:
            writer.add(document)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_we_read_documents_of_several_sequences(tmp_path: Path) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "c.bin"), np.int32, multimodal=True)
    builder.add_document(torch.arange(10), [4, 6], [0, 1])
    builder.add_document(torch.arange(10, 13), [3], [1])
    builder.finalize(str(tmp_path / "c.idx"))
    dataset = IndexedDataset(tmp_path / "c")
    assert (dataset.num_documents, dataset.num_tokens, dataset.lengths.tolist()) == (2, 13, [10, 3])
    assert [dataset.document_start(d) for d in range(3)] == [0, 10, 13]
    assert [dataset.document_at(p) for p in (0, 9, 10, 12)] == [0, 0, 1, 1]
    assert dataset.tokens(3, 12).tolist() == list(range(3, 12))


def test_stream_is_the_documents_end_to_end(dataset: IndexedDataset, documents: list[np.ndarray]) -> None:
    stream = np.concatenate(documents)
    assert dataset.num_tokens == stream.size
    assert dataset.lengths.tolist() == [document.size for document in documents]
    assert np.array_equal(dataset.tokens(0, stream.size), stream)
    assert np.array_equal(dataset.tokens(1234, 5678), stream[1234:5678])
    assert np.shares_memory(dataset.tokens(10, 20), dataset.tokens(0, 30))


def test_offsets_with_gaps_are_gathered(tmp_path: Path) -> None:
    """Megatron never writes gaps, but the format allows them."""
    np.array([9, 1, 2, 3, 9, 9, 4, 5, 9, 6], np.uint16).tofile(tmp_path / "gaps.bin")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 4, 5)
    lengths, offsets, documents = (np.array([3, 2, 0, 1], np.int32), np.array([2, 12, 16, 18], np.int64), np.arange(5))
    (tmp_path / "gaps.idx").write_bytes(header + lengths.tobytes() + offsets.tobytes() + documents.tobytes())
    dataset = IndexedDataset(tmp_path / "gaps")
    for start in range(7):
        for stop in range(start, 7):
            assert dataset.tokens(start, stop).tolist() == [1, 2, 3, 4, 5, 6][start:stop]
    assert dataset.lengths.tolist() == [3, 2, 0, 1]
    assert [dataset.document_start(d) for d in range(5)] == [0, 3, 5, 5, 6]
    assert dataset.document_at(5) == 3


def test_dtype_follows_megatron() -> None:
    for size in (1, 32000, 65499, 65500, 128256):
        assert token_dtype(size) == megatron.DType.optimal_dtype(size)


def test_failure_leaves_older_files_as_they_were(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "c", np.uint16) as writer:
        writer.add(np.array([1, 2, 3]))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(KeyError), IndexedDatasetWriter(tmp_path / "c", np.uint16) as writer:
        writer.add(np.array([7]))
        raise KeyError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_writer_that_nobody_owns_yet_has_made_no_file(tmp_path: Path) -> None:
    """Control-C may come before the block begins that would discard it."""
    IndexedDatasetWriter(tmp_path / "c", np.uint16)
    assert list(tmp_path.iterdir()) == []
    with IndexedDatasetWriter(tmp_path / "c", np.uint16):
        assert list(tmp_path.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]


def test_ids_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    message = "got token ids 0 to 70000, expected ids that fit uint16"
    with pytest.raises(DataError, match=message), IndexedDatasetWriter(tmp_path / "c", np.uint16) as writer:
        writer.add(np.array([0, 70000]))
    assert list(tmp_path.iterdir()) == []


def overwrite(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


def damage(kind: str, idx: Path, bin: Path, n: int) -> None:
    """One damage each to a dataset of n documents."""
    offsets, documents = HEADER + 4 * n, HEADER + 12 * n
    match kind:
        case "no idx":
            idx.unlink()
        case "no bin":
            bin.unlink()
        case "magic":
            overwrite(idx, 0, b"PK")
        case "version":
            overwrite(idx, 9, struct.pack("<Q", 2))
        case "dtype":
            overwrite(idx, 17, b"\x06")
        case "dtype code":
            overwrite(idx, 17, b"\x2a")
        case "short header":
            idx.write_bytes(idx.read_bytes()[:20])
        case "empty idx":
            idx.write_bytes(b"")
        case "truncated idx":
            idx.write_bytes(idx.read_bytes()[:-1])
        case "truncated bin":
            bin.write_bytes(bin.read_bytes()[:-2])
        case "negative length":
            overwrite(idx, HEADER, struct.pack("<i", -1))
        case "falling offset":
            overwrite(idx, offsets + 8, struct.pack("<q", 10**6))
        case "odd offset":
            overwrite(idx, offsets, struct.pack("<q", 1))
        case "falling document index":
            overwrite(idx, documents + 8, struct.pack("<q", 5))
        case "document indices":
            overwrite(idx, documents, struct.pack("<q", 3))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no idx", r"c\.idx: got no such file, expected PREFIX\.bin and PREFIX\.idx; give the common prefix"),
        ("no bin", r"c\.bin: got no such file"),
        ("magic", r"c\.idx: got the first bytes b'PKIDIDX.*', expected b'MMIDIDX"),
        ("version", r"c\.idx: got version 2, expected version 1"),
        ("dtype", r"c\.idx: got dtype code 6, expected the code of an integer type"),
        ("dtype code", r"c\.idx: got dtype code 42"),
        ("short header", r"c\.idx: got 20 bytes, expected a header of 34 bytes"),
        ("empty idx", r"c\.idx: got 0 bytes, expected a header of 34 bytes"),
        ("truncated idx", r"c\.idx: got (\d+) bytes, expected (\d+) bytes for its 76 sequences"),
        ("truncated bin", r"c\.bin: got (\d+) bytes, expected (\d+) bytes, as .*c\.idx says"),
        ("negative length", r"c\.idx: got a negative length"),
        ("falling offset", r"c\.idx: got offsets that do not rise, expected rising multiples of 2 bytes"),
        ("odd offset", r"c\.idx: got offsets that do not rise"),
        ("falling document index", r"c\.idx: got document indices that do not rise"),
        ("document indices", r"c\.idx: got document indices that do not rise, expected indices from 0 to 76"),
    ],
)
def test_each_damage_is_named(kind: str, message: str, dataset: IndexedDataset, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(dataset.prefix + suffix, tmp_path / f"c{suffix}")
    damage(kind, tmp_path / "c.idx", tmp_path / "c.bin", dataset.num_documents)
    with pytest.raises(DataError, match=message.replace("76", str(dataset.num_documents))):
        IndexedDataset(tmp_path / "c")


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_empty_dataset(documents: list[list[int]], tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "c", np.uint16) as writer:
        for document in documents:
            writer.add(np.array(document, np.uint16))
    with pytest.raises(DataError, match=r"c\.bin: got no tokens, expected at least one document"):
        IndexedDataset(tmp_path / "c")
