"""Reads folders of torch.distributed.checkpoint without that package: the index ``.metadata`` and
the tensors in ``*.distcp``.

Both are pickles, and pickles may call any code. The index is read with a short list of classes,
which become inert records here; a tensor's few fields are read the same way. Values are mapped from
the files only where and while they are copied, so that neither a tensor nor a chunk of one is ever
in memory whole.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import re
import zipfile
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_llama.checkpoint.storage import METADATA, file_problems, refuse
from megatron_llama.conversion.safetensors_file import DTYPES
from megatron_llama.conversion.torch_file import STORAGES, TorchFile
from megatron_llama.errors import CheckpointError, describe

COPY_AGAIN = "copy the folder again from where it was saved"
CRC_BYTES = 2**22
"""Checksums are computed over so many bytes at a time."""
FILE_NAME = re.compile(r"\w[\w.-]*")
LARGEST_HEADER = 2**16
"""The pickle that describes one tensor has some 200 bytes. A larger one is something else."""


class _Record:
    """Stands for an object of a class of torch or Megatron: keeps what the pickle gives it, and
    does nothing."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        record = object.__new__(cls)
        record.args = args
        record.state = {}
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        """Return a field of the object, None without it."""
        return self.state.get(field) if isinstance(self.state, dict) else None


def _records(*names: str) -> Mapping[str, type[_Record]]:
    return MappingProxyType({name: type(name, (_Record,), {}) for name in names})


