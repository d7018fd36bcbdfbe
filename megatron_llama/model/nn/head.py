"""The head and the loss together, chunk by chunk of tokens, where all logits at once would take too
much memory.

Logits, [tokens, vocabulary], are the largest tensor of a step: 1 GiB in bf16 for 4096 tokens and
128,256 words. Here a chunk of them is computed, is overwritten by its own gradient, gives its part
of the gradients of input and weight, and is freed. So all gradients are computed in the forward
pass, and the backward pass of the same microbatch has to follow before any other pass. Without a
backward pass each chunk gives its losses only. Where the weights of the tokens depend on the losses
of all of them, the chunks are computed twice: for the losses, then for the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_llama.engine import host_gemm as gemm
from megatron_llama.engine.comm import autograd, collectives
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.param_handle import ParamHandle, accumulate_product, wait_unsharded
from megatron_llama.model.nn.loss import TokenWeights, cross_entropy
from megatron_llama.model.nn.ops import Ops
from megatron_llama.model.plan.chunks import HEAD_CHUNK, head_rows


class _SoftCap(torch.autograd.Function):
    """Keeps the hyperbolic tangent, in the place of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float) -> Tensor:
        tangent = logits.detach().div_(cap).tanh_()
        ctx.save_for_backward(tangent)
        return tangent * cap

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (tangent,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(grad, tangent), None


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap), overwriting the logits, which have no other reader."""
    return _SoftCap.apply(logits, cap)  # type: ignore[no-any-return, no-untyped-call]


def head_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp: Axis,
    vocab_size: int,
    *,
    weights: Tensor | TokenWeights | None,
    sequence_parallel: bool,
    z_weight: float,
    ops: Ops,
    chunk: int = HEAD_CHUNK,
    cap: float = 0.0,
) -> tuple[Tensor, ParamHandle | None]:
    """Return the losses of ``cross_entropy`` for the logits of x [s or s/tp, b, h] by this rank's
    rows [padded_vocab / tp, h] of the head, and the handle that the weight gradient was written to.

    labels and weights are [s, b]; without weights no gradients are computed. x, contiguous, is
    overwritten by its gradient. The backward pass calls ``grad_written`` on the handle,
    which is None where the weight is not trained. At most ``chunk`` logits are computed at once, of
    ``head_rows`` tokens. With a ``cap`` they are ``soft_capped``."""
    unsharded = wait_unsharded(weight)
    trained = weight.requires_grad and weights is not None
    handle = unsharded.handle if trained else None
    assert handle is not None or not trained, "a weight that is trained has a handle"
    shard = x.detach()
    gathers = sequence_parallel and tp.size > 1
    with torch.no_grad():
        full, gathering = (
            autograd.start_all_gather(shard, tp) if gathers else (shard, collectives.DONE)
        )
        wgrad, beta = (None, 0.0) if handle is None else handle.grad_view()
        gathering.wait()
        rows = full.flatten(0, -2)
        targets = labels.flatten()
        step = head_rows(chunk, weight.shape[0])
        spans = [slice(start, start + step) for start in range(0, len(rows), step)]

        def chunk_loss(span: slice, token_weights: Tensor | None) -> Tensor:
            """Return the losses of some rows; with weights, also add to the weight gradient, and
            overwrite the rows by their gradient."""
            nonlocal beta
            logits = gemm.mm(rows[span], weight.t())
            tangent = None
            if cap:
                tangent = logits.div_(cap).tanh_()
                logits = tangent * cap
            loss = cross_entropy(
                logits,
                targets[span],
                tp,
                vocab_size,
                weights=token_weights,
                z_weight=z_weight,
                ops=ops,
            )
            if token_weights is None:
                return loss
            # The logits are their gradient now.
            if tangent is not None:
                torch.ops.aten.tanh_backward.grad_input(logits, tangent, grad_input=logits)
            # The weight gradient reads these rows of the input before their gradient overwrites
            # them.
            if wgrad is not None:
                accumulate_product(wgrad, beta, logits.t(), rows[span])
                beta = 1.0
            gemm.mm(logits, weight, out=rows[span])
            return loss

        if callable(weights):
            losses = torch.cat([chunk_loss(span, None) for span in spans]).view(labels.shape)
            weights = weights(losses)
        if weights is None:
            losses = torch.cat([chunk_loss(span, None) for span in spans]).view(labels.shape)
            return losses, None
        token_weights = weights.flatten()
        losses = torch.cat([chunk_loss(span, token_weights[span]) for span in spans])
        if gathers:
            summed, scattering = autograd.start_reduce_scatter(full, tp)
            scattering.wait()
            shard.copy_(summed)
        else:
            collectives.all_reduce(full, tp, async_op=False).wait()
    return losses.view(labels.shape), handle
