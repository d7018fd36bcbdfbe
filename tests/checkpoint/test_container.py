"""torch's distributed checkpoints: every box of every tensor, however it was cut; nothing in a damaged or malicious folder is run or believed."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_llama.checkpoint.container import Container
from megatron_llama.errors import CheckpointError
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from tests.converter.distcp import write_folder, write_index
from tests.flipped import flip

FIRST = "__0_0.distcp"


def parts(draw: random.Random, whole: int) -> list[int]:
    """Sizes that add up to ``whole``."""
    cuts = sorted(draw.sample(range(1, whole), draw.randrange(min(4, whole))))
    return [b - a for a, b in zip([0, *cuts], [*cuts, whole], strict=True)]


def box(draw: random.Random, shape: torch.Size) -> tuple[list[int], list[int]]:
    offset = [draw.randrange(n) for n in shape]
    return offset, [draw.randint(1, n - at) for n, at in zip(shape, offset, strict=True)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_box_is_what_torch_reads(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    shapes = {"stacked": (5, 7, 6), "matrix": (11, 9), "vector": (37,), "column": (8, 1), "one": (1,)}
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    cut = {
        f"{name}.{dtype}": (torch.randn(shape).to(dtype), [parts(draw, n) for n in shape])
        for name, shape in shapes.items()
        for dtype in dtypes
    }
    write_folder(tmp_path, cut, {"extra/shard_0_1": [{"step": 3}]}, ranks=draw.randint(1, 4))
    theirs = {name: torch.empty_like(tensor) for name, (tensor, _) in cut.items()}
    dcp.load(theirs, checkpoint_id=tmp_path, no_dist=True)
    container = Container(tmp_path)
    container.require(container.tensors)
    assert container.tensors.keys() == cut.keys()
    assert {name: (stored.shape, stored.dtype) for name, stored in container.tensors.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, (tensor, _) in cut.items()
    }
    assert container.load_object("extra/shard_0_1") == [{"step": 3}]
    for name, expected in theirs.items():
        for _ in range(6):
            offset, size = box(draw, expected.shape)
            wanted = expected[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))]
            for out in (
                torch.empty(size, dtype=expected.dtype),
                torch.empty(size[::-1], dtype=torch.float64).permute(*range(len(size))[::-1]),
            ):
                container.read(name, offset, out)
                assert torch.equal(out, wanted.to(out.dtype)), (name, offset, size)


def test_a_view_of_a_larger_storage_is_read_in_its_place(tmp_path: Path) -> None:
    """``torch.save`` keeps the storage of a view; not every program copies it before."""
    whole = torch.arange(48.0).view(6, 8)
    metadata = write_folder(tmp_path, {"w": (whole[1:5, 2:6].clone(), [[4], [4]])}, ranks=1)
    with (tmp_path / FIRST).open("wb") as file:
        torch.save(whole[1:5, 2:6], file)
        metadata.storage_data = {MetadataIndex("w", torch.Size([0, 0])): _StorageInfo(FIRST, 0, file.tell())}
    write_index(tmp_path, metadata)
    out = torch.empty(2, 3)
    Container(tmp_path).read("w", (1, 1), out)
    assert torch.equal(out, whole[2:4, 3:6])


class Malice:
    """Makes a file when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