RECORDS: Mapping[str, Mapping[str, type[_Record]]] = MappingProxyType(
    {
        "torch.distributed.checkpoint.metadata": _records(
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": _records("_StorageInfo"),
        "torch.distributed.checkpoint.planner": _records(
            "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"
        ),
        "torch.serialization": _records("_get_layout"),
        "megatron.core.dist_checkpointing.strategies.torch": _records(
            "MCoreMetadata", "MCoreSavePlan"
        ),
        "pathlib": _records("PosixPath"),
        "pathlib._local": _records("PosixPath"),
    }
)
"""The classes that torch and Megatron-Core pickle into the index. All become records."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in RECORDS.get(module, {}):
            return RECORDS[module][name]
        if (module, name) == ("torch", "Size"):
            return tuple
        # vars() alone: torch's own __getattr__ would import modules.
        dtype = vars(torch).get(name) if module == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise _ForeignNameError(f"{module}.{name}")
        return dtype


class _ForeignNameError(Exception):
    """A pickle names something that does not belong there."""


@dataclass(frozen=True)
class Place:
    """Where something lies: bytes ``[offset, offset + length)`` of a file of the folder."""

    relative_path: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
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
    """In the order of their offsets."""
    flattened: bool
    """Whether Megatron-Core before 0.15 has saved flat pieces of it: the chunks then do not say
    which elements they hold."""

    @cached_property
    def _starts(self) -> list[int]:
        return [chunk.offset[0] for chunk in self.chunks]

    @cached_property
    def _longest(self) -> int:
        return max(chunk.size[0] for chunk in self.chunks)

    def within(self, offset: Sequence[int], size: Sequence[int]) -> Iterator[Chunk]:
        """Yield the chunks that hold something of the box."""
        # Chunks are sorted by their start in dimension 0, in which none is longer than _longest.
        first = bisect_right(self._starts, offset[0] - self._longest)
        last = bisect_left(self._starts, offset[0] + size[0])
        for chunk in self.chunks[first:last]:
            if _overlap(chunk.offset, chunk.size, offset, size):
                yield chunk


@dataclass(frozen=True)
class _Header:
    """What the zip archive of one chunk says: where the storage lies in the file, and how the
    tensor lies in the storage."""

    start: int
    """First byte of the storage in the file."""
    first: int
    """Element of the storage that is the first of the tensor."""
    stride: tuple[int, ...]


class Container:
    """An opened folder: its tensors by name, and their values."""

    def __init__(self, folder: Path) -> None:
        """Read the index. Raises CheckpointError when it is missing, damaged, contradicts itself or
        names code to run."""
        self.folder = folder
        path = folder / METADATA
        index = _read_index(path)
        fields = [index.get(name) for name in ("state_dict_metadata", "storage_data")]
        if not all(isinstance(field, dict) for field in fields):
            got = "an object without state_dict_metadata and storage_data"
            raise CheckpointError(path, got=got, expected="torch's Metadata", do=COPY_AGAIN)
        described, placed = fields
        reformed = index.get("mcore_data")
        flattened = {
            name
            for name, value in (reformed.items() if isinstance(reformed, dict) else ())
            if isinstance(value, dict) and value.get("nd_reformulated_orig_global_shape")
        }
        places = _places(path, placed)
        tensors = {}
        objects = {}
        for name, value in described.items():
            if isinstance(value, _Record) and type(value).__name__ == "BytesStorageMetadata":
                if (name, None) in places:
                    objects[name] = places[name, None]
            else:
                tensors[name] = _tensor(path, name, value, places, name in flattened)
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(tensors)
        self.objects: Mapping[str, Place] = MappingProxyType(objects)
        """What was saved with ``torch.save`` beside the tensors, by name."""
        self._headers = dict[Place, _Header]()

    def require(self, names: Iterable[str]) -> None:
        """Raise CheckpointError with everything that keeps these tensors from being read: no such
        tensor, values that are no floats, chunks that are missing, overlap, lie outside of the
        tensor, of their files or upon each other. Values are not read."""
        problems = []
        chunks = list[Chunk]()
        for name in names:
            where = f"{self.folder / METADATA} {name}"
            tensor = self.tensors.get(name)
            if tensor is None:
                expected = "one of this name"
                problems.append(
                    describe(where, got="no tensor", expected=expected, do="take another folder")
                )
                continue
            if tensor.dtype not in DTYPES:
                do = "quantised models cannot be converted: take the original"
                expected = "float32, bfloat16 or float16"
                problems.append(describe(where, got=tensor.dtype, expected=expected, do=do))
            if tensor.flattened:
                got = "flattened pieces, as Megatron-Core before 0.15 saved them"
                do = "load and save it with a later Megatron-Core"
                problems.append(describe(where, got=got, expected="boxes of the tensor", do=do))
                continue
            problems += _cover_problems(where, tensor)
            chunks += tensor.chunks
        places = [chunk.place for chunk in chunks]
        problems += file_problems(self.folder, places, do=COPY_AGAIN)
        problems += self._shared_bytes(places)
        refuse(f"{self.folder} cannot be read:", problems)

    def read(self, name: str, offset: Sequence[int], out: Tensor) -> None:
        """Write the box of a tensor that begins at ``offset`` and has the size of ``out`` into
        ``out``, of any float dtype and with as many dimensions as the tensor, at least one. The
        tensor has to be one that ``require`` has seen. Called by several threads at a time. Raises
        CheckpointError when values are damaged."""
        tensor = self.tensors[name]
        for chunk in tensor.within(offset, out.shape):
            low = [max(pair) for pair in zip(chunk.offset, offset, strict=True)]
            ends = zip(chunk.offset, chunk.size, offset, out.shape, strict=True)
            size = [min(a + b, c + d) - at for (a, b, c, d), at in zip(ends, low, strict=True)]
            target = out
            for dim, (at, begin, count) in enumerate(zip(low, offset, size, strict=True)):
                target = target.narrow(dim, at - begin, count)
            inner = [at - begin for at, begin in zip(low, chunk.offset, strict=True)]
            self._copy(name, tensor.dtype, chunk, inner, target)

    def damaged(self) -> Iterator[str]:
        """Read every chunk of every tensor, and yield a line for each that is not what was saved.
        ``require`` has to have seen all tensors."""
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                try:
                    with self._opened(name, chunk) as file:
                        _open_chunk(file, chunk, tensor.dtype)
                except CheckpointError as error:
                    yield f"{error}"

    def load_object(self, name: str) -> Any:
        """Return an object of ``objects``, read with the restricted unpickler of ``TorchFile``.
        Raises CheckpointError."""
        place = self.objects[name]
        refuse(f"{self.folder} cannot be read:", file_problems(self.folder, [place], do=COPY_AGAIN))
        path = self.folder / place.relative_path
        with path.open("rb") as file:
            file.seek(place.offset)
            content = TorchFile(path, file.read(place.length))
        content.verify_all()
        return content.content

    def _shared_bytes(self, places: Collection[Place]) -> Iterator[str]:
        """Yield the places that begin within another one."""
        ends = defaultdict[str, int](int)
        for place in sorted(places, key=lambda place: (place.relative_path, place.offset)):
            if place.offset < ends[place.relative_path]:
                where = f"{self.folder / place.relative_path} byte {place.offset}"
                got = "chunks that share bytes"
                yield describe(where, got=got, expected="one behind the other", do=COPY_AGAIN)
            ends[place.relative_path] = place.offset + place.length

    def _copy(
        self, name: str, dtype: torch.dtype, chunk: Chunk, inner: Sequence[int], out: Tensor
    ) -> None:
        """Write the box of a chunk that begins at ``inner`` and has the size of ``out``."""
        with self._opened(name, chunk) as file:
            header = self._headers.get(chunk.place)
            if header is None:
                header = _open_chunk(file, chunk, dtype)
                self._headers[chunk.place] = header
            if out.dtype == dtype and out.stride(-1) == 1:
                _map(file, header, inner, out)
            else:
                values = torch.empty(out.shape, dtype=dtype)
                _map(file, header, inner, values)
                out.copy_(values)

    @contextmanager
    def _opened(self, name: str, chunk: Chunk) -> Iterator[io.FileIO]:
        """Open the file of a chunk, and raise CheckpointError for what goes wrong with it."""
        path = self.folder / chunk.place.relative_path
        try:
            with path.open("rb", buffering=0) as file:
                yield file
        except (OSError, ValueError, zipfile.BadZipFile, _DamageError) as error:
            where = f"{path} {name} at {chunk.offset}"
            got, expected = "damaged content", "the tensor that was saved"
            if isinstance(error, _DamageError):
                got, expected = error.got, error.expected
            elif isinstance(error, OSError):
                got = error.strerror or got
            raise CheckpointError(where, got=got, expected=expected, do=COPY_AGAIN) from error


class _DamageError(Exception):
    """A chunk is not what the index says."""

    def __init__(self, got: object, expected: object) -> None:
        super().__init__(got, expected)
        self.got = f"{got}"
        self.expected = f"{expected}"


def _read_index(path: Path) -> _Record:
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
    except _ForeignNameError as error:
        do = "do not load it elsewhere unless you trust who made it; take a copy from its origin"
        expected = "the classes of torch's index only (nothing was run)"
        raise CheckpointError(
            path, got=f"a pickle that calls {error}", expected=expected, do=do
        ) from error
    except OSError as error:
        got = error.strerror or str(error)
        raise CheckpointError(path, got=got, expected="torch's index", do=COPY_AGAIN) from error
    except Exception as error:
        # A damaged pickle raises whatever its bytes happen to mean.
        got = f"damaged content ({type(error).__name__})"
        raise CheckpointError(path, got=got, expected="torch's index", do=COPY_AGAIN) from error
    if not isinstance(index, _Record) or type(index).__name__ not in ("Metadata", "MCoreMetadata"):
        got = f"a {type(index).__name__}"
        raise CheckpointError(path, got=got, expected="torch's Metadata", do=COPY_AGAIN)
    return index


def _places(path: Path, placed: dict[Any, Any]) -> dict[tuple[Any, Any], Place]:
    """Return where each chunk lies, by name and offset, and each object, by name and None."""
    places = dict[tuple[Any, Any], Place]()
    for key, value in placed.items():
        if not isinstance(key, _Record) or not isinstance(value, _Record):
            got = f"{type(key).__name__}: {type(value).__name__}"
            raise _index_error(f"{path} storage_data", got, "MetadataIndex: _StorageInfo")
        name = key.get("fqn")
        offset = key.get("offset")
        where = f"{path} storage_data {name}"
        if not isinstance(name, str):
            raise _index_error(where, repr(name)[:80], "the name of a tensor")
        at = None if offset is None else _numbers(f"{where} offset", offset)
        if (name, at) in places:
            raise _index_error(f"{where} at {at}", "two places", "one")
        file = value.get("relative_path")
        # A name with a folder in it could lead anywhere.
        if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
            raise _index_error(f"{where} relative_path", repr(file)[:80], "a file of the folder")
        if value.get("transform_descriptors"):
            got = f"{value.get('transform_descriptors')!r}"[:80]
            do = "save it without compression"
            raise CheckpointError(
                f"{where} transform_descriptors", got=got, expected="plain tensors", do=do
            )
        start, length = _numbers(where, (value.get("offset"), value.get("length")))
        places[name, at] = Place(file, start, length)
    return places


def _tensor(
    path: Path, name: object, value: Any, places: Mapping[Any, Place], flattened: bool
) -> StoredTensor:
    where = f"{path} {name}"
    known = isinstance(value, _Record) and type(value).__name__ == "TensorStorageMetadata"
    if not isinstance(name, str) or not known:
        raise _index_error(where, f"a {type(value).__name__}", "a TensorStorageMetadata")
    properties = value.get("properties")
    state = properties.state if isinstance(properties, _Record) else None
    dtype = state.get("dtype") if isinstance(state, dict) else state[0] if state else None
    if not isinstance(dtype, torch.dtype):
        raise _index_error(f"{where} dtype", repr(dtype)[:80], "a dtype of torch")
    shape = _numbers(f"{where} size", value.get("size"))
    listed = value.get("chunks")
    if not isinstance(listed, list) or not listed:
        raise _index_error(f"{where} chunks", "none", "at least one")
    chunks = []
    for each in listed:
        if not isinstance(each, _Record):
            raise _index_error(f"{where} chunks", type(each).__name__, "ChunkStorageMetadata")
        offset = _numbers(f"{where} chunk offsets", each.get("offsets"))
        size = _numbers(f"{where} chunk sizes", each.get("sizes"))
        if len(offset) != len(shape) or len(size) != len(shape):
            expected = f"{len(shape)} dimensions, as in {shape}"
            raise _index_error(f"{where} chunk", f"{size} at {offset}", expected)
        if (name, offset) not in places:
            raise _index_error(f"{where} chunk at {offset}", "no place in a file", "one")
        chunks.append(Chunk(offset, size, places[name, offset]))
    ordered = sorted(chunks, key=lambda chunk: chunk.offset)
    return StoredTensor(shape, dtype, tuple(ordered), flattened)


def _numbers(where: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(n) is int and n >= 0 for n in values):
        raise _index_error(where, repr(values)[:80], "numbers that are not negative")
    return values


def _index_error(where: str, got: object, expected: object) -> CheckpointError:
    return CheckpointError(where, got=got, expected=expected, do=COPY_AGAIN)


def _overlap(
    offset: Sequence[int], size: Sequence[int], other: Sequence[int], extent: Sequence[int]
) -> bool:
    boxes = zip(offset, size, other, extent, strict=True)
    return all(a < c + d and c < a + b for a, b, c, d in boxes)


def _cover_problems(where: str, tensor: StoredTensor) -> Iterator[str]:
    """Yield what keeps the chunks from being the tensor, cut into pieces."""
    active: list[Chunk] = []
    for chunk in tensor.chunks:
        ends = [start + count for start, count in zip(chunk.offset, chunk.size, strict=True)]
        size = math.prod(chunk.size) * tensor.dtype.itemsize
        if size > chunk.place.length:
            got = f"a chunk {chunk.size} of {size} bytes in {chunk.place.length}"
            expected = "as many bytes as it has values"
            yield describe(where, got=got, expected=expected, do=COPY_AGAIN)
            return
        if any(end > whole for end, whole in zip(ends, tensor.shape, strict=True)):
            got = f"a chunk {chunk.size} at {chunk.offset}"
            expected = f"one within {tensor.shape}"
            yield describe(where, got=got, expected=expected, do=COPY_AGAIN)
            return
        # Sorted by dimension 0: what ended before this start cannot meet a later chunk either.
        if tensor.shape:
            start = chunk.offset[0]
            active = [each for each in active if each.offset[0] + each.size[0] > start]
        for each in active:
            if _overlap(each.offset, each.size, chunk.offset, chunk.size):
                got = f"overlapping chunks at {each.offset} and {chunk.offset}"
                expected = "each element once"
                yield describe(where, got=got, expected=expected, do=COPY_AGAIN)
                return
        active.append(chunk)
    # Boxes within the tensor that do not overlap fill it if they have as many elements.
    found = sum(math.prod(chunk.size) for chunk in tensor.chunks)
    if found != math.prod(tensor.shape):
        expected = f"{math.prod(tensor.shape)}, the shape being {tensor.shape}: chunks are missing"
        yield describe(where, got=f"{found} elements", expected=expected, do=COPY_AGAIN)


@dataclass(frozen=True)
class _Saved:
    """A tensor in the pickle of a chunk."""

    dtype: torch.dtype
    key: str
    numel: int
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _TensorUnpickler(pickle.Unpickler):
    """Reads the pickle that ``torch.save`` writes for one tensor, without making the tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _saved
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        for dtype, storage in STORAGES.items():
            if (module, name) == ("torch", storage.__name__):
                return dtype
        raise _ForeignNameError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _saved(storage: Any, first: Any, size: Any, stride: Any, *_: Any) -> _Saved:
    """Take the arguments of ``torch._utils._rebuild_tensor_v2``."""
    _, dtype, key, _, numel = storage
    numbers = (numel, first, *size, *stride)
    if not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(dtype, torch.dtype):
        raise ValueError("no tensor")
    return _Saved(dtype, f"{key}", numel, first, tuple(size), tuple(stride))


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view) or 0
        self._at += count
        return count


