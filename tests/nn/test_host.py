"""What hosts compute in ways of their own: fp32 products by oneDNN, bf16 attention by products; and how many operators a layer calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.distributed import device as devices
from megatron_llama.distributed.launcher import Place
from megatron_llama.nn.host import gemm
from megatron_llama.nn.host.attention import rotated_attention
from megatron_llama.nn.ops import PLAIN
from megatron_llama.nn.param_handle import accumulate_product
from megatron_llama.nn.rotary import rope_frequencies, rope_table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.cases import Layout, trainer

CPU = torch.device("cpu")
OPERATORS = 86
"""Of one block, forward, backward and update, those that read or write memory: a pass over the activations that is added shows here."""
VIEWS = {"view", "_unsafe_view", "detach", "t", "permute", "split", "split_with_sizes", "select", "slice", "unsqueeze", "promote_types"}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("apart", [False, True], ids=["MKL", "oneDNN"])
def test_large_products(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large enough to be cut, and with a rest. Relative to the largest element, sums of 300 terms in fp32."""
    monkeypatch.setattr(devices, "prefers_onednn", lambda: apart)
    monkeypatch.setattr("megatron_llama.nn.host.gemm.WGRAD_CHUNK", 100 * 70)
    x, weight, grad = (random(150, 2, 70, seed=1), random(370, 70, seed=2), random(150, 2, 370, seed=3))
    assert gemm.prefers_onednn(x, weight) is apart
    view = torch.full((370, 70), float("nan"))
    left, right = grad.flatten(0, 1).t(), x.flatten(0, 1)
    accumulate_product(view, 0.0, left, right)
    accumulate_product(view, 1.0, left, right)
    output = gemm.linear(x, weight)
    output.add_(1.0)
    found = (output - 1.0, gemm.linear_backward(grad, weight), view)
    wide = (x.double() @ weight.double().t(), grad.double() @ weight.double(), 2 * left.double() @ right.double())
    for own, exact in zip(found, wide, strict=True):
        assert (own - exact).abs().max() <= 3e-6 * exact.abs().max()


def test_products_of_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rank has them whose part of a batch is empty: outputs are empty, and weight gradients are zeros."""
    monkeypatch.setattr(devices, "prefers_onednn", lambda: True)
    x, weight, grad = random(0, 2, 70, seed=1), random(370, 70, seed=2), random(0, 2, 370, seed=3)
    assert gemm.linear(x, weight).shape == (0, 2, 370)
    assert gemm.linear_backward(grad, weight).shape == (0, 2, 70)
    view = torch.full((370, 70), float("nan"))
    accumulate_product(view, 0.0, grad.flatten(0, 1).t(), x.flatten(0, 1))
    assert not view.any()
    before = view.fill_(3.0).clone()
    accumulate_product(view, 1.0, grad.flatten(0, 1).t(), x.flatten(0, 1))
    assert torch.equal(view, before)


def attention(qkv: Tensor, heads: tuple[int, int], upstream: Tensor) -> tuple[Tensor, Tensor]:
    leaf = qkv.clone().requires_grad_()
    width = qkv.shape[2] // (heads[0] + 2 * heads[1])
    cos, sin = rope_table(torch.arange(len(qkv)).unsqueeze(-1), rope_frequencies(width, 1e4, None, CPU))
    out = rotated_attention(leaf.clone(), cos, sin, query=heads[0], key=heads[1], ops=PLAIN)
    out.backward(upstream.to(out.dtype))
    assert leaf.grad is not None
    return out.detach().double(), leaf.grad.double()


def attention_by_operators(qkv: Tensor, heads: tuple[int, int], upstream: Tensor) -> tuple[Tensor, Tensor]:
    """As HuggingFace's eager attention computes it in bf16: scores and probabilities are rounded, the softmax is fp32."""
    leaf, (length, batch, _) = qkv.clone().requires_grad_(), qkv.shape
    projected = leaf.view(length, batch, heads[0] + 2 * heads[1], -1)
    cos, sin = rope_table(torch.arange(length).unsqueeze(-1), rope_frequencies(projected.shape[-1], 1e4, None, CPU))
    first, second = projected[:, :, : sum(heads)].chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    query, key, value = (part.permute(1, 2, 0, 3) for part in (*turned.split(heads, dim=2), projected[:, :, sum(heads) :]))
    key, value = (part.repeat_interleave(heads[0] // heads[1], dim=1) for part in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores += torch.full((length, length), torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)
    out = (scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value).permute(2, 0, 1, 3).flatten(2)
    out.backward(upstream.to(out.dtype))
    assert leaf.grad is not None
    return out.detach().double(), leaf.grad.double()


@pytest.mark.parametrize(("length", "heads"), [(300, (4, 2)), (513, (2, 2)), (128, (6, 1))], ids=str)
def test_attention_by_products(length: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 as near to fp64 as HuggingFace's eager attention, whose roundings it has; whatever is cut, and for grouped heads.

    Over 200 draws of each case the output's error is the same, and the gradient's, whose sums over pieces of queries are rounded apart,
    0.94 to 1.07 of it. Torch's kernel for hosts, which keeps scores in fp32, is another one: its output's error is 0.66 to 0.77 of that."""
    monkeypatch.setattr("megatron_llama.nn.host.attention.SCORES", 2**17)
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: True)
    qkv, upstream = (
        random(length, 2, (heads[0] + 2 * heads[1]) * 16, seed=4).bfloat16(),
        random(length, 2, heads[0] * 16, seed=5).bfloat16(),
    )
    exact = attention(qkv.double(), heads, upstream)
    own, eager = (
        [float((found - true).norm() / true.norm()) for found, true in zip(body(qkv, heads, upstream), exact, strict=True)]
        for body in (attention, attention_by_operators)
    )
    assert own[0] == pytest.approx(eager[0], rel=0.01) and own[1] <= 1.1 * eager[1] < 0.01, (own, eager)


@dataclass(frozen=True)
class Deep(Layout):
    """Of so many blocks."""

    blocks: int = 2

    def config(self) -> Config:
        """See Layout."""
        config = super().config()
        return replace(config, model=replace(config.model, num_hidden_layers=self.blocks))


class Count(TorchDispatchMode):
    """Operators that reach torch's dispatcher and are no views."""

    calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += function.overloadpacket.__name__ not in VIEWS
        return function(*args, **(kwargs or {}))


def calls(blocks: int) -> int:
    run = trainer(Place(0, 1, 0), Deep(blocks=blocks))
    run.step(0)
    with Count() as count:
        run.step(1)
    return count.calls


def test_operators_of_a_block() -> None:
    transposed = 1 if devices.prefers_onednn() else 0  # it takes a transposed factor as a copy
    assert calls(3) - calls(2) <= OPERATORS + transposed
