"""A marker in the autograd graph, or on a tape: tells when backward gets to a place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_llama.distributed.comm.function import Function, has_gradient, is_followed


class _Marked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, callback: Callable[[], None]) -> Tensor:
        ctx.mark_dirty(x)
        ctx.callback = callback
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.callback()
        return grad, None


def before_backward(x: Tensor, callback: Callable[[], None]) -> Tensor:
    """``x``; when its gradient is there, and before anything is computed from it, backward calls
    ``callback``.

    Nothing is saved for backward. A tensor without a gradient is returned as it is, since no
    backward gets there."""
    if not has_gradient(x):
        return x
    if is_followed(x):
        return _Marked.apply(x, callback)  # type: ignore[no-any-return]
    x.register_hook(lambda grad: callback())  # type: ignore[no-untyped-call]  # cheaper than a function
    return x
