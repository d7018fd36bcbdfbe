"""The index of a large checkpoint: in parts, with a table on top.

    index.json              the table: each tensor's dtype and shape, which boxes of it each part
                            holds, each part's checksum, the bytes of each file of tensors
    index.pp3.tp5.json      a part: the chunks of the boxes that are held by tensor-parallel rank 5
                            of pipeline rank 3 alone
    index.pp3.json          the chunks of tensors that ranks of one pipeline rank hold in copies
    index.pp3.tp5.dp7.json  these where many ranks share the weights: those of the eighth group of
                            neighbours among them

A reader takes the table, and then only the parts whose boxes it wants. The proof that every element
is there once is divided in the same way: the boxes of the table make up each tensor, and the chunks
of a part make up its boxes. Folders with few chunks have ``.metadata`` instead (``index.py``)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import sub
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron_llama.checkpoint.bounds import largest_index
from megatron_llama.checkpoint.checksums import ANOTHER_COPY
from megatron_llama.checkpoint.container import Container
from megatron_llama.checkpoint.index import (
    FILE_NAME,
    INDEX_TABLE,
    Chunk,
    Place,
    StoredIndex,
    StoredTensor,
    cover_problems,
    is_count,
    paused_collector,
    shared_bytes,
)
from megatron_llama.checkpoint.native_folder import SAVED_DTYPES
from megatron_llama.checkpoint.storage import file_problems, refuse
from megatron_llama.config.json_file import parse_json_object
from megatron_llama.config.limits import LARGEST_DIMENSIONS, LARGEST_INTEGER
from megatron_llama.config.model_files import read_bounded
from megatron_llama.errors import CheckpointError, describe

TABLE_VERSION = 1
DIGEST = re.compile(r"[0-9a-f]{64}")
DTYPES = MappingProxyType({str(dtype).removeprefix("torch."): dtype for dtype in SAVED_DTYPES})
"""By the names in the table."""
NUMBERS_OF_PLACE = 4
"""A chunk of a part: file, offset, length and CRC-32, then its offset and its size in the
tensor."""


@dataclass(frozen=True)
class PartFile:
    """A part of the index, as the table names it."""

    name: str
    sum: str
    """SHA-256 of its content."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Table:
    """The content of ``index.json``."""

    parts: tuple[PartFile, ...]
    files: Mapping[str, int]
    """The bytes of each file of tensors."""
    layouts: tuple[StoredTensor, ...]
    """The boxes of tensors of one shape. They stand as chunks, whose file is a part. All tensors of
    a pipeline rank that are divided in the same way share a layout."""
    tensors: Mapping[str, tuple[torch.dtype, int]]
    """The dtype of each tensor, and the place of its layout in the list."""

    def content(self) -> bytes:
        """Return the bytes of the file."""
        number = {part.name: at for at, part in enumerate(self.parts)}
        layouts = [
            [
                layout.shape,
                [[number[box.place.relative_path], box.offset, box.size] for box in layout.chunks],
            ]
            for layout in self.layouts
        ]
        tensors = {
            name: [str(dtype).removeprefix("torch."), layout]
            for name, (dtype, layout) in self.tensors.items()
        }
        value = {
            "version": TABLE_VERSION,
            "parts": [[part.name, part.sum, part.size] for part in self.parts],
            "layouts": layouts,
            "tensors": tensors,
            "files": dict(self.files),
        }
        return json.dumps(value, separators=(",", ":")).encode()


def box_layout(
    shape: tuple[int, ...], boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...], str]]
) -> StoredTensor:
    """Return a layout of these boxes: offset, size, and the part's name."""
    chunks = (
        Chunk(offset, size, Place(part, 0, LARGEST_INTEGER)) for offset, size, part in sorted(boxes)
    )
    # A layout has no values: one byte for each element is never looked at.
    return StoredTensor(shape, torch.uint8, tuple(chunks), flattened=False)


def part_content(chunks: Mapping[str, Sequence[Chunk]]) -> bytes:
    """Return the bytes of a part with these chunks, by the name of their tensor."""
    files = sorted({chunk.place.relative_path for of in chunks.values() for chunk in of})
    number = {name: at for at, name in enumerate(files)}
    tensors = {
        name: [
            [
                number[chunk.place.relative_path],
                chunk.place.offset,
                chunk.place.length,
                chunk.place.crc32,
                *chunk.offset,
                *chunk.size,
            ]
            for chunk in of
        ]
        for name, of in chunks.items()
    }
    return json.dumps({"files": files, "tensors": tensors}, separators=(",", ":")).encode()


