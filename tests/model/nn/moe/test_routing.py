"""Which experts are chosen with which weights: against transformers, finite differences, and formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_llama.model.nn.moe.routing import Router, route
from megatron_llama.model.nn.recompute import Recomputable
from torch import Tensor
from torch.autograd import gradcheck
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.model.nn.handle import Handle
from tests.model.nn.moe.reference import Sizes, chosen

SIZES = Sizes(tokens=33, experts=8, top_k=3, hidden=16, inner=4)


def reference_router(kind: str, sizes: Sizes) -> Any:
    """transformers' router, and the rule that says the same."""
    if kind == "Mixtral":
        router: Any = MixtralTopKRouter(
            MixtralConfig(hidden_size=sizes.hidden, num_local_experts=sizes.experts, num_experts_per_tok=sizes.top_k)
        )
        return router, Router(sizes.top_k, normalize=True)
    normalize = kind == "Qwen3-MoE, normalized"
    config = Qwen3MoeConfig(hidden_size=sizes.hidden, num_experts=sizes.experts, num_experts_per_tok=sizes.top_k, norm_topk_prob=normalize)
    return Qwen3MoeTopKRouter(config), Router(sizes.top_k, normalize=normalize)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3-MoE", "Qwen3-MoE, normalized"])
@pytest.mark.parametrize("sizes", [SIZES, Sizes(17, 4, 1, 8, 4), Sizes(9, 5, 5, 8, 4)], ids=["few", "one", "all"])
def test_as_transformers(kind: str, sizes: Sizes) -> None:
    """Logits, experts, weights, and the gradients of input and weight through the weights of the experts."""
    x, weight, *_ = sizes.draw(3, torch.float32)
    upstream = torch.randn(sizes.tokens, sizes.top_k, generator=torch.Generator().manual_seed(4))
    router, rule = reference_router(kind, sizes)
    router.weight.data = weight.detach().clone()
    theirs = x.detach().clone().requires_grad_()
    logits, weights, experts = router(theirs)
    (weights * upstream).sum().backward()

    found = route(x, weight, rule)
    (found.weights * upstream).sum().backward()
    assert torch.equal(found.experts, experts)
    torch.testing.assert_close(found.logits, logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.weights, weights, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.probabilities.sum(-1), torch.ones(sizes.tokens))
    torch.testing.assert_close(x.grad, theirs.grad, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, router.weight.grad, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3-MoE"])
def test_ties_as_torch_topk(kind: str) -> None:
    """Experts with the same weight, and tokens of zeros, for which all experts are equal."""
    x, weight, *_ = SIZES.draw(5, torch.float32)
    with torch.no_grad():
        weight[5] = weight[2]
        weight[7] = weight[0]
        x[::4] = 0.0
    router, rule = reference_router(kind, SIZES)
    router.weight.data = weight.detach().clone()
    logits, _, experts = router(x)
    found = route(x, weight, rule)
    assert torch.equal(found.experts, experts) and torch.equal(found.experts, torch.topk(logits.softmax(-1), 3).indices)
    torch.testing.assert_close(found.weights[::4], torch.full_like(found.weights[::4], 1 / 3 if rule.normalize else 1 / 8))
    found.weights.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("buffer", [torch.float32, None], ids=["fp32", "as the weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_not_rounded(dtype: torch.dtype, buffer: torch.dtype | None) -> None:
    """Logits are products in fp32 of numbers in 16 bits, and so are the gradients of a weight, which only its buffer may round."""
    x, weight, *_ = SIZES.draw(6, dtype)
    handle = Handle(weight)
    handle.grad = torch.full((8, 16), torch.nan, dtype=buffer or dtype)
    rounding = 1e-5 if buffer else torch.finfo(dtype).eps
    found = route(x, weight, Router(3, normalize=True))
    wide, wide_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = route(wide, wide_weight, Router(3, normalize=True))
    upstream = torch.randn(33, 3, generator=torch.Generator().manual_seed(7))
    (expected.weights * upstream).sum().backward()
    for contributions in (1, 2):
        x.grad = None
        (found.weights * upstream).sum().backward(retain_graph=True)
        torch.testing.assert_close(handle.grad.double(), wide_weight.grad * contributions, rtol=rounding, atol=1e-5)
    assert {found.logits.dtype, found.weights.dtype, found.probabilities.dtype} == {torch.float32}
    assert torch.equal(found.experts, chosen(expected.logits, 3))
    torch.testing.assert_close(found.logits.double(), expected.logits, rtol=1e-6, atol=1e-5)
    assert x.grad is not None and x.grad.dtype is dtype
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 8)


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_of_everything(normalize: bool) -> None:
    """Against finite differences: weights, probabilities and logits, together and each alone."""
    x, weight, *_ = Sizes(5, 6, 2, 4, 2).draw(8)
    for outputs in ((1, 2, 3), (1,), (2,), (3,)):
        assert gradcheck(lambda x, weight: tuple(route(x, weight, Router(2, normalize=normalize))[i] for i in outputs), (x, weight))  # noqa: B023


def test_the_weight_gradient_goes_to_its_handle() -> None:
    """The first contribution overwrites what the buffer holds, the next one is added; a postponed one waits for its pass; a frozen weight
    is asked for nothing."""
    x, weight, *_ = SIZES.draw(9, torch.float32)

    def passes(count: int, weight: Tensor) -> Tensor:
        x.grad = None
        for _ in range(count):
            route(x, weight, Router(3, normalize=True)).weights.square().sum().backward()
        assert x.grad is not None
        return x.grad

    passes(1, weight)
    expected, weight.grad = weight.grad, None
    assert expected is not None
    handle = Handle(weight)
    input_grad = passes(1, weight)
    assert torch.equal(handle.grad, expected) and handle.written == 1 and weight.grad is None
    passes(1, weight)
    torch.testing.assert_close(handle.grad, expected * 2, rtol=1e-6, atol=1e-6)

    later = Handle(weight, put_off=True)
    assert torch.equal(passes(1, weight), input_grad) and later.written == 0
    for work in later.work:
        work()
    assert torch.equal(later.grad, expected) and later.written == 1

    frozen = weight.detach().clone()
    untouched = Handle(frozen)
    assert torch.equal(passes(1, frozen), input_grad) and untouched.written == 0


def test_an_input_that_is_made_again() -> None:
    """To the bit what an input that is kept gives."""
    x, weight, *_ = SIZES.draw(10, torch.float32)
    half = x.detach() / 2
    made = Recomputable(x, lambda half: half * 2, (half,))
    grads = []
    for given in (x, made):
        x.grad = weight.grad = None
        route(given, weight, Router(3, normalize=False)).weights.square().sum().backward()
        grads.append((x.grad, weight.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])
