"""Files of ``torch.save``: read through a memory map without running anything in them, and written
tensor by tensor.

The pickle in a file is read by ``torch_pickle``: tensors, settings and plain containers. Classes of
Megatron and its libraries (enums, settings) become inert objects: nothing of theirs is imported.
Everything else is refused by name. No entry of the archive may be compressed, or share bytes with
another: what a file claims to hold is bounded by its size.

A written file is a zip archive of one pickle and one entry for each tensor, into which the values
are streamed: ``torch.save`` wants all of them in memory.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.finite import is_finite
from megatron_llama.checkpoint.torch_pickle import ForbiddenNames, read_pickle
from megatron_llama.config.limits import LARGEST_ENTRIES, LARGEST_PICKLE
from megatron_llama.config.lines import require_regular
from megatron_llama.conversion.safetensors_file import DTYPES
from megatron_llama.errors import CheckpointError

STORAGES = MappingProxyType(
    {
        torch.float32: torch.FloatStorage,
        torch.bfloat16: torch.BFloat16Storage,
        torch.float16: torch.HalfStorage,
    }
)
LOCAL_HEADER = 30
"""Bytes in front of the name of an entry."""
ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes, as torch has it: memory-mapped values are read in
place."""


@dataclass(frozen=True)
class Entry:
    """One entry of a zip archive: where its bytes are, and their checksum."""

    start: int
    size: int
    crc: int


