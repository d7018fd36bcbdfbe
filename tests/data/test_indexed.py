"""The indexed dataset is Megatron's, both ways, and damage is told apart."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from megatron_llama.data.indexed import IndexedDataset, IndexedDatasetWriter, token_dtype
from megatron_llama.errors import DataError

HEADER = 34  # bytes before the lengths


@pytest.fixture(scope="module")
def megatron() -> ModuleType:
    """Megatron's module of the same name. It takes seconds to import."""
    from megatron.core.datasets import indexed_dataset

    return indexed_dataset


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_megatron_reads_what_we_write(dtype: type, tmp_path: Path, megatron: ModuleType) -> None:
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
def test_both_write_the_same_bytes(dtype: type, documents: list[np.ndarray], tmp_path: Path, megatron: ModuleType) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype)
    for document in documents:
        builder.add_document(torch.from_numpy(document.astype(np.int64)), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    with IndexedDatasetWriter(tmp_path / "ours", dtype) as writer:
        for document in documents:
            writer.add(document)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_we_read_documents_of_several_sequences(tmp_path: Path, megatron: ModuleType) -> None:
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


def test_what_megatron_merges_is_read(documents: list[np.ndarray], tmp_path: Path, megatron: ModuleType) -> None:
    """Two datasets in one, with documents of several sequences, of an empty one, and of none."""
    for name, chosen in (("first", documents[:5]), ("second", documents[5:9])):
        builder = megatron.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), np.uint16, multimodal=True)
        for document in chosen:
            tokens = torch.from_numpy(document.astype(np.int64))
            builder.add_document(tokens, [3, 0, len(document) - 3], [0, 1, 0])
        builder.end_document()
        builder.finalize(str(tmp_path / f"{name}.idx"))
    merged = megatron.IndexedDatasetBuilder(str(tmp_path / "all.bin"), np.uint16, multimodal=True)
    for name in ("first", "second"):
        merged.add_index(str(tmp_path / name))
    merged.finalize(str(tmp_path / "all.idx"))
    dataset = IndexedDataset(tmp_path / "all")
    sizes = [document.size for document in documents[:9]]
    assert dataset.lengths.tolist() == [*sizes[:5], 0, *sizes[5:], 0]
    assert np.array_equal(dataset.tokens(0, dataset.num_tokens), np.concatenate(documents[:9]))


def test_dtype_follows_megatron(megatron: ModuleType) -> None:
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


Damage = Callable[[Path, Path, int], object]


def at(place: Callable[[int], int], form: str, value: int) -> Damage:
    """Write a number into the index of a dataset of n documents, at a place that n says."""
    return lambda idx, bin, n: overwrite(idx, place(n), struct.pack(form, value))


def lengthen(place: Callable[[int], int], by: int) -> Damage:
    return lambda idx, bin, n: overwrite(idx, place(n), struct.pack("<i", struct.unpack_from("<i", idx.read_bytes(), place(n))[0] + by))


def offset_of(sequence: int) -> Callable[[int], int]:
    """Where the index has the offset of a sequence, of the last one for -1."""
    return lambda n: HEADER + 4 * n + 8 * (sequence % n)


def document(number: int) -> Callable[[int], int]:
    """Where the index has a document's first sequence; -1 is the end of all."""
    return lambda n: HEADER + 12 * n + 8 * (number % (n + 1))


