"""Reads folders of torch.distributed.checkpoint without that package: the index ``.metadata`` and
the tensors in ``*.distcp``. Native checkpoints and Megatron-Core's ``torch_dist`` are such folders.

Both files are pickles, and pickles may call any code: ``index.py`` and ``archive.py`` read them
into inert records. Every chunk is compared with its checksum before a value of it is used.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from megatron_llama.checkpoint.archive import (
    ChunkHeader,
    DamageError,
    MemoryWindow,
    Window,
    open_archive,
)
from megatron_llama.checkpoint.bounds import largest_index, size_of
from megatron_llama.checkpoint.index import (
    METADATA,
    Chunk,
    Place,
    StoredIndex,
    cover_problems,
    parse_index,
    shared_bytes,
)
from megatron_llama.checkpoint.storage import file_problems, refuse
from megatron_llama.checkpoint.storage_paths import is_remote
from megatron_llama.checkpoint.torch_file import TorchFile
from megatron_llama.config.model_files import read_bounded
from megatron_llama.errors import CheckpointError, describe

CONVERTED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
StoredBytes = Callable[[int, int], Tensor]
"""Returns the bytes of a chunk's storage, by their start and their number."""
LARGEST_WHOLE_READ = 2**24 + 2**16
"""A chunk of a native checkpoint is read at once. A larger tensor or chunk is never in memory
whole: its values are mapped where and while they are copied."""
COPY_AGAIN = "copy the folder again from where it was saved"


class Box(NamedTuple):
    """A box of a tensor, and the target of its values."""

    name: str
    offset: tuple[int, ...]
    """Its begin in the tensor."""
    out: Tensor
    """A tensor of the box's size, of at least one dimension, in any float dtype or the file's."""


class Container:
    """An opened folder: its tensors by name, and their values."""

    def __init__(
        self, folder: Path, index: bytes | StoredIndex | None = None, *, do: str = COPY_AGAIN
    ) -> None:
        """Read the index, which may have been read or parsed already. ``do`` is the remedy for
        damage. Raises CheckpointError when the index is missing, damaged, contradicts itself or
        names code to run."""
        self.folder = folder
        self._do = do
        path = folder / METADATA
        if index is None:
            index = read_bounded(path, limit=largest_index(folder, size_of(path)), do=do)
        if isinstance(index, bytes):
            index = parse_index(path, index, do=do)
        self.tensors = index.tensors
        self.objects = index.objects
        """Objects saved with ``torch.save`` beside the tensors, by name."""
        self._headers = dict[Place, ChunkHeader]()

    def places(self) -> list[Place]:
        """Return the places of the chunks of all tensors."""
        return [chunk.place for tensor in self.tensors.values() for chunk in tensor.chunks]

    def missing_files(self) -> list[str]:
        """Return a line for each file that is missing or too short for its chunks."""
        return file_problems(self.folder, self.places(), do=self._do)

    def require(self, names: Iterable[str]) -> None:
        """Raise CheckpointError with all problems that keep these tensors from being read: no such
        tensor, values that are no floats, and chunks that are missing, overlap, lie outside of the
        tensor or of their files, or share bytes. Values are not read."""
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
            problems += cover_problems(where, tensor, do=self._do)
            chunks += tensor.chunks
        places = [chunk.place for chunk in chunks]
        problems += file_problems(self.folder, places, do=self._do)
        problems += shared_bytes(self.folder, places, do=self._do)
        refuse(f"{self.folder} cannot be read:", problems)

    def read(self, name: str, offset: Sequence[int], out: Tensor) -> None:
        """Read one box. ``require`` must have seen its tensor. Several threads may call it at a
        time. Raises CheckpointError when values are damaged."""
        self.read_boxes([Box(name, tuple(offset), out)])

    def read_boxes(self, boxes: Iterable[Box]) -> None:
        """Fill boxes. The files are read one after the other, each from its start to its end, and
        every chunk once. Raises CheckpointError naming the file whose values are damaged."""
        wanted = defaultdict[tuple[Chunk, str], list[Box]](list)
        for box in boxes:
            for chunk in self.tensors[box.name].within(box.offset, box.out.shape):
                wanted[chunk, box.name].append(box)
        in_order = sorted(wanted, key=lambda key: key[0].place[:2])
        for file_name, of_file in groupby(in_order, key=lambda key: key[0].place.relative_path):
            with self._opened(file_name) as file:
                for chunk, name in of_file:
                    with self._errors_at(name, chunk):
                        self._fill(file, name, chunk, wanted[chunk, name])

    def damaged(self) -> Iterator[str]:
        """Read every chunk of every tensor, and yield a line for each that is damaged. ``require``
        must have seen all tensors."""
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                try:
                    with (
                        self._opened(chunk.place.relative_path) as file,
                        self._errors_at(name, chunk),
                    ):
                        _check_chunk(file, chunk, tensor.dtype)
                except CheckpointError as error:
                    yield f"{error}"

    def load_object(self, name: str) -> Any:
        """Return an object of ``objects``, read with the restricted unpickler of ``TorchFile``.
        Raises CheckpointError."""
        place = self.objects[name]
        refuse(f"{self.folder} cannot be read:", file_problems(self.folder, [place], do=self._do))
        path = self.folder / place.relative_path
        with path.open("rb") as file:
            file.seek(place.offset)
            content = TorchFile(path, file.read(place.length))
        content.verify_all()
        return content.content

    def _fill(self, file: IO[bytes], name: str, chunk: Chunk, boxes: Iterable[Box]) -> None:
        """Copy the values of a chunk into the boxes that it overlaps."""
        dtype = self.tensors[name].dtype
        header = self._headers.get(chunk.place)
        stored_bytes: StoredBytes
        if is_remote(self.folder) or (header is None and chunk.place.length <= LARGEST_WHOLE_READ):
            content = _read_whole(file, chunk.place)
            header = open_archive(
                MemoryWindow(content.numpy().data), chunk.size, dtype, chunk.place.crc32
            )
            stored_bytes = partial(content[header.start :].narrow, 0)
        else:
            if header is None:
                header = _check_chunk(file, chunk, dtype)
            stored_bytes = partial(_map_bytes, file, chunk.place.offset + header.start)
        self._headers[chunk.place] = header
        for box in boxes:
            low = [max(pair) for pair in zip(chunk.offset, box.offset, strict=True)]
            ends = zip(chunk.offset, chunk.size, box.offset, box.out.shape, strict=True)
            size = [min(a + b, c + d) - at for (a, b, c, d), at in zip(ends, low, strict=True)]
            target = box.out.detach()
            for dim, (at, begin, count) in enumerate(zip(low, box.offset, size, strict=True)):
                target = target.narrow(dim, at - begin, count)
            inner = [at - begin for at, begin in zip(low, chunk.offset, strict=True)]
            if target.dtype == dtype and target.stride(-1) == 1:
                _copy_box(stored_bytes, header, inner, target)
            else:
                values = torch.empty(target.shape, dtype=dtype)
                _copy_box(stored_bytes, header, inner, values)
                target.copy_(values)

    @contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes]]:
        path = self.folder / name
        try:
            with path.open("rb") if is_remote(path) else path.open("rb", buffering=0) as file:
                yield file
        except OSError as error:
            raise self._damage(path, error) from error

    @contextmanager
    def _errors_at(self, name: str, chunk: Chunk) -> Iterator[None]:
        """A section that reads a chunk. Its errors become CheckpointErrors."""
        try:
            yield
        except (OSError, DamageError) as error:
            where = f"{self.folder / chunk.place.relative_path} {name} at {chunk.offset}"
            raise self._damage(where, error) from error

    def _damage(self, where: object, error: OSError | DamageError) -> CheckpointError:
        got, expected = "damaged content", "the tensor that was saved"
        if isinstance(error, DamageError):
            got, expected = error.got, error.expected
        elif error.strerror:
            got = error.strerror
        return CheckpointError(where, got=got, expected=expected, do=self._do)