class TorchFile:
    """The content of one file: memory-mapped tensors in whatever dicts and lists they were saved
    in."""

    def __init__(self, path: Path, part: bytes | None = None) -> None:
        """Open the file, or what ``torch.save`` wrote as a ``part`` of it, which is in memory.
        Raises CheckpointError when it is damaged, of another kind, or names code to run."""
        self.path = path
        self._lock = Lock()
        self._verified = set[int]()
        self._sums: dict[int, int] = {}
        """The checksum of each storage's bytes, by the address of the storage."""
        try:
            if part is None:
                require_regular(path)
                size = path.stat().st_size
                with path.open("rb") as file:
                    text, entries = _read_entries(file, size)
                whole: Any = torch.UntypedStorage.from_file(str(path), False, size)
            else:
                text, entries = _read_entries(io.BytesIO(part), len(part))
                whole = None
            self.content = read_pickle(text, partial(self._load_storage, entries, whole, part))
        except OSError as error:
            raise self._error(error.strerror or error) from error
        except ForbiddenNames as error:
            trust = "do not load it elsewhere unless you trust who made it"
            do = f"{trust}; convert a copy from its origin"
            raise CheckpointError(
                path, got=error, expected="tensors and settings only (nothing was run)", do=do
            ) from error
        except _UNREADABLE as error:
            raise self._error(f"damaged or foreign content ({error})") from error

    def _load_storage(
        self, entries: Mapping[str, Entry], whole: Any, part: bytes | None, key: str, nbytes: int
    ) -> Any:
        """Return the values of one entry: of the map of the ``whole`` file, or a copy of them in
        the ``part``. Raises UnpicklingError unless there are ``nbytes`` of them."""
        entry = entries.get(key)
        if entry is None or entry.size != nbytes:
            size = "none" if entry is None else f"{entry.size:,}"
            raise pickle.UnpicklingError(f"storage {key} of {nbytes:,} bytes, where {size} are")
        stop = entry.start + entry.size
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        if whole is not None:
            storage = whole[entry.start : stop]
        else:
            assert part is not None
            copied = bytearray(part[entry.start : stop])
            storage = torch.frombuffer(copied, dtype=torch.uint8).untyped_storage()
        self._sums[storage.data_ptr()] = entry.crc
        return storage

    def verify(self, tensor: Tensor) -> None:
        """Compare the storage behind a tensor with the file's checksum, once: torch does not.
        Raises CheckpointError."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return
        with self._lock:
            if storage.data_ptr() in self._verified:
                return
            values: Tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
            if zlib.crc32(values.numpy().data) != self._sums[storage.data_ptr()]:
                raise self._error("damaged content (a checksum does not match)")
            self._verified.add(storage.data_ptr())

    def verify_all(self) -> None:
        """Compare every tensor of ``content`` with the file's checksums. For files whose tensors
        are few and small. Raises CheckpointError."""
        values = [self.content]
        while values:
            value = values.pop()
            if isinstance(value, Tensor):
                self.verify(value)
            elif isinstance(value, dict):
                values += value.values()
            elif isinstance(value, list | tuple):
                values += value

    def _error(self, got: object) -> CheckpointError:
        do = "copy the file again from where the model came from"
        return CheckpointError(self.path, got=got, expected="a file that torch.save wrote", do=do)


_UNREADABLE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    EOFError,
    RuntimeError,
    UnicodeDecodeError,
    ValueError,
    struct.error,
)
"""Errors of zipfile and of the reader of pickles for content that is not what it should be."""


def _read_entries(file: IO[bytes], size: int) -> tuple[bytes, dict[str, Entry]]:
    """Return the pickle in an archive, and the entries with the tensors' values by their keys.
    Entries of other purposes are small: they are read, which checks them. Raises BadZipFile for
    bytes that are compressed, that two entries share, or that are not there."""
    if file.read(4) != b"PK\x03\x04":
        raise zipfile.BadZipFile("no zip archive: torch before 1.6 wrote others")
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        if len(infos) > LARGEST_ENTRIES:
            got = f"{len(infos):,} entries, where {LARGEST_ENTRIES:,} are allowed"
            raise zipfile.BadZipFile(got)
        _require_stored(infos)
        places = {info.filename: _place(file, info) for info in infos}
        if len(places) != len(infos):
            raise zipfile.BadZipFile("two entries of one name")
        _require_apart(infos, places, size)
        pickles = [name for name in places if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise zipfile.BadZipFile("no single data.pkl")
        root = pickles[0].removesuffix("data.pkl")
        values = f"{root}data/"
        for info in infos:
            if info.filename.startswith(values):
                continue
            if info.file_size > LARGEST_PICKLE:
                got = f"{info.filename} of {info.file_size:,} bytes"
                raise zipfile.BadZipFile(f"{got}, where {LARGEST_PICKLE:,} are allowed")
            content = archive.read(info)
            if info.filename == f"{root}byteorder" and content != b"little":
                raise zipfile.BadZipFile(f"byte order {content[:10]!r}, where 'little' is read")
        text = archive.read(pickles[0])
    entries = {name.removeprefix(values): place for name, place in places.items()}
    return text, entries


def _require_stored(infos: Iterable[zipfile.ZipInfo]) -> None:
    """Raise BadZipFile for compressed entries: torch writes none, and 6 kB can be 8 GB."""
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            sizes = f"{info.compress_size:,} bytes that become {info.file_size:,}"
            raise zipfile.BadZipFile(f"{info.filename} is compressed, {sizes}")


def _place(file: IO[bytes], info: zipfile.ZipInfo) -> Entry:
    """Return where the bytes of an entry are, by the header in front of them."""
    file.seek(info.header_offset)
    header = file.read(LOCAL_HEADER)
    if len(header) != LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no header of {info.filename}")
    name, extra = struct.unpack_from("<HH", header, LOCAL_HEADER - 4)
    start = info.header_offset + LOCAL_HEADER + name + extra
    return Entry(start, info.file_size, info.CRC)


def _require_apart(
    infos: Iterable[zipfile.ZipInfo], places: Mapping[str, Entry], size: int
) -> None:
    """Raise BadZipFile where entries share bytes or end behind the file."""
    last = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        place = places[info.filename]
        if info.header_offset < last:
            raise zipfile.BadZipFile(f"{info.filename} shares bytes with another entry")
        last = place.start + place.size
        if last > size:
            raise zipfile.BadZipFile(
                f"{info.filename} ends at {last:,}, behind the file's {size:,}"
            )


class TorchWeights:
    """A file with plain named tensors, behind the interface of an opened safetensors file."""

    def __init__(self, file: TorchFile) -> None:
        """Take the file's content. Raises CheckpointError when it is something else."""
        content = file.content
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(t, Tensor) for name, t in content.items()
        ):
            do = "give the file that transformers' save_pretrained or Meta's download gave"
            raise CheckpointError(
                file.path, got="other things", expected="names with tensors", do=do
            )
        self.file = file
        self.tensors = dict[str, Tensor](content)

    def keys(self) -> KeysView[str]:
        """Return the names of the tensors."""
        return self.tensors.keys()

    def get_slice(self, name: str) -> TorchSlice:
        """Return a tensor of which nothing is read yet."""
        return TorchSlice(self.file, self.tensors[name])


