"""Plans and writes an index in parts (``index_parts.py``).

Neighbours among the ranks over which weights are sharded send their chunks to the first of them,
the *writer* of their part. It looks once which boxes the chunks make up, and in every save writes
the part. Rank 0 hears from the writers alone: of boxes in the plan, of checksums in a save."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypedDict

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_llama.checkpoint.bounds import largest_index, require_size
from megatron_llama.checkpoint.checksums import ANOTHER_COPY, HashedFile
from megatron_llama.checkpoint.chunks import Region
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.finite import merge_not_finite
from megatron_llama.checkpoint.index import (
    INDEX_TABLE,
    Chunk,
    Place,
    StoredTensor,
    cover_problems,
    paused_collector,
)
from megatron_llama.checkpoint.index_parts import PartFile, Table, box_layout, part_content
from megatron_llama.checkpoint.storage import WrittenParts, file_problems, refuse
from megatron_llama.engine.comm.gathering import gather_from
from megatron_llama.engine.comm.object_collectives import all_gather_float, raise_on_all_ranks
from megatron_llama.engine.mesh import Mesh

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size."""
PARTS = 256
"""Parts of an index of thousands of ranks, in whatever layout. A rank reads one or two at a
resume, and rank 0 hears from as many writers."""
FEWEST_SHARING = 8
"""Ranks that share a part at least, if there are so many: those of a machine read the same one."""


@dataclass(frozen=True)
class Outline:
    """A chunk that a rank is going to write."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box

    @staticmethod
    def of(part: Region) -> Outline:
        """Return the outline of a region."""
        return Outline(part.key, part.shape, part.tensor.dtype, (part.offset, part.size))


@dataclass(frozen=True)
class HeldBoxes:
    """The boxes of a tensor that are in one part of the index."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    part: str
    """The name of the part."""


@dataclass(frozen=True)
class PartPlan:
    """The parts that one writer writes in every save."""

    ranks: tuple[int, ...]
    """The ranks whose chunks these are; the writer is the first."""
    chunks: Mapping[str, Mapping[str, Sequence[Box]]]
    """The chunks by part and tensor."""

    @paused_collector()
    def write(self, folder: Path, written: Iterable[WrittenParts]) -> WrittenParts:
        """Write the parts for the chunks that the ranks have written, and return what stands for
        all of these ranks: the sums and bytes of all files. Raises CheckpointError unless the files
        of every rank can be seen here, and the parts can be read."""
        written = list(written)
        places = {key: place for rank in written for key, place in rank.places.items()}
        problems = file_problems(folder, places.values(), do=ON_SHARED_FOLDER)
        refuse("the files of some ranks have not arrived:", problems)
        sums = {name: digest for rank in written for name, digest in rank.sums.items()}
        sizes: dict[str, int] = {}
        for place in places.values():
            end = place.offset + place.length
            sizes[place.relative_path] = max(end, sizes.get(place.relative_path, 0))
        for name, tensors in self.chunks.items():
            content = part_content(
                {
                    key: [
                        Chunk(offset, size, _place(places[MetadataIndex(key, offset)]))
                        for offset, size in boxes
                    ]
                    for key, boxes in tensors.items()
                }
            )
            sums[name] = _write(folder, name, content)
            sizes[name] = len(content)
        not_finite = merge_not_finite(chain.from_iterable(rank.not_finite for rank in written))
        return WrittenParts({}, sums, not_finite, sizes)


ON_SHARED_FOLDER = "save to a folder that all machines share"


