"""What the linear layers of a block multiply by with ``--fp8``. The recipe ``tensorwise`` stands in
``tensorwise.py``.

Forward product and input gradient are in FP8. The weight gradient is a product in bf16, into its
fp32 slot, of what a layer keeps for it without FP8 too; so nothing else of a layer differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.param_handle import UnshardedRead, wait_unsharded
from megatron_llama.model.nn.fp8.codes import Blocks, both_orders, tiles
from megatron_llama.model.nn.fp8.product import product
from megatron_llama.model.nn.overlap import LayerProducts
from megatron_llama.model.plan.fp8 import TENSORWISE, fp8_layers, gathers_codes


class WeightCodes(NamedTuple):
    """The codes of a weight [n, k]."""

    read: UnshardedRead
    """The parameter and the version whose codes these are."""
    forward: Any
    """[n, k], for the product."""
    backward: Any
    """[k, n], for the gradient of the input."""


class KeptCodes(ABC):
    """The codes of weights, kept until another weight, or another version of it, is read at the
    same place.

    A weight with a slot to itself has its codes made once for each update, however many
    microbatches and recomputations read it; weights that take turns in a slot take turns in codes,
    which are then made as often as the weights are gathered. ``model/plan/fp8.py`` counts them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, Any], WeightCodes] = {}
        """By the place of a weight: its storage, and where it begins there."""

    def codes(self, weight: Tensor, experts: int = 0) -> WeightCodes:
        """Return the codes of a weight that has been waited for. ``experts``: it is so many
        matrices below each other, which every tensor-parallel rank has whole; 0: one matrix, of
        which it has a part."""
        read = wait_unsharded(weight)
        if read.handle is None:
            # Without an engine nothing says when the values change.
            return WeightCodes(read, *self.encoded(weight, experts))
        # Not ``data_ptr``: the tensors of a traced run have no memory.
        place = weight.untyped_storage()._cdata, weight.storage_offset()
        kept = self._kept.pop(place, None)
        same = kept is not None and kept.read.handle is read.handle
        if kept is None or not same or kept.read.version != read.version:
            kept = None  # before new ones are made in its place
            if not same:
                self._forget(*place, weight.numel())
            kept = WeightCodes(read, *self.encoded(weight, experts))
        self._kept[place] = kept
        return kept

    def _forget(self, storage: Any, start: Any, count: int) -> None:
        """Forget the codes of weights that lay where one lies now: those that take turns in a slot
        may be of other sizes, and begin at other places."""
        for place, kept in list(self._kept.items()):
            end = place[1] + kept.forward.codes.numel()
            if place[0] == storage and place[1] < start + count and start < end:
                del self._kept[place]

    @abstractmethod
    def encoded(self, weight: Tensor, experts: int = 0) -> tuple[Any, Any]:
        """Make the codes of a weight [n, k], and those of the transposed weight; ``experts`` as in
        ``codes``."""


class Blockwise(KeptCodes):
    """``Products`` of the blockwise recipe, for all layers of a process."""

    def encoded(self, weight: Tensor, experts: int = 0) -> tuple[Blocks, Blocks]:
        return both_orders(weight)  # no block crosses from an expert to the next

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = product(tiles(x), self.codes(weight).forward)
        return out if bias is None else out.add_(bias)

    def linear_into(
        self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> None:
        out.copy_(self.linear(x, weight, bias))

    def gradient(self, grad: Tensor) -> Tensor:
        return grad

    def linear_backward(self, grad: Tensor, weight: Tensor) -> Tensor:
        return product(tiles(grad), self.codes(weight).backward)

    def linear_backward_into(self, out: Tensor, grad: Tensor, weight: Tensor) -> None:
        out.copy_(self.linear_backward(grad, weight))


def products_by_layer(config: Config, mesh: Mesh) -> Callable[[int], LayerProducts]:
    """Return the products of the layers of a resolved configuration with ``--fp8``."""
    in_fp8: LayerProducts
    if config.training.fp8 == TENSORWISE:
        from megatron_llama.model.nn.fp8.tensorwise import tensorwise_products

        in_fp8 = tensorwise_products(mesh, gathers_codes=gathers_codes(config))
    else:
        in_fp8 = LayerProducts(products=Blockwise())
    if config.model.num_experts:
        from megatron_llama.model.nn.fp8.experts import with_experts  # of few models

        in_fp8 = with_experts(in_fp8, mesh)
    layers = fp8_layers(config)
    return lambda layer: in_fp8 if layer in layers else LayerProducts()
