"""Reads and writes the files of a native checkpoint: the format of torch.distributed.checkpoint,
with bounded memory, checksums, and errors that name the file."""

from __future__ import annotations

import pickle
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron_llama.checkpoint.archive import TAIL_BYTES, DamageError, tensor_in, values_crc32
from megatron_llama.checkpoint.checksums import ANOTHER_COPY, HashedFile, read_listed
from megatron_llama.checkpoint.chunks import Region
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.finite import NotFinite, copy_to_host
from megatron_llama.checkpoint.index import (
    METADATA,
    cover_problems,
    parse_index,
    paused_collector,
    shared_bytes,
)
from megatron_llama.checkpoint.storage_paths import is_remote
from megatron_llama.config.limits import LARGEST_INDEX
from megatron_llama.errors import CheckpointError, describe, listing

SAVED_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8})
"""The dtypes of what an engine saves."""
LISTED = 10
"""So many problems are listed: a damaged checkpoint of a large model has thousands of one kind."""


class SavedChunk(NamedTuple):
    """Where a chunk lies, as in a ``Place``, and what lies there."""

    relative_path: str
    offset: int
    length: int
    crc32: int | None
    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class WrittenParts:
    """What one rank has written."""

    places: dict[MetadataIndex, _StorageInfo]
    """File and position of each chunk."""
    sums: dict[str, str]
    """SHA-256 by file name."""
    not_finite: tuple[NotFinite, ...] = ()
    """Values that are infinite or NaN, by part."""


def write_parts(folder: Path, rank: int, parts: Iterable[Region]) -> WrittenParts:
    """Write and sync this rank's file: one ``torch.save`` after the other, as torch's own writer
    does. A copy of one part is in memory at a time. Raises CheckpointError naming the file."""
    name = f"__{rank}_0{DEFAULT_SUFFIX}"
    places = {}
    not_finite: list[NotFinite] = []
    with writing(folder):
        # Rank 0 has made the folder, but another machine's view of a shared disk may be behind.
        folder.mkdir(parents=True, exist_ok=True)
    with writing(folder / name), HashedFile(folder / name, tail_bytes=TAIL_BYTES) as file:
        for part in parts:
            start = file.tell()
            # A copy, since torch saves the whole storage of a view.
            values, problem = copy_to_host(part)
            not_finite += [problem] if problem is not None else []
            torch.save(values, cast(IO[bytes], file))
            del values  # not in memory while the next part is read
            place = _StorageInfo(name, start, file.tell() - start)
            # What binds the file to this index. torch pickles all attributes, and reads over it.
            place.crc32 = values_crc32(file.tail, place.length)  # type: ignore[attr-defined]
            places[part.index] = place
    sums = {name: file.sum} if places else {}
    return WrittenParts(places, sums, tuple(not_finite))


def write_index(folder: Path, index: Metadata, written: Sequence[WrittenParts]) -> dict[str, str]:
    """Write the index of all ranks' chunks and return the checksums of all files so far. Raises
    CheckpointError unless the files of every rank can be seen from here."""
    index.storage_data = {key: place for rank in written for key, place in rank.places.items()}
    with writing(folder / METADATA), HashedFile(folder / METADATA) as file:
        pickle.dump(index, file)
    problems = file_problems(
        folder, index.storage_data.values(), do="save to a folder that all machines share"
    )
    refuse("the files of some ranks have not arrived:", problems)
    sums = {name: digest for rank in written for name, digest in rank.sums.items()}
    return {**sums, METADATA: file.sum}


