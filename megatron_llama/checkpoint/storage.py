"""Reads and writes the files of a native checkpoint: the format of torch.distributed.checkpoint,
with bounded memory, checksums, and errors that name the file."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron_llama.checkpoint.checksums import HashedFile
from megatron_llama.checkpoint.chunks import Region
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.finite import NotFinite, copy_to_host
from megatron_llama.checkpoint.meta import ANOTHER_COPY
from megatron_llama.errors import CheckpointError, describe, listing

METADATA = ".metadata"
LISTED = 10
"""So many problems are listed: a damaged checkpoint of a large model has thousands of one kind."""


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
    with writing(folder / name), HashedFile(folder / name) as file:
        for part in parts:
            start = file.tell()
            # A copy, since torch saves the whole storage of a view.
            values, problem = copy_to_host(part)
            not_finite += [problem] if problem is not None else []
            torch.save(values, cast(IO[bytes], file))
            del values  # not in memory while the next part is read
            places[part.index] = _StorageInfo(name, start, file.tell() - start)
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
        by_file: dict[str, dict[tuple[int, int], list[ReadItem]]] = {}
        placed = [(self._places[item.storage_index], item) for item in plan.items]
        for place, item in sorted(placed, key=lambda pair: int(pair[0].offset)):
            chunks = by_file.setdefault(place.relative_path, {})
            chunks.setdefault((place.offset, place.length), []).append(item)
        for name, chunks in by_file.items():
            path = self._folder / name
            try:
                with path.open("rb") as file:
                    for (offset, length), items in chunks.items():
                        # No name here holds a chunk while the next one is read.
                        _fill(items, _read_chunk(file, offset, length), planner)
            except Exception as error:
                # torch's message for damaged bytes is long, and advises to load them unsafely.
                damage = f"damaged content ({type(error).__name__})"
                got = error.strerror if isinstance(error, OSError) else damage
                raise CheckpointError(
                    path, got=got, expected="the tensors that were saved", do=ANOTHER_COPY
                ) from error
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _read_chunk(file: BinaryIO, offset: int, length: int) -> Tensor:
    file.seek(offset)
    content = io.BytesIO(file.read(length))
    # torch reads its zip archives without a look at their checksums: a flipped bit would become a
    # wrong weight.
    with zipfile.ZipFile(content) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(damaged)
    content.seek(0)
    tensor: Tensor = torch.load(content, map_location="cpu", weights_only=True)
    return tensor


def _fill(items: Iterable[ReadItem], chunk: Tensor, planner: LoadPlanner) -> None:
    """Copy the parts of a chunk that were asked for to where they belong."""
    for item in items:
        target = planner.resolve_tensor(item).detach()
        target.copy_(narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)


def file_problems(folder: Path, places: Iterable[Any], *, do: str) -> list[str]:
    """Return a line for each file that is missing, or too short for its chunks, of which ``places``
    holds (relative_path, offset, length)."""
    needed: dict[str, int] = {}
    for place in places:
        end = place.offset + place.length
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
    problems = []
    for name, size in sorted(needed.items()):
        path = folder / name
        try:
            found = path.stat().st_size
        except OSError as error:
            problems.append(
                describe(path, got=error.strerror, expected=f"a file of {size} bytes", do=do)
            )
            continue
        if found < size:
            problems.append(
                describe(path, got=f"{found} bytes", expected=f"{size}: it was cut off", do=do)
            )
    return problems


def refuse(title: str, problems: list[str]) -> None:
    """Raise CheckpointError with the problems, if there are any."""
    if problems:
        more = [f"and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
        raise CheckpointError(listing(title, [*problems[:LISTED], *more]))


def read_metadata(folder: Path) -> Metadata:
    """Return the index of all chunks. Raises CheckpointError naming the file; a file with anything
    else in it runs no code."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError("it holds no metadata")
        return metadata
    except Exception as error:
        got = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            path, got=got, expected="the index that saving writes", do=ANOTHER_COPY
        ) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the index, which torch pickles. It knows the classes that belong there and no others,
    since a pickle may call any function of any module."""

    def find_class(self, module: str, name: str) -> Any:
        index = (
            "Metadata",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
        known = {
            "torch.distributed.checkpoint.metadata": index,
            "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
            "torch.serialization": ("_get_layout",),
            "torch": ("Size", "float32", "float64", "bfloat16", "float16", "uint8"),
        }
        if name not in known.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return super().find_class(module, name)
