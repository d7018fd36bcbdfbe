"""Operations on tensors that layers and the engine share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are taken: fp32, or fp64 for fp64 (reference runs)."""
    return torch.promote_types(dtype, torch.float32)


def accumulate(view: Tensor, beta: float, value: Tensor) -> None:
    """Set ``view = beta * view + value``, beta 0 or 1."""
    if beta == 0.0:
        view.copy_(value)
    else:
        view.add_(value)


def inner(tensor: Tensor) -> Tensor:
    """Return the tensor that has the values on this rank: of one that is around another, as a
    DTensor is, the one inside of it."""
    while is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        tensor = getattr(tensor, names[0])
    return tensor


def rows(x: Tensor) -> Tensor:
    """Return x [..., h] as [tokens, h]."""
    return x.flatten(0, -2)
