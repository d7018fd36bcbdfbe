"""Files of ``torch.save``: read through a memory map without running anything in them, and written
tensor by tensor.

Files are read with torch's own restricted unpickler and the few plain classes that checkpoints
hold. Classes of Megatron and its libraries (enums, settings) become inert objects: nothing of
theirs is imported. Everything else is refused by name.

A written file is a zip archive of one pickle and one entry for each tensor, into which the values
are streamed: ``torch.save`` wants all of them in memory.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import types
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, KeysView
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

from megatron_llama.checkpoint.failures import writing
from megatron_llama.config.model_files import require_model_file
from megatron_llama.conversion.safetensors_file import DTYPES, is_finite
from megatron_llama.errors import CheckpointError

FOREIGN = (
    "megatron.",
    "apex.",
    "transformer_engine.",
    "numpy.",
    "signal.Signals",
    "pathlib.",
    "_io.BytesIO",
    "datetime.",
)
"""Names (or their beginnings) that stand for settings and random states in checkpoints: read as
inert objects."""
STORAGES = MappingProxyType(
    {
        torch.float32: torch.FloatStorage,
        torch.bfloat16: torch.BFloat16Storage,
        torch.float16: torch.HalfStorage,
    }
)
ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes, as torch has it: memory-mapped values are read in
place."""


class Inert:
    """Stands for an object of a class that is not wanted here. It takes what a pickle gives it and
    does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


@contextmanager
def _no_others() -> Iterator[None]:
    """A section without the classes that other packages of this process have told torch to trust
    (megatron.core does when imported)."""
    trusted = get_safe_globals()
    clear_safe_globals()
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(trusted)


class TorchFile:
    """The content of one file: memory-mapped tensors in whatever dicts and lists they were saved
    in."""

    def __init__(self, path: Path, part: bytes | None = None) -> None:
        """Open the file, or what ``torch.save`` wrote as a ``part`` of it, which is in memory.
        Raises CheckpointError when it is damaged, of another kind, or names code to run."""
        self.path = path

        def source() -> Path | io.BytesIO:
            return path if part is None else io.BytesIO(part)

        self._lock = Lock()
        self._verified = set[int]()
        if part is None:
            require_model_file(path, do="copy the file again from where the model came from")
        try:
            self._sums = _checksums(source())
            # What the pickle would call is listed before anything in it runs.
            with _no_others():
                unknown = get_unsafe_globals_in_checkpoint(source())
        except OSError as error:
            raise self._error(error.strerror or error) from error
        except Exception as error:
            raise self._error(f"damaged or foreign content ({type(error).__name__})") from error
        allowed: list[Any] = [argparse.Namespace, types.SimpleNamespace]
        known = {f"{each.__module__}.{each.__qualname__}" for each in allowed}
        wrong = sorted(
            name for name in unknown if name not in known and not name.startswith(FOREIGN)
        )
        if wrong:
            trust = "do not load it elsewhere unless you trust who made it"
            do = f"{trust}; convert a copy from its origin"
            got = f"a pickle that calls {', '.join(wrong)}"
            raise CheckpointError(
                path, got=got, expected="tensors and settings only (nothing was run)", do=do
            )
        inert = [(Inert, name) for name in unknown if name not in known]
        try:
            with _no_others(), safe_globals([*allowed, *inert]):
                self.content = torch.load(
                    source(), map_location="cpu", mmap=part is None, weights_only=True
                )
        except Exception as error:
            raise self._error(f"damaged content ({type(error).__name__})") from error

    def verify(self, tensor: Tensor) -> None:
        """Compare the storage behind a tensor with the file's checksums, once: torch does not.
        Raises CheckpointError."""
        storage = tensor.untyped_storage()
        with self._lock:
            if storage.data_ptr() in self._verified:
                return
            values: Tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
            if (storage.nbytes(), zlib.crc32(values.numpy().data)) not in self._sums:
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


def _checksums(path: Path | io.BytesIO) -> frozenset[tuple[int, int]]:
    """Return size and CRC-32 of every tensor's entry. The other entries are small: they are read at
    once, which checks them."""
    sums = set()
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if "/data/" in entry.filename and entry.compress_type == zipfile.ZIP_STORED:
                sums.add((entry.file_size, entry.CRC))
            else:
                archive.read(entry)
    return frozenset(sums)


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
    if values.numel() and not is_finite(values):
        do = (
            "convert to bfloat16 or float32"
            if values.dtype == torch.float16
            else "look at the source: its weights are damaged"
        )
        raise CheckpointError(
            path.name, got=f"values beyond {values.dtype}", expected="finite values", do=do
        )
