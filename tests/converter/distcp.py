"""Folders of torch.distributed.checkpoint, written with torch's own classes: any tensors, cut into any boxes, on any number of ranks."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

Cuts = Mapping[str, tuple[Tensor, Sequence[Sequence[int]]]]
"""For each tensor the sizes of its pieces along each dimension."""


def boxes(pieces: Sequence[Sequence[int]]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offset and size of every box of a grid."""
    grid = [list(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)) for sizes in pieces]
    for box in itertools.product(*grid):
        yield tuple(at for at, _ in box), tuple(size for _, size in box)


def write_folder(folder: Path, tensors: Cuts, objects: Mapping[str, Any] | None = None, ranks: int = 2) -> Metadata:
    """Write the boxes in turn to the files of the ranks, the index last, and return it. As Megatron does, the index holds the plans too."""
    folder.mkdir(parents=True, exist_ok=True)
    streams = {f"__{rank}_0.distcp": io.BytesIO() for rank in range(ranks)}
    turn = itertools.cycle(streams.items())
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    items = []

    def write(index: MetadataIndex, value: Any) -> None:
        name, stream = next(turn)
        start = stream.tell()
        torch.save(value, stream)
        places[index] = _StorageInfo(name, start, stream.tell() - start)

    for key, (tensor, pieces) in tensors.items():
        properties = TensorProperties.create_from_tensor(tensor)
        chunks = []
        for offset, size in boxes(pieces):
            box = tensor[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
            chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
            index = MetadataIndex(key, chunk.offsets)
            write(index, box.clone(memory_format=torch.contiguous_format))
            chunks.append(chunk)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, tensor.shape)))
        described[key] = TensorStorageMetadata(properties, tensor.shape, chunks)
    for key, value in (objects or {}).items():
        write(MetadataIndex(key), value)
        described[key] = BytesStorageMetadata()
    for name, stream in streams.items():
        (folder / name).write_bytes(stream.getvalue())
    metadata = Metadata(described, storage_data=places, storage_meta=StorageMeta(checkpoint_id=folder))
    metadata.all_local_plans = [SavePlan(items)]  # type: ignore[attr-defined]
    write_index(folder, metadata)
    return metadata


def write_index(folder: Path, metadata: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
