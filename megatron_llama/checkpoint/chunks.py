"""Describes the shards of a running engine as chunks of HuggingFace tensors, for the planners of
torch.distributed.checkpoint.

The key of a master weight is its NAME in the HuggingFace model, that of the update rule's state
``optimizer.STATE.NAME``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_llama.engine.optimizer import ShardPiece
from megatron_llama.errors import describe
from megatron_llama.plans.specs import Rectangle

STATE = "optimizer."
CHUNK_ELEMENTS = 2**22
"""Chunks are read whole. So this bounds what a rank of another layout reads beyond its own part,
and the host memory of one chunk. At 16 MiB (fp32) reading a chunk costs the same per byte as
reading a larger one."""


@dataclass(frozen=True)
class Region:
    """A rectangle of a saved tensor, with the tensor of its size that holds the values now."""

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
        """Its name for torch's planners."""
        return MetadataIndex(self.key, self.offset)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Its position and size in the saved tensor."""
        return ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.size))

    def split(self) -> Iterator[Region]:
        """Yield the rectangle in blocks of rows of at most CHUNK_ELEMENTS, but at least one row."""
        rows = max(1, CHUNK_ELEMENTS // math.prod(self.size[1:]))
        for row in range(0, self.size[0], rows):
            part = self.tensor[row : row + rows]
            yield Region(
                self.key,
                self.shape,
                (self.offset[0] + row, *self.offset[1:]),
                tuple(part.shape),
                part,
            )

    def write_item(self) -> WriteItem:
        """Return the request to write it."""
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
    """Return whether a key belongs to the update rule's state."""
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
    """Return the index of what all ranks write, without positions in files. torch checks that the
    chunks fill each tensor, and do not overlap."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    return planner.create_global_plan([SavePlan(items) for items in plans])[1]


class RegionLoadPlanner(DefaultLoadPlanner):
    """Reads saved chunks of any shape into the tensors of regions."""

    def __init__(self, parts: Iterable[Region], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._regions = {part.index: part for part in parts}
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        wanted: dict[str, list[ChunkStorageMetadata]] = {}
        for part in self._regions.values():
            saved = self._saved.get(part.key)
            # torch compares boxes of one number of dimensions only; ``problems`` names the others.
            if isinstance(saved, TensorStorageMetadata) and tuple(saved.size) == part.shape:
                wanted.setdefault(part.key, []).append(part.chunk)
        items: list[ReadItem] = []
        for key, chunks in wanted.items():
            saved = cast(TensorStorageMetadata, self._saved[key])
            items += create_read_items_for_chunk_list(key, saved, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._regions[index].tensor

    def problems(self, where: str, *, any_dtype: bool) -> list[str]:
        """Return a line for each region that the saved tensors cannot fill. With ``any_dtype``
        values may be converted."""
        found: dict[str, None] = {}
        filled = dict.fromkeys(self._regions, 0)
        for item in self.create_local_plan().items:
            filled[item.dest_index] += math.prod(item.lengths)
        for index, part in self._regions.items():
            problem = self._problem(where, part, filled[index], any_dtype)
            if problem is not None:
                found[problem] = None
        return list(found)

    def _problem(self, where: str, part: Region, filled: int, any_dtype: bool) -> str | None:
        saved = self._saved.get(part.key)
        name = f"{where} {part.key}"
        do = "load another checkpoint"
        if not isinstance(saved, TensorStorageMetadata):
            return describe(name, got="no such tensor", expected=f"shape {part.shape}", do=do)
        if tuple(saved.size) != part.shape:
            return describe(name, got=f"shape {tuple(saved.size)}", expected=part.shape, do=do)
        dtypes = {saved.properties.dtype, part.tensor.dtype}
        # A moment that is kept in bf16 is the rounded one, whenever it is rounded.
        converted = is_state(part.key) and dtypes <= {torch.float32, torch.bfloat16}
        if len(dtypes) > 1 and not any_dtype and not converted:
            return describe(
                name,
                got=saved.properties.dtype,
                expected=part.tensor.dtype,
                do="resume in the precision that it was saved in",
            )
        if filled != part.tensor.numel():
            return describe(
                f"{name} at {part.offset}",
                got=f"{filled} elements",
                expected=part.tensor.numel(),
                do=do,
            )
        return None
