"""Autograd functions at the price of their forward pass, which a tape may record in autograd's place."""

from __future__ import annotations

from typing import Any

import torch


class Function(torch.autograd.Function):
    """``torch.autograd.Function`` for those who use none of functorch's transforms: its ``apply`` looks at every argument for them, a
    third of what a call costs.

    The first argument is a tensor. One that is followed by a tape (``nn/tape.py``) says so, and then this call is recorded there."""

    _by_autograd = torch._C._FunctionBase.__dict__["apply"]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run ``forward``; autograd, or the tape, will run ``backward``."""
        followed = getattr(args[0], "followed", None)
        return cls._by_autograd(*args) if followed is None else followed[0].run(cls, args)