class Folder:
    """A folder with two tensors, one in four chunks, to be damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.witness = path.parent / "run"
        self.metadata = write_folder(path, {"w": (torch.randn(4, 6), [[2, 2], [3, 3]]), "b": (torch.randn(6), [[6]])}, {"extra": [1]})
        assert self.metadata.storage_data is not None
        self.places: dict[MetadataIndex, _StorageInfo] = self.metadata.storage_data

    def index(self, change: Callable[[Metadata], object]) -> None:
        change(self.metadata)
        write_index(self.path, self.metadata)

    def key(self, name: str, *offset: int) -> MetadataIndex:
        return MetadataIndex(name, torch.Size(offset) if offset else None)

    def move(self, key: MetadataIndex, **fields: Any) -> None:
        self.places[key] = replace(self.places[key], **fields)
        write_index(self.path, self.metadata)

    def chunks(self) -> list[ChunkStorageMetadata]:
        described: Any = self.metadata.state_dict_metadata["w"]
        return described.chunks  # type: ignore[no-any-return]

    def last_chunk(self, offset: Sequence[int], size: Sequence[int]) -> None:
        """Have the index say that the last chunk lies there."""
        self.chunks()[3] = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))

    def rewrite(self, key: MetadataIndex, content: object) -> None:
        """Put another content where a chunk was."""
        place = self.places[key]
        with (self.path / place.relative_path).open("ab") as file:
            start = file.tell()
            torch.save(content, file)
            self.move(key, offset=start, length=file.tell() - start)


def flip_value(folder: Folder) -> None:
    """One bit of a value."""
    place = folder.places[folder.key("w", 0, 0)]
    path = folder.path / place.relative_path
    content = path.read_bytes()
    at = content.find(b"archive/data/0", place.offset)
    skip = int.from_bytes(content[at - 2 : at], "little")
    flip(path, at + 14 + skip + 5)


def share_bytes(folder: Folder) -> None:
    first = folder.places[folder.key("w", 0, 0)]
    folder.move(folder.key("w", 2, 0), relative_path=first.relative_path, offset=first.offset + 8)


def no_archive(folder: Folder) -> None:
    path = folder.path / FIRST
    start = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(200))
    folder.move(folder.key("b", 0), relative_path=FIRST, offset=start, length=200)


def overlap(folder: Folder) -> None:
    folder.places[folder.key("w", 0, 1)] = folder.places[folder.key("w", 0, 3)]
    folder.chunks()[1] = ChunkStorageMetadata(torch.Size([0, 1]), torch.Size([2, 3]))
    write_index(folder.path, folder.metadata)


def larger_than_its_bytes(folder: Folder) -> None:
    """Shape and chunks agree, and claim what no file holds."""
    described: Any = folder.metadata.state_dict_metadata["w"]
    described.size = torch.Size([1002, 6])
    for number, column in ((2, 0), (3, 3)):
        folder.chunks()[number] = ChunkStorageMetadata(torch.Size([2, column]), torch.Size([1000, 3]))
    write_index(folder.path, folder.metadata)


def flip_object(folder: Folder) -> None:
    """One bit of a tensor in an object."""
    folder.rewrite(folder.key("extra"), [torch.arange(3.0)])
    place = folder.places[folder.key("extra")]
    path = folder.path / place.relative_path
    flip(path, path.read_bytes().find(torch.arange(3.0).numpy().tobytes(), place.offset) + 4)


def nothing_described(metadata: Metadata) -> None:
    metadata.state_dict_metadata = None  # type: ignore[assignment]


def swap(folder: Folder) -> None:
    """Two chunks stand for each other: their sizes tell."""
    w, b = folder.key("w", 0, 0), folder.key("b", 0)
    folder.places[w], folder.places[b] = folder.places[b], folder.places[w]
    write_index(folder.path, folder.metadata)


DAMAGE: dict[str, tuple[Callable[[Folder], object], str]] = {
    "no index": (lambda f: (f.path / ".metadata").unlink(), ".metadata: got No such file"),
    "empty index": (lambda f: (f.path / ".metadata").write_bytes(b""), "damaged content (the end is missing: it was cut off)"),
    "index cut off": (lambda f: (f.path / ".metadata").write_bytes(pickle.dumps(f.metadata)[:-40]), ".metadata: got damaged content"),
    "index of something else": (lambda f: write_index(f.path, {"w": 1}), "got a dict, expected torch's Metadata"),
    "index that calls a function": (lambda f: write_index(f.path, Malice(f.witness)), "got a pickle that calls posix.mkdir"),
    "index with a call in it": (
        lambda f: f.index(lambda m: m.state_dict_metadata.update(x=Malice(f.witness))),  # type: ignore[call-arg]
        "got a pickle that calls posix.mkdir",
    ),
    "index without tensors": (lambda f: f.index(nothing_described), "without state_dict_metadata"),
    "chunk without a place": (lambda f: f.index(lambda m: f.places.pop(f.key("w", 0, 3))), "w chunk at (0, 3): got no place in a file"),
    "missing chunk": (lambda f: f.index(lambda m: f.chunks().pop(1)), "w: got 18 elements, expected 24"),
    "overlapping chunks": (overlap, "got overlapping chunks at (0, 0) and (0, 1)"),
    "chunk outside of the tensor": (
        lambda f: f.index(lambda m: f.last_chunk((2, 3), (9, 3))),
        "got a chunk (9, 3) at (2, 3), expected one within (4, 6)",
    ),
    "chunk of other dimensions": (lambda f: f.index(lambda m: f.last_chunk((2,), (3,))), "got (3,) at (2,), expected 2 dimensions"),
    "negative offset": (lambda f: f.index(lambda m: f.last_chunk((-2, 3), (2, 3))), "got (-2, 3), expected numbers that are not negative"),
    "chunk behind the end of the file": (lambda f: f.move(f.key("b", 0), offset=10**9), f"{FIRST}: got"),
    "file cut off": (lambda f: os.truncate(f.path / FIRST, 2000), "expected"),
    "file missing": (lambda f: (f.path / FIRST).unlink(), f"{FIRST}: got No such file"),
    "file elsewhere": (
        lambda f: f.move(f.key("b", 0), relative_path="../other/passwords"),
        "'../other/passwords', expected a file of the folder",
    ),
    "file above": (lambda f: f.move(f.key("b", 0), relative_path=".."), "'..', expected a file of the folder"),
    "no name of a file": (lambda f: f.move(f.key("b", 0), relative_path="a\0b"), "'a\\x00b', expected a file of the folder"),
    "chunk larger than its bytes": (larger_than_its_bytes, "w: got a chunk (1000, 3) of 12000 bytes in "),
    "flipped bit in an object": (flip_object, "got damaged content (a checksum does not match)"),
    "chunks on the same bytes": (share_bytes, "got chunks that share bytes"),
    "compressed chunk": (lambda f: f.move(f.key("b", 0), transform_descriptors=["zstd"]), "got ['zstd'], expected plain tensors"),
    "flipped bit": (flip_value, "at (0, 0): got damaged content (a checksum does not match)"),
    "chunks that stand for each other": (swap, "expected torch.float32 (2, 3), by the index"),
    "chunk of another dtype": (lambda f: f.rewrite(f.key("b", 0), torch.zeros(6, dtype=torch.bfloat16)), "got torch.bfloat16 (6,)"),
    "chunk that calls a function": (lambda f: f.rewrite(f.key("b", 0), Malice(f.witness)), "got a pickle that calls posix.mkdir"),
    "chunk of something else": (lambda f: f.rewrite(f.key("b", 0), [1, 2]), "got a list, expected a tensor"),
    "chunk that is no archive": (no_archive, "got damaged content (BadZipFile), expected a tensor that torch.save wrote"),
    "object that calls a function": (lambda f: f.rewrite(f.key("extra"), [Malice(f.witness)]), "got a pickle that calls posix.mkdir"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_nothing_runs(tmp_path: Path, name: str) -> None:
    folder = Folder(tmp_path / "saved")
    damage, expected = DAMAGE[name]
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        container = Container(folder.path)
        container.require(container.tensors)
        for key, stored in container.tensors.items():
            container.read(key, [0] * len(stored.shape), torch.empty(stored.shape))
        container.load_object("extra")
    message = f"{caught.value}"
    assert expected in message and str(folder.path) in message and "; " in message
    assert not folder.witness.exists()


def test_tensors_without_elements_and_numbers_are_no_damage(tmp_path: Path) -> None:
    write_folder(tmp_path, {"w": (torch.ones(4), [[2, 2]]), "empty": (torch.ones(0, 3), [[0], [3]]), "number": (torch.tensor(3.0), [])})
    container = Container(tmp_path)
    container.require(container.tensors)
    assert list(container.damaged()) == []


def test_a_quantised_tensor_is_refused_only_where_it_is_wanted(tmp_path: Path) -> None:
    values: dict[str, Tensor] = {"w": torch.ones(4), "q": torch.ones(4, dtype=torch.int8)}
    write_folder(tmp_path, {name: (value, [[4]]) for name, value in values.items()})
    container = Container(tmp_path)
    container.require(["w"])
    with pytest.raises(CheckpointError, match=r"q: got torch\.int8, expected float32, bfloat16 or float16; quantised"):
        container.require(["q"])
