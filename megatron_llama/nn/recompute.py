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

from megatron_llama.distributed.comm.autograd import gathered
from megatron_llama.distributed.comm.function import Function, has_gradient, is_followed
from megatron_llama.distributed.mesh import Axis
from megatron_llama.nn.tape import backward


@dataclass(frozen=True)
class Recomputable:
    """A tensor, and how to make it again from tensors that are kept anyway: ``function(*sources)``,
    without autograd.

    The consumer keeps the sources, which share their storage with what their own layers keep
    (Korthikanti et al., 2022, section 5)."""

    value: Tensor
    function: Callable[..., Tensor]
    sources: tuple[Tensor, ...]


class _Recomputed(Function):
    """Keeps the input, or 1/size of it where the ranks of an axis have it in common, and runs the
    function twice.

    ``anchor`` has no value and no gradient: it requires grad, so that backward comes here when the
    input does not."""

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
        ctx.save_for_backward(
            x if shared is None else x.reshape(shared.size, -1)[shared.rank].clone()
        )
        return function(x.detach())  # which no tape follows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        if ctx.shared is not None:
            x, pending = gathered(x, ctx.shared)
            pending.wait()
        x = x.view(ctx.shape).detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            output = ctx.function(x)
        # Weights are reached from inside, once: through their homes (now, or later when the pass is
        # split) or into .grad.
        backward(output, grad)
        return x.grad, None, None, None


def recomputed(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    weights: Iterable[Tensor] = (),
    shared: Axis | None = None,
) -> Tensor:
    """``function(x)``, of which only the input is kept (Chen et al., 2016).

    ``weights``: those that the function reads. Nothing is kept when neither they nor the input
    require grad; an input that does not (above frozen layers) gets no gradient, and is kept alike.
    ``shared``: an axis whose ranks all have this input and divide it among them until backward,
    when they gather it (collective); a tensor that does not divide evenly is kept whole."""
    wanted = has_gradient(x)
    if not wanted and not (
        (is_followed(x) or torch.is_grad_enabled())
        and any(weight.requires_grad for weight in weights)
    ):
        return function(x)
    if shared is not None and (shared.size == 1 or x.numel() % shared.size):
        shared = None
    anchor = torch.empty(0, requires_grad=not wanted)
    return _Recomputed.apply(x, anchor, function, shared)  # type: ignore[no-any-return]