class TorchSlice:
    """One tensor of a file, memory-mapped: its shape and dtype, and slices of its values."""

    def __init__(self, file: TorchFile, tensor: Tensor) -> None:
        self._file = file
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return the dtype by its name in safetensors, where it has one there."""
        return DTYPES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, window: tuple[slice, ...]) -> Tensor:
        """Return the values of a window after a comparison with the file's checksum. Raises
        CheckpointError."""
        self._file.verify(self._tensor)
        return self._tensor[window]


class StreamedTensor(Protocol):
    """A tensor to write: its shape, and its values as consecutive blocks of rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ...

    def blocks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield contiguous rows from the first to the last."""
        ...


@dataclass(frozen=True)
class _Storage:
    """A storage in the pickle: the number of its zip entry, its type and its length."""

    key: str
    kind: Any
    numel: int


class _Pickler(pickle.Pickler):
    """Pickles ``StreamedTensor`` as ``torch.save`` does tensors, and remembers them in order."""

    def __init__(self, file: io.BytesIO, dtype: torch.dtype) -> None:
        super().__init__(file, protocol=2)
        self.dtype = dtype
        self.values = list[Any]()

    def reducer_override(self, thing: Any) -> Any:
        if not hasattr(thing, "blocks"):
            return NotImplemented
        like = torch.empty(thing.shape, device="meta")
        storage = _Storage(str(len(self.values)), STORAGES[self.dtype], like.numel())
        self.values.append(thing)
        no_hooks: OrderedDict[str, Any] = OrderedDict()
        layout = (storage, 0, tuple(thing.shape), like.stride(), False, no_hooks)
        return torch._utils._rebuild_tensor_v2, layout

    def persistent_id(self, thing: Any) -> Any:
        if not isinstance(thing, _Storage):
            return None
        return "storage", thing.kind, thing.key, "cpu", thing.numel


def write_torch_file(path: Path, content: object, dtype: torch.dtype) -> None:
    """Write and sync a file for ``torch.load`` in which every ``StreamedTensor`` of ``content`` is
    a tensor of ``dtype``.

    One block of values is in memory at a time. Raises CheckpointError naming the file, also when a
    value does not fit into ``dtype``."""
    text = io.BytesIO()
    pickler = _Pickler(text, dtype)
    pickler.dump(content)
    small = {"data.pkl": text.getvalue(), "byteorder": b"little", "version": b"3\n"}
    with writing(path), path.open("wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, value in small.items():
                archive.writestr(zipfile.ZipInfo(f"archive/{name}"), value)
            for number, values in enumerate(pickler.values):
                entry = _aligned(f"archive/data/{number}", file.tell())
                with archive.open(entry, "w", force_zip64=True) as target:
                    for block in values.blocks(dtype):
                        require_finite(path, block)
                        target.write(block.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _aligned(name: str, start: int) -> zipfile.ZipInfo:
    """Return an entry whose data begin at a multiple of ALIGNMENT if it is written at ``start``: a
    field of padding, which readers skip, stands before them."""
    entry = zipfile.ZipInfo(name)
    header = 30 + len(name) + 20  # local header, name, sizes of 64 bits
    room = -(start + header + 4) % ALIGNMENT
    entry.extra = b"FB" + room.to_bytes(2, "little") + b"Z" * room
    return entry


def require_finite(path: Path, values: Tensor) -> None:
    """Raise CheckpointError when some value is infinite or not a number: it was too large for the
    target's dtype, or is damaged."""
    if not is_finite(values):
        do = (
            "convert to bfloat16 or float32"
            if values.dtype == torch.float16
            else "look at the source: its weights are damaged"
        )
        raise CheckpointError(
            path.name, got=f"values beyond {values.dtype}", expected="finite values", do=do
        )
