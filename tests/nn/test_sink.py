"""Layers write weight gradients into a sink and tell it so; without one they return them to autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from megatron_llama.mesh import Mesh
from megatron_llama.nn.embedding import VocabParallelEmbedding
from megatron_llama.nn.functional import rms_norm
from megatron_llama.nn.linear import ColumnLinear, RowLinear
from megatron_llama.nn.sink import attach_sink, sink_of


@dataclass
class Accumulator:
    """Writes at the first contribution, adds after."""

    view: Tensor
    calls: list[str] = field(default_factory=list)

    def buffer(self) -> tuple[Tensor, float]:
        beta = 1.0 if self.calls else 0.0
        self.calls.append("buffer")
        return self.view, beta

    def done(self) -> None:
        self.calls.append("done")

    def defer(self, work: Callable[[], None]) -> bool:
        return False


@dataclass
class Later(Accumulator):
    """Keeps what it is given, until asked."""

    kept: list[Callable[[], None]] = field(default_factory=list)

    def defer(self, work: Callable[[], None]) -> bool:
        self.kept.append(work)
        return True


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, 1e-5)


def layers() -> dict[str, tuple[nn.Module, tuple[int, ...], list[Tensor]]]:
    """Layer, shape of its weight, two inputs."""
    tp = Mesh.single().tp
    generator = torch.Generator().manual_seed(3)
    real = [torch.randn(5, 2, 8, generator=generator) for _ in range(2)]
    ids = [torch.randint(0, 12, (5, 2), generator=generator) for _ in range(2)]
    return {
        "column": (ColumnLinear(8, 6, tp=tp, sequence_parallel=False), (6, 8), real),
        "row": (RowLinear(8, 6, tp=tp, sequence_parallel=False), (6, 8), real),
        "embedding": (VocabParallelEmbedding(12, 8, tp=tp, sequence_parallel=False), (12, 8), ids),
        "norm": (Norm(), (8,), real),
    }


def backward(layer: nn.Module, inputs: list[Tensor]) -> None:
    for x in inputs:
        output = layer(x)
        output.backward(torch.cos(torch.arange(output.numel(), dtype=torch.float32)).view(output.shape).to(output.dtype))


@pytest.mark.parametrize("name", ["column", "row", "embedding", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sink_receives_what_autograd_would_have(name: str, dtype: torch.dtype) -> None:
    layer, shape, inputs = layers()[name]
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    layer.weight = nn.Parameter(weight.clone())
    assert sink_of(layer.weight) is None
    backward(layer, inputs)
    expected = layer.weight.grad
    assert expected is not None

    layer.weight = nn.Parameter(weight.clone())
    sink = Accumulator(torch.full(shape, float("nan")))  # beta 0 must overwrite, not multiply
    attach_sink(layer.weight, sink)
    backward(layer, inputs)
    assert layer.weight.grad is None
    assert sink.calls == ["buffer", "done"] * 2
    tolerance = 1e-6 if dtype is torch.float32 else 2**-5
    torch.testing.assert_close(sink.view, expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["column", "row", "embedding"])
def test_a_deferred_contribution_is_the_same_one_later(name: str) -> None:
    """Nothing is written in the pass itself, and its other gradients do not change."""
    layer, shape, inputs = layers()[name]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    views, input_grads = [], []
    for kind in (Accumulator, Later):
        layer.weight = nn.Parameter(weight.clone())
        sink = kind(torch.full(shape, float("nan")))
        attach_sink(layer.weight, sink)
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        backward(layer, leaves)
        if isinstance(sink, Later):
            assert sink.calls == [] and len(sink.kept) == 2
            with torch.no_grad():
                for work in sink.kept:
                    work()
        assert sink.calls == ["buffer", "done"] * 2
        views.append(sink.view)
        input_grads.append([leaf.grad for leaf in leaves])
    assert torch.equal(*views)
    assert all(one is other or torch.equal(one, other) for one, other in zip(*input_grads, strict=True))


def test_frozen_weight_needs_no_sink() -> None:
    layer = ColumnLinear(8, 6, tp=Mesh.single().tp, sequence_parallel=False)
    layer.weight = nn.Parameter(torch.randn(6, 8), requires_grad=False)
    x = torch.randn(2, 1, 8, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand_as(x))
