"""Autograd functions at the price of their forward pass, which a tape may record in autograd's
place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Function(torch.autograd.Function):
    """``torch.autograd.Function`` for those who use none of functorch's transforms: its ``apply``
    looks at every argument for them, a third of what a call costs.

    The first argument is a tensor. One that is followed by a tape (``nn/tape.py``) says so, and
    then this call is recorded there."""

    _by_autograd = torch._C._FunctionBase.__dict__["apply"]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run ``forward``; autograd, or the tape, will run ``backward``."""
        followed = getattr(args[0], "followed", None)
        return cls._by_autograd(*args) if followed is None else followed[0].run(cls, args)


def is_followed(tensor: Tensor) -> bool:
    """Whether a tape records what is computed from it."""
    return getattr(tensor, "followed", None) is not None


def has_gradient(tensor: Tensor) -> bool:
    """Whether what is computed from it will have a gradient with respect to it, by a tape or by
    autograd."""
    followed = getattr(tensor, "followed", None)
    return (
        torch.is_grad_enabled() and tensor.requires_grad
        if followed is None
        else followed[1] is not None
    )