def _check_chunk(file: IO[bytes], chunk: Chunk, dtype: torch.dtype) -> ChunkHeader:
    """Read the archive of a chunk, and compare its values with their checksum. Only a few MiB are
    in memory at a time. Raises DamageError, OSError."""
    window = Window(file, chunk.place.offset, chunk.place.length)
    return open_archive(window, chunk.size, dtype, chunk.place.crc32)


def _read_whole(file: IO[bytes], place: Place) -> Tensor:
    """Return the bytes of a chunk. Raises DamageError, OSError."""
    content = torch.empty(place.length, dtype=torch.uint8)
    file.seek(place.offset)
    count = file.readinto(content.numpy().data)  # type: ignore[attr-defined]
    if count != place.length:
        raise DamageError(f"{count} bytes", f"{place.length}: it was cut off")
    return content


def _map_bytes(file: IO[bytes], base: int, start: int, length: int) -> Tensor:
    """Return bytes ``[base + start, base + start + length)`` of a file. They are mapped only while
    the tensor lives: mapped pages count as resident memory."""
    begin = base + start
    skip = begin % mmap.ALLOCATIONGRANULARITY
    # A private mapping, since torch warns of memory that cannot be written. Nothing writes to it.
    mapping = mmap.mmap(file.fileno(), skip + length, access=mmap.ACCESS_COPY, offset=begin - skip)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=skip, count=length)


def _copy_box(
    stored_bytes: StoredBytes, header: ChunkHeader, inner: Sequence[int], out: Tensor
) -> None:
    """Copy the box that begins at ``inner`` and has the size of ``out``, which has the dtype of the
    file and neighbours in its rows."""
    steps = list(zip(header.stride, inner, out.shape, strict=True))
    first = header.first + sum(step * at for step, at, _ in steps)
    count = 1 + sum(step * (size - 1) for step, _, size in steps)
    # Values begin at any byte of the file, so they are copied as bytes: torch's kernels for a dtype
    # may expect its alignment.
    values = stored_bytes(first * out.itemsize, count * out.itemsize)
    size = (*out.shape[:-1], out.shape[-1] * out.itemsize)
    stride = (*(step * out.itemsize for step in header.stride[:-1]), 1)
    out.view(torch.uint8).copy_(values.as_strided(size, stride, values.storage_offset()))
