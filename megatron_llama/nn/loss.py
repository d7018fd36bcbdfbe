"""Cross entropy over a vocabulary that is split over tp: no rank ever holds a full-vocabulary tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.comm import collectives
from megatron_llama.mesh import Axis
from megatron_llama.nn.functional import at_least_fp32


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int, z_weight: float) -> Tensor:
        columns = logits.shape[-1]
        first = tp.rank * columns
        # The logits are consumed: a narrower dtype is widened into a new tensor, fp32 is overwritten.
        scores = logits.to(at_least_fp32(logits.dtype))
        scores[..., max(0, vocab_size - first) :] = float("-inf")  # padding has no probability
        largest = scores.amax(-1)
        collectives.all_reduce(largest, tp, dist.ReduceOp.MAX).wait()
        scores.sub_(largest.unsqueeze(-1))
        local = labels - first
        outside = (local < 0) | (local >= columns)
        index = local.masked_fill(outside, 0).unsqueeze(-1)
        target = scores.gather(-1, index).squeeze(-1).masked_fill_(outside, 0.0)
        probabilities = scores.exp_()
        sums = torch.stack((probabilities.sum(-1), target))
        collectives.all_reduce(sums, tp).wait()
        total, target = sums
        logarithm = total.log()
        # d(w z^2) = 2 w z dz for z, the logarithm of the denominator, and dz is the softmax.
        pull = (logarithm + largest).mul_(2 * z_weight) if z_weight else None
        ctx.save_for_backward(probabilities.div_(total.unsqueeze(-1)), index, outside, pull)
        ctx.dtype = logits.dtype
        return torch.sub(logarithm, target)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, index, outside, pull = ctx.saved_tensors
        if pull is not None:
            probabilities.mul_(pull.add_(1.0).unsqueeze(-1))
        # softmax - one_hot, in place: the probabilities are this function's own and are used once.
        hit = torch.where(outside, 0.0, -1.0).to(probabilities.dtype).unsqueeze(-1)
        scores_grad = probabilities.scatter_add_(-1, index, hit).mul_(grad.unsqueeze(-1))
        return scores_grad.to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int, *, z_weight: float = 0.0) -> Tensor:
    """Negative log-likelihood of each token, in fp32 (fp64 for fp64 logits).

    logits [s, b, padded_vocab / tp], overwritten; labels [s, b] int64 below ``vocab_size`` (the true, unpadded size).
    Returns [s, b], the same on every tp rank. Two small all-reduces: the maximum, then the sum with the target's score.
    ``z_weight``: gradients are those of the loss plus this times the square of log sum exp(logits); the value is that of the loss.
    """
    return _CrossEntropy.apply(logits, labels, tp, vocab_size, z_weight)  # type: ignore[no-any-return, no-untyped-call]


def likeliest(logits: Tensor, tp: Axis, vocab_size: int) -> Tensor:
    """The token with the largest of logits [..., padded_vocab / tp], int64 [...]; of equal ones the last. The same on every tp rank."""
    columns = logits.shape[-1]
    first = tp.rank * columns
    scores = logits.to(at_least_fp32(logits.dtype), copy=True)
    scores[..., max(0, vocab_size - first) :] = float("-inf")
    own, index = scores.max(-1)
    largest = own.clone()
    collectives.all_reduce(largest, tp, dist.ReduceOp.MAX).wait()
    found = torch.where(own == largest, index + first, -1)
    collectives.all_reduce(found, tp, dist.ReduceOp.MAX).wait()
    return found
