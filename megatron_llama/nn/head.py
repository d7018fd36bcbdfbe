"""The head and the loss together, chunk by chunk of tokens, where all scores at once would take too much memory.

Scores, [tokens, vocabulary], are the largest tensor of a step: 1 GiB in bf16 for 4096 tokens and 128,256 words. Here a chunk of them is
made, becomes its own gradient, gives its part of the gradients of input and weight, and is forgotten. So all gradients are computed in
the forward pass; the backward pass of the same microbatch has to follow before any other pass. Without a backward pass each chunk gives
its losses only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.distributed.comm import autograd, collectives
from megatron_llama.distributed.mesh import Axis
from megatron_llama.nn.loss import cross_entropy
from megatron_llama.nn.ops import Bodies
from megatron_llama.nn.param_handle import Home, accumulate_product, arrive
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
    bodies: Bodies,
    chunk: int = HEAD_CHUNK,
) -> tuple[Tensor, Home | None]:
    """What ``cross_entropy`` says of the scores of x [s or s/tp, b, h] by this rank's rows [padded_vocab / tp, h] of the head; labels and
    weights [s, b]; without weights no gradients. x, contiguous, becomes its gradient. The weight's is in its home: whoever begins the
    backward pass calls ``done``. None: the weight is not trained. ``chunk``: scores at once."""
    arrived = arrive(weight)
    trained = weight.requires_grad and weights is not None
    home = arrived.home if trained else None
    assert home is not None or not trained, "a weight that is trained has a home"
    own, gathers = x.detach(), sequence_parallel and tp.size > 1
    with torch.no_grad():
        full, pending = autograd.gathered(own, tp) if gathers else (own, collectives.DONE)
        view, beta = (None, 0.0) if home is None else home.buffer()
        pending.wait()
        rows, targets, losses = full.flatten(0, -2), labels.flatten(), []
        shares = None if weights is None else weights.flatten()
        step = max(1, chunk // weight.shape[0])
        for part in (slice(start, start + step) for start in range(0, len(rows), step)):
            scores, share = F.linear(rows[part], weight), None if shares is None else shares[part]
            losses.append(cross_entropy(scores, targets[part], tp, vocab_size, weights=share, z_weight=z_weight, bodies=bodies))
            if view is not None:
                accumulate_product(view, beta, scores.t(), rows[part])
                beta = 1.0
            if share is not None:
                torch.mm(scores, weight, out=rows[part])
            del scores  # before the next ones are made
        if weights is None:
            return torch.cat(losses).view(labels.shape), None
        if gathers:
            summed, pending = autograd.scattered(full, tp)
            pending.wait()
            own.copy_(summed)
        else:
            collectives.all_reduce(full, tp).wait()
    return torch.cat(losses).view(labels.shape), home