@dataclass(frozen=True)
class PartedIndex:
    """The plan of the table, on rank 0."""

    layouts: tuple[StoredTensor, ...]
    tensors: Mapping[str, tuple[torch.dtype, int]]
    """See ``Table``."""

    @property
    def parts(self) -> list[str]:
        """The names of the parts."""
        return sorted({box.place.relative_path for layout in self.layouts for box in layout.chunks})

    def write(self, folder: Path, written: Iterable[WrittenParts]) -> dict[str, str]:
        """Write the table for the parts that the writers have written, and return the checksums of
        all files so far. Raises CheckpointError unless all parts can be seen here, and the table
        can be read."""
        sums: dict[str, str] = {}
        sizes: dict[str, int] = {}
        for writer in written:
            sums.update(writer.sums)
            sizes.update(writer.sizes)
        parts = tuple(PartFile(name, sums[name], sizes.pop(name)) for name in self.parts)
        places = [Place(part.name, 0, part.size) for part in parts]
        problems = file_problems(folder, places, do=ON_SHARED_FOLDER)
        refuse("the parts of the index have not arrived:", problems)
        table = Table(parts, sizes, self.layouts, self.tensors)
        return {**sums, INDEX_TABLE: _write(folder, INDEX_TABLE, table.content())}


class Plans(TypedDict):
    """The fields of ``RankSavePlan`` for an index in parts."""

    index: PartedIndex | None
    part: PartPlan | None
    writers: tuple[int, ...]


