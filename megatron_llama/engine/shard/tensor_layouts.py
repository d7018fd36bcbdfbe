"""Parameters that are DTensors, by their local parts.

A model in which torch's ``parallelize_module`` has put tensor parallelism has DTensors for
parameters. The engine shards, gathers, reduces and updates the part that this rank holds as it does
a plain parameter, and its modules see the DTensor around that part while they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from megatron_llama.engine.shard.tensor_parallel import TensorLayout


@dataclass(frozen=True)
class TensorLayouts:
    """The layouts of a model's parameters; plain parameters have none."""

    by_name: Mapping[str, TensorLayout]
    lines: Mapping[int, tuple[int, ...]]
    """By data-parallel rank, the ranks with which it shares parameters, in the order of the mesh.
    All ranks are global."""

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def is_cut(self, name: str) -> bool:
        """Whether tensor-parallel ranks have parts of a parameter; others they have whole."""
        return name in self.by_name and self.by_name[name].is_cut

    def parameter(self, name: str, local: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return the parameter of a model around its values on this rank, in their memory."""
        layout = self.by_name.get(name)
        with torch.no_grad():
            value = local if layout is None else layout.around(local)
        return nn.Parameter(value, requires_grad=requires_grad)

    def shape(self, name: str, local: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a parameter that has the shape ``local`` on this rank."""
        return self.by_name[name].shape if name in self.by_name else local

    def fits(self, name: str, value: Tensor) -> bool:
        """Whether ``part`` knows this rank's part of a value."""
        if not isinstance(value, DTensor):
            return True
        return name in self.by_name and self.by_name[name].has(value)

    def part(self, name: str, value: Tensor) -> Tensor:
        """Return this rank's part of a parameter's value."""
        return self.by_name[name].part(value) if name in self.by_name else value

    def gradient(self, name: str, grad: Tensor) -> Tensor:
        """Return this rank's part of what autograd has accumulated for a parameter. Collective over
        the tensor-parallel ranks where that is a sum of which each has a term, as it is for a norm
        between ranks with other tokens."""
        layout = self.by_name.get(name)
        if layout is None or not isinstance(grad, DTensor):
            return grad
        with torch.no_grad():
            if not layout.has(grad):
                grad = grad.redistribute(placements=(layout.placement,))
            return grad.to_local()


ALL_PLAIN = TensorLayouts(MappingProxyType({}), MappingProxyType({}))
