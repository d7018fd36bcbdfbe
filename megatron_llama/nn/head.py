"""The head and the loss together, chunk by chunk of tokens, where all scores at once would take too
much memory.

Scores, [tokens, vocabulary], are the largest tensor of a step: 1 GiB in bf16 for 4096 tokens and
128,256 words. Here a chunk of them is made, becomes its own gradient, gives its part of the
gradients of input and weight, and is forgotten. So all gradients are computed in the forward pass;
the backward pass of the same microbatch has to follow before any other pass. Without a backward
pass each chunk gives its losses only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.distributed.comm import autograd, collectives
from megatron_llama.distributed.mesh import Axis
from megatron_llama.nn.loss import cross_entropy
from megatron_llama.nn.ops import Ops
from megatron_llama.nn.param_handle import ParamHandle, accumulate_product, wait_unsharded
from megatron_llama.plans.activation_memory import HEAD_CHUNK


def head_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp: Axis,
    vocab_size: int,
    *,
    weights: Tensor | None,
    sequence_parallel: bool,
    z_weight: float,
    ops: Ops,
    chunk: int = HEAD_CHUNK,
) -> tuple[Tensor, ParamHandle | None]:
    """What ``cross_entropy`` says of the scores of x [s or s/tp, b, h] by this rank's rows
    [padded_vocab / tp, h] of the head; labels and weights [s, b]; without weights no gradients. x,
    contiguous, becomes its gradient. The weight's is in its home: whoever begins the backward pass
    calls ``done``. None: the weight is not trained. ``chunk``: scores at once."""
    unsharded = wait_unsharded(weight)
    trained = weight.requires_grad and weights is not None
    handle = unsharded.handle if trained else None
    assert handle is not None or not trained, "a weight that is trained has a home"
    own = x.detach()
    gathers = sequence_parallel and tp.size > 1
    with torch.no_grad():
        full, pending = autograd.gathered(own, tp) if gathers else (own, collectives.DONE)
        view, beta = (None, 0.0) if handle is None else handle.buffer()
        pending.wait()
        rows = full.flatten(0, -2)
        targets = labels.flatten()
        losses = []
        shares = None if weights is None else weights.flatten()
        step = max(1, chunk // weight.shape[0])
        for part in (slice(start, start + step) for start in range(0, len(rows), step)):
            logits = F.linear(rows[part], weight)
            share = None if shares is None else shares[part]
            losses.append(
                cross_entropy(
                    logits, targets[part], tp, vocab_size, weights=share, z_weight=z_weight, ops=ops
                )
            )
            if view is not None:
                accumulate_product(view, beta, logits.t(), rows[part])
                beta = 1.0
            if share is not None:
                torch.mm(logits, weight, out=rows[part])
            del logits  # before the next ones are made
        if weights is None:
            return torch.cat(losses).view(labels.shape), None
        if gathers:
            summed, pending = autograd.scattered(full, tp)
            pending.wait()
            own.copy_(summed)
        else:
            collectives.all_reduce(full, tp).wait()
    return torch.cat(losses).view(labels.shape), handle
