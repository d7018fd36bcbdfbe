"""A parameter's handle: the source of its values, and the destination of its gradients.

A layer asks the handle for its weight right before reading it, and in backward once more. Its
backward also asks for a view of the gradient, accumulates into it and reports completion. Autograd
never holds the gradient of a matrix, so nothing is copied, and a parameter is complete at a known
moment. Layers used on their own have weights without a handle; then nothing is waited for, and
gradients go to ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron_llama.engine import host_gemm as gemm
from megatron_llama.engine.backward import pre_backward_hook
from megatron_llama.engine.comm.device import is_fake, is_host
from megatron_llama.engine.tensors import accumulate


class ParamHandle(Protocol):
    """The engine's side of one parameter."""

    def wait_unsharded(self) -> int:
        """Wait until the weight may be read: its gather is complete. Returns its version, the
        number of times its values changed.

        Raises RuntimeError, with bucket, unit and parameter, if its slot does not hold it."""

    def check_version(self, version: int) -> None:
        """Wait again, in backward, and compare the weight with what forward read.

        Raises RuntimeError if the slot holds another bucket, or a version other than ``version``.
        """

    def grad_view(self) -> tuple[Tensor, float]:
        """Return a view shaped like the parameter, and beta: the new gradient is ``beta * view +
        contribution``; with beta 0 the view may hold anything."""

    def grad_written(self) -> None:
        """Report that this contribution has been written."""

    def keep_wgrad(self, work: Callable[[], object]) -> bool:
        """Keep ``work``, which writes this contribution, for a later weight pass; False: write it
        now."""


def attach_param_handle(parameter: nn.Parameter, handle: ParamHandle) -> None:
    """Let a parameter's values come from ``handle``, and its gradients go there, from now on."""
    parameter.param_handle = handle  # type: ignore[attr-defined]


def param_handle_of(parameter: Tensor) -> ParamHandle | None:
    """Return the parameter's handle, or None (a layer used on its own)."""
    return getattr(parameter, "param_handle", None)


class UnshardedRead(NamedTuple):
    """Handle and version of a weight that forward has read, by which backward reads it again."""

    handle: ParamHandle | None
    version: int

    def check(self) -> None:
        """Wait, right before any read in backward, as ``ParamHandle.check_version``."""
        if self.handle is not None:
            self.handle.check_version(self.version)


def wait_unsharded(weight: Tensor) -> UnshardedRead:
    """Wait, right before the first read in forward, as ``ParamHandle.wait_unsharded``."""
    handle = param_handle_of(weight)
    return UnshardedRead(handle, 0 if handle is None else handle.wait_unsharded())


def use_param_handles(module: nn.Module) -> None:
    """Let a module of plain torch, which returns a tensor or a tuple, have parameters that
    the engine shards: from now on its forward and backward passes wait for them, and the gradients
    that autograd computes go to their handles.

    Does nothing for a module without parameters of its own."""
    if not any(True for _ in module.parameters(recurse=False)):
        return

    def before_forward(module: nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            read = wait_unsharded(parameter)
            # Once per parameter, and only now: the engine replaces the parameters that a module was
            # built with.
            delivers = getattr(parameter, "delivers_grad", False)
            if read.handle is not None and parameter.requires_grad and not delivers:
                parameter.delivers_grad = True  # type: ignore[attr-defined]
                add_hook = parameter.register_post_accumulate_grad_hook
                add_hook(_deliver_grad)  # type: ignore[no-untyped-call]

    def after_forward(module: nn.Module, args: Any, output: Tensor | tuple[Any, ...]) -> None:
        # The gathers are complete: this only asks for the versions that have been read.
        reads = [wait_unsharded(parameter) for parameter in module.parameters(recurse=False)]

        def before_backward() -> None:
            for read in reads:
                read.check()

        for part in (output,) if isinstance(output, Tensor) else output:
            if isinstance(part, Tensor):
                pre_backward_hook(part, before_backward)

    module.register_forward_pre_hook(before_forward)
    module.register_forward_hook(after_forward)


def _deliver_grad(parameter: Tensor) -> None:
    """Give the gradient that autograd has accumulated to the parameter's handle."""
    handle = param_handle_of(parameter)
    if handle is None or parameter.grad is None:
        return
    view, beta = handle.grad_view()
    accumulate(view, beta, parameter.grad)
    parameter.grad = None
    handle.grad_written()


def deliver(handle: ParamHandle | None, grad: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Give a gradient to the parameter's handle, or return it to autograd, in the parameter's
    ``dtype``, if there is none."""
    if handle is None:
        return grad.to(dtype)
    view, beta = handle.grad_view()
    accumulate(view, beta, grad)
    handle.grad_written()
    return None


def accumulate_product(view: Tensor, beta: float, left: Tensor, right: Tensor) -> None:
    """Set ``view = beta * view + left @ right``, beta 0 or 1. The factors share a dtype, and that
    of the view may be wider.

    With beta 0 the view is not read: it may hold anything, NaN too. BLAS defines it so, cuBLAS
    included."""
    # BLAS accumulates in place into a view of the factors' own dtype.
    if view.dtype == left.dtype and not gemm.computes(left, right):
        torch.addmm(view, left, right, beta=beta, out=view)
    elif is_host(view.device) and not is_fake(view):
        # Hosts have no kernel of torch that accumulates into a wider dtype.
        gemm.accumulate_product(view, beta, left, right)
    else:
        # cuBLAS writes wider than it reads (torch's ``out_dtype``): no gradient in bf16 is made.
        addmm_fp32(view, left, right, beta)


@torch.library.custom_op("megatron_llama::addmm_fp32", mutates_args=("view",))
def addmm_fp32(view: Tensor, left: Tensor, right: Tensor, beta: float) -> None:
    """Set ``view = beta * view + left @ right`` in one kernel: fp32 view [m, n], bf16 or fp16
    factors [m, k] and [k, n].

    An operator of its own, so that compilers see a function that changes ``view``, not an ``out=``
    of a rare overload. Not implemented on hosts, where torch has no such kernel."""
    torch.addmm(view, left, right, out_dtype=view.dtype, beta=beta, out=view)


@addmm_fp32.register_fake
def _(view: Tensor, left: Tensor, right: Tensor, beta: float) -> None:
    """Return nothing: the view keeps its shape."""
