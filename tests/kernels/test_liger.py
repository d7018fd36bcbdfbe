"""Liger's kernels as a second opinion, where they run in the interpreter: its norm and its SwiGLU do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.closeness import draw, error

pytestmark = pytest.mark.kernels


def test_head_and_loss_are_ligers(device: torch.device) -> None:
    """Its product with the head and cross entropy in one, against ours behind a product: losses, and gradients of input and head."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from megatron_llama.model.nn.kernels.cross_entropy import cross_entropy

    x, head = (draw(6, 16, seed=1, device=device).requires_grad_(), draw(37, 16, seed=2, device=device).requires_grad_())
    labels = torch.tensor([0, 36, 5, 5, 17, 30], device=device)
    expected, *_ = LigerFusedLinearCrossEntropyFunction.apply(x, head, labels)
    expected.backward()
    scores = F.linear(x, head).detach()
    losses = cross_entropy(scores, labels, torch.full((6,), 1 / 6, device=device), 37, 0.0)
    assert error(losses.mean(), expected.detach()) < 1e-6
    assert error(scores @ head.detach(), x.grad) < 1e-5 and error(scores.t() @ x.detach(), head.grad) < 1e-5
