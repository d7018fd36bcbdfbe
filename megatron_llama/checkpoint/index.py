"""The index of a folder of torch.distributed.checkpoint, ``.metadata``: its tensors by name, and
the place of each of their chunks. Native checkpoints and Megatron-Core's have the same format.

It is a pickle, and pickles may call any code. It is read with a short list of classes, which become
inert records here, and all of its content is checked."""

from __future__ import annotations

import gc
import io
import math
import pickle
import re
import reprlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import add, gt
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from megatron_llama.checkpoint.pickles import ForbiddenNames, require_bounded
from megatron_llama.checkpoint.records import Record, make_records
from megatron_llama.config.limits import (
    LARGEST_COVER_WORK,
    LARGEST_DIMENSIONS,
    LARGEST_INTEGER,
    SHOWN_CHARACTERS,
)
from megatron_llama.errors import CheckpointError, describe

METADATA = ".metadata"
INDEX_TABLE = "index.json"
"""The table that large checkpoints have in its place (``index_parts.py``)."""
FILE_NAME = re.compile(r"\w[\w.-]*")
FREE_COVER_WORK = 10**6
"""Comparisons of chunks that are allowed whatever their number."""
RECORDS: Mapping[str, Mapping[str, type[Record]]] = MappingProxyType(
    {
        "torch.distributed.checkpoint.metadata": make_records(
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": make_records("_StorageInfo"),
        "torch.distributed.checkpoint.planner": make_records(
            "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"
        ),
        "torch.serialization": make_records("_get_layout"),
        "megatron.core.dist_checkpointing.strategies.torch": make_records(
            "MCoreMetadata", "MCoreSavePlan"
        ),
        "pathlib": make_records("PosixPath"),
        "pathlib._local": make_records("PosixPath"),
    }
)
"""Classes that torch and Megatron-Core pickle into the index. All become records."""


class Place(NamedTuple):
    """A place in a folder: bytes ``[offset, offset + length)`` of a file."""

    relative_path: str
    offset: int
    length: int
    crc32: int | None = None
    """CRC-32 of the values there; None if the index has none."""


class Chunk(NamedTuple):
    """A box of a tensor that was saved as one piece."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the index."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    """Chunks in the order of their offsets."""
    flattened: bool
    """Whether Megatron-Core before 0.15 has saved flat pieces of it: the chunks then do not tell
    which elements they hold."""

    @cached_property
    def _starts(self) -> list[int]:
        return [chunk.offset[0] for chunk in self.chunks]

    @cached_property
    def _longest(self) -> int:
        return max(chunk.size[0] for chunk in self.chunks)

    def within(self, offset: Sequence[int], size: Sequence[int]) -> Iterator[Chunk]:
        """Yield the chunks that overlap the box."""
        # Chunks are sorted by their start in dimension 0, in which none is longer than _longest.
        first = bisect_right(self._starts, offset[0] - self._longest)
        last = bisect_left(self._starts, offset[0] + size[0])
        for chunk in self.chunks[first:last]:
            if _overlap(chunk, Chunk(tuple(offset), tuple(size), chunk.place)):
                yield chunk


@dataclass(frozen=True)
class StoredIndex:
    """The content of an index."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Place]
    """Objects saved with ``torch.save`` beside the tensors, by name."""


@contextmanager
def paused_collector() -> Iterator[None]:
    """A section that makes millions of objects, none of which is garbage. The collector would visit
    all of them again and again, which takes as long as making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@paused_collector()
def parse_index(path: Path, content: bytes, *, do: str) -> StoredIndex:
    """Return the parsed ``content`` of an index. ``path`` and the remedy ``do`` are for messages.

    Raises CheckpointError when it is damaged, names code to run, or has chunks that have other
    dimensions than their tensors, have no place, or lie in files of other folders.
    ``cover_problems`` and ``shared_bytes`` tell whether the chunks make up the tensors."""
    index = _unpickle(path, content, do)
    described = index.get("state_dict_metadata")
    placed = index.get("storage_data")
    if not isinstance(described, dict) or not isinstance(placed, dict):
        got = "an object without state_dict_metadata and storage_data"
        raise CheckpointError(path, got=got, expected="torch's Metadata", do=do)
    reformed = index.get("mcore_data")
    flattened = {
        name
        for name, value in (reformed.items() if isinstance(reformed, dict) else ())
        if isinstance(value, dict) and value.get("nd_reformulated_orig_global_shape")
    }
    reader = _IndexReader(path, do)
    places = reader.read_places(placed)
    tensors = {}
    objects = {}
    for name, value in described.items():
        if isinstance(value, Record) and type(value).__name__ == "BytesStorageMetadata":
            if (name, None) in places:
                objects[name] = places[name, None]
        else:
            tensors[name] = reader.read_tensor(name, value, places, name in flattened)
    return StoredIndex(MappingProxyType(tensors), MappingProxyType(objects))


def cover_problems(where: str, tensor: StoredTensor, *, do: str) -> Iterator[str]:
    """Yield the problem because of which the chunks are not exactly the tensor."""
    held = 0
    for chunk in tensor.chunks:
        elements = math.prod(chunk.size)
        held += elements
        size = elements * tensor.dtype.itemsize
        if size > chunk.place.length:
            got = f"a chunk {chunk.size} of {size} bytes in {chunk.place.length}"
            yield describe(where, got=got, expected="as many bytes as it has values", do=do)
            return
        if any(map(gt, map(add, chunk.offset, chunk.size), tensor.shape)):
            got = f"a chunk {chunk.size} at {chunk.offset}"
            yield describe(where, got=got, expected=f"one within {tensor.shape}", do=do)
            return
    overlap = _find_overlap(tensor.chunks, len(tensor.shape))
    if overlap is not None:
        yield describe(where, got=overlap, expected="each element once", do=do)
        return
    # Boxes within the tensor that do not overlap fill it if they have as many elements.
    if held != math.prod(tensor.shape):
        expected = f"{math.prod(tensor.shape)}, the shape being {tensor.shape}: chunks are missing"
        yield describe(where, got=f"{held} elements", expected=expected, do=do)


def shared_bytes(folder: Path, places: Collection[Place], *, do: str) -> Iterator[str]:
    """Yield the places that begin within another one."""
    ends = defaultdict[str, int](int)
    for place in sorted(places, key=lambda place: (place.relative_path, place.offset)):
        if place.offset < ends[place.relative_path]:
            where = f"{folder / place.relative_path} byte {place.offset}"
            yield describe(
                where, got="chunks that share bytes", expected="one behind the other", do=do
            )
        ends[place.relative_path] = place.offset + place.length


def _overlap(first: Chunk, second: Chunk) -> bool:
    boxes = zip(first.offset, first.size, second.offset, second.size, strict=True)
    return all(a < c + d and c < a + b for a, b, c, d in boxes)


def _find_overlap(chunks: Sequence[Chunk], dimensions: int) -> str | None:
    """Return a message on two chunks that have an element in common; None without any.

    Groups of chunks are divided along each dimension in turn, at places that no chunk crosses.
    Pairs are compared only in groups that cannot be divided any more."""
    work = FREE_COVER_WORK + LARGEST_COVER_WORK * len(chunks)
    groups = [[chunk for chunk in chunks if 0 not in chunk.size]]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        work -= len(group) * max(1, dimensions)
        for dim in range(dimensions):
            divided = _divide(group, dim)
            if len(divided) > 1:
                groups += divided
                break
        else:
            for number, chunk in enumerate(group):
                work -= number
                for earlier in group[:number] if work >= 0 else ():
                    if _overlap(earlier, chunk):
                        return f"overlapping chunks at {earlier.offset} and {chunk.offset}"
        if work < 0:
            return f"{len(chunks)} chunks that are not cut along straight lines"
    return None


def _divide(group: list[Chunk], dim: int) -> list[list[Chunk]]:
    """Divide a group where no chunk reaches across along a dimension."""
    parts: list[list[Chunk]] = []
    end = -1
    for chunk in sorted(group, key=lambda chunk: chunk.offset[dim]):
        if chunk.offset[dim] >= end:
            parts.append([])
        parts[-1].append(chunk)
        end = max(end, chunk.offset[dim] + chunk.size[dim])
    return parts


def _size(values: Any = ()) -> tuple[Any, ...]:
    """Stand for ``torch.Size``. A pickle could name a list a thousand times, and each time it would
    be copied; a tuple is taken as it is."""
    if type(values) is not tuple:
        raise pickle.UnpicklingError(f"a size made of a {type(values).__name__}")
    return values


class _IndexUnpickler(pickle.Unpickler):
    """The unpickler of CPython, which is fast: the index of a large model has millions of opcodes.
    It can make nothing but records."""

    def find_class(self, module: str, name: str) -> Any:
        if name in RECORDS.get(module, {}):
            return RECORDS[module][name]
        if (module, name) == ("torch", "Size"):
            return _size
        # vars() alone: torch's own __getattr__ would import modules.
        dtype = vars(torch).get(name) if module == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise ForbiddenNames([f"{module}.{name}"])
        return dtype


def _unpickle(path: Path, content: bytes, do: str) -> Record:
    try:
        require_bounded(content)
        index = _IndexUnpickler(io.BytesIO(content)).load()
    except ForbiddenNames as error:
        trust = "do not load it elsewhere unless you trust who made it; take a copy from its origin"
        expected = "the classes of torch's index only (nothing was run)"
        raise CheckpointError(path, got=error, expected=expected, do=trust) from error
    except Exception as error:
        # A damaged pickle may raise any error, since its bytes may mean anything.
        got = f"damaged content ({type(error).__name__})"
        if type(error) is pickle.UnpicklingError:
            got = f"damaged content ({error})"
        raise CheckpointError(path, got=got, expected="torch's index", do=do) from error
    if not isinstance(index, Record) or type(index).__name__ not in ("Metadata", "MCoreMetadata"):
        got = f"a {type(index).__name__}"
        raise CheckpointError(path, got=got, expected="torch's Metadata", do=do)
    return index


class _IndexReader:
    """Reads the records of an index, and raises CheckpointError for impossible values."""

    def __init__(self, path: Path, do: str) -> None:
        self._path = path
        self._do = do

    def read_places(self, placed: Mapping[Any, Any]) -> dict[tuple[Any, Any], Place]:
        """Return the place of each chunk, by name and offset, and of each object, by name and
        None."""
        places = dict[tuple[Any, Any], Place]()
        files = set[str]()
        for key, value in placed.items():
            if not isinstance(key, Record) or not isinstance(value, Record):
                got = f"{type(key).__name__}: {type(value).__name__}"
                raise self._error("storage_data", got, "MetadataIndex: _StorageInfo")
            name = key.get("fqn")
            offset = key.get("offset")
            if not isinstance(name, str):
                raise self._error("storage_data", _shown(name), "the name of a tensor")
            at = None if offset is None else self._counts("storage_data", name, offset)
            if (name, at) in places:
                raise self._error(f"storage_data {name} at {at}", "two places", "one")
            file = value.get("relative_path")
            # A name with a folder in it could lead anywhere.
            if not isinstance(file, str) or not (file in files or FILE_NAME.fullmatch(file)):
                where = f"storage_data {name} relative_path"
                raise self._error(where, _shown(file), "a file of the folder")
            files.add(file)
            transforms = value.get("transform_descriptors")
            if transforms:
                raise CheckpointError(
                    f"{self._path} storage_data {name} transform_descriptors",
                    got=_shown(transforms),
                    expected="plain tensors",
                    do="save it without compression",
                )
            crc32 = value.get("crc32")
            numbers = (value.get("offset"), value.get("length"), 0 if crc32 is None else crc32)
            start, length, _ = self._counts("storage_data", name, numbers)
            places[name, at] = Place(file, start, length, crc32)
        return places

    def read_tensor(
        self, name: object, value: Any, places: Mapping[Any, Place], flattened: bool
    ) -> StoredTensor:
        """Return a tensor of the index with the places of its chunks."""
        if not isinstance(name, str):
            raise self._error("state_dict_metadata", _shown(name), "the name of a tensor")
        known = isinstance(value, Record) and type(value).__name__ == "TensorStorageMetadata"
        if not known:
            raise self._error(name, f"a {type(value).__name__}", "a TensorStorageMetadata")
        properties = value.get("properties")
        state = properties.state if isinstance(properties, Record) else None
        dtype = state.get("dtype") if isinstance(state, dict) else None
        if isinstance(state, tuple) and state:
            dtype = state[0]
        if not isinstance(dtype, torch.dtype):
            raise self._error(f"{name} dtype", _shown(dtype), "a dtype of torch")
        shape = self._counts(name, "size", value.get("size"))
        listed = value.get("chunks")
        if not isinstance(listed, list) or not listed:
            raise self._error(f"{name} chunks", "none", "at least one")
        chunks = []
        for chunk in listed:
            if not isinstance(chunk, Record):
                raise self._error(f"{name} chunks", type(chunk).__name__, "ChunkStorageMetadata")
            offset = self._counts(name, "chunk offsets", chunk.get("offsets"))
            size = self._counts(name, "chunk sizes", chunk.get("sizes"))
            if len(offset) != len(shape) or len(size) != len(shape):
                expected = f"{len(shape)} dimensions, as in {shape}"
                raise self._error(f"{name} chunk", f"{size} at {offset}", expected)
            place = places.get((name, offset))
            if place is None:
                raise self._error(f"{name} chunk at {offset}", "no place in a file", "one")
            chunks.append(Chunk(offset, size, place))
        ordered = sorted(chunks, key=lambda chunk: chunk.offset)
        return StoredTensor(shape, dtype, tuple(ordered), flattened)

    def _counts(self, where: str, what: str, values: Any) -> tuple[int, ...]:
        if isinstance(values, tuple) and len(values) <= LARGEST_DIMENSIONS:
            if all(map(is_count, values)):
                return values
            expected = "numbers that are not negative"
        elif isinstance(values, tuple):
            expected = f"at most {LARGEST_DIMENSIONS} of them"
        else:
            expected = "numbers that are not negative"
        raise self._error(f"{where} {what}", _shown(values), expected)

    def _error(self, where: str, got: object, expected: object) -> CheckpointError:
        return CheckpointError(f"{self._path} {where}", got=got, expected=expected, do=self._do)


def is_count(value: object) -> bool:
    """Whether a value is an integer that is not negative, and that torch can hold."""
    return type(value) is int and 0 <= value <= LARGEST_INTEGER


def _shown(value: object) -> str:
    """Return a value of a pickle for a message, cut even if values hold themselves."""
    return reprlib.repr(value)[:SHOWN_CHARACTERS]