def without_documents(idx: Path, bin: Path, n: int) -> None:
    idx.write_bytes(idx.read_bytes()[: HEADER + 12 * n])
    overwrite(idx, 26, struct.pack("<Q", 0))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no idx": (lambda idx, bin, n: idx.unlink(), r"c\.idx: got no such file, expected PREFIX\.bin and PREFIX\.idx; give the common prefix"),
    "no bin": (lambda idx, bin, n: bin.unlink(), r"c\.bin: got no such file"),
    "magic": (lambda idx, bin, n: overwrite(idx, 0, b"PK"), r"c\.idx: got the first bytes b'PKIDIDX.*', expected b'MMIDIDX"),
    "version": (at(lambda n: 9, "<Q", 2), r"c\.idx: got version 2, expected version 1"),
    "dtype": (at(lambda n: 17, "<B", 6), r"c\.idx: got dtype code 6, expected the code of an integer type"),
    "dtype code": (at(lambda n: 17, "<B", 42), r"c\.idx: got dtype code 42"),
    "short header": (lambda idx, bin, n: idx.write_bytes(idx.read_bytes()[:20]), r"c\.idx: got 20 bytes, expected a header of 34 bytes"),
    "empty idx": (lambda idx, bin, n: idx.write_bytes(b""), r"c\.idx: got 0 bytes, expected a header of 34 bytes"),
    "truncated idx": (lambda idx, bin, n: idx.write_bytes(idx.read_bytes()[:-1]), r"c\.idx: got \d+ bytes, expected \d+ bytes for its ALL"),
    "truncated bin": (lambda idx, bin, n: bin.write_bytes(bin.read_bytes()[:-2]), r"c\.bin: got \d+ bytes, expected \d+ bytes, as .*c\.idx says"),
    "appended idx": (lambda idx, bin, n: idx.write_bytes(idx.read_bytes() + b"\0"), r"c\.idx: got \d+ bytes, expected \d+ bytes for its ALL"),
    "appended bin": (lambda idx, bin, n: bin.write_bytes(bin.read_bytes() + b"\0\0"), r"c\.bin: got \d+ bytes, expected \d+ bytes, as .*c\.idx says"),
    "count of sequences": (at(lambda n: 18, "<Q", 2**60), r"c\.idx: got \d+ bytes, expected \d+ bytes for its 1152921504606846\d+ sequences"),
    "count of documents": (at(lambda n: 26, "<Q", 2**64 - 1), r"c\.idx: got \d+ bytes, .* and 18446744073709551615 document indices"),
    "no documents": (without_documents, r"c\.idx: got no document indices, expected at least one"),
    "negative length": (at(lambda n: HEADER, "<i", -1), r"c\.idx: got a negative length, -1, of sequence 0"),
    "offset beyond the bin": (at(offset_of(1), "<q", 10**9), r"c\.idx: got an offset of 1000000000 for sequence 1, outside the \.bin of \d+ bytes"),
    "offset that overflows": (at(offset_of(-1), "<q", 2**63 - 2), r"c\.idx: got an offset of 9223372036854775806 for sequence LAST"),
    "negative offset": (at(offset_of(1), "<q", -2), r"c\.idx: got an offset of -2 for sequence 1, outside the \.bin"),
    "overlap": (at(offset_of(1), "<q", 0), r"c\.idx: got an offset of 0 for sequence 1, inside the sequence before it"),
    "gap": (lengthen(lambda n: HEADER, -1), r"c\.idx: got an offset of \d+ for sequence 1, behind a gap of 2 bytes"),
    "long": (lengthen(lambda n: HEADER + 4 * (n - 1), 1), r"c\.bin: got \d+ bytes, expected \d+ bytes, as .*c\.idx says"),
    "falling documents": (at(document(1), "<q", 5), r"c\.idx: got document indices that do not rise: number 2 is 2, expected indices from 0 to ALL"),
    "first document": (at(document(0), "<q", 3), r"c\.idx: got document indices that do not rise: number 0 is 3"),
    "last document": (lambda idx, bin, n: at(document(-1), "<q", n + 1)(idx, bin, n), r"document indices that do not rise: number ALL is NEXT"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_named(name: str, dataset: IndexedDataset, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(dataset.prefix + suffix, tmp_path / f"c{suffix}")
    count, (damage, message) = dataset.num_documents, DAMAGES[name]
    damage(tmp_path / "c.idx", tmp_path / "c.bin", count)
    for word, number in (("ALL", count), ("LAST", count - 1), ("NEXT", count + 1)):
        message = message.replace(word, str(number))
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "c")


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_empty_dataset(documents: list[list[int]], tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "c", np.uint16) as writer:
        for document in documents:
            writer.add(np.array(document, np.uint16))
    with pytest.raises(DataError, match=r"c\.bin: got no tokens, expected at least one document"):
        IndexedDataset(tmp_path / "c")
