"""The loss of tokens with autograd, for contenders that wrap modules: the runtime of this project
needs none (``model/nn/loss.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.tensors import at_least_fp32
from megatron_llama.model.nn.loss import cross_entropy


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int, z_weight: float
    ) -> Tensor:
        ones = torch.ones(labels.shape, dtype=at_least_fp32(logits.dtype), device=labels.device)
        weights = ones if ctx.needs_input_grad[0] else None
        losses = cross_entropy(logits, labels, tp, vocab_size, weights=weights, z_weight=z_weight)
        ctx.save_for_backward(logits.detach())
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (scores_grad,) = ctx.saved_tensors
        # In place: this memory is the function's own and is used once.
        return scores_grad.mul_(grad.unsqueeze(-1)), None, None, None, None


def token_losses(
    logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int, *, z_weight: float = 0.0
) -> Tensor:
    """The losses [s, b] of ``cross_entropy``, whose gradient may be anything. logits [s, b,
    padded_vocab / tp] are overwritten."""
    return _TokenLosses.apply(logits, labels, tp, vocab_size, z_weight)  # type: ignore[no-any-return, no-untyped-call]
