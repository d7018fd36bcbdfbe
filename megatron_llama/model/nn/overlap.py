"""Ways to hide the messages of tensor-parallel layers under their products, which
``--tp-comm-overlap`` chooses between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.model.nn.recompute import Recomputable
from megatron_llama.model.plan.pieces import SYMMETRIC, chosen_pieces

if TYPE_CHECKING:
    from megatron_llama.model.nn.linear import RowLinear


class GatheredInput(Protocol):
    """A shard [s / tp, b, d] whose gather has been started."""

    def products(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
        """Multiply all rows by weights [f, d] and add their biases [f]; the outputs are stacked:
        [s, b, all f]."""


class TensorOverlap(Protocol):
    """One way, for the layers of a stage."""

    def gather(self, shard: Tensor, tp: Axis) -> GatheredInput:
        """Start to gather the input of a column-parallel layer, whose weights are not read yet.
        With sequence parallelism only."""

    def sum(self, x: Tensor | Recomputable, layer: RowLinear, addition: Tensor | None) -> Tensor:
        """Multiply x [s, b, d / tp] by the weight of a row-parallel layer, add ``addition`` [s, b,
        f], and sum over tp: [s, b, f], or with sequence parallelism this rank's [s / tp, b, f]."""


def tensor_overlap(config: Config, mesh: Mesh) -> TensorOverlap | None:
    """Return the way of a resolved configuration; None: messages are whole. Raises ConfigError
    where this torch or the device does not have it."""
    if mesh.tp.size == 1:
        return None
    if config.parallel.tp_comm_overlap == SYMMETRIC:
        from megatron_llama.model.nn.symmetric import SymmetricMemory  # which few runs need

        return SymmetricMemory(mesh)
    pieces = chosen_pieces(config)
    if pieces == 1:
        return None
    from megatron_llama.model.nn.pieces import InPieces  # likewise

    return InPieces(pieces)