class PartedContainer(Container):
    """A folder whose index is in parts. A part is read when a box is first asked for that it
    holds."""

    def __init__(self, folder: Path, content: bytes) -> None:
        """``content`` is that of the table, compared with its checksum. Raises CheckpointError if
        it contradicts itself."""
        self._table = parse_table(folder / INDEX_TABLE, content)
        self._parts = _Parts(folder, self._table)
        tensors = {
            name: PartedTensor(name, dtype, self._table.layouts[layout], self._parts)
            for name, (dtype, layout) in self._table.tensors.items()
        }
        super().__init__(folder, StoredIndex(tensors, {}), do=ANOTHER_COPY)

    def missing_files(self) -> list[str]:
        """Return a line for each file that is missing or too short, and for each part of the index
        that is not as it was saved. No part is parsed, so this takes a moment for any number of
        chunks."""
        whole = [Place(name, 0, size) for name, size in self._table.files.items()]
        problems = file_problems(self.folder, whole, do=ANOTHER_COPY)
        for part in self._table.parts:
            try:
                self._parts.content(part.name)
            except CheckpointError as error:
                problems.append(f"{error}")
        return problems


class PartedTensor(StoredTensor):
    """A tensor whose chunks are in parts of the index."""

    def __init__(self, name: str, dtype: torch.dtype, layout: StoredTensor, parts: _Parts) -> None:
        # The base class is frozen, and its chunks are read below when they are asked for.
        vars(self).update(shape=layout.shape, dtype=dtype, flattened=False)
        vars(self).update(_name=name, _layout=layout, _parts=parts)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks, which takes all parts that hold some."""
        chunks = self.within((0,) * len(self.shape), self.shape)
        return tuple(sorted(chunks, key=lambda chunk: chunk.offset))

    def within(self, offset: Sequence[int], size: Sequence[int]) -> Iterator[Chunk]:
        """Yield the chunks that overlap the box. Raises CheckpointError for a damaged part."""
        layout: StoredTensor = vars(self)["_layout"]
        parts: _Parts = vars(self)["_parts"]
        for name in sorted({box.place.relative_path for box in layout.within(offset, size)}):
            yield from parts.tensors(name)[vars(self)["_name"]].within(offset, size)


class _Parts:
    """The parts of an index that have been read."""

    def __init__(self, folder: Path, table: Table) -> None:
        self._folder = folder
        self._table = table
        self._files = {part.name: part for part in table.parts}
        self._read = dict[str, Mapping[str, StoredTensor]]()

    def tensors(self, part: str) -> Mapping[str, StoredTensor]:
        """Return the chunks of a part, by tensor. Raises CheckpointError if they are not exactly
        what the table says."""
        if part not in self._read:
            self._read[part] = self._parse(part)
        return self._read[part]

    def content(self, part: str) -> bytes:
        """Return the bytes of a part. Raises CheckpointError unless they are those with which the
        table was written."""
        path, listed = self._folder / part, self._files[part]
        limit = largest_index(self._folder, listed.size)
        content = read_bounded(path, limit=limit, do=ANOTHER_COPY)
        digest = hashlib.sha256(content).hexdigest()
        if digest != listed.sum:
            got = f"SHA-256 {digest} in {len(content):,} bytes"
            expected = f"{listed.sum} in {listed.size:,}, by {INDEX_TABLE}"
            raise CheckpointError(path, got=got, expected=expected, do=ANOTHER_COPY)
        return content

    @paused_collector()
    def _parse(self, part: str) -> Mapping[str, StoredTensor]:
        path = self._folder / part
        of_layouts = [
            [box for box in layout.chunks if box.place.relative_path == part]
            for layout in self._table.layouts
        ]
        boxes = {
            name: of_layouts[layout]
            for name, (_, layout) in self._table.tensors.items()
            if of_layouts[layout]
        }
        value = parse_json_object(self.content(part), path, do=ANOTHER_COPY)
        files, listed = value.get("files"), value.get("tensors")
        if not isinstance(files, list) or not all(
            isinstance(name, str) and name in self._table.files for name in files
        ):
            raise _error(f"{path} files", "others", f"files that {INDEX_TABLE} names")
        if not isinstance(listed, dict) or listed.keys() != boxes.keys():
            raise _error(f"{path} tensors", "others", f"those that {INDEX_TABLE} puts into it")
        tensors = {}
        problems = list[str]()
        for name, rows in listed.items():
            dtype, layout = self._table.tensors[name]
            shape = self._table.layouts[layout].shape
            where = f"{path} {name}"
            chunks = list(self._chunks(where, rows, files, len(shape)))
            chunks.sort(key=lambda chunk: chunk.offset)
            tensors[name] = StoredTensor(shape, dtype, tuple(chunks), flattened=False)
            problems += _part_problems(where, tensors[name], boxes[name])
        places = [chunk.place for tensor in tensors.values() for chunk in tensor.chunks]
        problems += shared_bytes(self._folder, places, do=ANOTHER_COPY)
        refuse(f"{path} cannot be used:", problems)
        return tensors

    def _chunks(self, where: str, rows: Any, files: list[str], dims: int) -> Iterator[Chunk]:
        if not isinstance(rows, list) or not rows:
            raise _error(where, "no chunks", "at least one")
        for row in rows:
            counts = isinstance(row, list) and all(map(is_count, row))
            if not counts or len(row) != NUMBERS_OF_PLACE + 2 * dims or row[0] >= len(files):
                expected = f"file, offset, length, CRC-32 and a box of {dims} dimensions"
                raise _error(where, repr(row)[:80], expected)
            name = files[row[0]]
            place = Place(name, *row[1:NUMBERS_OF_PLACE])
            if place.offset + place.length > self._table.files[name]:
                expected = f"one within its {self._table.files[name]} bytes"
                raise _error(where, f"a chunk at byte {place.offset} of {name}", expected)
            numbers = tuple(row[NUMBERS_OF_PLACE:])
            yield Chunk(numbers[:dims], numbers[dims:], place)


def _part_problems(where: str, tensor: StoredTensor, boxes: Sequence[Chunk]) -> Iterator[str]:
    """Yield the problems because of which the chunks are not exactly the boxes."""
    left = list(tensor.chunks)
    for box in boxes:
        inside = [chunk for chunk in left if _begins_in(chunk, box)]
        left = [chunk for chunk in left if not _begins_in(chunk, box)]
        moved = (
            chunk._replace(offset=tuple(map(sub, chunk.offset, box.offset))) for chunk in inside
        )
        yield from cover_problems(
            f"{where} at {box.offset}",
            StoredTensor(box.size, tensor.dtype, tuple(moved), flattened=False),
            do=ANOTHER_COPY,
        )
    if left:
        got = f"a chunk at {left[0].offset}"
        expected = f"those of the boxes in {INDEX_TABLE} alone"
        yield describe(where, got=got, expected=expected, do=ANOTHER_COPY)


def _begins_in(chunk: Chunk, box: Chunk) -> bool:
    return all(
        low <= at < low + length
        for at, low, length in zip(chunk.offset, box.offset, box.size, strict=True)
    )


def parse_table(path: Path, content: bytes) -> Table:
    """Return the content of a table. Raises CheckpointError if the boxes do not make up the
    tensors, or a value is none that a save writes."""
    value = parse_json_object(content, path, do=ANOTHER_COPY)
    if value.get("version") != TABLE_VERSION:
        do = "load it with the version of this program that saved it"
        where, got = f"{path} version", value.get("version")
        raise CheckpointError(where, got=got, expected=TABLE_VERSION, do=do)
    parts = tuple(_parse_part(path, entry) for entry in _entries(path, value, "parts", list))
    files = _entries(path, value, "files", dict)
    for name, size in files.items():
        if not FILE_NAME.fullmatch(name) or not is_count(size):
            raise _error(f"{path} files", f"{name[:80]}: {size!r}", "a file of the folder: bytes")
    layouts = tuple(
        _parse_layout(path, entry, parts) for entry in _entries(path, value, "layouts", list)
    )
    where = f"{path} layouts"
    problems = (cover_problems(where, layout, do=ANOTHER_COPY) for layout in layouts)
    refuse(f"{path} cannot be used:", list(chain.from_iterable(problems)))
    tensors = {}
    for name, entry in _entries(path, value, "tensors", dict).items():
        known = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
        if not known or entry[0] not in DTYPES or not _is_below(entry[1], len(layouts)):
            raise _error(f"{path} {name[:80]}", repr(entry)[:80], "a dtype and a layout")
        tensors[name] = (DTYPES[entry[0]], entry[1])
    return Table(parts, files, layouts, tensors)


def _entries(path: Path, value: Mapping[str, Any], name: str, kind: type) -> Any:
    entries = value.get(name)
    if not isinstance(entries, kind):
        raise _error(f"{path} {name}", type(entries).__name__, kind.__name__)
    return entries


def _parse_part(path: Path, entry: Any) -> PartFile:
    if isinstance(entry, list) and len(entry) == 3:
        name, digest, size = entry
        named = isinstance(name, str) and FILE_NAME.fullmatch(name)
        if named and isinstance(digest, str) and DIGEST.fullmatch(digest) and is_count(size):
            return PartFile(name, digest, size)
    raise _error(f"{path} parts", repr(entry)[:80], "name, SHA-256 and bytes of a part")


def _parse_layout(path: Path, entry: Any, parts: Sequence[PartFile]) -> StoredTensor:
    if isinstance(entry, list) and len(entry) == 2 and _is_shape(entry[0]):
        shape, rows = entry
        if isinstance(rows, list) and all(_is_box(row, len(shape), len(parts)) for row in rows):
            boxes = [(tuple(offset), tuple(size), parts[part].name) for part, offset, size in rows]
            if boxes:
                return box_layout(tuple(shape), boxes)
    raise _error(f"{path} layouts", repr(entry)[:80], "a shape, and boxes of it in parts")


def _is_box(row: Any, dims: int, parts: int) -> bool:
    if not isinstance(row, list) or len(row) != 3 or not _is_below(row[0], parts):
        return False
    return all(_is_shape(sides) and len(sides) == dims for sides in row[1:])


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) <= LARGEST_DIMENSIONS and all(map(is_count, value))
    )


def _is_below(value: Any, end: int) -> bool:
    return is_count(value) and value < end


def _error(where: str, got: object, expected: object) -> CheckpointError:
    return CheckpointError(where, got=got, expected=expected, do=ANOTHER_COPY)