class ChunkReader(StorageReader):
    """Reads chunks of a checkpoint whose metadata is known, as torch's planners ask for them."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder = folder
        self._metadata = metadata
        self._places = metadata.storage_data

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing: no state is kept between reads."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the constructor has set everything up."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def problems(self, items: Iterable[ReadItem]) -> list[str]:
        """Return a line for each file that these reads need and that is missing or too short."""
        return file_problems(
            self._folder, (self._places[item.storage_index] for item in items), do=ANOTHER_COPY
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the files one after the other, each from its start to its end. Every chunk is read
        once and checked. Raises CheckpointError naming the file."""
        by_file: dict[str, dict[SavedChunk, list[ReadItem]]] = {}
        placed = [(self._places[item.storage_index], item) for item in plan.items]
        for place, item in sorted(placed, key=lambda pair: int(pair[0].offset)):
            by_file.setdefault(place.relative_path, {}).setdefault(place, []).append(item)
        for name, chunks in by_file.items():
            path = self._folder / name
            where = f"{path}"
            try:
                with path.open("rb") as file:
                    for place, items in chunks.items():
                        index = items[0].storage_index
                        where = f"{path} {index.fqn} at {tuple(index.offset or ())}"
                        # No name here holds a chunk while the next one is read.
                        _fill(items, _read_chunk(file, place), planner)
            except (DamageError, OSError) as error:
                got, expected = "damaged content", "the tensor that was saved"
                if isinstance(error, DamageError):
                    got, expected = error.got, error.expected
                elif error.strerror:
                    got = error.strerror
                raise CheckpointError(where, got=got, expected=expected, do=ANOTHER_COPY) from error
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _read_chunk(file: BinaryIO, place: SavedChunk) -> Tensor:
    """Return a chunk, whose bytes are read once. Raises DamageError, OSError."""
    content = torch.empty(place.length, dtype=torch.uint8)
    file.seek(place.offset)
    count = file.readinto(content.numpy().data)  # type: ignore[attr-defined]
    if count != place.length:
        raise DamageError(f"{count} bytes", f"{place.length}: it was cut off")
    return tensor_in(content, place.size, place.dtype, place.crc32)


def _fill(items: Iterable[ReadItem], chunk: Tensor, planner: LoadPlanner) -> None:
    """Copy the parts of a chunk that were asked for to where they belong."""
    for item in items:
        target = planner.resolve_tensor(item).detach()
        target.copy_(narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)


def file_problems(folder: Path, places: Iterable[Any], *, do: str) -> list[str]:
    """Return a line for each file that is missing, no regular file, or too short for its chunks, of
    which ``places`` holds (relative_path, offset, length)."""
    needed: dict[str, int] = {}
    for place in places:
        end = place.offset + place.length
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
    problems = []
    for name, size in sorted(needed.items()):
        path = folder / name
        try:
            status = path.stat()
        except OSError as error:
            problems.append(
                describe(path, got=error.strerror, expected=f"a file of {size} bytes", do=do)
            )
            continue
        # A device or a pipe may have no end. Links to files are a hub's cache, or a user's.
        if not is_remote(path) and not stat.S_ISREG(status.st_mode):
            expected = f"a file of {size} bytes"
            problems.append(describe(path, got="no regular file", expected=expected, do=do))
        elif status.st_size < size:
            expected = f"{size}: it was cut off"
            problems.append(describe(path, got=f"{status.st_size} bytes", expected=expected, do=do))
    return problems


def refuse(title: str, problems: list[str]) -> None:
    """Raise CheckpointError with the problems, if there are any."""
    if problems:
        more = [f"and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
        raise CheckpointError(listing(title, [*problems[:LISTED], *more]))


@paused_collector()
def read_metadata(folder: Path) -> Metadata:
    """Return the index of a native checkpoint, for torch's planners. Its ``storage_data`` are
    ``SavedChunk``s.

    Raises CheckpointError when it is not what was saved, names code to run, or has chunks that are
    not its tensors, cut into pieces."""
    path = folder / METADATA
    content = read_listed(folder, METADATA, largest=LARGEST_INDEX)
    index = parse_index(path, content, do=ANOTHER_COPY)
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, SavedChunk] = {}
    placed = [chunk.place for tensor in index.tensors.values() for chunk in tensor.chunks]
    problems = []
    if index.objects:
        got = f"objects, such as {next(iter(index.objects))}"
        problems.append(describe(path, got=got, expected="tensors alone", do=ANOTHER_COPY))
    for name, tensor in index.tensors.items():
        where = f"{path} {name}"
        if tensor.dtype not in SAVED_DTYPES:
            expected = "a dtype that is saved"
            problems.append(describe(where, got=tensor.dtype, expected=expected, do=ANOTHER_COPY))
            continue
        problems += cover_problems(where, tensor, do=ANOTHER_COPY)
        chunks = []
        for chunk in tensor.chunks:
            offset = torch.Size(chunk.offset)
            places[MetadataIndex(name, offset)] = SavedChunk(*chunk.place, chunk.size, tensor.dtype)
            chunks.append(ChunkStorageMetadata(offset, torch.Size(chunk.size)))
        properties = TensorProperties(dtype=tensor.dtype)
        described[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    problems += shared_bytes(folder, placed, do=ANOTHER_COPY)
    refuse(f"{path} cannot be used:", problems)
    return Metadata(described, storage_data=places)
