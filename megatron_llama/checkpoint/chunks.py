"""Describes the shards of a running engine as chunks of HuggingFace tensors, for the planner with
which torch.distributed.checkpoint saves.

The key of a master weight is its NAME in the HuggingFace model, that of the update rule's state
``optimizer.STATE.NAME``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_llama.engine.pieces import ShardPiece
from megatron_llama.engine.plan.specs import Rectangle

STATE = "optimizer."
CHUNK_ELEMENTS = 2**22
"""Largest number of elements of a chunk. Chunks are read whole, so it bounds the bytes that a rank
of another layout reads beyond its own part, and the host memory of one chunk. At 16 MiB (fp32)
reading a chunk costs the same per byte as reading a larger one."""


@dataclass(frozen=True)
class Region:
    """A rectangle of a saved tensor, with the tensor of its size that holds the values."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    tensor: Tensor

    @staticmethod
    def of(rectangle: Rectangle, tensor: Tensor, key: str | None = None) -> Region:
        """Return the region of a HuggingFace rectangle; ``key`` is the HuggingFace name by
        default."""
        return Region(
            key or rectangle.name, rectangle.shape, rectangle.offset, rectangle.size, tensor
        )

    @staticmethod
    def without_values(
        key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Region:
        """Return the region of a whole tensor of which only size and dtype are known."""
        # An expanded scalar has the shape and takes no memory.
        return Region(
            key, shape, (0,) * len(shape), shape, torch.empty((), dtype=dtype).expand(shape)
        )

    @property
    def index(self) -> MetadataIndex:
        """The name of the region for torch's planners."""
        return MetadataIndex(self.key, self.offset)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Position and size of the region in the saved tensor."""
        return ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.size))

    def split(self) -> Iterator[Region]:
        """Yield the rectangle in blocks of rows of at most CHUNK_ELEMENTS, but at least one row."""
        rows = max(1, CHUNK_ELEMENTS // math.prod(self.size[1:]))
        for row in range(0, self.size[0], rows):
            block = self.tensor[row : row + rows]
            yield Region(
                self.key,
                self.shape,
                (self.offset[0] + row, *self.offset[1:]),
                tuple(block.shape),
                block,
            )

    def write_item(self) -> WriteItem:
        """Return the request to write the region."""
        properties = TensorProperties.create_from_tensor(self.tensor)
        return WriteItem(
            self.index,
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(self.chunk, properties, torch.Size(self.shape)),
        )


def state_key(state: str, name: str) -> str:
    """Return the key of a tensor of the engine."""
    return name if state == "master" else f"{STATE}{state}.{name}"


def is_state(key: str) -> bool:
    """Whether a key belongs to the update rule's state."""
    return key.startswith(STATE)


def parse_state_key(key: str) -> tuple[str, str]:
    """Return the state and the tensor's name of a key that ``is_state``."""
    state, _, name = key.removeprefix(STATE).partition(".")
    return state, name


def regions(pieces: Iterable[ShardPiece]) -> Iterator[Region]:
    """Yield every tensor of the pieces."""
    for piece in pieces:
        for state, tensor in piece.tensors.items():
            yield Region.of(piece.rectangle, tensor, state_key(state, piece.rectangle.name))


def make_index(plans: Iterable[list[WriteItem]]) -> Metadata:
    """Return the index of the tensors that all ranks write, without positions in files. torch
    checks that the chunks fill each tensor, and do not overlap."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    return planner.create_global_plan([SavePlan(items) for items in plans])[1]
