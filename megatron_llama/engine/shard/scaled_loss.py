"""The loss of a model in fp16, whose gradients would vanish without a factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


def scaled(loss: Tensor, factor: Tensor, begin: Callable[[], None]) -> Tensor:
    """Return ``loss`` times ``factor`` in fp32. ``begin`` is called when a backward pass begins
    there."""
    return cast(Tensor, _Scaled.apply(loss.float(), factor, begin))  # type: ignore[no-untyped-call]


class _Scaled(torch.autograd.Function):
    """A product with a number, which tells of the backward pass that begins with it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: Tensor, begin: Callable[[], None]) -> Tensor:
        ctx.factor = factor
        ctx.begin = begin
        return loss * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.begin()
        return grad * ctx.factor, None, None
