"""What ZenFlow knows of columns, in checkpoints: how often each has been updated and which are hot,
in HuggingFace's coordinates.

    optimizer.updates.NAME      fp64 [columns of NAME]
    optimizer.hot.NAME          fp64 [columns of NAME], 1 or 0
    optimizer.zenflow.windows   fp64 [2]: steps, and one more than the steps before columns were
                                last chosen (0: never)

Nothing is pending in a checkpoint, so no sums of gradients are in it. Another update rule counts
updates once for all columns: moments that it takes over are changed to mean the same with that
count, and ZenFlow takes that count over for every column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_llama.checkpoint.chunks import Region, regions, state_key
from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.engine.offload.adam import corrections
from megatron_llama.engine.offload.divided import Divided
from megatron_llama.engine.offload.zenflow import ZenFlow
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer, ShardPiece
from megatron_llama.plans.params import Rectangle

UPDATES = "updates"
HOT = "hot"
WINDOWS = "windows"


def zenflow_of(engine: OverlappedDistributedOptimizer) -> ZenFlow | None:
    """The engine's rule, if it is ZenFlow."""
    rule = engine.update.rule if isinstance(engine.update, Divided) else engine.update
    return rule if isinstance(rule, ZenFlow) else None


def column_pieces(engine: OverlappedDistributedOptimizer, mesh: Mesh) -> Iterator[ShardPiece]:
    """What a checkpoint holds of the columns on this rank, live. Call ``settle`` first."""
    rule = zenflow_of(engine)
    if rule is None:
        return
    for column in rule.columns:
        spec = column.placement.spec
        matrix = column.matrix
        alone = mesh.dp.rank == 0 and not (spec.tied and mesh.embedding.rank)
        for part in spec.slices:
            rectangle = Rectangle(part.name, (matrix.total,), (matrix.first,), (matrix.columns,), 0)
            primary = alone and (matrix.columns < matrix.total or mesh.tp.rank == 0)
            yield ShardPiece(rectangle, {UPDATES: column.updates, HOT: column.hot}, primary)
    yield ShardPiece(
        Rectangle(WINDOWS, (2,), (0,), (2,), 0), {"zenflow": rule.progress}, mesh.rank == 0
    )


class SavedColumns:
    """Taking up what a checkpoint says of columns, or does not say."""

    def __init__(
        self, engine: OverlappedDistributedOptimizer, mesh: Mesh, metadata: Metadata
    ) -> None:
        saved = metadata.state_dict_metadata
        self._engine = engine
        self._rule = zenflow_of(engine)
        own = list(regions(column_pieces(engine, mesh)))
        self._missing = [
            part.tensor
            for part in own
            if part.key not in saved and part.key.startswith(state_key(UPDATES, ""))
        ]
        for part in own:
            part.tensor.zero_()  # hot, where nothing says so: no
        mine = {part.rectangle.name for part in column_pieces(engine, mesh)}
        self._foreign = {
            name: _whole(saved, name)
            for name in _names(engine.pieces()) - mine
            if state_key(UPDATES, name) in saved
        }
        self.regions = [part for part in own if part.key in saved]
        """To be read; what is missing is known otherwise."""
        self.regions += [
            Region(state_key(UPDATES, name), (len(c),), (0,), (len(c),), c)
            for name, c in self._foreign.items()
        ]

    def take_up(self, step: int, optimizer: Mapping[str, Any]) -> None:
        """The regions have been read, and all state. ``step``: updates of a rule that does not
        count by columns; ``optimizer``: options of the run that saved."""
        config = OptimizerConfig(
            adam_beta1=optimizer["adam_beta1"], adam_beta2=optimizer["adam_beta2"]
        )
        for updates in self._missing:
            updates.fill_(step)
        for piece in self._engine.pieces():
            counts = self._foreign.get(piece.rectangle.name)
            if counts is not None and piece.tensors.keys() >= {"exp_avg", "exp_avg_sq"}:
                _recount(piece, counts, step, config)
        if self._rule is not None:
            self._rule.resume(step)


def _names(pieces: Iterable[ShardPiece]) -> set[str]:
    return {
        piece.rectangle.name
        for piece in pieces
        if len(piece.rectangle.shape) == 2 and "exp_avg" in piece.tensors
    }


def _whole(saved: Mapping[str, object], name: str) -> Tensor:
    found = saved[state_key(UPDATES, name)]
    assert isinstance(found, TensorStorageMetadata)
    return torch.zeros(found.size, dtype=torch.float64)


def _recount(piece: ShardPiece, counts: Tensor, step: int, config: OptimizerConfig) -> None:
    """Moments that are, corrected as after ``step`` updates, what they were, corrected by the
    number of each column's."""
    low = piece.rectangle.offset[1]
    counts = counts[low : low + piece.rectangle.size[1]].clamp(
        min=1
    )  # without any update moments are zero
    moments = (piece.tensors["exp_avg"], piece.tensors["exp_avg_sq"])
    before = corrections(counts, config, torch.float64)
    after = corrections(torch.tensor(max(step, 1)), config, torch.float64)
    for moment, power, was, will_be in zip(moments, (1, 2), before, after, strict=True):
        moment.mul_(((will_be / was) ** power).to(moment.device, moment.dtype))
