"""Autograd functions at the price of their forward pass."""

from __future__ import annotations

import torch


class Function(torch.autograd.Function):
    """``torch.autograd.Function`` for those who use none of functorch's transforms: its ``apply`` looks at every argument for them, a
    third of what a call costs."""

    apply = torch._C._FunctionBase.__dict__["apply"]
