"""The one path of weight gradients: layers write them where the reduction reads them.

A layer's backward asks its parameter for a buffer, accumulates into it and reports completion. Autograd never holds a
weight gradient, so nothing is copied, and a parameter is complete at a known moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn


class GradSink(Protocol):
    """Where one parameter's gradient goes."""

    def buffer(self) -> tuple[Tensor, float]:
        """(view shaped like the parameter, beta): the new gradient is ``beta * view + contribution``; 0 writes."""

    def done(self) -> None:
        """This contribution has been written."""

    def defer(self, work: Callable[[], None]) -> bool:
        """Keep ``work``, which writes this contribution, for a later weight pass; False: write it now."""


def attach_sink(parameter: nn.Parameter, sink: GradSink) -> None:
    """Send the gradients of a parameter to ``sink`` from now on."""
    parameter.grad_sink = sink  # type: ignore[attr-defined]


def sink_of(parameter: Tensor) -> GradSink | None:
    """The parameter's sink, or None when gradients go to ``.grad`` as usual (a layer used on its own)."""
    return getattr(parameter, "grad_sink", None)


def accumulate_product(view: Tensor, beta: float, left: Tensor, right: Tensor) -> None:
    """``view = beta * view + left @ right`` with ``view`` possibly of a wider dtype than the factors."""
    if view.dtype == left.dtype:
        torch.addmm(view, left, right, beta=beta, out=view)
    else:
        accumulate(view, beta, left @ right)


def accumulate(view: Tensor, beta: float, value: Tensor) -> None:
    """``view = beta * view + value``."""
    if beta == 0.0:
        view.copy_(value)
    else:
        view.add_(value)
