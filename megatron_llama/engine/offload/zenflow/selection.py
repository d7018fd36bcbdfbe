"""The columns of each matrix that ZenFlow updates at every step: those with the largest gradient
over all ranks.

A column is an input channel of the matrix as it is over all tensor-parallel ranks. Its norm is
summed over the shards of data-parallel ranks; over tensor-parallel ranks it is summed too where
they split the outputs, while where they split the inputs each rank knows other columns. Only these
norms cross ranks: a number for each column instead of one for each element.

Queries, keys and values read the same channels. They are one matrix here even where they are stored
as two, so that the same columns are selected in every layout. One-dimensional parameters and
low-rank additions have no columns: they are small, and always updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.engine.comm.collectives import all_reduce
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.offload.zenflow.columns import Block
from megatron_llama.engine.plan.specs import ParamSpec
from megatron_llama.engine.plan.zenflow import hot_column_count

ATTENTION_INPUTS = ("q_proj", "kv_proj", "qkv_proj")
"""Names under which our own model stores queries, keys and values, which have one input. The
last of them names their columns in every layout."""


@dataclass(frozen=True)
class Matrix:
    """The columns of one matrix, as this tensor-parallel rank sees them."""

    name: str
    first: int
    """The first column that is here, of all columns."""
    columns: int
    """The number of columns here."""
    total: int
    """The number of columns over all tensor-parallel ranks."""
    tied: bool
    """Whether the other end of the pipeline holds the matrix too."""

    @staticmethod
    def of(spec: ParamSpec) -> Matrix:
        """Return the columns of a parameter with two dims or more. Those of a convolution are
        the elements of a filter: its input channels, at each place of the kernel."""
        owner, _, leaf = spec.name.removesuffix(".weight").rpartition(".")
        stored = spec.slices[0]
        # In our own model these two are fused. A user's cross-attention may have queries and
        # keys of different inputs.
        if leaf in ATTENTION_INPUTS[1:] and len(spec.slices) == 1:
            name = spec.name
        elif leaf in ATTENTION_INPUTS:
            name = f"{owner}.{ATTENTION_INPUTS[-1]}"
        else:
            name = f"{owner}.{leaf}".lstrip(".")
        return Matrix(name, stored.hf_col, spec.width, stored.width, spec.tied)

    def local(self, columns: Tensor) -> Tensor:
        """Return this rank's part of a vector over all columns."""
        return columns[self.first : self.first + self.columns]


class ColumnNorms:
    """Squared norms of the gradient's columns, for all matrices of one rank: taken shard by shard,
    then summed over the ranks."""

    def __init__(self, matrices: Sequence[Matrix], mesh: Mesh) -> None:
        """``matrices`` come in the same order on every rank of dp and tp. Several may have one
        name: they share their columns."""
        self._mesh = mesh
        self._totals = {matrix.name: matrix.total for matrix in matrices}
        self._matrices = tuple(matrices)
        self._tied = next((matrix.name for matrix in matrices if matrix.tied), None)
        self._local = [torch.zeros(matrix.columns, device=mesh.device) for matrix in matrices]

    def add(self, shard: Tensor, blocks: Iterable[Block]) -> None:
        """Count the gradient of a shard, where this rank is the one to count it. ``Block.matrix``
        numbers the matrices."""
        for block in blocks:
            for rows in block.row_views(shard):
                block.of(self._local[block.matrix]).add_(rows.square().sum(0, dtype=torch.float32))

    def totals(self) -> dict[str, Tensor]:
        """Return the squared norms over all ranks, by name, [total], on the host, and starts from
        zero again. Every rank gets the same bits. Collective over the ranks of dp and tp, and where
        the embedding is tied over those of both ends."""
        mesh = self._mesh
        flat = torch.cat([*self._local, torch.zeros(0, device=mesh.device)])
        for local in self._local:
            local.zero_()
        all_reduce(flat, mesh.dp_shard).wait()
        whole = {
            name: torch.zeros(total, device=mesh.device) for name, total in self._totals.items()
        }
        for matrix, local in zip(
            self._matrices,
            torch.split(flat, [matrix.columns for matrix in self._matrices]),
            strict=True,
        ):
            matrix.local(whole[matrix.name]).add_(local)
        norms = torch.cat([*whole.values(), torch.zeros(0, device=mesh.device)])
        all_reduce(norms, mesh.tp).wait()
        # A backend may add in another order on another rank. Replicas that then select other
        # columns would be replicas no more, so the largest sum that any rank found counts.
        for axis in (mesh.dp, mesh.tp):
            all_reduce(norms, axis, dist.ReduceOp.MAX).wait()
        totals = dict(zip(whole, torch.split(norms, list(self._totals.values())), strict=True))
        if mesh.embedding.size > 1 and self._tied is not None:
            all_reduce(totals[self._tied], mesh.embedding).wait()
        return {name: values.cpu() for name, values in totals.items()}


def select_columns(norms: Mapping[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """Return by name which columns are hot, bool [total]: the share ``ratio`` with the largest
    norms; of equal norms the first columns."""
    selected = {}
    for name, values in norms.items():
        # A stable sort, on the host: all ranks and layouts break ties in the same way.
        order = torch.sort(values, descending=True, stable=True).indices
        selected[name] = torch.zeros(values.numel(), dtype=torch.bool)
        selected[name][order[: hot_column_count(ratio, values.numel())]] = True
    return selected
