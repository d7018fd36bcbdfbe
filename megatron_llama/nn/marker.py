"""A marker in the autograd graph: tells when backward gets to a place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_llama.nn.function import Function


class _BeforeBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, callback: Callable[[], None]) -> Tensor:
        ctx.callback = callback
        # Not x itself: autograd would make that a view, which may not be changed in place. The storage is the same.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.callback()
        return grad, None


def before_backward(x: Tensor, callback: Callable[[], None]) -> Tensor:
    """``x``; when its gradient is there, and before anything is computed from it, backward calls ``callback``.

    Nothing is saved for backward. A tensor that does not require grad is returned as it is, since no backward gets there."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _BeforeBackward.apply(x, callback)  # type: ignore[no-any-return]
