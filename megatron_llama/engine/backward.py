"""Two small additions to autograd: a hook in front of a tensor's backward pass, and a backward pass
that starts from a given gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def pre_backward_hook(output: Tensor, hook: Callable[[], None]) -> None:
    """Let backward call ``hook`` when the gradient of ``output`` is complete, before it is used.
    Nothing is saved, and nothing happens where ``output`` has no gradient."""
    if output.requires_grad:
        output.register_hook(lambda grad: hook())  # type: ignore[no-untyped-call]


class _WithGradient(torch.autograd.Function):
    """A scalar without a value whose gradient with respect to ``output`` is ``grad``."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


def backward(output: Tensor, grad: Tensor, *, retain_graph: bool = False) -> None:
    """Run ``torch.autograd.backward(output, grad)`` without torch's check of the gradient's shape.

    For that check torch imports sympy, which is half a second of a program's start."""
    with (
        torch.enable_grad()
    ):  # recomputation calls this inside a backward pass, which has no grad mode
        scalar = _WithGradient.apply(output, grad)  # type: ignore[no-untyped-call]
    torch.autograd.backward(scalar, retain_graph=retain_graph)