@dataclass(frozen=True)
class Sharing:
    """The ranks whose chunks are in one part of the index, and the names of their parts."""

    ranks: tuple[int, ...]
    """The first one is the writer."""
    own: str
    common: str
    """The part of the first tensor-parallel rank for what the others hold in copies: they should
    not have to read all of that rank's part for a norm."""

    @staticmethod
    def of(
        dp: Sequence[int], data: int, stage: tuple[int, int], tensor: tuple[int, int]
    ) -> Sharing:
        """Return those with which number ``data`` of the ranks ``dp`` shares a part. ``stage`` and
        ``tensor`` are number and size on the pipeline and tensor axes."""
        blocks = max(1, PARTS // (stage[1] * tensor[1]))
        length = max(FEWEST_SHARING, -(-len(dp) // blocks))
        block = data // length
        name = f"index.pp{stage[0]}"
        end = f".dp{block}.json" if len(dp) > length else ".json"
        ranks = tuple(dp[block * length : (block + 1) * length])
        return Sharing(ranks, f"{name}.tp{tensor[0]}{end}", f"{name}{end}")


def sharing(mesh: Mesh) -> Sharing:
    """Return those with which this rank shares a part."""
    stage, tensor = ((axis.rank, axis.size) for axis in (mesh.pp, mesh.tp))
    return Sharing.of(mesh.dp.ranks, mesh.dp.rank, stage, tensor)


def plan_parts(parts: Sequence[Region], mesh: Mesh) -> Plans:
    """Return the plans of the table, on rank 0, and of this rank's parts. Collective. Raises
    CheckpointError, on every rank, if the chunks of all ranks do not make up the tensors."""
    place = sharing(mesh)
    writers = sorted({int(rank) for rank in all_gather_float(place.ranks[0], mesh.world)})
    outlines = gather_from(place.ranks, [Outline.of(part) for part in parts], mesh.world)
    plan: PartPlan | None = None
    of_writers: list[list[HeldBoxes]] | None = None
    if outlines is not None:
        keys = {outline.key for own in outlines for outline in own}
        # The tensor ranks beside a writer are writers, too.
        of_line = gather_from(mesh.tp.ranks, keys, mesh.world)
        common = of_line[0].difference(*of_line[1:]) if of_line and len(of_line) > 1 else set()
        plan, held = plan_part(place, outlines, common)
        of_writers = gather_from(writers, held, mesh.world)
    index: PartedIndex | None = None
    with raise_on_all_ranks(mesh.world):
        if of_writers is not None:
            index = plan_table(of_writers)
    return Plans(index=index, part=plan, writers=tuple(writers))


@paused_collector()
def plan_part(
    place: Sharing, outlines: Iterable[Iterable[Outline]], common: Collection[str]
) -> tuple[PartPlan, list[HeldBoxes]]:
    """Return the plan of the parts of a writer for the chunks of each rank, and the boxes that its
    parts hold. ``common`` are the tensors of which no other tensor rank writes any."""
    tensors: dict[str, list[Outline]] = {}
    for outline in chain.from_iterable(outlines):
        tensors.setdefault(outline.key, []).append(outline)
    held = []
    chunks: dict[str, dict[str, list[Box]]] = {}
    for key, own in tensors.items():
        [(shape, dtype)] = {(outline.shape, outline.dtype) for outline in own}
        boxes = merged_boxes(outline.box for outline in own)
        name = place.common if key in common else place.own
        held.append(HeldBoxes(key, shape, dtype, tuple(boxes), name))
        chunks.setdefault(name, {})[key] = sorted(outline.box for outline in own)
    return PartPlan(place.ranks, chunks), held


def plan_table(held: Iterable[Iterable[HeldBoxes]]) -> PartedIndex:
    """Return the plan of the table for the boxes that all writers hold. Raises CheckpointError if
    they do not make up the tensors."""
    tensors: dict[str, list[HeldBoxes]] = {}
    for boxes in chain.from_iterable(held):
        tensors.setdefault(boxes.key, []).append(boxes)
    layouts: dict[StoredTensor, int] = {}
    placed = {}
    for key, own in tensors.items():
        [(shape, dtype)] = {(of_part.shape, of_part.dtype) for of_part in own}
        layout = box_layout(
            shape, ((*box, of_part.part) for of_part in own for box in of_part.boxes)
        )
        if layout not in layouts:
            refuse(
                f"the chunks of {key} cannot be saved:",
                list(cover_problems(key, layout, do=ANOTHER_COPY)),
            )
        placed[key] = (dtype, layouts.setdefault(layout, len(layouts)))
    return PartedIndex(tuple(layouts), placed)


def merged_boxes(boxes: Iterable[Box]) -> list[Box]:
    """Return the fewest boxes that merging neighbours leads to. A box is merged only with one that
    has the same sides in all other dimensions and begins where it ends. So the result holds each
    element as often as the boxes do."""
    merged = sorted(boxes)
    count = None
    while count != len(merged):
        count = len(merged)
        for dim in reversed(range(len(merged[0][0]))):
            merged = _merged_along(merged, dim)
    return sorted(merged)


def _merged_along(boxes: Iterable[Box], dim: int) -> list[Box]:
    def lines(box: Box) -> tuple[Box, int]:
        offset, size = box
        sides = (offset[:dim] + offset[dim + 1 :], size[:dim] + size[dim + 1 :])
        return sides, offset[dim]

    merged: list[Box] = []
    before: tuple[Box, int] | None = None
    for box in sorted(boxes, key=lines):
        size, (sides, start) = box[1], lines(box)
        if before == (sides, start):
            first, length = merged[-1]
            grown = (*length[:dim], length[dim] + size[dim], *length[dim + 1 :])
            merged[-1] = (first, grown)
        else:
            merged.append(box)
        before = (sides, start + size[dim])
    return merged


def collect_written(
    written: WrittenParts, plan: PartPlan | None, writers: Sequence[int], folder: Path, mesh: Mesh
) -> list[WrittenParts] | None:
    """Have the writers write their parts for what all ranks have written, and return their results
    on rank 0; None on the others. Collective. Raises CheckpointError on every rank."""
    of_part = gather_from(sharing(mesh).ranks, written, mesh.world)
    with raise_on_all_ranks(mesh.world), writing(folder):
        if of_part is not None:
            assert plan is not None
            written = plan.write(folder, of_part)
    return gather_from(writers, written, mesh.world) if of_part is not None else None


def _place(stored: _StorageInfo) -> Place:
    crc32: int = stored.crc32  # type: ignore[attr-defined]
    return Place(stored.relative_path, stored.offset, stored.length, crc32)


def _write(folder: Path, name: str, content: bytes) -> str:
    """Write and sync a file of the index, and return its SHA-256."""
    bound = largest_index(folder, len(content))
    require_size(folder / name, len(content), bound, do="save from fewer ranks")
    with writing(folder / name), HashedFile(folder / name) as file:
        file.write(content)
    return file.sum