def _open_chunk(file: io.FileIO, chunk: Chunk, dtype: torch.dtype) -> _Header:
    """Read the zip archive of a chunk, and compare its values with their checksum. Raises
    _DamageError, or what a damaged archive raises."""
    window = _Window(file, chunk.place.offset, chunk.place.length)
    with zipfile.ZipFile(window) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        pickled = entries.get("data.pkl")
        if pickled is None or pickled.file_size > LARGEST_HEADER:
            raise _DamageError("no data.pkl of a tensor", "a tensor that torch.save wrote")
        try:
            saved = _TensorUnpickler(io.BytesIO(archive.read(pickled))).load()
        except _ForeignNameError as error:
            raise _DamageError(
                f"a pickle that calls {error}", "a tensor (nothing was run)"
            ) from error
        except zipfile.BadZipFile:
            raise
        except Exception as error:
            raise _DamageError(f"damaged content ({type(error).__name__})", "a tensor") from error
        if not isinstance(saved, _Saved):
            raise _DamageError(f"a {type(saved).__name__}", "a tensor")
        if (saved.size, saved.dtype) != (chunk.size, dtype):
            raise _DamageError(f"{saved.dtype} {saved.size}", f"{dtype} {chunk.size}, by the index")
        if entries.get("byteorder") and archive.read(entries["byteorder"]) != b"little":
            raise _DamageError("values in another byte order", "little-endian values")
        entry = entries.get(f"data/{saved.key}")
        if entry is None or entry.compress_type != zipfile.ZIP_STORED:
            raise _DamageError("no plain values", f"an entry data/{saved.key}")
        if entry.file_size != saved.numel * dtype.itemsize:
            raise _DamageError(f"{entry.file_size} bytes", saved.numel * dtype.itemsize)
        reach = sum((n - 1) * step for n, step in zip(saved.size, saved.stride, strict=True))
        if 0 not in saved.size and saved.first + reach >= saved.numel:
            raise _DamageError(f"elements behind {saved.numel} in the storage", "none")
        if saved.stride and saved.stride[-1] != 1 and saved.size[-1] != 1:
            raise _DamageError(f"strides {saved.stride}", "rows whose elements are neighbours")
        # Name and extra field may have other lengths here than in the archive's directory.
        window.seek(entry.header_offset)
        local = window.read(30) or b""
        if local[:4] != b"PK\3\4":
            raise _DamageError("no entry where the archive's directory has it", "one")
        skip = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        start = entry.header_offset + 30 + skip
        if start + entry.file_size > chunk.place.length:
            raise _DamageError("values behind the end of the chunk", "all within")
        if _crc32(window, start, entry.file_size) != entry.CRC:
            raise _DamageError("damaged content (a checksum does not match)", "what was saved")
    return _Header(chunk.place.offset + start, saved.first, saved.stride)


