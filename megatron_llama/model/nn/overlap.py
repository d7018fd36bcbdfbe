"""Interfaces of what linear layers are made of: products (``--fp8``), and ways to hide messages of
tensor parallelism under them (``--tp-comm-overlap``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from torch import Tensor

from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.model.nn.recompute import Recomputable
from megatron_llama.model.plan.pieces import SYMMETRIC, chosen_pieces

if TYPE_CHECKING:
    from megatron_llama.model.nn.linear import RowLinear
    from megatron_llama.model.nn.moe.rows import ExpertProducts


class Products(Protocol):
    """Products with the weights [f, d] of linear layers: those of ``engine/host_gemm.py``, or in
    FP8 (``model/nn/fp8/layers.py``). Weights have been waited for. Where a message is cut into
    pieces, each row of an output depends on its row of the input alone."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [..., d] and add bias [f]: [..., f]."""

    def linear_into(
        self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> None:
        """Write ``linear`` of x [blocks, m, d] to out [blocks, m, f], whose blocks may lie
        apart."""

    def gradient(self, grad: Tensor) -> Any:
        """Return what ``linear_backward`` takes of the gradient [..., f] of an output. May start
        messages; rows that are pieces are taken as they are."""

    def linear_backward(self, grad: Any, weight: Tensor) -> Tensor:
        """Return the gradient [..., d] of the input from that of the output, [..., f]."""

    def linear_backward_into(self, out: Tensor, grad: Tensor, weight: Tensor) -> None:
        """Write ``linear_backward`` of grad [blocks, m, f] to out [blocks, m, d], likewise."""


class GatheredInput(Protocol):
    """A shard [s / tp, b, d] whose gather has been started."""

    def products(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], products: Products
    ) -> Tensor:
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


class LayerProducts(TypedDict, total=False):
    """What the linear layers of one block multiply by; what is left out is as without ``--fp8``."""

    products: Products
    row_products: Products
    """Of row-parallel layers, if they are others."""
    overlap: TensorOverlap | None
    """Hides the gather of an input, or the sum of outputs; None: it is waited for."""
    experts: ExpertProducts
    """Of the rows of a block's experts."""
    shared_expert: LayerProducts
    """Of the expert of all tokens, if they are others."""
