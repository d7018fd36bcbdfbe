"""Files of ``torch.save``: writes them tensor by tensor, and shows those with tensors by name
behind the interface of an opened safetensors file.

A written file is a zip archive of one pickle and one entry for each tensor, into which the values
are streamed: ``torch.save`` needs all of them in memory.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, KeysView
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.finite import is_finite
from megatron_llama.checkpoint.model_folders.safetensors_file import DTYPES
from megatron_llama.checkpoint.torch_file import TorchFile
from megatron_llama.errors import CheckpointError

STORAGES = MappingProxyType(
    {
        torch.float32: torch.FloatStorage,
        torch.bfloat16: torch.BFloat16Storage,
        torch.float16: torch.HalfStorage,
    }
)
ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes, as torch does it: memory-mapped values are read in
place."""


class TorchWeights:
    """A file with plain named tensors, behind the interface of an opened safetensors file."""

    def __init__(self, file: TorchFile) -> None:
        """Take the file's content. Raises CheckpointError when it is of another kind."""
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
        """Return a tensor whose values are not read yet."""
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
        """Return the name of the dtype in safetensors, or torch's if it has none there."""
        return DTYPES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, window: tuple[slice, ...]) -> Tensor:
        """Return the values of a window, after a comparison of the tensor with the file's checksum.
        Raises CheckpointError."""
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
    """Return an entry whose data begin at a multiple of ALIGNMENT if it is written at ``start``. In
    front of them stands a field of padding, which readers skip."""
    entry = zipfile.ZipInfo(name)
    header = 30 + len(name) + 20  # local header, name, sizes of 64 bits
    room = -(start + header + 4) % ALIGNMENT
    entry.extra = b"FB" + room.to_bytes(2, "little") + b"Z" * room
    return entry


def require_finite(path: Path, values: Tensor) -> None:
    """Raise CheckpointError when some value is infinite or NaN: it was too large for the target's
    dtype, or is damaged."""
    if not is_finite(values):
        do = (
            "convert to bfloat16 or float32"
            if values.dtype == torch.float16
            else "look at the source: its weights are damaged"
        )
        raise CheckpointError(
            path.name, got=f"values beyond {values.dtype}", expected="finite values", do=do
        )