def _crc32(window: _Window, start: int, length: int) -> int:
    window.seek(start)
    buffer = bytearray(min(CRC_BYTES, length))
    crc = 0
    while length > 0:
        count = window.readinto(memoryview(buffer)[: min(length, CRC_BYTES)])
        if count == 0:
            raise _DamageError("the end of the file", f"{length} more bytes")
        crc = zlib.crc32(memoryview(buffer)[:count], crc)
        length -= count
    return crc


def _map(file: io.FileIO, header: _Header, inner: Sequence[int], out: Tensor) -> None:
    """Copy the box that begins at ``inner`` and has the size of ``out``, which has the dtype of the
    file and neighbours in its rows. The file is mapped only meanwhile: mapped pages count as
    resident memory."""
    steps = list(zip(header.stride, inner, out.shape, strict=True))
    first = header.first + sum(step * at for step, at, _ in steps)
    count = 1 + sum(step * (size - 1) for step, _, size in steps)
    begin = header.start + first * out.itemsize
    skip = begin % mmap.ALLOCATIONGRANULARITY
    length = count * out.itemsize
    # A private mapping, since torch warns of memory that cannot be written. Nothing writes to it.
    mapping = mmap.mmap(file.fileno(), skip + length, access=mmap.ACCESS_COPY, offset=begin - skip)
    # Values begin at any byte of the file, so they are copied as bytes: torch's kernels for a dtype
    # may expect its alignment.
    values = torch.frombuffer(mapping, dtype=torch.uint8, offset=skip, count=length)
    size = (*out.shape[:-1], out.shape[-1] * out.itemsize)
    stride = (*(step * out.itemsize for step in header.stride[:-1]), 1)
    out.view(torch.uint8).copy_(values.as_strided(size, stride))
