"""Reads folders of torch.distributed.checkpoint without that package: the index ``.metadata`` and
the tensors in ``*.distcp``.

Both are pickles, and pickles may call any code: ``checkpoint/index.py`` and ``archive.py`` read
them into inert records. Values are mapped from the files only where and while they are copied, so
that neither a tensor nor a chunk of one is ever in memory whole.
"""

from __future__ import annotations

import io
import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_llama.checkpoint.archive import ChunkHeader, DamageError, Window, open_archive
from megatron_llama.checkpoint.index import (
    METADATA,
    Chunk,
    Place,
    cover_problems,
    parse_index,
    shared_bytes,
)
from megatron_llama.checkpoint.storage import file_problems, refuse
from megatron_llama.checkpoint.torch_file import TorchFile
from megatron_llama.config.limits import LARGEST_INDEX
from megatron_llama.config.model_files import read_bounded
from megatron_llama.errors import CheckpointError, describe

CONVERTED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
COPY_AGAIN = "copy the folder again from where it was saved"


class Container:
    """An opened folder: its tensors by name, and their values."""

    def __init__(self, folder: Path) -> None:
        """Read the index. Raises CheckpointError when it is missing, damaged, contradicts itself or
        names code to run."""
        self.folder = folder
        path = folder / METADATA
        content = read_bounded(path, limit=LARGEST_INDEX, do=COPY_AGAIN)
        index = parse_index(path, content, do=COPY_AGAIN)
        self.tensors = index.tensors
        self.objects = index.objects
        """What was saved with ``torch.save`` beside the tensors, by name."""
        self._headers = dict[Place, ChunkHeader]()

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
            if tensor.dtype not in CONVERTED_DTYPES:
                do = "quantised models cannot be converted: take the original"
                expected = "float32, bfloat16 or float16"
                problems.append(describe(where, got=tensor.dtype, expected=expected, do=do))
            if tensor.flattened:
                got = "flattened pieces, as Megatron-Core before 0.15 saved them"
                do = "load and save it with a later Megatron-Core"
                problems.append(describe(where, got=got, expected="boxes of the tensor", do=do))
                continue
            problems += cover_problems(where, tensor, do=COPY_AGAIN)
            chunks += tensor.chunks
        places = [chunk.place for chunk in chunks]
        problems += file_problems(self.folder, places, do=COPY_AGAIN)
        problems += shared_bytes(self.folder, places, do=COPY_AGAIN)
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
                _map(file, chunk.place, header, inner, out)
            else:
                values = torch.empty(out.shape, dtype=dtype)
                _map(file, chunk.place, header, inner, values)
                out.copy_(values)

    @contextmanager
    def _opened(self, name: str, chunk: Chunk) -> Iterator[io.FileIO]:
        """Open the file of a chunk, and raise CheckpointError for what goes wrong with it."""
        path = self.folder / chunk.place.relative_path
        try:
            with path.open("rb", buffering=0) as file:
                yield file
        except (OSError, DamageError) as error:
            where = f"{path} {name} at {chunk.offset}"
            got, expected = "damaged content", "the tensor that was saved"
            if isinstance(error, DamageError):
                got, expected = error.got, error.expected
            elif isinstance(error, OSError):
                got = error.strerror or got
            raise CheckpointError(where, got=got, expected=expected, do=COPY_AGAIN) from error


def _open_chunk(file: io.FileIO, chunk: Chunk, dtype: torch.dtype) -> ChunkHeader:
    """Read the archive of a chunk, and compare its values with their checksum. Raises DamageError,
    OSError."""
    window = Window(file, chunk.place.offset, chunk.place.length)
    return open_archive(window, chunk.size, dtype, chunk.place.crc32)


def _map(
    file: io.FileIO, place: Place, header: ChunkHeader, inner: Sequence[int], out: Tensor
) -> None:
    """Copy the box that begins at ``inner`` and has the size of ``out``, which has the dtype of the
    file and neighbours in its rows. The file is mapped only meanwhile: mapped pages count as
    resident memory."""
    steps = list(zip(header.stride, inner, out.shape, strict=True))
    first = header.first + sum(step * at for step, at, _ in steps)
    count = 1 + sum(step * (size - 1) for step, _, size in steps)
    begin = place.offset + header.start + first * out.itemsize
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
