"""Activations that are computed again in backward instead of kept: one input of a linear layer, or
all of a block.

Nothing in a LLaMA block is random, so a second computation is the first one bit for bit, and no
generator state is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_llama.engine.backward import backward
from megatron_llama.engine.comm.autograd import start_all_gather
from megatron_llama.engine.mesh import Axis


@dataclass(frozen=True)
class Recomputable:
    """A tensor that can be made again from tensors that are kept anyway: ``function(*sources)``,
    without autograd.

    The consumer keeps the sources, which share their storage with what their own layers keep
    (Korthikanti et al., 2022, section 5)."""

    value: Tensor
    function: Callable[..., Tensor]
    sources: tuple[Tensor, ...]


class _Recomputed(torch.autograd.Function):
    """Keeps the input of a function and runs the function again in backward. Where the ranks of an
    axis have the input in common, each keeps 1/size of it.

    ``anchor`` is empty. It requires grad where the input does not, so that backward runs even for
    the weights alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        function: Callable[[Tensor], Tensor],
        shared: Axis | None,
    ) -> Tensor:
        ctx.function = function
        ctx.shared = shared
        ctx.shape = x.shape
        # The clone lets the other parts of the storage go.
        ctx.save_for_backward(
            x if shared is None else x.reshape(shared.size, -1)[shared.rank].clone()
        )
        return function(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        if ctx.shared is not None:
            x, gathering = start_all_gather(x, ctx.shared, async_op=False)
            gathering.wait()
        x = x.view(ctx.shape).detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            output = ctx.function(x)
        # The inner pass reaches the weights, once: through their handles, or into .grad. Only the
        # gradient of the input is left to return.
        backward(output, grad)
        return x.grad, None, None, None


def recomputed(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    weights: Iterable[Tensor] = (),
    shared: Axis | None = None,
) -> Tensor:
    """Compute ``function(x)``, and keep only its input for backward (Chen et al., 2016).

    ``weights`` are those that the function reads: nothing is kept when neither they nor the input
    require grad. ``shared`` is an axis whose ranks all have this input: they divide it among them
    until backward, when they gather it (collective). An input that does not divide evenly is kept
    whole."""
    if not torch.is_grad_enabled():
        return function(x)
    if not x.requires_grad and not any(weight.requires_grad for weight in weights):
        return function(x)
    if shared is not None and (shared.size == 1 or x.numel() % shared.size):
        shared = None
    anchor = torch.empty(0, requires_grad=not x.requires_grad)
    out: Tensor = _Recomputed.apply(x, anchor, function, shared)  # type: ignore[no-untyped-call]
    return out
