"""A parameter's home: where its values are while they are read, and the one path of its gradients.

A layer asks the home for its weight right before reading it, and in backward once more. Its
backward also asks for a buffer, accumulates into it and reports completion. Autograd never holds a
weight gradient, so nothing is copied, and a parameter is complete at a known moment. Layers used on
their own have weights without a home; then nothing is waited for, and gradients go to ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron_llama.distributed.device import is_fake, is_host
from megatron_llama.nn.host.gemm import apart, product

PART = 2**21
"""Elements of a weight gradient that a host computes at once."""


class ParamHandle(Protocol):
    """The engine's side of one parameter."""

    def wait_unsharded(self) -> int:
        """Wait until the weight may be read: its gather has arrived. Returns its generation, the
        number of times its values changed.

        RuntimeError, with bucket, unit and parameter, if its slot does not hold it."""

    def check(self, version: int) -> None:
        """In backward: wait again. RuntimeError if the slot holds another bucket, or another
        generation than forward saw."""

    def buffer(self) -> tuple[Tensor, float]:
        """(view shaped like the parameter, beta): the new gradient is ``beta * view +
        contribution``; 0 writes."""

    def done(self) -> None:
        """This contribution has been written."""

    def postpone_wgrad(self, work: Callable[[], None]) -> bool:
        """Keep ``work``, which writes this contribution, for a later weight pass; False: write it
        now."""


def attach_param_handle(parameter: nn.Parameter, handle: ParamHandle) -> None:
    """A parameter's values come from ``handle`` and its gradients go there from now on."""
    parameter.param_handle = handle  # type: ignore[attr-defined]


def param_handle_of(parameter: Tensor) -> ParamHandle | None:
    """The parameter's home, or None (a layer used on its own)."""
    return getattr(parameter, "param_handle", None)


class UnshardedRead(NamedTuple):
    """A weight that forward has read; what backward has to know to read it again."""

    handle: ParamHandle | None
    version: int

    def check(self) -> None:
        """Call right before any read in backward. See ``ParamHandle.check``."""
        if self.handle is not None:
            self.handle.check(self.version)


def wait_unsharded(weight: Tensor) -> UnshardedRead:
    """Call right before the first read in forward. See ``ParamHandle.arrive``."""
    handle = param_handle_of(weight)
    return UnshardedRead(handle, 0 if handle is None else handle.wait_unsharded())


def accumulate_product(view: Tensor, beta: float, left: Tensor, right: Tensor) -> None:
    """``view = beta * view + left @ right`` with ``view`` possibly of a wider dtype than the
    factors, which share one; beta 0 or 1.

    With beta 0 the view is not read: it may hold anything, NaN too. BLAS defines it so, cuBLAS
    included."""
    if view.dtype == left.dtype and not apart(left, right):
        torch.addmm(view, left, right, beta=beta, out=view)
    elif is_host(view.device) and not is_fake(view):
        # No product here writes into the view: parts of one are made where a cache holds them, and
        # put in their place.
        step = max(1, PART // view.shape[1])
        for start in range(0, len(view), step):
            accumulate(view[start : start + step], beta, product(left[start : start + step], right))
    else:
        addmm_wide(view, left, right, beta)


@torch.library.custom_op("megatron_llama::addmm_wide", mutates_args=("view",))
def addmm_wide(view: Tensor, left: Tensor, right: Tensor, beta: float) -> None:
    """``view = beta * view + left @ right`` in one kernel: fp32 view [m, n], bf16 or fp16 factors
    [m, k] and [k, n].

    An operator of its own, so that compilers see a function that changes ``view``, not an ``out=``
    of a rare overload. Not implemented on hosts, where torch has no such kernel."""
    torch.addmm(view, left, right, out_dtype=view.dtype, beta=beta, out=view)


@addmm_wide.register_fake
def _(view: Tensor, left: Tensor, right: Tensor, beta: float) -> None:
    """Nothing is returned, and the view keeps its shape."""


def accumulate(view: Tensor, beta: float, value: Tensor) -> None:
    """``view = beta * view + value``, beta 0 or 1."""
    if beta == 0.0:
        view.copy_(value)
    else:
        view.add_(value)
