"""The head of a reward model: one number for every position (Ouyang et al., 2022, section 3.5)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_llama.engine.comm import autograd
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.param_handle import deliver, wait_unsharded
from megatron_llama.engine.tensors import at_least_fp32, rows
from megatron_llama.model.nn.linear import empty_weight


class _Score(torch.autograd.Function):
    """The product with one row, at least in fp32. Its weight gradient goes to the handle, and is
    never postponed: a sum over a gradient that is at hand costs next to nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.unsharded = wait_unsharded(weight)
        # Only the weight gradient reads the input.
        ctx.save_for_backward(weight, *([x] if ctx.needs_input_grad[1] else []))
        wide = at_least_fp32(x.dtype)
        return x.to(wide) @ weight[0].to(wide)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, *inputs = ctx.saved_tensors
        x_grad = None
        if ctx.needs_input_grad[0]:
            ctx.unsharded.check()
            x_grad = (grad.unsqueeze(-1) * weight[0].to(grad.dtype)).to(weight.dtype)
        weight_grad = None
        if inputs:
            product = grad.flatten() @ rows(inputs[0]).to(grad.dtype)
            weight_grad = deliver(ctx.unsharded.handle, product.unsqueeze(0), weight.dtype)
        return x_grad, weight_grad


class _GatherEqual(torch.autograd.Function):
    """Gathers the parts of a sequence with which all ranks do the same: every rank has the whole
    gradient, and takes its own part."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        full, pending = autograd.start_all_gather(shard, tp, async_op=False)
        pending.wait()
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.tp.size)[ctx.tp.rank], None


class Score(nn.Module):
    """The score of every position. All tp ranks hold its weight [1, h] and return the same."""

    def __init__(self, hidden: int, *, tp: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        self.tp = tp
        self.gathers = sequence_parallel and tp.size > 1
        self.weight = empty_weight(1, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [s or s/tp, b, h] -> [s, b], at least fp32."""
        scores = cast(Tensor, _Score.apply(x, self.weight))  # type: ignore[no-untyped-call]
        if not self.gathers:
            return scores
        # The backward pass of this rank's gradient needs no sum: all ranks compute the same loss.
        return cast(Tensor, _GatherEqual.apply(scores, self.tp))  # type: ignore[no-untyped-call]
