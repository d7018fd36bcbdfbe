"""Which columns of each matrix are updated at every step: those whose gradient is largest, over all
ranks.

A column is an input channel of the matrix as it is over all tensor-parallel ranks. Its norm is
summed over the shards of data-parallel ranks; over tensor-parallel ranks it is summed too where
they split the outputs, while where they split the inputs each rank knows other columns. Only these
norms cross ranks: a number for each column instead of one for each element.

Queries, keys and values read the same channels: they are one matrix here even where they are stored
as two, so that the same columns are chosen in every layout. One-dimensional parameters and low-rank
additions have no columns: they are small, and always updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.distributed.comm.collectives import all_reduce
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.engine.offload.columns import Block
from megatron_llama.plans.checks.zenflow import hot_columns
from megatron_llama.plans.params import ParamSpec

ATTENTION_INPUTS = ("q_proj", "kv_proj", "qkv_proj")
"""Names under which queries, keys and values are stored: whatever the layout, the last of them
names their columns."""


@dataclass(frozen=True)
class Matrix:
    """The columns of one matrix, as this tensor-parallel rank sees them."""

    name: str
    first: int
    """Of all columns, the first that is here."""
    columns: int
    """Here."""
    total: int
    """Over all tensor-parallel ranks."""
    tied: bool
    """The other end of the pipeline holds it too."""

    @staticmethod
    def of(spec: ParamSpec) -> Matrix:
        """Of a parameter with two dims."""
        owner, _, leaf = spec.name.removesuffix(".weight").rpartition(".")
        part = spec.slices[0]
        name = (
            f"{owner}.{ATTENTION_INPUTS[-1]}"
            if leaf in ATTENTION_INPUTS
            else f"{owner}.{leaf}".lstrip(".")
        )
        return Matrix(name, part.hf_col, spec.width, part.shape[1], spec.tied)

    def own(self, columns: Tensor) -> Tensor:
        """Of a vector over all columns, this rank's part."""
        return columns[self.first : self.first + self.columns]


class Norms:
    """Squared norms of the gradient's columns, for all matrices of one rank: taken shard by shard,
    then summed over the ranks."""

    def __init__(self, matrices: Sequence[Matrix], mesh: Mesh) -> None:
        """``matrices``: in the same order on every rank of dp and tp. Several may carry one name:
        they share their columns."""
        self._mesh = mesh
        self._totals = {matrix.name: matrix.total for matrix in matrices}
        self._matrices = tuple(matrices)
        self._tied = next((matrix.name for matrix in matrices if matrix.tied), None)
        self._local = [torch.zeros(matrix.columns, device=mesh.device) for matrix in matrices]

    def add(self, shard: Tensor, blocks: Iterable[Block]) -> None:
        """Count the gradient in a shard, where this rank is the one to count it. ``Block.matrix``
        numbers the matrices."""
        for block in blocks:
            for part in block.parts(shard):
                block.of(self._local[block.matrix]).add_(part.square().sum(0, dtype=torch.float32))

    def totals(self) -> dict[str, Tensor]:
        """Over all ranks, by name, [total], on the host; from now on zero again. Collective over
        the ranks of dp and tp, and where the embedding is tied over those of both ends. Every rank
        gets the same bits."""
        mesh = self._mesh
        flat = torch.cat([*self._local, torch.zeros(0, device=mesh.device)])
        for local in self._local:
            local.zero_()
        all_reduce(flat, mesh.dp_shard).wait()
        whole = {
            name: torch.zeros(total, device=mesh.device) for name, total in self._totals.items()
        }
        for matrix, part in zip(
            self._matrices,
            torch.split(flat, [matrix.columns for matrix in self._matrices]),
            strict=True,
        ):
            matrix.own(whole[matrix.name]).add_(part)
        together = torch.cat([*whole.values(), torch.zeros(0, device=mesh.device)])
        all_reduce(together, mesh.tp).wait()
        # A backend may add in another order elsewhere. Replicas that took other columns for it
        # would be replicas no more.
        for axis in (mesh.dp, mesh.tp):
            all_reduce(together, axis, dist.ReduceOp.MAX).wait()
        found = dict(zip(whole, torch.split(together, list(self._totals.values())), strict=True))
        if mesh.embedding.size > 1 and self._tied is not None:
            all_reduce(found[self._tied], mesh.embedding).wait()
        return {name: norms.cpu() for name, norms in found.items()}


def choose(norms: Mapping[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """By name, which columns are hot: bool [total]. Of equal norms the first columns."""
    chosen = {}
    for name, values in norms.items():
        order = torch.sort(values, descending=True, stable=True).indices
        chosen[name] = torch.zeros(values.numel(), dtype=torch.bool)
        chosen[name][order[: hot_columns(ratio, values.numel())]] = True
    return chosen
