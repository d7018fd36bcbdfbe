"""A marker in the autograd graph: tells when backward gets to a place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def before_backward(x: Tensor, callback: Callable[[], None]) -> Tensor:
    """``x``; when its gradient is there, and before anything is computed from it, backward calls ``callback``.

    Nothing is saved for backward. A tensor that does not require grad is returned as it is, since no backward gets there."""
    if torch.is_grad_enabled() and x.requires_grad:
        x.register_hook(lambda grad: callback())  # type: ignore[no-untyped-call]
    return x
