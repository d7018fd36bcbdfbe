"""Low-rank additions to linear layers (LoRA: Hu et al., 2021), tensor-parallel as their layers are.

The half on the side of a layer that tp splits is split alike, the other half is the same on all tp
ranks. A column-parallel layer communicates rank-wide activations, [..., rank], and nothing else; a
row-parallel one adds to its partial sums, which are summed anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor, nn

from megatron_llama.config.schema import LoraConfig
from megatron_llama.engine.comm import autograd
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.plan.specs import ParamSpec
from megatron_llama.model.nn.linear import ColumnLinear, RowLinear, empty_weight, plain_linear
from megatron_llama.model.nn.recompute import Recomputable
from megatron_llama.model.plan.lora import adapter_names, projection_of


@dataclass(frozen=True)
class Part:
    """One of the projections whose outputs a layer stacks."""

    name: str
    rows: int
    """Outputs on this rank."""
    adapted: bool


class _Factor(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = empty_weight(rows, columns)


class Adapter(nn.Module):
    """The product B A for one projection: A [rank, inputs] and B [outputs, rank], as this tp rank
    holds them."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.lora_A = _Factor(rank, inputs)
        self.lora_B = _Factor(outputs, rank)


class _Adapters(nn.ModuleDict):
    """The adapters of one layer, by the names of their projections."""

    def __init__(
        self, inputs: int, parts: Sequence[Part], *, rank: int, scaling: float, tp: Axis
    ) -> None:
        super().__init__({p.name: Adapter(inputs, p.rows, rank) for p in parts if p.adapted})
        self.scaling = scaling
        self.tp = tp

    def low(self, x: Tensor | Recomputable) -> Tensor:
        """Return scaling * A x of all adapters, concatenated: [..., adapters * rank]."""
        parts = [plain_linear(x, self._of(name).lora_A.weight, self.tp) for name in self]
        return torch.cat(parts, -1) * self.scaling

    def _high(self, name: str, low: Tensor) -> Tensor:
        """Return B low of one adapter."""
        return plain_linear(low, self._of(name).lora_B.weight, self.tp)

    def _of(self, name: str) -> Adapter:
        return cast(Adapter, self[name])


class ColumnAdapters(_Adapters):
    """The addition to a column-parallel layer, zero where a projection has no adapter. Between its
    halves ``column_additions`` communicates."""

    def __init__(
        self, inputs: int, parts: Sequence[Part], *, rank: int, scaling: float, tp: Axis
    ) -> None:
        super().__init__(inputs, parts, rank=rank, scaling=scaling, tp=tp)
        self.parts = tuple(parts)

    def high(self, low: Tensor) -> Tensor:
        """Multiply by B: [s, b, adapters * rank] -> [s, b, outputs / tp]."""
        lows = dict(zip(self, low.chunk(len(self), -1), strict=True))
        shape = low.shape[:-1]
        zero = low.new_zeros(1)
        return torch.cat(
            [
                self._high(p.name, lows[p.name]) if p.adapted else zero.expand(*shape, p.rows)
                for p in self.parts
            ],
            -1,
        )


def column_additions(x: Tensor | Recomputable, layers: Sequence[ColumnLinear]) -> Tensor:
    """Return what adapters add to ``stacked_outputs`` of some layers, zero for those without:
    [s, b, all outputs / tp]. One message carries the first halves of all."""
    tp = layers[0].tp
    lows = [layer.adapters.low(x) for layer in layers if isinstance(layer.adapters, ColumnAdapters)]
    low = torch.cat(lows, dim=-1)
    # The wide side of the second halves is split over tp, so the gradient of their input is a
    # partial sum.
    gathers = layers[0].sequence_parallel
    low = autograd.gather_sequence(low, tp) if gathers else autograd.copy(low, tp)
    inputs = iter(low.split_with_sizes([activation.shape[-1] for activation in lows], dim=-1))
    zero = low.new_zeros(1)
    additions = [
        layer.adapters.high(next(inputs))
        if isinstance(layer.adapters, ColumnAdapters)
        else zero.expand(*low.shape[:-1], len(layer.weight))
        for layer in layers
    ]
    return torch.cat(additions, dim=-1)


class RowAdapter(_Adapters):
    """The addition to a row-parallel layer, to its sums before they are summed over tp."""

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        """Multiply by A and B: [s, b, inputs / tp] -> partial sums [s, b, outputs]."""
        [name] = self
        return self._high(name, self.low(x))


def add_adapters(stage: nn.Module, specs: Sequence[ParamSpec], lora: LoraConfig) -> None:
    """Give the linear layers of a stage the low-rank additions in its parameters ``specs``."""
    adapted = {hf_slice.name for spec in specs if spec.adapter for hf_slice in spec.slices}
    for spec in specs:
        parts = [
            Part(
                projection_of(name),
                sum(hf_slice.rows for hf_slice in slices),
                adapter_names(name)[0] in adapted,
            )
            for name, slices in groupby(spec.slices, attrgetter("name"))
        ]
        if not any(projection.adapted for projection in parts):
            continue
        layer = stage.get_submodule(spec.name.removesuffix(".weight"))
        assert isinstance(layer, (ColumnLinear, RowLinear))
        scaling = lora.lora_alpha / lora.lora_rank
        if isinstance(layer, ColumnLinear):
            layer.adapters = ColumnAdapters(
                spec.shape[1], parts, rank=lora.lora_rank, scaling=scaling, tp=layer.tp
            )
        else:
            layer.adapters = RowAdapter(
                spec.shape[1], parts, rank=lora.lora_rank, scaling=scaling, tp=layer.tp
            )


@contextmanager
def additions_off(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Make these stages compute as if they had no low-rank additions, bit for bit, in a section of
    passes without backward. The additions keep their weights."""
    layers = [
        layer
        for stage in stages
        for layer in stage.modules()
        if isinstance(layer, (ColumnLinear, RowLinear)) and layer.adapters is not None
    ]
    set_aside = [layer.adapters for layer in layers]
    for layer in layers:
        layer.adapters = None
    try:
        yield
    finally:
        for layer, adapters in zip(layers, set_aside, strict=True):
            layer.adapters = adapters
