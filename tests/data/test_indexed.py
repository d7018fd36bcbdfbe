"""The indexed dataset is Megatron's, both ways, and damage is told apart."""

from __future__ import annotations

import shutil
import struct
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
        case "short header":
            idx.write_bytes(idx.read_bytes()[:20])
        case "truncated idx":
            idx.write_bytes(idx.read_bytes()[:-1])
        case "truncated bin":
            bin.write_bytes(bin.read_bytes()[:-2])
        case "negative length":
            overwrite(idx, HEADER, struct.pack("<i", -1))
        case "appended idx":
            idx.write_bytes(idx.read_bytes() + b"\0")
        case "appended bin":
            bin.write_bytes(bin.read_bytes() + b"\0\0")
        case "count of sequences":
            overwrite(idx, 18, struct.pack("<Q", 2**60))
        case "count of documents":
            overwrite(idx, 26, struct.pack("<Q", 2**64 - 1))
        case "no documents":
            idx.write_bytes(idx.read_bytes()[:documents])
            overwrite(idx, 26, struct.pack("<Q", 0))
        case "offset beyond the bin":
            overwrite(idx, offsets + 8, struct.pack("<q", 10**9))
        case "offset that overflows":
            overwrite(idx, offsets + 8 * (n - 1), struct.pack("<q", 2**63 - 2))
        case "negative offset":
            overwrite(idx, offsets + 8, struct.pack("<q", -2))
        case "overlap":
            overwrite(idx, offsets + 8, struct.pack("<q", 0))
        case "gap":
            (length,) = struct.unpack_from("<i", idx.read_bytes(), HEADER)
            overwrite(idx, HEADER, struct.pack("<i", length - 1))
        case "long":
            (length,) = struct.unpack_from("<i", idx.read_bytes(), HEADER + 4 * (n - 1))
            overwrite(idx, HEADER + 4 * (n - 1), struct.pack("<i", length + 1))
        case "falling document index":
            overwrite(idx, documents + 8, struct.pack("<q", 5))
        case "first document":
            overwrite(idx, documents, struct.pack("<q", 3))
        case "last document":
            overwrite(idx, documents + 8 * n, struct.pack("<q", n + 1))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no idx", r"c\.idx: got no such file, expected PREFIX\.bin and PREFIX\.idx; give the common prefix"),
        ("no bin", r"c\.bin: got no such file"),
        ("magic", r"c\.idx: got the first bytes b'PKIDIDX.*', expected b'MMIDIDX"),
        ("version", r"c\.idx: got version 2, expected version 1"),
        ("dtype", r"c\.idx: got dtype code 6, expected the code of an integer type"),
        ("short header", r"c\.idx: got 20 bytes, expected a header of 34 bytes"),
        ("truncated idx", r"c\.idx: got (\d+) bytes, expected (\d+) bytes for its 76 sequences"),
        ("truncated bin", r"c\.bin: got (\d+) bytes, expected (\d+) bytes, as .*c\.idx says"),
        ("appended idx", r"c\.idx: got (\d+) bytes, expected (\d+) bytes for its 76 sequences"),
        ("appended bin", r"c\.bin: got (\d+) bytes, expected (\d+) bytes, as .*c\.idx says"),
        ("count of sequences", r"c\.idx: got (\d+) bytes, expected (\d+) bytes for its 1152921504606846\d+ sequences"),
        ("count of documents", r"c\.idx: got (\d+) bytes, .* and 18446744073709551615 document indices"),
        ("no documents", r"c\.idx: got no document indices, expected at least one"),
        ("negative length", r"c\.idx: got a negative length, -1, of sequence 0"),
        ("offset beyond the bin", r"c\.idx: got an offset of 1000000000 for sequence 1, outside the \.bin of \d+ bytes"),
        ("offset that overflows", r"c\.idx: got an offset of 9223372036854775806 for sequence LAST, outside the \.bin"),
        ("negative offset", r"c\.idx: got an offset of -2 for sequence 1, outside the \.bin"),
        ("overlap", r"c\.idx: got an offset of 0 for sequence 1, inside the sequence before it, expected \d+, since sequences lie"),
        ("gap", r"c\.idx: got an offset of \d+ for sequence 1, behind a gap of 2 bytes"),
        ("long", r"c\.bin: got (\d+) bytes, expected (\d+) bytes, as .*c\.idx says"),
        ("falling document index", r"c\.idx: got document indices that do not rise: number 2 is 2, expected indices from 0 to 76"),
        ("first document", r"c\.idx: got document indices that do not rise: number 0 is 3"),
        ("last document", r"c\.idx: got document indices that do not rise: number 76 is NEXT"),
    ],
)
def test_each_damage_is_named(kind: str, message: str, dataset: IndexedDataset, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(dataset.prefix + suffix, tmp_path / f"c{suffix}")
    damage(kind, tmp_path / "c.idx", tmp_path / "c.bin", dataset.num_documents)
    count = dataset.num_documents
    words = message.replace("76", str(count)).replace("LAST", str(count - 1)).replace("NEXT", str(count + 1))
    with pytest.raises(DataError, match=words):
        IndexedDataset(tmp_path / "c")


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_empty_dataset(documents: list[list[int]], tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "c", np.uint16) as writer:
        for document in documents:
            writer.add(np.array(document, np.uint16))
    with pytest.raises(DataError, match=r"c\.bin: got no tokens, expected at least one document"):
        IndexedDataset(tmp_path / "c")
