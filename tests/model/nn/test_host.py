"""What hosts compute in ways of their own: fp32 products by oneDNN, bf16 attention by products; and how many operators a layer calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine import host_gemm as gemm
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.param_handle import accumulate_product
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.attention import attend, attend_backward
from megatron_llama.model.nn.host.attention import rotated_attention
from megatron_llama.model.nn.host.ops import HOST
from megatron_llama.model.nn.ops import PLAIN
from megatron_llama.model.nn.rotary import rope_frequencies, rope_table
from torch import Tensor

from tests.model.nn.dispatch import Dispatched
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
    monkeypatch.setattr("megatron_llama.engine.host_gemm.WGRAD_CHUNK", 100 * 70)
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


@pytest.mark.parametrize("side", [1024, 40], ids=["at once", "in blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 gradient", "bf16 gradient"])
def test_products_without_instructions_for_bf16(side: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, and rounded once; a product that is added to a gradient, as that is."""
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: False)
    monkeypatch.setattr("megatron_llama.engine.host_gemm.WIDE_SIDE", side)
    x, weight, bias, grad = (
        random(*shape, seed=seed).bfloat16() for seed, shape in enumerate([(150, 2, 70), (370, 70), (370,), (150, 2, 370)])
    )
    left, right = grad.flatten(0, 1).t(), x.flatten(0, 1)
    view = torch.full((370, 70), float("nan"), dtype=dtype)
    accumulate_product(view, 0.0, left, right)
    accumulate_product(view, 1.0, left, right)
    written = torch.empty(300, 70, dtype=torch.bfloat16)
    gemm.mm(grad.flatten(0, 1), weight, out=written)
    exact = (x.double() @ weight.double().t(), grad.double() @ weight.double(), left.double() @ right.double())
    for own, true, roundings in (
        (gemm.linear(x, weight), exact[0], 1),
        (gemm.linear(x, weight, bias), exact[0] + bias.double(), 1),
        (gemm.linear_backward(grad, weight), exact[1], 1),
        (written.view_as(x), exact[1], 1),
        (gemm.matmul(left, right), exact[2], 1),
        (view, 2 * exact[2], 2),
    ):
        unit = torch.finfo(own.dtype).eps
        assert ((own - true).abs() <= roundings * unit / 2 * true.abs().clamp(min=1.0) + 1e-5 * true.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_no_tokens_and_of_few(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of an empty part of a batch are empty, and weight gradients are zeros. Torch computes few rows in bf16: widening the weight
    would take longer than its product with a generated token."""
    monkeypatch.setattr(devices, "prefers_onednn", lambda: True)
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: False)
    x, weight, grad = (random(*shape, seed=1).to(dtype) for shape in ((4, 1, 70), (370, 70), (0, 1, 370)))
    assert gemm.linear(x[:0], weight).shape == (0, 1, 370) and gemm.linear_backward(grad, weight).shape == (0, 1, 70)
    view = torch.full((370, 70), float("nan"))
    accumulate_product(view, 0.0, grad.flatten(0, 1).t(), x[:0, 0])
    assert not view.any()
    accumulate_product(view.fill_(3.0), 1.0, grad.flatten(0, 1).t(), x[:0, 0])
    assert (view == 3.0).all()
    assert gemm.multiplies_in_fp32(x[:, 0]) is (dtype is torch.bfloat16) and not gemm.multiplies_in_fp32(x[:3, 0])
    assert dtype is torch.float32 or torch.equal(gemm.linear(x[:3], weight), torch.nn.functional.linear(x[:3], weight))


def by_host_and_by_torch(name: str, given: tuple[Any, ...]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each result of a function, overwritten arguments among them: as a host computes it, as torch does, and torch in fp64."""
    found = []
    for body, dtype in ((getattr(HOST, name), None), (getattr(PLAIN, name), None), (getattr(PLAIN, name), torch.float64)):
        args = [arg.to(dtype or arg.dtype, copy=True) if isinstance(arg, Tensor) else arg for arg in given]
        results = body(*args)
        found.append([*(results if isinstance(results, tuple) else (results,)), *(arg for arg in args if isinstance(arg, Tensor))])
    return zip(*found, strict=True)


def check_host(name: str, given: tuple[Any, ...]) -> None:
    """With 16 bits the same; otherwise no further from fp64 than torch's operators, up to a few units in the last place."""
    for own, plain, exact in by_host_and_by_torch(name, given):
        assert own.dtype is plain.dtype and own.shape == plain.shape
        if given[0].dtype is torch.bfloat16:
            assert torch.equal(own, plain)
            continue
        unit = torch.finfo(own.dtype).eps * exact.abs().max()
        assert (own - exact).abs().max() <= 2 * (plain - exact).abs().max() + 4 * unit


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
ELEMENTS = pytest.mark.parametrize("elements", [2**18, 200, 1], ids=["at once", "in parts", "one by one"])


@DTYPES
@ELEMENTS
@pytest.mark.parametrize("one_plus", [False, True], ids=["weight", "1 + weight"])
def test_norms_of_heads_in_parts(one_plus: bool, elements: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward in a part of the projection, of which the rest stays as it is; backward through all of it."""
    monkeypatch.setattr("megatron_llama.model.nn.host.ops.ELEMENTS", elements)
    projected, upstream = (3 * random(7, 2, 8, 16, seed=seed).to(dtype) for seed in (1, 2))
    weights = [random(16, seed=seed).to(dtype) for seed in (3, 4)]

    results = []
    for ops in (HOST, PLAIN):
        after = projected.clone()
        kept, scale = ops.norm_heads(after[:, :, :6], *weights, 1e-5, one_plus, 4)
        assert torch.equal(kept, projected[:, :, :6]) and torch.equal(after[:, :, 6:], projected[:, :, 6:])
        results.append((after, scale))
    for own, plain in zip(*results, strict=True):
        torch.testing.assert_close(own, plain, rtol=0 if dtype is torch.bfloat16 else 1e-6, atol=0)
    check_host("norm_heads_backward", (upstream, kept, *weights, scale, one_plus, 4))


@DTYPES
@ELEMENTS
def test_gate_by_gelu_in_parts(elements: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where gelu is 0 to where it is the identity."""
    monkeypatch.setattr("megatron_llama.model.nn.host.ops.ELEMENTS", elements)
    gate = torch.linspace(-30.0, 30.0, 7 * 2 * 31).view(7, 2, 31)
    gate_up = torch.cat((gate, random(7, 2, 31, seed=1)), -1).to(dtype)
    check_host("geglu", (gate_up,))
    check_host("geglu_backward", (random(7, 2, 31, seed=2).to(dtype), gate_up))


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
    monkeypatch.setattr("megatron_llama.model.nn.host.attention.SCORES", 2**17)
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


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_gradients_of_attention_without_instructions_for_bf16(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32: no further from fp64 than torch's kernel for bf16 comes; for grouped heads and several samples."""
    query, key, value, upstream = (random(2, 40, heads, 16, seed=heads).bfloat16().transpose(1, 2) for heads in (4, 2, 2, 4))
    mask = torch.ones(40, 40, dtype=torch.bool).tril().expand(2, 1, 40, 40) if masked else None
    given = {"causal": not masked, "mask": mask}
    wide = [part.double() for part in (query, key, value)]
    exact = attend_backward(upstream.double(), *wide, *attend(*wide, **given), **given)
    errors = []
    for multiplies in (False, True):
        monkeypatch.setattr(devices, "multiplies_bf16", lambda multiplies=multiplies: multiplies)
        found = attend_backward(upstream, query, key, value, *attend(query, key, value, **given), **given)
        assert all(own.dtype is torch.bfloat16 and own.shape == true.shape for own, true in zip(found, exact, strict=True))
        errors.append([float((own - true).norm() / true.norm()) for own, true in zip(found, exact, strict=True)])
    assert all(own <= 1.05 * torchs < 0.02 for own, torchs in zip(*errors, strict=True)), errors


@dataclass(frozen=True)
class Deep(Layout):
    """Of so many blocks."""

    blocks: int = 2

    def config(self) -> Config:
        """See Layout."""
        config = super().config()
        return replace(config, model=replace(config.model, num_hidden_layers=self.blocks))


def calls(blocks: int) -> int:
    run = trainer(Place(0, 1, 0), Deep(blocks=blocks))
    run.step(0)
    with Dispatched() as dispatched:
        run.step(1)
    return sum(name not in VIEWS for name, *_ in dispatched.calls)


def test_operators_of_a_block() -> None:
    transposed = 1 if devices.prefers_onednn() else 0  # it takes a transposed factor as a copy
    assert calls(3) - calls(2) <= OPERATORS + transposed
