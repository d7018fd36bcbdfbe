"""State of single columns in checkpoints: the number of updates of each column, and the selected
columns (ZenFlow's hot columns), in HuggingFace's coordinates.

    optimizer.updates.NAME      fp64 [columns of NAME]
    optimizer.hot.NAME          fp64 [columns of NAME], 1 or 0
    optimizer.zenflow.windows   fp64 [2]: steps, and one more than the steps before columns were
                                last selected (0: never)

Nothing is pending in a checkpoint, so it has no sums of gradients. A rule without columns counts
updates once for all columns: moments that it takes over are rescaled to mean the same with that
count, and a rule with columns takes that count over for every column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_llama.checkpoint.chunks import Region, regions, state_key
from megatron_llama.checkpoint.index import StoredTensor
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.options import UpdateOptions
from megatron_llama.engine.pieces import (
    ShardPiece,
    column_state,
    resume_rules,
    rule_progress,
    shard_pieces,
)
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.engine.rules.bias_correction import bias_corrections

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The state of every parameter that AdamW updates, in fp32 or bf16."""
UPDATES = "updates"
HOT = "hot"
WINDOWS = "windows"


def column_pieces(engine: OverlappedDistributedOptimizer, mesh: Mesh) -> Iterator[ShardPiece]:
    """Yield the state of the columns on this rank, live. Call ``settle`` first."""
    written = set[str]()
    for column in column_state(engine):
        spec = column.spec
        here = len(column.updates)
        alone = mesh.dp.rank == 0 and not (spec.tied and mesh.embedding.rank)
        primary = alone and (here < column.total or mesh.tp.rank == 0)
        tensors = {UPDATES: column.updates, HOT: column.selected}
        for name in dict.fromkeys(hf_slice.name for hf_slice in spec.slices):
            rectangle = Rectangle(name, (column.total,), (column.first,), (here,), 0)
            # Queries may be apart from keys and values here, and all in one tensor of HuggingFace:
            # they have the same columns, which are written once.
            yield ShardPiece(rectangle, tensors, primary and name not in written)
            written.add(name)
    progress = rule_progress(engine)
    if progress is not None:
        rectangle = Rectangle(WINDOWS, (len(progress),), (0,), (len(progress),), 0)
        yield ShardPiece(rectangle, {"zenflow": progress}, mesh.rank == 0)


class SavedColumns:
    """Loads the columns of a checkpoint, or what stands for them if it has none."""

    def __init__(
        self, engine: OverlappedDistributedOptimizer, mesh: Mesh, saved: Mapping[str, StoredTensor]
    ) -> None:
        self._engine = engine
        own = list(regions(column_pieces(engine, mesh)))
        self._missing = [
            region.tensor
            for region in own
            if region.key not in saved and region.key.startswith(state_key(UPDATES, ""))
        ]
        for region in own:
            region.tensor.zero_()  # where the checkpoint says nothing, no column is selected
        with_columns = {piece.rectangle.name for piece in column_pieces(engine, mesh)}
        # Saved by a rule with columns, loaded by a rule without: the moments have to be rescaled.
        self._foreign = {
            name: _whole(saved, name)
            for name in _names(shard_pieces(engine)) - with_columns
            if state_key(UPDATES, name) in saved
        }
        once: dict[MetadataIndex, Region] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        for region in own:
            if region.index in once:
                self._copies.append((region.tensor, once[region.index].tensor))
            else:
                once[region.index] = region
        self.regions = [region for region in once.values() if region.key in saved]
        """Regions to be read, once where several parameters have the same columns."""
        self.regions += [
            Region(state_key(UPDATES, name), (len(c),), (0,), (len(c),), c)
            for name, c in self._foreign.items()
        ]

    def take_up(self, step: int, optimizer: Mapping[str, Any]) -> None:
        """Take over the regions, which have been read as all other state. ``step`` is the number of
        updates of a rule without columns; ``optimizer`` has the options of the run that saved."""
        numbers = UpdateOptions(
            **{name: optimizer[name] for name in ("adam_beta1", "adam_beta2") if name in optimizer}
        )
        for copy, read in self._copies:
            copy.copy_(read)
        for updates in self._missing:
            updates.fill_(step)
        for piece in shard_pieces(self._engine):
            counts = self._foreign.get(piece.rectangle.name)
            if counts is not None and piece.tensors.keys() >= {*MOMENTS}:
                _recount(piece, counts, step, numbers)
        resume_rules(self._engine, step)


def _names(pieces: Iterable[ShardPiece]) -> set[str]:
    return {
        piece.rectangle.name
        for piece in pieces
        if len(piece.rectangle.shape) == 2 and "exp_avg" in piece.tensors
    }


def _whole(saved: Mapping[str, StoredTensor], name: str) -> Tensor:
    return torch.zeros(saved[state_key(UPDATES, name)].shape, dtype=torch.float64)


def _recount(piece: ShardPiece, counts: Tensor, step: int, numbers: UpdateOptions) -> None:
    """Rescale moments so that, corrected as after ``step`` updates, they have the values that they
    had when corrected by the number of each column's updates."""
    low = piece.rectangle.offset[1]
    counts = counts[low : low + piece.rectangle.size[1]]
    counts = counts.clamp(min=1)  # without any update the moments are zero
    moments = [piece.tensors[name] for name in MOMENTS]
    before = bias_corrections(counts, numbers, torch.float64)
    after = bias_corrections(torch.tensor(max(step, 1)), numbers, torch.float64)
    for moment, power, was, will_be in zip(moments, (1, 2), before, after, strict=True):
        moment.mul_(((will_be / was) ** power).to(moment.device, moment.dtype))
