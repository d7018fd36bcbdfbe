"""The files of a native checkpoint: torch's own format, with bounded memory, and with errors that name the file."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.meta import ANOTHER_COPY
from megatron_llama.errors import CheckpointError, describe, listing

METADATA = ".metadata"
FILE_BYTES = 2**30
"""torch's writer keeps a host copy of a file's tensors until the file is complete: files of about this size bound that."""
LISTED = 10
"""A damaged checkpoint of a large model has thousands of problems of one kind."""


class ChunkWriter(FileSystemWriter):
    """Writes and syncs this rank's chunks, a file after the other."""

    def storage_meta(self) -> StorageMeta | None:
        """Nothing: the path and the random number that torch would note are not true of the finished checkpoint."""
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See StorageWriter. Raises CheckpointError naming the file."""
        results: list[WriteResult] = []
        for number, items in enumerate(_batches(plan.items)):
            prefix = f"{plan.storage_data.prefix}{number}_"
            part = dataclasses.replace(plan, items=items, storage_data=dataclasses.replace(plan.storage_data, prefix=prefix))
            with writing(Path(self.path, f"{prefix}0{DEFAULT_SUFFIX}")):
                results += super().write_data(part, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See StorageWriter; on rank 0. Raises CheckpointError unless every rank's files can be seen from here."""
        with writing(Path(self.path, METADATA)):
            super().finish(metadata, results)
        problems = file_problems(Path(self.path), metadata.storage_data.values(), do="save to a folder that all machines share")
        refuse("the files of some ranks have not arrived:", problems)


def _batches(items: Iterable[WriteItem]) -> Iterator[list[WriteItem]]:
    batch: list[WriteItem] = []
    size = 0
    for item in items:
        assert item.tensor_data is not None
        bytes_ = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        if batch and size + bytes_ > FILE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += bytes_
    if batch:
        yield batch


class ChunkReader(FileSystemReader):
    """Reads chunks of a checkpoint whose metadata is known."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata
        self.storage_data = metadata.storage_data

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See StorageReader."""
        return self.metadata

    def problems(self, items: Iterable[ReadItem]) -> list[str]:
        """Files that these reads need and that are missing or too short."""
        return file_problems(Path(self.path), (self.storage_data[item.storage_index] for item in items), do=ANOTHER_COPY)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See StorageReader: files one after the other, each from its start to its end. Raises CheckpointError naming the file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in sorted(plan.items, key=lambda item: int(self.storage_data[item.storage_index].offset)):
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(LoadPlan(items), planner)
            except Exception as error:
                # What torch says of damaged bytes is long, and advises to load them unsafely.
                got = error.strerror if isinstance(error, OSError) else f"damaged content ({type(error).__name__})"
                path = str(Path(self.path, name))
                raise CheckpointError(describe(path, got=got, expected="the tensors that were saved", do=ANOTHER_COPY)) from error
        future: Future[None] = Future()
        future.set_result(None)
        return future


def file_problems(folder: Path, places: Iterable[Any], *, do: str) -> list[str]:
    """Files in which some of the stored places (relative_path, offset, length) cannot be."""
    needed: dict[str, int] = {}
    for place in places:
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    problems = []
    for name, size in sorted(needed.items()):
        path = folder / name
        try:
            found = path.stat().st_size
        except OSError as error:
            problems.append(describe(str(path), got=error.strerror, expected=f"a file of {size} bytes", do=do))
            continue
        if found < size:
            problems.append(describe(str(path), got=f"{found} bytes", expected=f"{size}: it was cut off", do=do))
    return problems


def refuse(title: str, problems: list[str]) -> None:
    """Raise CheckpointError with the problems, if there are any."""
    if problems:
        more = [f"and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
        raise CheckpointError(listing(title, [*problems[:LISTED], *more]))


def read_metadata(folder: Path) -> Metadata:
    """The index of all chunks. Raises CheckpointError naming the file; a file with anything else in it runs no code."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError("it holds no metadata")
        return metadata
    except Exception as error:
        got = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(describe(str(path), got=got, expected="the index that saving writes", do=ANOTHER_COPY)) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of the index and no others: a pickle may name any function of any module."""

    def find_class(self, module: str, name: str) -> Any:
        index = ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING")
        known = {
            "torch.distributed.checkpoint.metadata": index,
            "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
            "torch.serialization": ("_get_layout",),
            "torch": ("Size", "float32", "float64", "bfloat16", "float16"),
        }
        if name not in known.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return super().find_class(module, name)
