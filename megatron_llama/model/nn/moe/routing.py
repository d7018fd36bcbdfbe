"""Which experts a token is sent to, with which weights: softmax over all experts, then the top k,
in the order of operations of HuggingFace's Mixtral and Qwen3-MoE; or the top k of the logits, then
their sigmoid, as in its LLaMA 4.

Logits, probabilities and weights are at least fp32 whatever the dtype of the model is. HuggingFace
rounds the logits to that of the model, and Qwen3-MoE the weights: in bf16 this can send a token to
another expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_llama.engine import host_gemm as gemm
from megatron_llama.engine.param_handle import ParamHandle, accumulate_product, wait_unsharded
from megatron_llama.engine.tensors import at_least_fp32, rows
from megatron_llama.model.nn.recompute import Recomputable


@dataclass(frozen=True)
class Router:
    """How experts are chosen from the logits of a token."""

    top_k: int
    """Experts of each token."""
    normalize: bool
    """Whether the weights of a token's experts are divided by their sum."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Probabilities from logits: over all experts, or of each by itself."""


class Routing(NamedTuple):
    """The experts of t tokens."""

    experts: Tensor
    """[t, k] int64: of each token the most probable ones, the most probable first."""
    weights: Tensor
    """[t, k]: the factors of their outputs."""
    logits: Tensor
    """[t, E]."""
    probabilities: Tensor
    """[t, E]: the softmax of the logits, or their sigmoid."""


def route(x: Tensor | Recomputable, weight: Tensor, rule: Router) -> Routing:
    """Choose experts for x [..., h] by a weight [E, h]. Of equal probabilities torch.topk
    chooses."""
    value, source = (x.value, x) if isinstance(x, Recomputable) else (x, None)
    logits = _Logits.apply(value, weight, source)  # type: ignore[no-untyped-call]
    chosen = _Choice.apply(logits, rule)  # type: ignore[no-untyped-call]
    experts, weights, probabilities = chosen
    return Routing(experts, weights, logits, probabilities)


class _Logits(torch.autograd.Function):
    """x @ weight.T at least in fp32, [t, E], of x [..., h]. ``source``: kept in place of x, to make
    it again; None: x itself is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, source: Recomputable | None) -> Tensor:
        ctx.unsharded = wait_unsharded(weight)
        # Only the weight gradient reads the input.
        sources = (x,) if source is None else source.sources
        ctx.save_for_backward(weight, *(sources if ctx.needs_input_grad[1] else ()))
        ctx.make_input = None if source is None else source.function
        ctx.shape, ctx.dtype = x.shape, x.dtype
        dtype = at_least_fp32(x.dtype)
        return gemm.linear(rows(x).to(dtype), weight.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, *sources = ctx.saved_tensors
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            ctx.unsharded.check()
            x_grad = gemm.linear_backward(grad, weight.to(grad.dtype)).to(ctx.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            make_input = ctx.make_input
            # Detached: a postponed gradient must not keep the graph below its input.
            sources = [source.detach() for source in sources]

            def make_rows() -> Tensor:
                x = sources[0] if make_input is None else make_input(*sources)
                return rows(x).to(grad.dtype)

            handle: ParamHandle | None = ctx.unsharded.handle
            if handle is None:
                weight_grad = gemm.mm(grad.t(), make_rows()).to(weight.dtype)
            elif not handle.keep_wgrad(lambda: _write(handle, grad, make_rows)):
                _write(handle, grad, make_rows)
        return x_grad, weight_grad, None


def _write(handle: ParamHandle, grad: Tensor, make_rows: Callable[[], Tensor]) -> None:
    x = make_rows()
    view, beta = handle.grad_view()
    left = grad.t()
    if view.dtype is left.dtype:
        accumulate_product(view, beta, left, x)
    else:  # gradients in the dtype of the model
        product = gemm.mm(left, x)
        view.copy_(product if beta == 0.0 else product.add_(view))
    handle.grad_written()


class _Choice(torch.autograd.Function):
    """Returns experts and weights [t, k] and probabilities [t, E] from logits [t, E], and keeps the
    three."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rule: Router) -> tuple[Tensor, Tensor, Tensor]:
        if rule.score == "sigmoid":
            # By the logits: large ones have equal sigmoids.
            experts = torch.topk(logits, rule.top_k, dim=-1).indices
            probabilities = logits.sigmoid()
            values = probabilities.gather(-1, experts)
        else:
            probabilities = logits.softmax(-1)
            values, experts = torch.topk(probabilities, rule.top_k, dim=-1)
        weights = values / values.sum(-1, keepdim=True) if rule.normalize else values
        ctx.save_for_backward(experts, weights, probabilities)
        ctx.rule = rule
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        return experts, weights, probabilities

    @staticmethod
    def backward(
        ctx: Any, _: None, weights_grad: Tensor | None, probabilities_grad: Tensor | None
    ) -> tuple[Tensor | None, None]:
        experts, weights, probabilities = ctx.saved_tensors
        if weights_grad is None and probabilities_grad is None:
            return None, None
        grad = torch.zeros_like(probabilities)
        if weights_grad is not None:
            if ctx.rule.normalize:
                along = (weights_grad * weights).sum(-1, keepdim=True)
                chosen = probabilities.gather(-1, experts)
                weights_grad = (weights_grad - along) / chosen.sum(-1, keepdim=True)
            # A token's experts differ, so no element is written twice.
            grad.scatter_(-1, experts, weights_grad)
        if probabilities_grad is not None:
            grad.add_(probabilities_grad)
        if ctx.rule.score == "sigmoid":
            return grad.mul_(probabilities).mul_(1.0 - probabilities), None
        along = (grad * probabilities).sum(-1, keepdim=True)
        return grad.sub_(along).mul_(probabilities), None
